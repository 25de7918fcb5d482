"""DINOv3: self-distillation of vision transformers."""

from recipe_utils import exported

__getattr__, __dir__ = exported(__file__)
