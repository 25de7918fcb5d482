"""Kinds of models and modules: decoders, fusion models with one at ``decoder``, and what a pipeline stage lacks."""

from typing import Any

from torch import Tensor, nn


def text_decoder(model: nn.Module) -> Any:
    """Returns the decoder of a fusion model, or the model itself."""
    return getattr(model, "decoder", model)


class NotOnThisStage(nn.Module):
    """Identity in place of a module that is on another stage; layers keep their index.

    ``weight`` is that of token embeddings that this stage only shares with its output layer.
    """

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns ``hidden``."""
        return hidden

    def caches_are_enabled(self) -> bool:
        """Returns False; the decoder calls it on its first layer."""
        return False
