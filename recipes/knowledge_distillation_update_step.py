"""Distillation of a teacher into a student or its adapters, on one or several processes.

Every target token has the same weight in cross-entropy and divergence, for any split over
microbatches and ranks. The teacher computes hidden states at target positions; the loss projects
those of both models in chunks. With pipeline stages each model has one schedule per update step.

    tune run knowledge_distillation_update_step --config llama3_2/5M_to_1M_KD_update_step
"""

import sys
from collections.abc import Iterator

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.profiler import record_function

from recipe_utils import check_version, data, distillation, models, optim, parallel, training
from recipe_utils.distillation import SUMS
from recipe_utils.parallel import gradient_sync, to_device_ahead
from recipe_utils.settings import STRICT, Component, Problem, read_settings
from recipe_utils.update_steps import DataSettings, UpdateStep, mark_last

RECIPE_NAME = "knowledge_distillation_update_step"
check_version("0.7", RECIPE_NAME)  # this file was written for it


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Keys of the config, where those of all groups stand side by side. Each class documents and checks its own."""

    components: training.TextComponents  # model, tokenizer, dataset, dataset_val, checkpointer
    teacher: distillation.TeacherSettings  # kd_ratio, teacher_dtype, ...
    model: models.ModelSettings  # dtype, compile, enable_activation_checkpointing, ...
    pipeline: models.PipelineSettings  # pipeline_parallel_schedule, ...
    optimizer: optim.OptimizerSettings  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    run: training.RunSettings  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...
    data: DataSettings  # batch_size, global_batch_size, microbatching, num_workers, ...
    ranks: parallel.RankSettings  # device, data_parallel_shard_dim, pipeline_parallel_dim, ...
    loss: Component
    """``recipe_utils.losses.LinearCrossEntropyLoss``, or a stock cross-entropy."""
    kd_loss: Component | None = None
    """Divergence: ``recipe_utils.distillation.LinearDistillationLoss`` (null) or one of torchtune's six."""
    teacher_model: Component | None = None
    """Frozen torchtune decoder or transformers folder, with the student's vocabulary."""
    teacher_checkpointer: Component | None = None
    """Loads its weights."""

    def problems(self) -> Iterator[Problem]:
        """Yields keys that exclude each other."""
        yield from training.problems_between(self)
        yield from self.data.problems_of_long_rows(self.ranks)
        yield from self.teacher.problems_of_teacher(self.teacher_model, self.teacher_checkpointer)
        yield from training.problems_with_sample_losses(self.data, self.loss)


class KDRecipe:
    """Trains a student, or its adapters, on a dataset and the outputs of a teacher."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = self.settings.ranks.join()  # device, mesh, process groups, coordinates
        self.run = training.Run(RECIPE_NAME, self.settings.run, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds all parts. Weights are loaded after all other checks."""
        settings, ranks, kd_ratio = self.settings, self.ranks, self.settings.teacher.kd_ratio
        self.metrics = SUMS if kd_ratio > 0 else SUMS[:1]  # those of fine-tuning
        built = training.build_components(cfg, settings, self.run)  # tokenizer, meta_model, checkpointer
        loss_fn = distillation.build_loss(cfg, kd_ratio)
        meta_teacher = distillation.build_teacher_on_meta(settings.teacher, built)

        # Data: the collator makes rows that both models can compute.
        datasets = data.load_datasets(cfg, built.tokenizer)
        has_trees, kernel = any(data.facts_of(d).has_sequences for d in datasets), settings.model.packed_attention
        limits = models.limits_of(built.meta_model, ranks.device, teacher=meta_teacher.model, packed_attention=kernel)
        collator = data.text_collator(settings.data, built.tokenizer, loss_fn.ignore_index, limits, has_trees)
        self.loader, self.val_loader = data.build_loaders(*datasets, collator, settings.data, ranks, built.num_to_run)

        # Model: it ends in the loss. Its teacher, its optimizer, what training does beside update steps, and resume.
        rows = models.rows_of(limits, collator.longest_row, ranks, settings.data.max_ranks_per_row)
        self.model = training.build_model(built, self.loader, rows, lambda stage: loss_fn, self.metrics)
        self.teacher = distillation.Teacher(meta_teacher, built, rows)
        self.attached = self.teacher.attached  # a pass before the pass
        self.stepper = training.build_stepper(built, self.model)
        training.add_usual_parts(built, self.model, self.stepper, self.validate, self.loader, self.val_loader, loss_fn)
        training.resume_run(built, self.model, self.stepper, self.loader, self.teacher.fingerprints)

    def objective(self, scaled: Tensor) -> Tensor:
        """Returns what is differentiated, [], of scaled sums of ``self.metrics``: the first."""
        return scaled[0]

    def update(self, step: UpdateStep) -> tuple[dict[str, Tensor], Tensor | None]:
        """Steps along grad[(1 / N) sum_t (1 - r) CE_t + r T^2 KL_t(teacher || student)].

        N target tokens on all ranks, r is ``kd_ratio``, T the temperature. Returns this rank's part
        of ``self.metrics`` (means over ranks are means per target token) and the gradient norm
        before clipping.
        """
        # dp_degree / target tokens on all ranks: FSDP2 averages gradients over data-parallel ranks.
        scale = step.scale("target_tokens")
        metrics = torch.zeros(len(self.metrics), dtype=torch.float64, device=self.ranks.device)
        # The teacher computes all microbatches first: its stages need another schedule.
        with self.attached(step) as microbatches:
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
        return self.named(metrics), self.stepper.clip_and_step()

    def validate(self) -> dict[str, Tensor]:
        """Returns means per target token of ``dataset_val`` over all ranks."""
        sums, totals = training.sum_over(self.val_loader, self.model, self.attached)
        return parallel.means_over_ranks(self.named(sums, "val_"), totals, "target_tokens", self.ranks.dp_degree)

    def named(self, sums: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Returns sums [5] or [1] by name, without those that are not computed."""
        found = dict(zip(self.metrics, sums, strict=True))
        if self.settings.teacher.kd_ratio == 1:
            del found["ce_loss"]
        return {f"{prefix}{name}": value for name, value in found.items()}

    def train(self) -> None:
        """Trains until the last epoch or a requested stop."""
        for step in self.run.steps(self.loader, "target_tokens", distillation.STUDENT):
            metrics, grad_norm = self.update(step)
            self.run.finish(step, metrics, grad_norm, teacher_seconds=self.teacher.read_seconds())


@training.entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Trains with a config; ``key=value`` on the command line overrides its keys."""
    recipe = KDRecipe(cfg)
    with recipe.run:  # closes files and process groups, also after an error
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
