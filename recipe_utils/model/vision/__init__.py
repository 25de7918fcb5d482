"""DINOv3 vision transformers and their EMA teacher."""

from recipe_utils.model.vision.vision_transformer import (
    dinov3_vit,
    dinov3_vit_b16,
    dinov3_vit_l16,
    dinov3_vit_s16,
)

__all__ = ["dinov3_vit", "dinov3_vit_b16", "dinov3_vit_l16", "dinov3_vit_s16"]
