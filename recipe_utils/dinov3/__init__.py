"""DINOv3: self-distillation of vision transformers."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "DINOv3Checkpointer": "recipe_utils.dinov3.checkpoint",
        "MultiCrop": "recipe_utils.dinov3.images.multi_crop",
        "dinov3_vit": "recipe_utils.dinov3.backbone",
        "dinov3_vit_b16": "recipe_utils.dinov3.backbone",
        "dinov3_vit_l16": "recipe_utils.dinov3.backbone",
        "dinov3_vit_s16": "recipe_utils.dinov3.backbone",
        "hf_image_dataset": "recipe_utils.dinov3.images.folders",
        "image_folder_dataset": "recipe_utils.dinov3.images.folders",
    }
)
