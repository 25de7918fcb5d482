"""Step checkpoints, from which training resumes, and exported models.

Importing it corrects torchtune 0.6.1's names of Gemma 2's weights, for loading and exporting: it
swaps the norms before and after the feed-forward, so it loads a different model.
"""

from torchtune.models.gemma2 import _convert_weights

from recipe_utils import exported

_convert_weights._GEMMA2_FROM_HF |= {
    "model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.mlp_norm.scale",
    "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.mlp_scale.scale",
}

__getattr__, __dir__ = exported(__file__)
