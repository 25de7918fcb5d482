"""DINOv3: self-distillation of vision transformers."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.dinov3.average_teacher": "AverageTeacher",
        "recipe_utils.dinov3.backbone": "dinov3_vit dinov3_vit_b16 dinov3_vit_l16 "
        "dinov3_vit_s16 fresh_vit_weights part_of with_heads",
        "recipe_utils.dinov3.checkpoint": "check_normalization DINOv3Checkpointer",
        "recipe_utils.dinov3.images.crop_rows": "layout_of",
        "recipe_utils.dinov3.images.folders": "hf_image_dataset image_folder_dataset",
        "recipe_utils.dinov3.images.multi_crop": "MultiCrop",
        "recipe_utils.dinov3.images.views": "ViewSettings",
        "recipe_utils.dinov3.loaders": "build_image_loaders build_optimizer_by_depth ImageComponents IMAGES",
        "recipe_utils.dinov3.schedules": "ScheduleSettings",
        "recipe_utils.dinov3.self_distillation": "HeadArguments ObjectiveSettings SelfDistillationLoss SUMS",
    }
)
