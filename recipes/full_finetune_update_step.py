"""Fine-tuning of all weights or of adapters (LoRA, DoRA, QLoRA), on one or several processes.

An update step contains all microbatches of one optimizer step and their number of target tokens
over all data-parallel ranks, planned on the CPU before the first forward. Summed losses are
multiplied by one scale, so the gradient is that of one large batch for any split.

    tune run full_finetune_update_step --config llama3_2/5M_full_update_step
    tune run --nproc_per_node 2 full_finetune_update_step --config llama3_2/5M_full_update_step

``python -m recipe_utils.settings full_finetune_update_step`` prints all keys, and
``tune cp full_finetune_update_step my_recipe.py`` copies this file for changes.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.profiler import record_function

from recipe_utils import check_version, data, losses, models, optim, parallel, text, training
from recipe_utils.parallel import gradient_sync, to_device_ahead
from recipe_utils.settings import STRICT, Component, Problem, build, instantiate, naming, read_settings
from recipe_utils.update_steps import DataSettings, Microbatch, UpdateStep, declared_by, mark_last

RECIPE_NAME = "full_finetune_update_step"
check_version("0.6", RECIPE_NAME)  # this file was written for it


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Keys of the config, where those of all groups stand side by side. Each class documents and checks its own."""

    components: training.TextComponents  # model, tokenizer, dataset, dataset_val, checkpointer
    model: models.ModelSettings  # dtype, compile, enable_activation_checkpointing, ...
    pipeline: models.PipelineSettings  # pipeline_parallel_schedule, ...
    optimizer: optim.OptimizerSettings  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    run: training.RunSettings  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...
    data: DataSettings  # batch_size, global_batch_size, microbatching, num_workers, ...
    ranks: parallel.RankSettings  # device, data_parallel_shard_dim, pipeline_parallel_dim, ...
    loss: Component
    """``recipe_utils.losses.LinearCrossEntropyLoss`` (target positions only, in chunks), a stock loss, or yours."""
    loss_weights: Literal["tokens", "datasets"] = "tokens"
    """What the ``loss_weight`` of a named dataset weighs in an update step. ``tokens``: each target token;
    ``datasets``: the dataset's mean loss. The loss is divided by the sum of weights."""

    def problems(self) -> Iterator[Problem]:
        """Yields keys that exclude each other."""
        yield from training.problems_between(self, weighs_datasets=True)
        yield from self.data.problems_of_long_rows(self.ranks)
        datasets = self.components.dataset, self.components.dataset_val
        yield from data.problems_of_weights(self.loss_weights, *datasets, self.loss)
        yield from training.problems_with_sample_losses(self.data, self.loss)


class FullFinetuneRecipe:
    """Fine-tunes a model, or its adapters, on a map-style dataset."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = self.settings.ranks.join()  # device, mesh, process groups, coordinates
        self.run = training.Run(RECIPE_NAME, self.settings.run, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds all parts. Weights are loaded after all other checks."""
        settings, ranks, run, schedule = self.settings, self.ranks, self.run, cfg.get("lr_scheduler")

        # ---- Components: errors name the key
        self.tokenizer = build("tokenizer", instantiate, cfg.tokenizer)
        loss_fn = build("loss", losses.build_loss, cfg.loss)
        declared = build("", declared_by, loss_fn)  # what it takes of each target, its divisor, its sums
        self.divisor, self.names = declared.divisor, declared.sums
        meta_model = build("model", models.build_on_meta, partial(instantiate, cfg.model), settings.model)
        self.checkpointer = build("checkpointer", instantiate, cfg.checkpointer)
        small = models.small_model(meta_model, settings.model, ranks)  # whose parameters are sharded as the model's
        build("optimizer", optim.check_optimizer, cfg.optimizer, schedule, settings.optimizer, small)

        # ---- Data: the collator makes rows that this model can compute
        datasets = data.load_datasets(cfg, partial(text.load_dataset, tokenizer=self.tokenizer))
        kernel = settings.model.packed_attention
        limits = models.limits_of(meta_model, ranks.device, ranks.dims.tp, packed_attention=kernel)
        has_trees = any(map(text.makes_trees, datasets))
        collator = data.text_collator(
            settings.data, self.tokenizer, loss_fn.ignore_index, limits, has_trees=has_trees, declared=declared
        )
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
                    losses.attach_loss(stage, loss_fn, splits_backward, compiles, num_sums=len(self.names))
                models.parallelize(stage, settings.model, ranks)
        run.open_log(cfg, meta_model, self.model, self.loader)
        fingerprints = models.load_model(  # of frozen weights
            self.model, self.checkpointer, cfg.checkpointer, settings.model, ranks, run.seed
        )
        self.pipeline = models.build_pipeline(
            self.model, settings.pipeline, settings.model.torch_dtype, ranks, len(self.names)
        )
        self.offloading = settings.model.offloading(self.model)
        self.attached: models.Attached = models.nothing_attached  # or a pass before the pass
        if settings.loss_weights == "datasets":
            self.attached = partial(data.mean_of_datasets, datasets[0], ranks)

        # ---- Optimizer, parts of the training, and resume
        self.optimizer = optim.build_optimizer(cfg.optimizer, self.model, settings.optimizer)
        models.speed_up_adapters(self.model, self.optimizer)
        self.nonfinite = optim.NonfiniteGuard(self.optimizer, ranks.device, settings.optimizer)
        parts, every = run.parts, settings.run
        parts.add("budget", training.StepMemory(run, self.loader, self.optimizer))
        if settings.data.sample_losses:
            parts.add("sample_losses", training.SampleLosses(run, self.loader, loss_fn))
        self.by_dataset = training.DatasetLosses(run, loss_fn, self.loader, self.val_loader)
        parts.add("by_dataset", self.by_dataset)
        validation = training.Validation(run, self.validate)
        parts.add_every(every.run_val_every_n_steps, "validation", validation, at_ends=True)
        parts.add_every(every.sample_every_n_steps, "answers", training.Answers(run, self.model, self.tokenizer))
        parts.add_every(every.export_every_n_steps, "exports", training.Exports(run))
        trained = training.Trained(
            self.model, self.optimizer, self.nonfinite, self.loader, self.checkpointer, fingerprints
        )
        self.lr_scheduler = optim.build_lr_scheduler(schedule, self.optimizer, *run.resume(trained))

    # ---- Objective and update -------------------------------------------------------------------

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Returns the loss module's sums over the microbatch's targets, [1]: the weighted cross-entropy [nats].

        ``attach_loss`` makes the loss a part of the model, where FSDP2 gathers the output weight.
        """
        with self.offloading, record_function("forward"):
            return self.model(**microbatch.inputs, targets=microbatch.targets)

    def update(self, step: UpdateStep) -> tuple[dict[str, Tensor], Tensor | None]:
        """Computes gradients and makes one optimizer step.

        Returns this rank's part of the sums by name, whose means over ranks are means per target [nats], and the
        gradient norm before clipping, None with ``optimizer_in_bwd``.
        """
        # dp_degree / weights of the targets on all ranks: FSDP2 averages gradients over data-parallel ranks.
        scale = step.scale(self.divisor)
        metrics = torch.zeros(len(self.names), dtype=torch.float64, device=self.ranks.device)
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
        return dict(zip(self.names, metrics, strict=True)), grad_norm

    def validate(self) -> dict[str, Tensor]:
        """Returns the sums per target of ``dataset_val``, over all ranks, and the loss of each dataset."""
        self.by_dataset.start(validates=True)
        sums, totals = training.sum_over(
            self.val_loader, self.model, self.sums, len(self.names), self.pipeline, self.ranks.device, self.attached
        )
        metrics = {f"val_{name}": value for name, value in zip(self.names, sums, strict=True)}
        means = parallel.means_over_ranks(metrics, totals, self.divisor, self.ranks.dp_degree)
        return {**means, **self.by_dataset.means()}

    # ---- Training loop --------------------------------------------------------------------------

    def train(self) -> None:
        """Trains until the last epoch or a requested stop."""
        for step in self.run.steps(self.loader, divisor=self.divisor):
            metrics, grad_norm = self.update(step)
            self.run.finish(step, metrics, grad_norm)


@training.entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Trains with a config; ``key=value`` on the command line overrides its keys."""
    recipe = FullFinetuneRecipe(cfg)
    with recipe.run:  # closes files and process groups, also after an error
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
