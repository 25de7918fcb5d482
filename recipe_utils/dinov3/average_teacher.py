"""EMA teacher of self-distillation, and its outputs for update steps.

Shapes: g images of a microbatch, m masked patches, b bottleneck width, k prototypes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recipe_utils.dinov3.backbone import PatchEmbedding
from recipe_utils.dinov3.images.crop_rows import global_crops
from recipe_utils.dinov3.koleo import gradient_of_all
from recipe_utils.dinov3.self_distillation import ObjectiveSettings, TeacherBottlenecks, TeacherViews
from recipe_utils.dinov3.sinkhorn import num_prototypes_used, sinkhorn
from recipe_utils.losses.attach import HiddenAtTargets
from recipe_utils.losses.divergences import TeacherHidden
from recipe_utils.models.frozen import FrozenModel
from recipe_utils.models.runner import Runner, build_modules, build_runner
from recipe_utils.models.weights import load_weights
from recipe_utils.parallel.fsdp import local, reshard
from recipe_utils.settings.problems import naming
from recipe_utils.training.setup import Built
from recipe_utils.update_steps.step import Microbatch, UpdateStep


class AverageTeacher:
    """Moving average of a student's weights, and its outputs for update steps. All ranks together.

    The averages are copies of the model, cut and sharded like the student, with loss modules of their own. They start
    with the weights of ``built.checkpointer``, as the student has.
    """

    def __init__(self, built: Built, objective: ObjectiveSettings, student: Runner) -> None:
        self._objective, self._student, ranks = objective, student.module, built.run.ranks
        self._ranks, self._student_forward = ranks, FrozenModel(student)
        # Made by all ranks, used on the last stage.
        self._dp_group = ranks.dp_group if ranks.dp_degree > 1 else None
        self._forward = _average(built, TeacherBottlenecks())
        self.model = self._forward.model.module
        """The average, with heads."""
        has_gram = bool(objective.gram_loss_weight)
        self._gram_forward = _average(built, HiddenAtTargets("patch_positions")) if has_gram else None
        self.gram_model = self._gram_forward.model.module if self._gram_forward is not None else None
        """An earlier average for the Gram loss; None without that loss."""

    def beside(self, student: nn.Module) -> nn.ModuleDict:
        """Returns all modules of a checkpoint by name."""
        models = {"student": student, "teacher": self.model, "gram_teacher": self.gram_model}
        return nn.ModuleDict({name: model for name, model in models.items() if model is not None})

    @contextmanager
    def with_targets(
        self, step: UpdateStep, temperature: float, max_images: int | None
    ) -> Iterator[tuple[Sequence[Microbatch], Tensor]]:
        """Attaches teacher outputs to the microbatches of an update step, before any gradient exists.

        ``temperature`` is that of Sinkhorn-Knopp's targets. ``max_images`` are those on the fullest
        rank, for two-pass KoLeo; else None.

        Yields the microbatches, unchanged on stages before the last one, and the number of prototypes that are the most
        probable one of some global crop, 0 on these stages: the ranks of a pipeline average it.
        """
        # The teacher sees global crops alone; the two-pass KoLeo is of the student's.
        seen = [global_crops(microbatch) for microbatch in step.microbatches]
        bottlenecks = self._forward.outputs(seen)
        anchors = self._gram_forward.outputs(seen) if self._gram_forward is not None else {}
        koleo = self._koleo_gradients(seen, max_images) if max_images is not None else {}
        with self._forward.output_layer() as heads:  # prototypes stay gathered until the end
            if heads is None:
                yield step.microbatches, torch.zeros((), device=self._ranks.device)
                return
            crop_rows, patch_rows = zip(*(bottlenecks[i] for i in range(len(seen))), strict=True)
            # Before any loss, because Sinkhorn-Knopp couples all crops of the update step.
            dino, ibot = heads.dino.prototypes, heads.ibot.prototypes
            crop_biases = self._biases(dino.weight, crop_rows, temperature)
            patch_biases = self._biases(ibot.weight, patch_rows, temperature)
            num_used = num_prototypes_used(crop_rows, dino.weight, temperature, crop_biases, self._dp_group)
            crops = [TeacherHidden(rows, dino, bias) for rows, bias in zip(crop_rows, crop_biases, strict=True)]
            patches = [TeacherHidden(rows, ibot, bias) for rows, bias in zip(patch_rows, patch_biases, strict=True)]
            microbatches = [
                microbatch.with_outputs(teacher=TeacherViews(crops[i], patches[i], anchors.get(i), koleo.get(i)))
                for i, microbatch in enumerate(step.microbatches)
            ]
            yield microbatches, num_used * self._ranks.dims.pp

    def _biases(self, prototypes: Tensor, rows: Sequence[Tensor], temperature: float) -> list[Tensor]:
        """Returns the dual variable of each microbatch's rows: shared by the update step, or per microbatch."""
        num_iterations = self._objective.sinkhorn_iterations
        if self._objective.sinkhorn_over == "microbatch":
            return [sinkhorn([bottlenecks], prototypes, temperature, num_iterations) for bottlenecks in rows]
        dual = sinkhorn(rows, prototypes, temperature, num_iterations, self._dp_group)
        return [dual] * len(rows)

    def _koleo_gradients(self, seen: Sequence[Microbatch], max_images: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Returns KoLeo's gradient and mean for each microbatch, over all images of the update step as one group."""
        states = self._student_forward.outputs(seen)
        if not states:  # the last stage is on another rank
            return {}
        cls = [states[i] for i in range(len(states))]
        gradient, mean = gradient_of_all(torch.cat(cls), max_images, self._dp_group)
        return {i: (part, mean) for i, part in enumerate(gradient.split(list(map(len, cls))))}

    def update(self, momentum: float, grad_norm: Tensor | None, num_steps: int) -> None:
        """Updates the average (:func:`update_average`) and, if due after ``num_steps``, the Gram teacher."""
        update_average(self.model, self._student, momentum, grad_norm)
        every = self._objective.gram_teacher_every_n_steps
        if self.gram_model is not None and every is not None and num_steps % every == 0:
            update_average(self.gram_model, self.model, 0.0)

    def states_of(self, microbatches: Sequence[Microbatch]) -> dict[int, Tensor]:
        """Returns class states [g, d] of whole images by microbatch index; empty on ranks without the last stage."""
        return self._forward.outputs(microbatches)


def _average(built: Built, loss_fn: Any) -> FrozenModel:
    """Returns a copy of the model that ends in ``loss_fn``, with the weights of the start."""
    modules, pipeline, ranks = built.settings.model, built.settings.pipeline, built.run.ranks
    with naming():
        model = build_modules(built.meta_model, lambda _: loss_fn, modules, pipeline, ranks)
    load_weights(model, built.checkpointer.load_checkpoint(), modules, ranks.device)
    model.eval()  # drops no branch
    for module in model.modules():
        if isinstance(module, PatchEmbedding):
            module.sees_masked_patches = True
    return FrozenModel(build_runner(model, modules, pipeline, ranks))


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, momentum: float, grad_norm: Tensor | None = None) -> None:
    """Computes average = momentum * average + (1 - momentum) * model, without a device synchronization.

    (Polyak and Juditsky 1992; as a teacher Tarvainen and Valpola, arXiv:1703.01780.) Each rank
    averages its own shards. If ``grad_norm`` [] is not finite, a fused optimizer has skipped the
    step on the device, and so does this; None if the step was taken.
    """
    reshard(average)
    reshard(model)
    averages, followed = ([local(p) for _, p in sorted(each.named_parameters())] for each in (average, model))
    if grad_norm is None:
        torch._foreach_lerp_(averages, followed, 1.0 - momentum)
        return
    is_taken = grad_norm.isfinite()
    weights = {dtype: is_taken.to(dtype) * (1.0 - momentum) for dtype in {shard.dtype for shard in averages}}
    torch._foreach_lerp_(averages, followed, [weights[shard.dtype] for shard in averages])
