"""Images: decoding, multi-crop augmentation, token rows."""

from recipe_utils.data.images.folders import image_folder_dataset
from recipe_utils.data.images.multi_crop import MultiCrop

__all__ = ["MultiCrop", "image_folder_dataset"]
