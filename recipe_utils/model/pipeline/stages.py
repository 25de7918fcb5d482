"""Cuts a decoder into pipeline stages: which layers each has, and what is left of the model there."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn
from torchtune.modules import TransformerDecoder
from torchtune.modules.tied_linear import TiedLinear

from recipe_utils.model.adapters.adapters import Adapters, find_adapters


class WholeModel(NamedTuple):
    """What a rank's stages must know of the model that they are parts of."""

    names_of_weights: list[str]
    """In the order of its state dict."""
    num_stages: int
    embed_dim: int
    """Width of the hidden states."""
    output_is_tied: bool
    """The first stage's embeddings and the last one's output share their weight."""
    adapters: Adapters
    """What of it is trained."""


class Stages(nn.ModuleDict):
    """The pipeline stages on this rank by their index, as ``stage_0``, ``stage_2``, ..."""

    def __init__(self, whole: WholeModel) -> None:
        super().__init__()
        self.whole = whole

    def by_index(self) -> dict[int, nn.Module]:
        """The stages, by their place in the pipeline."""
        return {int(name.removeprefix("stage_")): stage for name, stage in self.items()}


def adapters_of(model: nn.Module) -> Adapters:
    """What of a model is trained; of the whole one, where these are stages of it."""
    return model.whole.adapters if isinstance(model, Stages) else find_adapters(model)


def layers_of_stages(
    model: nn.Module, num_stages: int, split_points: Sequence[int] | None = None
) -> list[range]:
    """Which layers each stage has.

    Args:
        model: a torchtune decoder; may be on the meta device.
        num_stages: at least 2.
        split_points: the first layer of each stage but the first, ascending. None balances the stages by
            their number of parameters, which a token's matrix products follow; the output layer counts,
            the embedding, a lookup, does not.

    Raises:
        ValueError: a model that cannot be cut, fewer layers than stages, or split points that are none.
    """
    if not isinstance(model, TransformerDecoder) or model.output_hidden_states:
        raise ValueError(
            f"pipeline_parallel_dim: only a plain TransformerDecoder can be cut into stages, this model "
            f"is a {type(model).__name__}; set pipeline_parallel_dim=1"
        )
    num_layers = len(model.layers)
    if num_layers < num_stages:
        raise ValueError(
            f"pipeline_parallel_dim: {num_stages} stages need as many layers, the model has "
            f"{num_layers}; set a smaller pipeline_parallel_dim, or a schedule with one stage per rank"
        )
    if split_points is None:
        costs = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
        return split_layers(costs, _output_cost(model), num_stages)
    borders = [0, *split_points, num_layers]
    if any(start >= stop for start, stop in pairwise(borders)):
        raise ValueError(
            f"pipeline_parallel_split_points={list(split_points)}: they must ascend between 1 and "
            f"{num_layers - 1}, the last of the model's {num_layers} layers"
        )
    return [range(start, stop) for start, stop in pairwise(borders)]


def split_layers(layer_costs: Sequence[float], output_cost: float, num_stages: int) -> list[range]:
    """Cuts layers into stages so that the costliest stage costs least.

    Args:
        layer_costs: of each layer, in any unit.
        output_cost: of the output layer, which is on the last stage.
        num_stages: at most as many as layers; each stage gets at least one.

    Returns:
        The layers of each stage. Found by going over all cuts, O(stages * layers^2).
    """
    num_layers = len(layer_costs)
    totals = [0.0, *accumulate(layer_costs)]
    # least[n]: (cost of the costliest stage, start of the last stage), the first n layers in so many stages
    least = [(totals[n], 0) for n in range(num_layers + 1)]
    starts: list[list[int]] = [[0] * (num_layers + 1)]
    for stage in range(1, num_stages):
        extra = output_cost if stage == num_stages - 1 else 0.0
        least = [
            min(
                (max(least[start][0], totals[n] - totals[start] + extra), start)
                for start in range(stage, n)
            )
            if n > stage
            else (float("inf"), 0)
            for n in range(num_layers + 1)
        ]
        starts.append([start for _, start in least])
    stages, stop = [], num_layers
    for of_stage in reversed(starts):
        stages.append(range(of_stage[stop], stop))
        stop = of_stage[stop]
    return stages[::-1]


class NotOnThisStage(nn.Module):
    """Stands for a part of the model that another stage has: what goes in comes out.

    Layers keep their index and so their parameters the names that they have in the whole model.

    Args:
        weight: of token embeddings that this stage does not look up, but whose weight its output
            layer shares.
    """

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        """Returns ``hidden``, whatever its shape."""
        return hidden

    def caches_are_enabled(self) -> bool:
        """What the decoder asks its first layer."""
        return False


def cut_to_stage(model: Any, layers: range) -> None:
    """Leaves a decoder the layers of one stage, in place.

    The first stage takes tokens [b, s], all others the hidden states [b, s, d] of the one before. The
    last gives what the whole model does, all others hidden states.

    Args:
        model: a torchtune decoder on the meta device, before it is wrapped in any way.
        layers: of the stage.
    """
    if layers.start > 0:
        shared = ties_output(model) and layers.stop == len(model.layers)
        model.tok_embeddings = NotOnThisStage(model.tok_embeddings.weight if shared else None)
        if shared:
            model.output.tied_module = model.tok_embeddings
    for index in range(len(model.layers)):
        if index not in layers:
            model.layers[index] = NotOnThisStage()
    if layers.stop < len(model.layers):
        model.norm = NotOnThisStage()
        model.output = NotOnThisStage()
        model.unembed = lambda hidden: hidden


def ties_output(model: Any) -> bool:
    """Whether the output layer shares its weight with the token embeddings."""
    return isinstance(model.output, TiedLinear)


def _output_cost(model: Any) -> float:
    """Parameters of the output layer, or of what else takes its place: heads that few tokens reach, or nothing."""
    output = model.output.tied_module if ties_output(model) else model.output
    weight = getattr(output, "weight", None)
    if isinstance(weight, Tensor):
        return weight.numel()
    num_parameters = sum(p.numel() for p in output.parameters())
    return num_parameters * float(getattr(output, "share_of_tokens", 1.0))
