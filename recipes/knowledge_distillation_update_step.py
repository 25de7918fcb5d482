"""Distillation of a teacher into a student or its adapters, on one or several processes.

Every target token has the same weight in cross-entropy and divergence, for any split over
microbatches and ranks. The teacher computes hidden states at target positions; the loss projects
those of both models in chunks. With pipeline stages each model has one schedule per update step.

    tune run knowledge_distillation_update_step --config llama3_2/5M_to_1M_KD_update_step
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.profiler import record_function
from torchtune import config

import recipe_utils
from recipe_utils.data.loaders import build_loaders, load_datasets
from recipe_utils.distillation.losses import SUMS, make_distillation_loss
from recipe_utils.distillation.teacher import Teacher, TeacherSettings, build_teacher_on_meta
from recipe_utils.long_rows.exchange import row_groups
from recipe_utils.losses.attach import attach_loss, build_loss
from recipe_utils.models.adapters.adapted_linear import speed_up_adapters
from recipe_utils.models.attention.document_mask import attend_within_documents
from recipe_utils.models.construct import build_on_meta, build_stages
from recipe_utils.models.parallelize import parallelize
from recipe_utils.models.pipeline.microbatches import build_pipeline
from recipe_utils.models.pipeline.schedule import PipelineSettings, num_to_run
from recipe_utils.models.pipeline.stages import has_output, local_stages
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.sizes import limits_of
from recipe_utils.models.weights import load_model
from recipe_utils.optim import optimizer
from recipe_utils.optim.grad_norm import clip_grad_norm_
from recipe_utils.optim.nonfinite import NonfiniteGuard
from recipe_utils.parallel.fsdp import gradient_sync
from recipe_utils.parallel.process_group import means_over_ranks
from recipe_utils.parallel.ranks import RankSettings, join_ranks
from recipe_utils.parallel.to_device import to_device_ahead
from recipe_utils.settings.components import Component, MadeWith
from recipe_utils.settings.keys import STRICT
from recipe_utils.settings.problems import Problem, build, naming
from recipe_utils.settings.read import read_settings
from recipe_utils.text.collator import text_collator
from recipe_utils.text.datasets import load_dataset
from recipe_utils.text.mixture import refused_weights
from recipe_utils.text.trees import makes_trees
from recipe_utils.training.entry_point import entry_point
from recipe_utils.training.parts.answers import Answers
from recipe_utils.training.parts.budget import StepMemory
from recipe_utils.training.parts.exports import Exports
from recipe_utils.training.parts.sample_losses import DatasetLosses, SampleLosses, problems_with_sample_losses
from recipe_utils.training.parts.validation import Validation, sum_over
from recipe_utils.training.run import Run, Trained
from recipe_utils.training.settings import RunSettings, problems_between
from recipe_utils.update_steps.settings import DataSettings
from recipe_utils.update_steps.step import Microbatch, UpdateStep, mark_last

RECIPE_NAME = "knowledge_distillation_update_step"
recipe_utils.check_version("0.6", RECIPE_NAME)  # this file was written for it
OfTokenizer = Annotated[dict[str, Any], MadeWith(num_positional=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(
    TeacherSettings,  # kd_ratio, teacher_dtype, ...
    ModelSettings,  # dtype, compile, enable_activation_checkpointing, ...
    PipelineSettings,  # pipeline_parallel_schedule, ...
    optimizer.OptimizerSettings,  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    RunSettings,  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...
    DataSettings,  # batch_size, global_batch_size, microbatching, num_workers, ...
    RankSettings,  # device, data_parallel_shard_dim, pipeline_parallel_dim, ...
):
    """Keys of the config. Each class documents and checks its own keys."""

    model: Component
    """Student: a torchtune decoder or fusion model, or a transformers folder."""
    tokenizer: Component
    """A torchtune tokenizer, or that of a transformers folder:
    recipe_utils.text.folder_tokenizer. Its ``max_seq_len`` truncates samples."""
    dataset: OfTokenizer | list[OfTokenizer]
    """Map-style dataset, identical on all ranks. A list is concatenated, or mixed by ``weight``."""
    checkpointer: Component
    """A torchtune checkpointer, or FolderCheckpointer (transformers): loads and saves weights."""
    loss: Component
    """``recipe_utils.losses.LinearCrossEntropyLoss``, or a stock cross-entropy."""
    kd_loss: Component | None = None
    """Divergence: ``recipe_utils.distillation.LinearDistillationLoss`` (null) or one of torchtune's six."""
    teacher_model: Component | None = None
    """Frozen torchtune decoder or transformers folder, with the student's vocabulary."""
    teacher_checkpointer: Component | None = None
    """Loads its weights."""
    dataset_val: OfTokenizer | list[OfTokenizer] | None = None
    """Validation dataset; requires ``run_val_every_n_steps``."""

    def problems(self) -> Iterator[Problem]:
        """Yields keys that exclude each other."""
        yield from problems_between(
            data=self, ranks=self, model=self, pipeline=self, optimizer=self, run=self, components=self
        )
        yield from self.problems_of_long_rows(self)
        components = {"teacher_model": self.teacher_model, "teacher_checkpointer": self.teacher_checkpointer}
        yield from self.problems_of_teacher(self, self, components)
        yield from problems_with_sample_losses(self, self.loss)
        yield from refused_weights(dataset=self.dataset, dataset_val=self.dataset_val)


class KDRecipe:
    """Trains a student, or its adapters, on a dataset and the outputs of a teacher."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = join_ranks(self.settings)  # device, mesh, process groups, coordinates
        self.run = Run(RECIPE_NAME, self.settings, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds all parts. Weights are loaded after all other checks."""
        # ---- Components
        settings, ranks, run, schedule = self.settings, self.ranks, self.run, cfg.get("lr_scheduler")
        self.tokenizer = build("tokenizer", config.instantiate, cfg.tokenizer)
        loss_fn = build("loss", build_loss, cfg.loss)
        kd_loss_fn = build("kd_loss", config.instantiate, cfg.get("kd_loss"))
        meta_model = build("model", build_on_meta, partial(config.instantiate, cfg.model), settings)
        self.checkpointer = build("checkpointer", config.instantiate, cfg.checkpointer)
        build("optimizer", optimizer.check_optimizer, cfg.optimizer, schedule, settings, meta_model)
        meta_teacher = build_teacher_on_meta(cfg, settings, settings, meta_model, self.checkpointer)
        self.metrics = SUMS if settings.kd_ratio > 0 else SUMS[:1]  # those of fine-tuning
        if settings.kd_ratio > 0:
            loss_fn = build("", make_distillation_loss, loss_fn, kd_loss_fn, settings.kd_ratio)

        # ---- Data
        limits = limits_of(meta_model, ranks.device, teacher=meta_teacher.model)
        datasets = load_datasets(cfg, partial(load_dataset, tokenizer=self.tokenizer))
        collator = text_collator(
            settings, self.tokenizer, loss_fn.ignore_index, limits, any(map(makes_trees, datasets))
        )
        self.loader, self.val_loader = build_loaders(*datasets, collator, settings, ranks, num_to_run(settings, ranks))

        # ---- Model: each pipeline stage is changed, then parallelized
        groups = row_groups(ranks, settings.max_ranks_per_row)
        with naming():
            self.model = build_stages(meta_model, settings, ranks)
            for stage in local_stages(self.model):
                attend_within_documents(stage, ranks.device, collator.longest_row, groups)
                if has_output(stage):
                    attach_loss(stage, loss_fn, settings.splits_backward, settings.compile)
                parallelize(stage, settings, ranks)
        run.open_log(cfg, meta_model, self.model, self.loader)
        frozen = load_model(self.model, self.checkpointer, cfg.checkpointer, settings, ranks, run.seed)
        self.pipeline = build_pipeline(self.model, settings, settings.torch_dtype, ranks, len(self.metrics))
        self.offloading = settings.offloading(self.model)
        self.teacher = Teacher(meta_teacher, ranks, meta_model, collator.longest_row, groups)
        self.attached = self.teacher.attached  # a pass before the pass
        frozen |= self.teacher.fingerprints

        # ---- Optimizer, parts of the training, and resume
        self.optimizer = optimizer.build_optimizer(cfg.optimizer, self.model, settings)
        speed_up_adapters(self.model, self.optimizer)
        self.nonfinite = NonfiniteGuard(self.optimizer, ranks.device, settings)
        trained = self.model, self.optimizer, self.nonfinite, self.loader, self.checkpointer
        run.parts.add("budget", StepMemory(run, self.loader, self.optimizer))
        if settings.sample_losses:
            run.parts.add("sample_losses", SampleLosses(run, self.loader, loss_fn))
        run.parts.add("by_dataset", DatasetLosses(run, loss_fn, self.loader))
        run.parts.add_every(settings.run_val_every_n_steps, "validation", Validation(run, self.validate), at_ends=True)
        run.parts.add_every(settings.sample_every_n_steps, "answers", Answers(run, self.model, self.tokenizer))
        run.parts.add_every(settings.export_every_n_steps, "exports", Exports(run))
        position = run.resume(Trained(*trained, frozen))
        self.lr_scheduler = optimizer.build_lr_scheduler(schedule, self.optimizer, *position)

    # ---- Objective and update -------------------------------------------------------------------

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Returns sums of ``self.metrics`` over target tokens, [5] or [1]; first the loss."""
        with self.offloading, record_function("forward"):
            return self.model(**microbatch.inputs, targets=microbatch.targets)

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
            if self.pipeline is not None:
                # One schedule per update step pays the pipeline bubble once.
                sums = self.pipeline.forward_backward(microbatches, lambda sums: sums[0] * scale)
                metrics += sums * scale
            else:
                for microbatch, is_last in to_device_ahead(mark_last(microbatches), self.ranks.device):
                    with gradient_sync(self.model, is_last, self.settings.gradient_sync):
                        scaled = self.sums(microbatch) * scale
                        with record_function("backward"):
                            scaled[0].backward()
                    metrics += scaled.detach()

        grad_norm = clip_grad_norm_(self.model, self.settings.clip_grad_norm, self.pipeline)
        # Fused optimizers skip non-finite gradients without a device synchronization.
        if self.nonfinite.should_step(grad_norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return self.named(metrics), grad_norm

    def validate(self) -> dict[str, Tensor]:
        """Returns means per target token of ``dataset_val`` over all ranks."""
        how = len(self.metrics), self.pipeline, self.ranks.device, self.attached
        sums, totals = sum_over(self.val_loader, self.model, self.sums, *how)
        return means_over_ranks(self.named(sums, "val_"), totals, "target_tokens", self.ranks.dp_degree)

    def named(self, sums: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Returns sums [5] or [1] by name, without those that are not computed."""
        found = dict(zip(self.metrics, sums, strict=True))
        if self.settings.kd_ratio == 1:
            del found["ce_loss"]
        return {f"{prefix}{name}": value for name, value in found.items()}

    # ---- Training loop --------------------------------------------------------------------------

    def train(self) -> None:
        """Trains until the last epoch or a requested stop."""
        for step in self.run.steps(self.loader, counted="target_tokens"):
            metrics, grad_norm = self.update(step)
            self.run.finish(step, metrics, grad_norm, teacher_seconds=self.teacher.read_seconds())


@entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Trains with a config; ``key=value`` on the command line overrides its keys."""
    recipe = KDRecipe(cfg)
    with recipe.run:  # closes files and process groups, also after an error
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
