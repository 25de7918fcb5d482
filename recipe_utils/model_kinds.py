"""Kinds of models: decoders, and fusion models with one at ``decoder``."""

from typing import Any

from torch import nn


def text_decoder(model: nn.Module) -> Any:
    """Returns the decoder of a fusion model, or the model itself."""
    return getattr(model, "decoder", model)
