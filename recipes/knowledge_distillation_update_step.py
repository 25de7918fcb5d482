"""Distillation of a teacher into a student or its adapters, on one or several processes.

Every target token has the same weight in cross-entropy and divergence, for any split over
microbatches and ranks. The teacher computes hidden states at target positions; the loss projects
those of both models in chunks. With pipeline stages each model has one schedule per update step.

    tune run knowledge_distillation_update_step --config llama3_2/5M_to_1M_KD_update_step
"""

import sys
from collections.abc import Iterator
from functools import partial

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.profiler import record_function

from recipe_utils import check_version, data, distillation, losses, models, optim, parallel, text, training
from recipe_utils.distillation import SUMS
from recipe_utils.parallel import gradient_sync, to_device_ahead
from recipe_utils.settings import STRICT, Component, Problem, build, instantiate, naming, read_settings
from recipe_utils.update_steps import DataSettings, Microbatch, UpdateStep, mark_last

RECIPE_NAME = "knowledge_distillation_update_step"
check_version("0.6", RECIPE_NAME)  # this file was written for it


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
        components = {"teacher_model": self.teacher_model, "teacher_checkpointer": self.teacher_checkpointer}
        yield from self.teacher.problems_of_teacher(components)
        yield from training.problems_with_sample_losses(self.data, self.loss)


class KDRecipe:
    """Trains a student, or its adapters, on a dataset and the outputs of a teacher."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = self.settings.ranks.join()  # device, mesh, process groups, coordinates
        self.run = training.Run(RECIPE_NAME, self.settings.run, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds all parts. Weights are loaded after all other checks."""
        settings, ranks, run, schedule = self.settings, self.ranks, self.run, cfg.get("lr_scheduler")
        kd_ratio = settings.teacher.kd_ratio
        self.metrics = SUMS if kd_ratio > 0 else SUMS[:1]  # those of fine-tuning

        # ---- Components: errors name the key
        self.tokenizer = build("tokenizer", instantiate, cfg.tokenizer)
        loss_fn = build("loss", losses.build_loss, cfg.loss)
        kd_loss_fn = build("kd_loss", instantiate, cfg.get("kd_loss"))
        meta_model = build("model", models.build_on_meta, partial(instantiate, cfg.model), settings.model)
        self.checkpointer = build("checkpointer", instantiate, cfg.checkpointer)
        small = models.small_model(meta_model, settings.model, ranks)  # whose parameters are sharded as the model's
        build("optimizer", optim.check_optimizer, cfg.optimizer, schedule, settings.optimizer, small)
        meta_teacher = distillation.build_teacher_on_meta(
            cfg, settings.teacher, settings.model, meta_model, self.checkpointer
        )
        if kd_ratio > 0:
            loss_fn = build("", distillation.make_distillation_loss, loss_fn, kd_loss_fn, kd_ratio)

        # ---- Data: the collator makes rows that both models can compute
        datasets = data.load_datasets(cfg, partial(text.load_dataset, tokenizer=self.tokenizer))
        kernel = settings.model.packed_attention
        limits = models.limits_of(meta_model, ranks.device, teacher=meta_teacher.model, packed_attention=kernel)
        has_trees = any(map(text.makes_trees, datasets))
        collator = data.text_collator(settings.data, self.tokenizer, loss_fn.ignore_index, limits, has_trees=has_trees)
        num_to_run = models.num_to_run(settings.pipeline, ranks)
        self.loader, self.val_loader = data.build_loaders(*datasets, collator, settings.data, ranks, num_to_run)

        # ---- Model: each pipeline stage is changed, then parallelized, then gets its weights
        groups = models.row_groups(ranks, settings.data.max_ranks_per_row)
        splits_backward, compiles = settings.pipeline.splits_backward, settings.model.compile
        with naming():
            self.model = models.build_stages(meta_model, settings.pipeline, ranks)
            for stage in models.local_stages(self.model):
                models.attend_within_documents(stage, limits.attentions[0], collator.longest_row, groups)
                if models.has_output(stage):
                    losses.attach_loss(stage, loss_fn, splits_backward, compiles)
                models.parallelize(stage, settings.model, ranks)
        run.open_log(cfg, meta_model, self.model, self.loader)
        fingerprints = models.load_model(  # of frozen weights
            self.model, self.checkpointer, cfg.checkpointer, settings.model, ranks, run.seed
        )
        self.pipeline = models.build_pipeline(
            self.model, settings.pipeline, settings.model.torch_dtype, ranks, len(self.metrics)
        )
        self.offloading = settings.model.offloading(self.model)
        self.teacher = distillation.Teacher(meta_teacher, ranks, meta_model, collator.longest_row, groups)
        self.attached = self.teacher.attached  # a pass before the pass

        # ---- Optimizer, parts of the training, and resume
        self.optimizer = optim.build_optimizer(cfg.optimizer, self.model, settings.optimizer)
        models.speed_up_adapters(self.model, self.optimizer)
        self.nonfinite = optim.NonfiniteGuard(self.optimizer, ranks.device, settings.optimizer)
        parts, every = run.parts, settings.run
        parts.add("budget", training.StepMemory(run, self.loader, self.optimizer))
        if settings.data.sample_losses:
            parts.add("sample_losses", training.SampleLosses(run, self.loader, loss_fn))
        parts.add("by_dataset", training.DatasetLosses(run, loss_fn, self.loader))
        validation = training.Validation(run, self.validate)
        parts.add_every(every.run_val_every_n_steps, "validation", validation, at_ends=True)
        parts.add_every(every.sample_every_n_steps, "answers", training.Answers(run, self.model, self.tokenizer))
        parts.add_every(every.export_every_n_steps, "exports", training.Exports(run))
        fingerprints |= self.teacher.fingerprints
        trained = training.Trained(
            self.model, self.optimizer, self.nonfinite, self.loader, self.checkpointer, fingerprints
        )
        self.lr_scheduler = optim.build_lr_scheduler(schedule, self.optimizer, *run.resume(trained))

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
                    with gradient_sync(self.model, is_last, self.settings.ranks.gradient_sync):
                        scaled = self.sums(microbatch) * scale
                        with record_function("backward"):
                            scaled[0].backward()
                    metrics += scaled.detach()

        grad_norm = optim.clip_grad_norm_(self.model, self.settings.optimizer.clip_grad_norm, self.pipeline)
        # Fused optimizers skip non-finite gradients without a device synchronization.
        if self.nonfinite.should_step(grad_norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return self.named(metrics), grad_norm

    def validate(self) -> dict[str, Tensor]:
        """Returns means per target token of ``dataset_val`` over all ranks."""
        sums, totals = training.sum_over(
            self.val_loader, self.model, self.sums, len(self.metrics), self.pipeline, self.ranks.device, self.attached
        )
        return parallel.means_over_ranks(self.named(sums, "val_"), totals, "target_tokens", self.ranks.dp_degree)

    def named(self, sums: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Returns sums [5] or [1] by name, without those that are not computed."""
        found = dict(zip(self.metrics, sums, strict=True))
        if self.settings.teacher.kd_ratio == 1:
            del found["ce_loss"]
        return {f"{prefix}{name}": value for name, value in found.items()}

    # ---- Training loop --------------------------------------------------------------------------

    def train(self) -> None:
        """Trains until the last epoch or a requested stop."""
        for step in self.run.steps(self.loader, divisor="target_tokens", reported=distillation.STUDENT):
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
