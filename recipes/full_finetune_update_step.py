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
from typing import Annotated, Any

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.profiler import record_function
from torchtune import config

import recipe_utils
from recipe_utils.data.loaders import build_loaders, load_datasets
from recipe_utils.long_rows.exchange import row_groups
from recipe_utils.losses.attach import attach_loss, build_loss
from recipe_utils.losses.dataset_weights import LossWeightSettings, mean_of_datasets
from recipe_utils.models.adapters.adapted_linear import speed_up_adapters
from recipe_utils.models.attention.document_mask import attend_within_documents
from recipe_utils.models.construct import build_on_meta, build_stages
from recipe_utils.models.frozen import Attached, nothing_attached
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
from recipe_utils.text.trees import makes_trees
from recipe_utils.training.entry_point import entry_point
from recipe_utils.training.parts.answers import Answers
from recipe_utils.training.parts.budget import StepMemory
from recipe_utils.training.parts.exports import Exports
from recipe_utils.training.parts.sample_losses import DatasetLosses, SampleLosses, problems_with_sample_losses
from recipe_utils.training.parts.validation import Validation, sum_over
from recipe_utils.training.run import Run, Trained
from recipe_utils.training.settings import RunSettings, problems_between
from recipe_utils.update_steps.objective import declared_by
from recipe_utils.update_steps.settings import DataSettings
from recipe_utils.update_steps.step import Microbatch, UpdateStep, mark_last

RECIPE_NAME = "full_finetune_update_step"
recipe_utils.check_version("0.6", RECIPE_NAME)  # this file was written for it
OfTokenizer = Annotated[dict[str, Any], MadeWith(num_positional=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(
    LossWeightSettings,  # loss_weights
    ModelSettings,  # dtype, compile, enable_activation_checkpointing, ...
    PipelineSettings,  # pipeline_parallel_schedule, ...
    optimizer.OptimizerSettings,  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    RunSettings,  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...
    DataSettings,  # batch_size, global_batch_size, microbatching, num_workers, ...
    RankSettings,  # device, data_parallel_shard_dim, pipeline_parallel_dim, ...
):
    """Keys of the config. Each class documents and checks its own keys."""

    model: Component
    """A torchtune decoder, a fusion model with a ``decoder``, or a transformers folder:
    recipe_utils.models.causal_lm."""
    tokenizer: Component
    """A torchtune tokenizer, or that of a transformers folder:
    recipe_utils.text.folder_tokenizer. Its ``max_seq_len`` truncates samples."""
    dataset: OfTokenizer | list[OfTokenizer]
    """Map-style dataset, identical on all ranks. A list is concatenated, or mixed by ``weight``."""
    checkpointer: Component
    """A torchtune checkpointer, or FolderCheckpointer (transformers): loads and saves weights."""
    loss: Component
    """``recipe_utils.losses.LinearCrossEntropyLoss`` (target positions only, in chunks), a stock loss, or yours."""
    dataset_val: OfTokenizer | list[OfTokenizer] | None = None
    """Validation dataset; requires ``run_val_every_n_steps``."""

    def problems(self) -> Iterator[Problem]:
        """Yields keys that exclude each other."""
        yield from problems_between(
            data=self, ranks=self, model=self, pipeline=self, optimizer=self, run=self, components=self
        )
        yield from self.problems_of_long_rows(self)
        yield from self.problems_of_weights(self.dataset, self.dataset_val, self.loss)
        yield from problems_with_sample_losses(self, self.loss)


class FullFinetuneRecipe:
    """Fine-tunes a model, or its adapters, on a map-style dataset."""

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
        meta_model = build("model", build_on_meta, partial(config.instantiate, cfg.model), settings)
        self.checkpointer = build("checkpointer", config.instantiate, cfg.checkpointer)
        build("optimizer", optimizer.check_optimizer, cfg.optimizer, schedule, settings, meta_model)

        # ---- Data
        limits = limits_of(meta_model, ranks.device, ranks.dims.tp)
        datasets = load_datasets(cfg, partial(load_dataset, tokenizer=self.tokenizer))
        declared = build("", declared_by, loss_fn)  # what it takes of each target, its divisor, its sums
        self.divisor, self.names = declared.divisor, declared.sums
        given = settings, self.tokenizer, loss_fn.ignore_index, limits
        collator = text_collator(*given, any(map(makes_trees, datasets)), declared)
        self.loader, self.val_loader = build_loaders(*datasets, collator, settings, ranks, num_to_run(settings, ranks))

        # ---- Model: each pipeline stage is changed, then parallelized
        groups = row_groups(ranks, settings.max_ranks_per_row)
        with naming():
            self.model = build_stages(meta_model, settings, ranks)
            for stage in local_stages(self.model):
                attend_within_documents(stage, ranks.device, collator.longest_row, groups)
                if has_output(stage):
                    attach_loss(stage, loss_fn, settings.splits_backward, settings.compile, num_sums=len(self.names))
                parallelize(stage, settings, ranks)
        run.open_log(cfg, meta_model, self.model, self.loader)
        frozen = load_model(self.model, self.checkpointer, cfg.checkpointer, settings, ranks, run.seed)
        self.pipeline = build_pipeline(self.model, settings, settings.torch_dtype, ranks, len(self.names))
        self.offloading = settings.offloading(self.model)
        self.attached: Attached = nothing_attached  # or a pass before the pass
        if settings.loss_weights == "datasets":
            self.attached = partial(mean_of_datasets, datasets[0], ranks)

        # ---- Optimizer, parts of the training, and resume
        self.optimizer = optimizer.build_optimizer(cfg.optimizer, self.model, settings)
        speed_up_adapters(self.model, self.optimizer)
        self.nonfinite = NonfiniteGuard(self.optimizer, ranks.device, settings)
        trained = self.model, self.optimizer, self.nonfinite, self.loader, self.checkpointer
        run.parts.add("budget", StepMemory(run, self.loader, self.optimizer))
        if settings.sample_losses:
            run.parts.add("sample_losses", SampleLosses(run, self.loader, loss_fn))
        self.by_dataset = DatasetLosses(run, loss_fn, self.loader, self.val_loader)
        run.parts.add("by_dataset", self.by_dataset)
        run.parts.add_every(settings.run_val_every_n_steps, "validation", Validation(run, self.validate), at_ends=True)
        run.parts.add_every(settings.sample_every_n_steps, "answers", Answers(run, self.model, self.tokenizer))
        run.parts.add_every(settings.export_every_n_steps, "exports", Exports(run))
        position = run.resume(Trained(*trained, frozen))
        self.lr_scheduler = optimizer.build_lr_scheduler(schedule, self.optimizer, *position)

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
        return dict(zip(self.names, metrics, strict=True)), grad_norm

    def validate(self) -> dict[str, Tensor]:
        """Returns the sums per target of ``dataset_val``, over all ranks, and the loss of each dataset."""
        self.by_dataset.start(validates=True)
        how = len(self.names), self.pipeline, self.ranks.device, self.attached
        sums, totals = sum_over(self.val_loader, self.model, self.sums, *how)
        metrics = {f"val_{name}": value for name, value in zip(self.names, sums, strict=True)}
        means = means_over_ranks(metrics, totals, self.divisor, self.ranks.dp_degree)
        return {**means, **self.by_dataset.means()}

    # ---- Training loop --------------------------------------------------------------------------

    def train(self) -> None:
        """Trains until the last epoch or a requested stop."""
        for step in self.run.steps(self.loader, counted=self.divisor):
            metrics, grad_norm = self.update(step)
            self.run.finish(step, metrics, grad_norm)


@entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Trains with a config; ``key=value`` on the command line overrides its keys."""
    recipe = FullFinetuneRecipe(cfg)
    with recipe.run:  # closes files and process groups, also after an error
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
