"""Preference tuning (DPO and others) of all weights or of adapters, on one or several processes.

The reference is frozen; with adapters, it is what training starts from. Every pair of answers has the same
weight for any split. Packed rows compute a common prefix of both answers once.

    tune run full_dpo_update_step --config llama3_2/5M_full_dpo_update_step
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
from recipe_utils.losses.attach import attach_loss
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
from recipe_utils.preference import losses as preference
from recipe_utils.preference.losses import METRICS, PreferenceLoss, PreferenceSettings
from recipe_utils.preference.pairs import PairSettings, check_is_pair, layout_of, pair_collator
from recipe_utils.preference.reference import ReferenceSettings, build_reference, reference_checkpointer
from recipe_utils.settings.components import Component, MadeWith
from recipe_utils.settings.keys import STRICT
from recipe_utils.settings.problems import Problem, build, naming
from recipe_utils.settings.read import read_settings
from recipe_utils.text.datasets import load_dataset
from recipe_utils.text.mixture import refused_weights
from recipe_utils.training.entry_point import entry_point
from recipe_utils.training.parts.answers import Answers
from recipe_utils.training.parts.budget import StepMemory
from recipe_utils.training.parts.exports import Exports
from recipe_utils.training.parts.sample_losses import SampleLosses
from recipe_utils.training.parts.validation import Validation, sum_over
from recipe_utils.training.run import Run, Trained
from recipe_utils.training.settings import RunSettings, problems_between
from recipe_utils.update_steps.settings import DataSettings
from recipe_utils.update_steps.step import Microbatch, UpdateStep, mark_last

RECIPE_NAME = "full_dpo_update_step"
recipe_utils.check_version("0.6", RECIPE_NAME)  # this file was written for it
OfTokenizer = Annotated[dict[str, Any], MadeWith(num_positional=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(
    PreferenceSettings,  # sft_loss_weight, tokens_per_chunk
    ReferenceSettings,  # reference, reference_cache_dir
    PairSettings,  # prefix_sharing
    ModelSettings,  # dtype, compile, enable_activation_checkpointing, ...
    PipelineSettings,  # pipeline_parallel_schedule, ...
    optimizer.OptimizerSettings,  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    RunSettings,  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...
    DataSettings,  # batch_size (pairs), global_batch_size, microbatching, num_workers, ...
    RankSettings,  # device, data_parallel_shard_dim, tensor_parallel_dim, ...
):
    """Keys of the config. Each class documents and checks its own keys."""

    model: Component
    """A torchtune decoder or transformers folder."""
    tokenizer: Component
    """A torchtune tokenizer, or that of a transformers folder:
    recipe_utils.text.folder_tokenizer. Its ``max_seq_len`` truncates samples."""
    dataset: OfTokenizer | list[OfTokenizer]
    """Map-style dataset, identical on all ranks. A list is concatenated, or mixed by ``weight``."""
    checkpointer: Component
    """A torchtune checkpointer, or FolderCheckpointer (transformers): loads and saves weights."""
    loss: Component
    """torchtune's ``DPOLoss`` or ``RSOLoss``, one of ``recipe_utils.preference.losses``, or yours."""
    ref_checkpointer: Component | None = None
    """Loads the reference's weights; null uses ``checkpointer``, also when training resumes."""
    dataset_val: OfTokenizer | list[OfTokenizer] | None = None
    """Validation dataset; requires ``run_val_every_n_steps``."""

    def problems(self) -> Iterator[Problem]:
        """Yields keys that exclude each other."""
        yield from problems_between(
            data=self, ranks=self, model=self, pipeline=self, optimizer=self, run=self, components=self
        )
        yield from self.problems_of_pairs(self)
        yield from self.problems_with_split_backward()
        yield from refused_weights(dataset=self.dataset, dataset_val=self.dataset_val)


class FullDPORecipe:
    """Tunes a model, or its adapters, on a map-style dataset of pairs of answers."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = join_ranks(self.settings)  # device, mesh, process groups, coordinates
        self.run = Run(RECIPE_NAME, self.settings, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds all parts. Weights are loaded after all other checks."""
        # ---- Components
        settings, ranks, run, schedule = self.settings, self.ranks, self.run, cfg.get("lr_scheduler")
        self.tokenizer = build("tokenizer", config.instantiate, cfg.tokenizer)
        loss_fn = build("loss", preference.make_preference_loss, partial(config.instantiate, cfg.loss))
        meta_model = build("model", build_on_meta, partial(config.instantiate, cfg.model), settings)
        self.checkpointer = build("checkpointer", config.instantiate, cfg.checkpointer)
        build("optimizer", optimizer.check_optimizer, cfg.optimizer, schedule, settings, meta_model)
        of_policy = meta_model, self.checkpointer
        of_reference = build("ref_checkpointer", reference_checkpointer, cfg.get("ref_checkpointer"), *of_policy)

        # ---- Data
        limits = limits_of(meta_model, ranks.device, ranks.dims.tp)
        collator = pair_collator(settings, self.tokenizer, limits, settings.prefix_sharing)
        datasets = load_datasets(cfg, partial(load_dataset, tokenizer=self.tokenizer, check=check_is_pair))
        self.loader, self.val_loader = build_loaders(*datasets, collator, settings, ranks, num_to_run(settings, ranks))

        # ---- Model: each pipeline stage is changed, then parallelized
        pair_loss = PreferenceLoss(loss_fn, settings.tokens_per_chunk)
        with naming():
            self.model = build_stages(meta_model, settings, ranks)
            for stage in local_stages(self.model):
                attend_within_documents(stage, ranks.device, collator.longest_row)
                if has_output(stage):
                    attach_loss(stage, pair_loss, compiles=settings.compile)
                parallelize(stage, settings, ranks)
        run.open_log(cfg, meta_model, self.model, self.loader)
        frozen = load_model(self.model, self.checkpointer, cfg.checkpointer, settings, ranks, run.seed)
        self.pipeline = build_pipeline(self.model, settings, settings.torch_dtype, ranks, len(METRICS))
        self.offloading = settings.offloading(self.model)
        self.attached, fingerprints, cache = build_reference(  # a pass before the pass
            *(settings, settings, ranks, pair_loss, of_reference, meta_model, self.model, self.pipeline),
            longest_row=collator.longest_row,
            start=settings.checkpointer,
            context={"model": settings.model, "layout": layout_of(settings, settings.prefix_sharing)},
            output_dir=settings.output_dir,
        )

        # ---- Optimizer, parts of the training, and resume
        self.optimizer = optimizer.build_optimizer(cfg.optimizer, self.model, settings)
        speed_up_adapters(self.model, self.optimizer)
        self.nonfinite = NonfiniteGuard(self.optimizer, ranks.device, settings)
        trained = self.model, self.optimizer, self.nonfinite, self.loader, self.checkpointer
        run.parts.add("budget", StepMemory(run, self.loader, self.optimizer))
        if settings.sample_losses:
            run.parts.add("sample_losses", SampleLosses(run, self.loader, pair_loss))
        run.parts.add_every(settings.run_val_every_n_steps, "validation", Validation(run, self.validate), at_ends=True)
        run.parts.add_every(settings.sample_every_n_steps, "answers", Answers(run, self.model, self.tokenizer))
        run.parts.add_every(settings.export_every_n_steps, "exports", Exports(run))
        position = run.resume(Trained(*trained, {**frozen, **fingerprints}))
        self.lr_scheduler = optimizer.build_lr_scheduler(schedule, self.optimizer, *position)
        if cache is not None:
            cache.precompute(settings.epochs, self.loader, self.val_loader)

    # ---- Objective and update -------------------------------------------------------------------

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Returns sums of METRICS over pairs, the last one over chosen targets, [8] in fp64."""
        with self.offloading, record_function("forward"):
            return self.model(**microbatch.inputs, targets=microbatch.targets)

    def objective(self, metrics: Tensor) -> Tensor:
        """Returns the objective. METRICS are divided by their counts."""
        return metrics[0] + self.settings.sft_loss_weight * metrics[-1]

    def update(self, step: UpdateStep) -> tuple[dict[str, Tensor], Tensor | None]:
        """Steps along grad[(1 / N) sum_i l_i - sft_loss_weight (1 / T) sum_i log pi(chosen_i)].

        N pairs, T chosen targets on all ranks. Returns this rank's part of METRICS (their means are
        ratios of sums) and the gradient norm before clipping, None with ``optimizer_in_bwd``.
        """
        # dp_degree / counts on all ranks: FSDP2 averages gradients over data-parallel ranks.
        metrics = torch.zeros(len(METRICS), dtype=torch.float64, device=self.ranks.device)
        scale = torch.full_like(metrics, step.scale("pairs"))
        scale[-1:].fill_(step.scale("chosen_tokens"))  # no copy to the device
        # The reference computes all microbatches first: its stages need another schedule.
        with self.attached(step) as microbatches:
            if self.pipeline is not None:
                # One schedule per update step pays the pipeline bubble once.
                objective = lambda sums: self.objective(sums * scale)  # noqa: E731
                metrics += scale * self.pipeline.forward_backward(microbatches, objective)
            else:
                for microbatch, is_last in to_device_ahead(mark_last(microbatches), self.ranks.device):
                    with gradient_sync(self.model, is_last, self.settings.gradient_sync):
                        scaled = self.sums(microbatch) * scale
                        with record_function("backward"):
                            self.objective(scaled).backward()
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
        """Returns METRICS of ``dataset_val``, ratios of sums over all ranks."""
        how = len(METRICS), self.pipeline, self.ranks.device, self.attached
        sums, totals = sum_over(self.val_loader, self.model, self.sums, *how)
        found, counts = dict(zip(METRICS, sums, strict=True)), dict.fromkeys(METRICS, "pairs")
        counts["sft_loss"] = "chosen_tokens"
        found = means_over_ranks(found, totals, counts, self.ranks.dp_degree)
        return self.named(torch.stack([*found.values()]), prefix="val_")

    def named(self, metrics: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Returns METRICS [8] by name, and the objective as ``loss``."""
        found = {"loss": self.objective(metrics), **dict(zip(METRICS, metrics, strict=True))}
        if self.settings.sft_loss_weight == 0:
            del found["preference_loss"], found["sft_loss"]
        return {f"{prefix}{name}": value for name, value in found.items()}

    # ---- Training loop --------------------------------------------------------------------------

    def train(self) -> None:
        """Trains until the last epoch or a requested stop."""
        for step in self.run.steps(self.loader, counted="pairs"):
            metrics, grad_norm = self.update(step)
            self.run.finish(step, metrics, grad_norm, num_left_out=step.totals["skipped_samples"])


@entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Trains with a config; ``key=value`` on the command line overrides its keys."""
    recipe = FullDPORecipe(cfg)
    with recipe.run:  # closes files and process groups, also after an error
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
