"""Pipeline stages of a decoder: their layers, and the modules that remain on each.

Example: 4 layers with 10M parameters each and an output layer with 25M on two stages. A token costs as much as the
parameters that it passes: layers 0 to 2 (30M) are the first stage, layer 3, norm and output layer (35M) the second.
With two layers on each it would be 20M and 45M, and the first would wait. On a stage, :class:`NotOnThisStage` replaces
the modules of the others, so layer 3 is called ``layers.3`` there, as in checkpoints.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn
from torchtune.modules import TransformerDecoder
from torchtune.modules.tied_linear import TiedLinear

from recipe_utils.model_kinds import NotOnThisStage, text_decoder
from recipe_utils.models.adapters.lora import Adapters, find_adapters
from recipe_utils.models.transformers.interface import DecoderOfTransformers

_OF_DECODERS = {"tok_embeddings", "layers", "norm", "output", "model"}
"""Children of decoders, of which ``model`` is that of transformers."""


class Stages(nn.ModuleDict):
    """Pipeline stages on this rank, named ``stage_0``, ``stage_2``, ... by index.

    Attributes are properties of the whole ``meta_model``, which no stage has.
    """

    def __init__(self, meta_model: Any, num_stages: int) -> None:
        super().__init__()
        self.num_stages = num_stages
        self.names_of_weights = list(meta_model.state_dict())
        self.embed_dim: int = meta_model.tok_embeddings.embedding_dim
        self.output_is_tied = ties_output(meta_model)
        self.adapters = find_adapters(meta_model)


def local_stages(model: nn.Module) -> list[nn.Module]:
    """Returns the pipeline stages on this rank; a model without a pipeline is the only one."""
    return [*model.values()] if isinstance(model, Stages) else [model]


def has_output(stage: nn.Module) -> bool:
    """Returns True for the stage that computes the output layer, and so the loss; True for a whole model."""
    return not isinstance(getattr(text_decoder(stage), "output", None), NotOnThisStage)


def adapters_of(model: nn.Module) -> Adapters:
    """Returns the adapters of a model; for stages, those of the whole model."""
    return model.adapters if isinstance(model, Stages) else find_adapters(model)


def layers_of_stages(model: Any, num_stages: int, split_points: Sequence[int] | None = None) -> list[range]:
    """Returns the layers of each of ``num_stages`` (2 or more) stages of a decoder.

    ``split_points`` are the first layers of each stage but the first. None balances the stages by
    their number of parameters, to which a token's FLOPs are proportional; the output layer counts,
    the embedding, a lookup, does not. Raises ValueError for models and points that do not fit.
    """
    if isinstance(model, DecoderOfTransformers):
        if not model.check.can_be_cut:
            beside = " with images" if model.check.joins else ""
            raise ValueError(
                f"pipeline_parallel_dim: {type(model.model).__name__}{beside} cannot be cut into stages that compute what "
                "the whole model computes; set pipeline_parallel_dim=1"
            )
    elif not isinstance(model, TransformerDecoder) or model.output_hidden_states:
        raise ValueError(
            f"pipeline_parallel_dim: only a plain TransformerDecoder can be cut into stages, this model "
            f"is a {type(model).__name__}; set pipeline_parallel_dim=1"
        )
    num_layers = len(model.layers)
    # A stage without layers would only pass hidden states on.
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
    """Partitions layers into stages of at least one layer so that the maximum cost is minimal.

    Dynamic programming over all cuts, O(stages * layers^2). ``output_cost`` is added to the last stage.
    """
    num_layers = len(layer_costs)
    totals = [0.0, *accumulate(layer_costs)]

    @cache
    def best(stop: int, num_stages: int) -> tuple[float, int]:
        """Returns the least maximum cost of the layers before ``stop``, and the last stage's start."""
        if num_stages == 1:
            return totals[stop], 0
        extra = output_cost if stop == num_layers else 0.0
        return min(
            (max(best(start, num_stages - 1)[0], totals[stop] - totals[start] + extra), start)
            for start in range(num_stages - 1, stop)
        )

    # From the last stage to the first, each starts where the least maximum of those before it does.
    stages: list[range] = []
    stop = num_layers
    for remaining in range(num_stages, 0, -1):
        _, start = best(stop, remaining)
        stages.insert(0, range(start, stop))
        stop = start
    return stages


def cut_to_stage(model: Any, layers: range) -> None:
    """Removes all layers but those of one stage from a decoder on the meta device, in place.

    The first stage takes tokens [b, s]; hidden states are [b, s, d]. Modules that were added to the decoder stay on
    the last stage.
    """
    is_last = layers.stop == len(model.layers)
    # Modules that a recipe adds beside the decoder's own compute from its last hidden states.
    for name, module in [*model.named_children()] if not is_last else ():
        if name not in _OF_DECODERS and any(True for _ in module.parameters()):
            setattr(model, name, NotOnThisStage())
    if isinstance(model, DecoderOfTransformers):
        model.cut_to_stage(layers)
        return
    if layers.start > 0:
        shared = ties_output(model) and is_last
        model.tok_embeddings = NotOnThisStage(model.tok_embeddings.weight if shared else None)
        if shared:
            model.output.tied_module = model.tok_embeddings
    for index in range(len(model.layers)):
        if index not in layers:
            model.layers[index] = NotOnThisStage()
    if not is_last:
        model.norm = NotOnThisStage()
        model.output = NotOnThisStage()
        model.unembed = lambda hidden: hidden


def ties_output(model: Any) -> bool:
    """Returns True if the output layer shares its weight with the token embeddings."""
    return model.output_is_tied if isinstance(model, DecoderOfTransformers) else isinstance(model.output, TiedLinear)


def _output_cost(model: Any) -> float:
    """Returns the output layer's parameters; heads count by the fraction of tokens they get."""
    output = getattr(model.output, "tied_module", model.output)
    weight = getattr(output, "weight", None)
    if isinstance(weight, Tensor):
        return weight.numel()
    num_parameters = sum(p.numel() for p in output.parameters())
    return num_parameters * float(getattr(output, "share_of_tokens", 1.0))
