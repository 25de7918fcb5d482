"""Decoders of transformers, built from a local folder and checked at start-up."""

import sys
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from recipe_utils.models.transformers.decoder import Decoder


def transformers_decoder(model: nn.Module) -> "Decoder | None":
    """Returns ``model`` if it is a decoder of transformers; else None."""
    # Where there is one, its module has been imported. transformers takes seconds to import.
    module = sys.modules.get(f"{__name__}.decoder")
    return model if module is not None and isinstance(model, module.Decoder) else None
