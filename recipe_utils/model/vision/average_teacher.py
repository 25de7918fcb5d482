"""The teacher of a self-distillation: a moving average of its student, and what it says of update steps.

Shapes: g images of a microbatch, m masked patches, b width of a bottleneck, k prototypes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchtune import training

from recipe_utils.data.images.crop_rows import of_global_crops
from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.loss.distillation import TeacherHidden
from recipe_utils.loss.koleo import gradient_of_all
from recipe_utils.loss.self_distillation import (
    ObjectiveSettings,
    PatchStates,
    TeacherBottlenecks,
    TeacherViews,
)
from recipe_utils.loss.sinkhorn import num_prototypes_used, sinkhorn
from recipe_utils.model.build.build import ModelSettings
from recipe_utils.model.build.weights import load_weights
from recipe_utils.model.frozen.model import FrozenModel
from recipe_utils.model.pipeline.pipeline import Pipeline, build_pipeline
from recipe_utils.model.pipeline.schedule import PipelineSettings
from recipe_utils.model.vision.vision_transformer import PatchEmbedding
from recipe_utils.parallel.fsdp import local, reshard
from recipe_utils.parallel.ranks import Ranks


class AverageTeacher:
    """Says of update steps what the moving average of a student's weights makes of them. All ranks together.

    It is wrapped, cut and sharded as the student is, so that each rank averages what it has.

    Args:
        build: makes a model whose head is what it is called with.
        objective: what is asked.
        modules: how models are wrapped.
        pipeline: how they are cut.
        ranks: of the job.
    """

    def __init__(
        self,
        build: Callable[[Any], nn.Module],
        objective: ObjectiveSettings,
        modules: ModelSettings,
        pipeline: PipelineSettings,
        ranks: Ranks,
    ) -> None:
        self._objective = objective
        self._modules = modules
        self._ranks = ranks
        self._pipeline = pipeline
        self._dp_group = ranks.dp_group
        self.model = build(TeacherBottlenecks())
        """The average, with heads."""
        self.gram_model = build(PatchStates()) if objective.gram_loss_weight else None
        """An earlier average, for Gram; None if nothing is asked of it."""

    def set_up(
        self, student: nn.Module, pipeline: Pipeline | None, weights: Mapping[str, Tensor]
    ) -> None:
        """Gives it the student's first weights.

        Args:
            student: with its weights.
            pipeline: of its stages, if it has some.
            weights: the same in full, by name.
        """
        modules, ranks = self._modules, self._ranks
        for model in filter(None, (self.model, self.gram_model)):
            load_weights(model, {training.MODEL_KEY: dict(weights)}, modules, ranks.device)
            model.eval()  # drops no branch
            for module in model.modules():
                if isinstance(module, PatchEmbedding):
                    module.sees_masked_patches = True
        stages_of = partial(
            build_pipeline, settings=self._pipeline, dtype=modules.torch_dtype, ranks=ranks
        )
        self._forward = FrozenModel(self.model, stages_of(self.model), ranks.device)
        self._student = FrozenModel(student, pipeline, ranks.device)
        self._average = MovingAverage(self.model, student)
        if self.gram_model is not None:
            stages = stages_of(self.gram_model)
            self._gram_forward = FrozenModel(self.gram_model, stages, ranks.device)
            self._gram_copy = MovingAverage(self.gram_model, self.model)

    def beside(self, student: nn.Module) -> nn.ModuleDict:
        """All that a checkpoint holds, by name."""
        models = {"student": student, "teacher": self.model, "gram_teacher": self.gram_model}
        return nn.ModuleDict({name: model for name, model in models.items() if model is not None})

    @contextmanager
    def teaching(
        self, step: UpdateStep, temperature: float, max_images: int | None
    ) -> Iterator[tuple[Sequence[Microbatch], Tensor]]:
        """The microbatches with what is said of all images of an update step, before any gradient exists.

        Sinkhorn-Knopp's targets are softmax(logits / temperature + dual). Each microbatch has its own logits, which
        are made of bottlenecks when they are needed; dual [k] is of all microbatches on all ranks.

        Args:
            step: the update step.
            temperature: of the targets.
            max_images: on the fullest rank, where KoLeo's two passes are asked for; else None.

        Yields:
            They; on a pipeline's earlier stages, which have no loss, as they are. And how many prototypes are the
            likeliest of some global crop; as a mean over the ranks of a pipeline, of which the last knows it.
        """
        seen = [of_global_crops(microbatch) for microbatch in step.microbatches]
        said = self._forward.outputs(seen)
        anchors = self._gram_forward.outputs(seen) if self.gram_model is not None else {}
        spread = self._spread_of(seen, max_images) if max_images is not None else {}
        with self._forward.output_layer() as heads:  # its prototypes are gathered until the end
            if heads is None:
                yield step.microbatches, torch.zeros((), device=self._ranks.device)
                return
            of_crops, of_patches = zip(*(said[i] for i in range(len(seen))), strict=True)
            crop_biases = self._biases(heads.dino.prototypes.weight, of_crops, temperature)
            patch_biases = self._biases(heads.ibot.prototypes.weight, of_patches, temperature)
            taught = []
            for i, microbatch in enumerate(step.microbatches):
                crops = TeacherHidden(of_crops[i], heads.dino.prototypes, crop_biases[i])
                patches = TeacherHidden(of_patches[i], heads.ibot.prototypes, patch_biases[i])
                views = TeacherViews(crops, patches, anchors.get(i), spread.get(i))
                taught.append(microbatch.with_teacher(views))
            num_used = num_prototypes_used(
                of_crops, heads.dino.prototypes.weight, temperature, crop_biases, self._dp_group
            )
            yield taught, num_used * self._ranks.dims.pp

    def _biases(
        self, prototypes: Tensor, rows: Sequence[Tensor], temperature: float
    ) -> list[Tensor]:
        """Dual for each microbatch's rows: that of the update step for all, or each its own."""
        num_iterations = self._objective.sinkhorn_iterations
        if self._objective.sinkhorn_over == "microbatch":
            return [sinkhorn([each], prototypes, temperature, num_iterations) for each in rows]
        dual = sinkhorn(rows, prototypes, temperature, num_iterations, self._dp_group)
        return [dual] * len(rows)

    def _spread_of(
        self, seen: Sequence[Microbatch], max_images: int
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """KoLeo's gradient and mean for each microbatch, all images of the update step being one group.

        The first of two passes: it takes one more forward of the student's global crops.
        """
        found = self._student.outputs(seen)
        if not found:  # the last stage is on another rank
            return {}
        cls = [found[i] for i in range(len(found))]
        gradient, mean = gradient_of_all(torch.cat(cls), max_images, self._dp_group)
        parts = gradient.split([len(each) for each in cls])
        return {i: (part, mean) for i, part in enumerate(parts)}

    def follow(self, momentum: float, grad_norm: Tensor | None, num_steps: int) -> None:
        """Moves the average towards the student, after each update step; not where that was left out as not finite.

        Args:
            momentum: how much of itself it keeps.
            grad_norm: see :meth:`MovingAverage.update`.
            num_steps: update steps that are done, by which the Gram teacher is due.
        """
        self._average.update(momentum, grad_norm)
        every = self._objective.gram_teacher_every_n_steps
        if self.gram_model is not None and every is not None and num_steps % every == 0:
            self._gram_copy.update(0.0)

    def states_of(self, microbatches: Sequence[Microbatch]) -> dict[int, Tensor]:
        """Class states [g, d] of whole images by the microbatch's index; empty on ranks without the last stage."""
        return self._forward.outputs(microbatches)


class MovingAverage:
    """The moving average of a model's weights over update steps, in place, each rank of its own shards.

    (Polyak and Juditsky 1992; as a teacher Tarvainen and Valpola, arXiv:1703.01780.) What is split over ranks is
    split alike in both, so nothing is communicated.

    Args:
        average: of the same builder, wrapped, cut and sharded alike, with weights.
        model: that it follows.
    """

    def __init__(self, average: nn.Module, model: nn.Module) -> None:
        self._average = average
        self._model = model

    @torch.no_grad()
    def update(self, momentum: float, grad_norm: Tensor | None = None) -> None:
        """Average = momentum * average + (1 - momentum) * model. Does not wait for the device.

        Args:
            momentum: from 0, a copy, to 1.
            grad_norm: of the update step, []; where it is not finite a fused optimizer has left the
                step out on the device, and so does this. None where it was taken.
        """
        averages, followed = (_local_weights(each) for each in (self._average, self._model))
        if not averages:
            return
        if grad_norm is None:
            torch._foreach_lerp_(averages, followed, 1.0 - momentum)
            return
        is_taken = grad_norm.isfinite()
        for dtype in {each.dtype for each in averages}:
            of_dtype = [i for i, each in enumerate(averages) if each.dtype == dtype]
            weights = [is_taken.to(dtype) * (1.0 - momentum)] * len(of_dtype)
            torch._foreach_lerp_(
                [averages[i] for i in of_dtype], [followed[i] for i in of_dtype], weights
            )


def _local_weights(model: nn.Module) -> list[Tensor]:
    """This rank's shards of the parameters, in the order of their names."""
    reshard(model)
    return [local(parameter) for _, parameter in sorted(model.named_parameters())]
