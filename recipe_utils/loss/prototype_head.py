"""What a self-supervised backbone's states are compared through: projections onto prototypes."""

from itertools import pairwise
from typing import Annotated, Any

import torch.nn.functional as F
from torch import Tensor, nn

from recipe_utils.loss.chunks import sum_dtype
from recipe_utils.settings.components import MadeWith

HeadArguments = Annotated[
    dict[str, Any], MadeWith(1, default="recipe_utils.loss.prototype_head.PrototypeHead")
]
"""A config's arguments of a :class:`PrototypeHead`, but for the width of what comes in."""


class PrototypeHead(nn.Module):
    """An MLP to a bottleneck of length 1, and prototypes that it is compared with.

    As in DINO (Caron et al., arXiv:2104.14294, appendix C): linear layers with GELU between them, normalised.
    The prototypes are a plain matrix, as in DINOv3 (arXiv:2508.10104).

    Args:
        embed_dim: of what comes in.
        num_prototypes: k.
        hidden_dim: of the MLP.
        bottleneck_dim: b of the bottleneck.
        num_layers: of the MLP, at least 1.

    Raises:
        ValueError: an argument below 1.
    """

    def __init__(
        self,
        embed_dim: int,
        num_prototypes: int = 65536,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        num_layers: int = 3,
    ) -> None:
        super().__init__()
        for name, value in (
            ("num_prototypes", num_prototypes),
            ("hidden_dim", hidden_dim),
            ("bottleneck_dim", bottleneck_dim),
            ("num_layers", num_layers),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1")
        widths = [embed_dim, *[hidden_dim] * (num_layers - 1), bottleneck_dim]
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.GELU()]
        self.mlp = nn.Sequential(*layers[:-1])
        self.prototypes = nn.Linear(bottleneck_dim, num_prototypes, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """The bottleneck [n, b] of states [n, d]; it is for the loss to compare it with prototypes."""
        found: Tensor = self.mlp(states)
        return F.normalize(found.to(sum_dtype(found)), dim=-1).to(found.dtype)


class SelfDistillationHeads(nn.Module):
    """The heads of crops and of patches, as a decoder's output layer.

    Args:
        dino: of crops, by their cls tokens.
        ibot: of patches.
    """

    share_of_tokens = 0.1
    """About: class tokens and masked patches, of all tokens of DINOv3's crops; for cutting pipeline stages."""

    def __init__(self, dino: PrototypeHead, ibot: PrototypeHead) -> None:
        super().__init__()
        self.dino = dino
        self.ibot = ibot

    def forward(self, states: Tensor) -> Tensor:
        """Returns the states: heads are called by the loss, each with what is its own."""
        return states
