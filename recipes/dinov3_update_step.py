"""Self-supervised training of a vision transformer with DINOv3's objective.

Sinkhorn-Knopp assigns prototypes evenly to all images of an update step. Therefore the teacher, a
moving average of the student, computes all microbatches of all ranks first; targets depend on other
images only through one dual variable per prototype. The gradient is that of one batch for any split
over microbatches, ranks and stages.

    tune run dinov3_update_step --config vit/digits_dinov3_update_step
    tune run --nproc_per_node 2 dinov3_update_step --config vit/digits_dinov3_update_step \
      pipeline_parallel_dim=2
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.profiler import record_function
from torchtune import config, training

import recipe_utils
from recipe_utils.dinov3.average_teacher import AverageTeacher
from recipe_utils.dinov3.backbone import fresh_vit_weights, with_heads
from recipe_utils.dinov3.checkpoint import check_normalization
from recipe_utils.dinov3.images.crop_rows import layout_of
from recipe_utils.dinov3.images.views import ViewSettings
from recipe_utils.dinov3.loaders import build_image_loaders, build_optimizer_by_depth
from recipe_utils.dinov3.self_distillation import SUMS, HeadArguments, ObjectiveSettings, SelfDistillationLoss
from recipe_utils.losses.attach import attach_loss
from recipe_utils.models.construct import build_on_meta, build_stages
from recipe_utils.models.parallelize import parallelize
from recipe_utils.models.pipeline.microbatches import build_pipeline
from recipe_utils.models.pipeline.schedule import PipelineSettings, num_to_run
from recipe_utils.models.pipeline.stages import has_output, local_stages
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.weights import load_weights
from recipe_utils.optim.grad_norm import clip_grad_norm_
from recipe_utils.optim.nonfinite import NonfiniteGuard
from recipe_utils.optim.optimizer import OptimizerSettings, build_lr_scheduler, check_optimizer
from recipe_utils.optim.schedules import ScheduleSettings
from recipe_utils.parallel.fsdp import gradient_sync
from recipe_utils.parallel.ranks import RankSettings, join_ranks
from recipe_utils.parallel.to_device import to_device_ahead
from recipe_utils.settings.components import Component
from recipe_utils.settings.keys import STRICT
from recipe_utils.settings.problems import Problem, build, naming
from recipe_utils.settings.read import read_settings
from recipe_utils.text.mixture import refused_weights
from recipe_utils.training.entry_point import entry_point
from recipe_utils.training.parts.budget import StepMemory
from recipe_utils.training.parts.exports import Exports
from recipe_utils.training.parts.validation import Validation
from recipe_utils.training.run import Run, Trained
from recipe_utils.training.settings import RunSettings, problems_between
from recipe_utils.update_steps.settings import DataSettings
from recipe_utils.update_steps.step import Microbatch, UpdateStep, mark_last

RECIPE_NAME = "dinov3_update_step"
recipe_utils.check_version("0.6", RECIPE_NAME)  # this file was written for it


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(
    ScheduleSettings,  # ema_momentum, teacher_temperature, layerwise_lr_decay, ...
    ViewSettings,  # transform, mask_ratio, koleo_group_size, ...
    ObjectiveSettings,  # ibot_loss_weight, sinkhorn_over, student_temperature, ...
    ModelSettings,  # dtype, compile, enable_activation_checkpointing, ...
    PipelineSettings,  # pipeline_parallel_schedule, ...
    OptimizerSettings,  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    RunSettings,  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...
    DataSettings,  # batch_size, global_batch_size, num_workers, ...
    RankSettings,  # device, data_parallel_shard_dim, pipeline_parallel_dim, ...
):
    """Keys of the config. Each class documents and checks its own keys."""

    model: Component
    """Backbone: ``recipe_utils.dinov3.dinov3_vit`` or one of its sizes."""
    dataset: Component | list[Component]
    """Map-style images; labels are ignored. A list is concatenated, or mixed by ``weight``."""
    checkpointer: Component
    """``recipe_utils.dinov3.DINOv3Checkpointer``. Loads a given backbone, saves the
    teacher's."""
    dino_head: HeadArguments | None = None
    """Head of crops: ``num_prototypes`` 65536, ``hidden_dim`` 2048, ``bottleneck_dim`` 256,
    ``num_layers`` 3."""
    ibot_head: HeadArguments | None = None
    """Head of patches, with the same arguments."""
    dataset_knn: Component | list[Component] | None = None
    """Labeled images that the k-NN classifier votes with; null is ``dataset``."""
    dataset_val: Component | list[Component] | None = None
    """Labeled images for the k-NN accuracy; requires ``run_val_every_n_steps``."""

    def problems(self) -> Iterator[Problem]:
        """Yields keys that exclude each other, and those that this recipe restricts."""
        # Losses couple images, so global_batch_size must divide into microbatches.
        yield from problems_between(
            data=self,
            ranks=self,
            model=self,
            pipeline=self,
            optimizer=self,
            run=self,
            components=self,
            must_divide=True,
        )
        yield from self.problems_of_long_rows(self)
        yield from self.problems_of_views(self)
        yield from self.problems_of_objective(self, self)
        yield from self.problems_of_schedules(self.optimizer, self.student_temperature)
        yield from self.problems_without_text()
        yield from refused_weights(dataset=self.dataset, dataset_val=self.dataset_val)
        if (dim := self.tensor_parallel_dim) > 1:
            yield Problem("tensor_parallel_dim", "not with images; set it to 1", dim)
        if self.optimizer_in_bwd:
            yield Problem("optimizer_in_bwd", "not with a moving average; set it to False", True)


def part_of(name: str) -> str:
    """Returns the part of the model to which a parameter belongs; gradients are clipped part by part."""
    return next((head for head in ("output.dino.", "output.ibot.") if name.startswith(head)), "backbone")


class DINOv3Recipe:
    """Trains a backbone and its heads to predict their moving average's outputs for other views."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = join_ranks(self.settings)  # device, mesh, process groups, coordinates
        self.run = Run(RECIPE_NAME, self.settings, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds all parts. Weights are loaded after all other checks."""
        # ---- Components
        settings, ranks, run, schedule = self.settings, self.ranks, self.run, cfg.get("lr_scheduler")
        heads = settings.dino_head or {}, settings.ibot_head or {}
        make_model = partial(with_heads, partial(config.instantiate, cfg.model), *heads)
        meta_model = build("model", build_on_meta, make_model, settings)
        transform = build("transform", config.instantiate, cfg.transform)
        self.checkpointer = build("checkpointer", config.instantiate, cfg.checkpointer)
        build("checkpointer", check_normalization, self.checkpointer, transform)
        build("optimizer", check_optimizer, cfg.optimizer, schedule, settings, meta_model)

        # ---- Data
        keys = {"data": settings, "views": settings, "objective": settings, "num_to_run": num_to_run(settings, ranks)}
        self.loader, self.neighbors = build_image_loaders(cfg, transform, layout_of(meta_model), ranks, **keys)
        settings.warn_if_longer_than(settings.epochs * self.loader.order.num_steps(0))
        self.samples_per_rank = -(-settings.samples_per_update_step(ranks.dp_degree) // ranks.dp_degree)

        # ---- Student and teacher, with different loss modules
        self.loss_fn = SelfDistillationLoss(settings)
        with naming():
            self.model = build_stages(meta_model, settings, ranks)
            for stage in local_stages(self.model):
                if has_output(stage):
                    attach_loss(stage, self.loss_fn, settings.splits_backward, settings.compile)
                parallelize(stage, settings, ranks)
            self.teacher = AverageTeacher(meta_model, settings, settings, settings, ranks)
        run.open_log(cfg, meta_model, self.model, self.loader)
        with naming("checkpointer"):
            weights = fresh_vit_weights(meta_model, run.seed)
            weights |= self.checkpointer.load_checkpoint()[training.MODEL_KEY]
            load_weights(self.model, {training.MODEL_KEY: weights}, settings, ranks.device)
        self.pipeline = build_pipeline(self.model, settings, settings.torch_dtype, ranks, len(SUMS))
        self.teacher.set_up(self.model, self.pipeline, weights)
        self.models = self.teacher.beside(self.model)  # modules of a checkpoint
        self.offloading = settings.offloading(self.model)

        # ---- Optimizer, parts of the training, and resume
        self.optimizer = build_optimizer_by_depth(cfg.optimizer, self.model, meta_model, settings, settings)
        self.nonfinite = NonfiniteGuard(self.optimizer, ranks.device, settings)
        trained = self.models, self.optimizer, self.nonfinite, self.loader, self.checkpointer
        run.parts.add("budget", StepMemory(run, self.loader, self.optimizer))
        run.parts.add_every(settings.run_val_every_n_steps, "validation", Validation(run, self.validate), at_ends=True)
        run.parts.add_every(settings.export_every_n_steps, "exports", Exports(run))
        position = run.resume(Trained(*trained, exported=self.teacher.model))
        self.lr_scheduler = build_lr_scheduler(schedule, self.optimizer, *position)

    # ---- Objective and update -------------------------------------------------------------------

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Returns ``SUMS`` over the microbatch's images, [7]; the first is the loss.

        ``attach_loss`` makes the loss a part of the backbone, where FSDP2 gathers the heads'
        weights.
        """
        with self.offloading, record_function("forward"):
            return self.model(**microbatch.inputs, targets=microbatch.targets)

    def update(self, step: UpdateStep) -> tuple[dict[str, Tensor], Tensor | None]:
        """Steps along grad[(1 / N) sum_i w_d DINO_i + w_i iBOT_i + w_k KoLeo_i + w_g Gram_i].

        Then updates the teacher. N images on all ranks. Returns this rank's part of ``SUMS`` (means
        over ranks are means per image) and of the number of prototypes used, and the gradient norm
        of all parts before clipping.
        """
        settings, run = self.settings, self.run
        settings.set_weight_decay(self.optimizer, run.global_step, run.num_steps)
        temperature = settings.temperature_at(run.global_step)
        self.loss_fn.divergence.teacher_temperature = temperature
        # dp_degree / images on all ranks: FSDP2 averages gradients over data-parallel ranks.
        scale = step.scale("images")
        metrics = torch.zeros(len(SUMS), dtype=torch.float64, device=self.ranks.device)
        # The teacher computes all microbatches first: its targets depend on all images.
        with self.teacher.with_targets(step, temperature, self.max_images) as (microbatches, num_used):
            if self.pipeline is not None:
                # One schedule per update step pays the pipeline bubble once.
                sums = self.pipeline.forward_backward(microbatches, lambda sums: sums[0] * scale)
                metrics += sums * scale
            else:
                for microbatch, is_last in to_device_ahead(mark_last(microbatches), self.ranks.device):
                    with gradient_sync(self.model, is_last, settings.gradient_sync):
                        scaled = self.sums(microbatch) * scale
                        with record_function("backward"):
                            scaled[0].backward()
                    metrics += scaled.detach()

        settings.freeze_prototypes(self.model, run.global_step)
        max_norm = settings.clip_grad_norm
        grad_norm = clip_grad_norm_(self.model, max_norm, self.pipeline, part_of)
        # Fused optimizers skip non-finite gradients without a device synchronization.
        if self.nonfinite.should_step(grad_norm):
            self.optimizer.step()
        momentum = settings.momentum_at(run.global_step, run.num_steps)
        self.teacher.update(momentum, grad_norm, run.global_step + 1)
        self.optimizer.zero_grad(set_to_none=True)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        named = dict(zip(SUMS, metrics, strict=True))
        return {**named, "prototypes_used": num_used.to(metrics.dtype)}, grad_norm

    @property
    def max_images(self) -> int | None:
        """Images per rank if KoLeo needs two passes over all images, else None."""
        in_groups = self.settings.koleo_group_size is not None
        takes_two = self.settings.koleo_loss_weight > 0 and not in_groups
        return self.samples_per_rank if takes_two else None

    def figures(self, step: UpdateStep) -> dict[str, Any]:
        """Returns schedules and the images of an update step: per rank if it is full, and over all."""
        return {
            "lr": self.optimizer.param_groups[-1]["lr"],
            **self.settings.schedules_at(self.run.global_step, self.run.num_steps),
            "effective_local_batch": self.samples_per_rank,
            "effective_global_batch": step.totals["images"],
        }

    @torch.no_grad()
    def validate(self) -> dict[str, Tensor]:
        """Returns the k-NN accuracy on ``dataset_val`` with the teacher's states."""
        return {"knn_accuracy": self.neighbors.accuracy(self.teacher.states_of)}

    # ---- Training loop --------------------------------------------------------------------------

    def train(self) -> None:
        """Trains until the last epoch or a requested stop."""
        for step in self.run.steps(self.loader, counted="images"):
            figures = self.figures(step)
            metrics, grad_norm = self.update(step)
            self.run.finish(step, metrics, grad_norm, **figures)


@entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Trains with a config; ``key=value`` on the command line overrides its keys."""
    recipe = DINOv3Recipe(cfg)
    with recipe.run:  # closes files and process groups, also after an error
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
