"""A frozen model's hidden states at target positions, whole, sharded or in pipeline stages.

Shapes: n target tokens of a microbatch, d the model's width, v its vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.modules.tied_linear import TiedLinear

from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.loss.attach_loss import HiddenAtTargets, attach_loss
from recipe_utils.model.attention.document_mask import attend_within_documents
from recipe_utils.model.build.build import ModelSettings, build_model
from recipe_utils.model.build.weights import load_weights
from recipe_utils.model.frozen.forward_only import ForwardOnly
from recipe_utils.model.pipeline.pipeline import build_pipeline
from recipe_utils.model.pipeline.schedule import PipelineSettings
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import naming


class FrozenModel:
    """Gives hidden states at target positions, never logits. All ranks together.

    With ``pp`` ranks it is cut by its own costs into one stage on each, and microbatches go forward through
    them in one schedule; its hidden states lie on the rank of the last stage.

    Args:
        make_model: the model's builder.
        checkpoint: its full weights, by torchtune's keys.
        modules: how it is wrapped.
        split_points: of its stages; see ``pipeline_parallel_split_points``.
        longest_row: see :func:`recipe_utils.model.attention.document_mask.attend_within_documents`.
        ranks: of the job.

    Raises:
        recipe_utils.settings.problems.ConfigError: it cannot be cut, split or sharded, or its weights do not fit;
            names ``teacher_model`` or ``teacher_checkpointer``.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        checkpoint: dict[str, Any],
        modules: ModelSettings,
        split_points: list[int] | None,
        longest_row: int,
        ranks: Ranks,
    ) -> None:
        self._device = ranks.device
        pipeline = PipelineSettings(
            pipeline_parallel_schedule="GPipe",  # no backward, so nothing to interleave
            pipeline_parallel_split_points=split_points,
        )

        def prepare(decoder: nn.Module, has_output: bool) -> None:
            attend_within_documents(decoder, ranks.device, longest_row)
            if has_output:
                attach_loss(decoder, HiddenAtTargets())

        with naming("teacher_model"):
            model = build_model(make_model, prepare, modules, ranks, pipeline)
        with naming("teacher_checkpointer"):
            load_weights(model, checkpoint, modules, ranks.device)
        self._model = model.requires_grad_(False).eval()
        stages = build_pipeline(self._model, pipeline, modules.torch_dtype, ranks)
        self._forward = ForwardOnly(self._model, stages, ranks.device)
        self.output_layer = self._forward.output_layer
        """See :meth:`recipe_utils.model.frozen.forward_only.ForwardOnly.output_layer`."""

    def hidden_of(self, microbatches: Sequence[Microbatch]) -> dict[int, Tensor]:
        """Hidden states [n, d] by the microbatch's index; empty on ranks without the last stage.

        Args:
            microbatches: on the CPU; as many on all ranks.

        Raises:
            ValueError: they are NaN or infinite; looked at on a CPU only, where nobody waits for it.
        """
        hidden = self._forward.outputs(microbatches)
        if self._device.type == "cpu" and not all(
            each.isfinite().all() for each in hidden.values()
        ):
            raise ValueError(
                "teacher_checkpointer: the teacher's hidden states are NaN or infinite; look at its weights, "
                "or set teacher_dtype=fp32"
            )
        return hidden


def output_layer_alone(
    whole: Any, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Any:
    """The output layer of a model without the rest of it, unsharded.

    Args:
        whole: the model, on the meta device.
        weights: full, by torchtune's keys.
        dtype: of the layer.
        device: likewise.
    """
    output = getattr(whole, "decoder", whole).output
    holder = output.tied_module if isinstance(output, TiedLinear) else output
    (prefix,) = [name for name, module in whole.named_modules() if module is holder]
    own = {name: weights[f"{prefix}.{name}"].to(device, dtype) for name in holder.state_dict()}
    holder.load_state_dict(own, assign=True)
    holder.requires_grad_(False)
    return output
