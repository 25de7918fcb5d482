"""DINOv3: self-distillation of vision transformers."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "AverageTeacher": "recipe_utils.dinov3.average_teacher",
        "build_image_loaders": "recipe_utils.dinov3.loaders",
        "build_optimizer_by_depth": "recipe_utils.dinov3.loaders",
        "check_normalization": "recipe_utils.dinov3.checkpoint",
        "dinov3_vit": "recipe_utils.dinov3.backbone",
        "dinov3_vit_b16": "recipe_utils.dinov3.backbone",
        "dinov3_vit_l16": "recipe_utils.dinov3.backbone",
        "dinov3_vit_s16": "recipe_utils.dinov3.backbone",
        "DINOv3Checkpointer": "recipe_utils.dinov3.checkpoint",
        "fresh_vit_weights": "recipe_utils.dinov3.backbone",
        "HeadArguments": "recipe_utils.dinov3.self_distillation",
        "hf_image_dataset": "recipe_utils.dinov3.images.folders",
        "image_folder_dataset": "recipe_utils.dinov3.images.folders",
        "layout_of": "recipe_utils.dinov3.images.crop_rows",
        "MultiCrop": "recipe_utils.dinov3.images.multi_crop",
        "IMAGES": "recipe_utils.dinov3.loaders",
        "ImageComponents": "recipe_utils.dinov3.loaders",
        "ObjectiveSettings": "recipe_utils.dinov3.self_distillation",
        "ScheduleSettings": "recipe_utils.dinov3.schedules",
        "SelfDistillationLoss": "recipe_utils.dinov3.self_distillation",
        "SUMS": "recipe_utils.dinov3.self_distillation",
        "ViewSettings": "recipe_utils.dinov3.images.views",
        "with_heads": "recipe_utils.dinov3.backbone",
    }
)
