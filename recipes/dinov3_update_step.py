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

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.profiler import record_function

from recipe_utils import check_version, dinov3, models, optim, parallel, training
from recipe_utils.dinov3 import SUMS
from recipe_utils.parallel import gradient_sync, to_device_ahead
from recipe_utils.settings import STRICT, Problem, build, instantiate, read_settings
from recipe_utils.update_steps import DataSettings, UpdateStep, mark_last

RECIPE_NAME = "dinov3_update_step"
check_version("0.7", RECIPE_NAME)  # this file was written for it


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Keys of the config, where those of all groups stand side by side. Each class documents and checks its own."""

    components: dinov3.ImageComponents  # model, dataset, dataset_knn, dataset_val, checkpointer
    schedules: dinov3.ScheduleSettings  # ema_momentum, teacher_temperature, layerwise_lr_decay, ...
    views: dinov3.ViewSettings  # transform, mask_ratio, koleo_group_size, ...
    objective: dinov3.ObjectiveSettings  # ibot_loss_weight, sinkhorn_over, student_temperature, ...
    model: models.ModelSettings  # dtype, compile, enable_activation_checkpointing, ...
    pipeline: models.PipelineSettings  # pipeline_parallel_schedule, ...
    optimizer: optim.OptimizerSettings  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    run: training.RunSettings  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...
    data: DataSettings  # batch_size, global_batch_size, num_workers, ...
    ranks: parallel.RankSettings  # device, data_parallel_shard_dim, pipeline_parallel_dim, ...
    dino_head: dinov3.HeadArguments | None = None
    """Head of crops: ``num_prototypes`` 65536, ``hidden_dim`` 2048, ``bottleneck_dim`` 256,
    ``num_layers`` 3."""
    ibot_head: dinov3.HeadArguments | None = None
    """Head of patches, with the same arguments."""

    def problems(self) -> Iterator[Problem]:
        """Yields keys that exclude each other, and those that this recipe restricts."""
        # Losses couple images, so global_batch_size must divide into microbatches.
        yield from training.problems_between(self, must_divide=True)
        yield from self.views.problems_of_views(self.data)
        yield from self.objective.problems_of_objective(self.data, self.ranks, self.model)
        yield from self.schedules.problems_of_schedules(self.optimizer.optimizer, self.objective.student_temperature)


class DINOv3Recipe:
    """Trains a backbone and its heads to predict their moving average's outputs for other views."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = self.settings.ranks.join()  # device, mesh, process groups, coordinates
        self.run = training.Run(RECIPE_NAME, self.settings.run, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds all parts. Weights are loaded after all other checks."""
        settings, ranks = self.settings, self.ranks
        heads = settings.dino_head or {}, settings.ibot_head or {}
        make_model = partial(dinov3.with_heads, partial(instantiate, cfg.model), *heads)
        built = training.build_components(cfg, settings, self.run, make_model)  # meta_model, checkpointer
        transform = build("transform", instantiate, cfg.transform)
        build("checkpointer", dinov3.check_normalization, built.checkpointer, transform)

        # Data: crops of images, and whole ones for the k-NN classifier.
        groups = settings.data, settings.views, settings.objective, built.num_to_run
        self.loader, self.neighbors = dinov3.build_image_loaders(cfg, transform, built.meta_model, ranks, *groups)
        settings.schedules.warn_if_longer_than(settings.run.epochs * self.loader.order.num_steps(0))
        self.samples_per_rank = -(-settings.data.samples_per_update_step(ranks.dp_degree) // ranks.dp_degree)

        # Student and teacher, with different loss modules.
        self.loss_fn = dinov3.SelfDistillationLoss(settings.objective)
        fresh = dinov3.with_fresh_weights(built)
        self.model = training.build_model(fresh, self.loader, None, lambda stage: self.loss_fn, SUMS)
        self.teacher = dinov3.AverageTeacher(fresh, settings.objective, self.model)
        self.stepper = training.build_stepper(built, self.model, dinov3.groups_by_depth(built, settings.schedules))
        training.add_usual_parts(built, self.model, self.stepper, self.validate, self.loader, None)
        saved, exported = self.teacher.beside(self.model.module), self.teacher.model
        training.resume_run(built, self.model, self.stepper, self.loader, saved=saved, exported=exported)

    def objective(self, scaled: Tensor) -> Tensor:
        """Returns what is differentiated, [], of scaled ``SUMS`` [7]: the first."""
        return scaled[0]

    def update(self, step: UpdateStep) -> tuple[dict[str, Tensor], Tensor | None]:
        """Steps along grad[(1 / N) sum_i w_d DINO_i + w_i iBOT_i + w_k KoLeo_i + w_g Gram_i].

        Then updates the teacher. N images on all ranks. Returns this rank's part of ``SUMS`` (means
        over ranks are means per image) and of the number of prototypes used, and the gradient norm
        of all parts before clipping.
        """
        run, schedules = self.run, self.settings.schedules
        schedules.set_weight_decay(self.stepper.optimizer, run.global_step, run.num_steps)
        temperature = schedules.temperature_at(run.global_step)
        self.loss_fn.divergence.teacher_temperature = temperature
        # dp_degree / images on all ranks: FSDP2 averages gradients over data-parallel ranks.
        scale = step.scale("images")
        metrics = torch.zeros(len(SUMS), dtype=torch.float64, device=self.ranks.device)
        # The teacher computes all microbatches first: its targets depend on all images.
        with self.teacher.with_targets(step, temperature, self.max_images) as (microbatches, num_used):
            if isinstance(self.model, models.Pipeline):
                # One schedule per update step pays the pipeline bubble once.
                sums = self.model.forward_backward(microbatches, lambda sums: self.objective(sums * scale))
                metrics += sums * scale
            else:
                for microbatch, is_last in to_device_ahead(mark_last(microbatches), self.ranks.device):
                    with gradient_sync(self.model.module, is_last, self.settings.ranks.gradient_sync):
                        scaled = self.model.sums(microbatch) * scale
                        with record_function("backward"):
                            self.objective(scaled).backward()
                    metrics += scaled.detach()

        schedules.freeze_prototypes(self.model.module, run.global_step)
        grad_norm = self.stepper.clip_and_step(dinov3.part_of)
        momentum = schedules.momentum_at(run.global_step, run.num_steps)
        self.teacher.update(momentum, grad_norm, run.global_step + 1)
        named = dict(zip(SUMS, metrics, strict=True))
        return {**named, "prototypes_used": num_used.to(metrics.dtype)}, grad_norm

    @property
    def max_images(self) -> int | None:
        """Images per rank if KoLeo needs two passes over all images, else None."""
        in_groups = self.settings.views.koleo_group_size is not None
        takes_two = self.settings.objective.koleo_loss_weight > 0 and not in_groups
        return self.samples_per_rank if takes_two else None

    def figures(self, step: UpdateStep) -> dict[str, float]:
        """Returns schedules and the images of an update step: per rank if it is full, and over all."""
        return {
            "lr": self.stepper.optimizer.param_groups[-1]["lr"],
            **self.settings.schedules.schedules_at(self.run.global_step, self.run.num_steps),
            "effective_local_batch": self.samples_per_rank,
            "effective_global_batch": step.totals["images"],
        }

    @torch.no_grad()
    def validate(self) -> dict[str, Tensor]:
        """Returns the k-NN accuracy on ``dataset_val`` with the teacher's states."""
        assert self.neighbors is not None
        return {"knn_accuracy": self.neighbors.accuracy(self.teacher.states_of)}

    def train(self) -> None:
        """Trains until the last epoch or a requested stop."""
        for step in self.run.steps(self.loader, "images", dinov3.IMAGES):
            figures = self.figures(step)
            metrics, grad_norm = self.update(step)
            self.run.finish(step, metrics, grad_norm, **figures)


@training.entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Trains with a config; ``key=value`` on the command line overrides its keys."""
    recipe = DINOv3Recipe(cfg)
    with recipe.run:  # closes files and process groups, also after an error
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
