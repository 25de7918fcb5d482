"""Kinds of models: torchtune's decoders, fusion models with one at ``decoder``, decoders of transformers."""

from typing import Any

from torch import nn


def text_decoder(model: nn.Module) -> Any:
    """Returns the decoder of a fusion model, or the model itself."""
    return getattr(model, "decoder", model)


def transformers_decoder(model: nn.Module) -> Any:
    """Returns ``model`` if it is a :class:`.transformers.decoder.Decoder`, which this does not import; else None."""
    return model if hasattr(model, "proof") else None
