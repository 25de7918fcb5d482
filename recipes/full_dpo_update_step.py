"""Preference tuning (DPO and others) of all weights or of adapters, on one or several processes.

The reference is frozen; with adapters, it is what training starts from. Every pair of answers has the same
weight for any split. Packed rows compute a common prefix of both answers once.

    tune run full_dpo_update_step --config llama3_2/5M_full_dpo_update_step
"""

import sys
from collections.abc import Iterator
from functools import partial

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.profiler import record_function

from recipe_utils import check_version, data, losses, models, optim, parallel, preference, text, training
from recipe_utils.parallel import gradient_sync, to_device_ahead
from recipe_utils.preference import METRICS
from recipe_utils.settings import STRICT, Component, Problem, build, instantiate, naming, read_settings
from recipe_utils.update_steps import DataSettings, Microbatch, UpdateStep, mark_last

RECIPE_NAME = "full_dpo_update_step"
check_version("0.6", RECIPE_NAME)  # this file was written for it


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Keys of the config, where those of all groups stand side by side. Each class documents and checks its own."""

    components: training.TextComponents  # model, tokenizer, dataset, dataset_val, checkpointer
    preference: preference.PreferenceSettings  # sft_loss_weight, tokens_per_chunk
    reference: preference.ReferenceSettings  # reference, reference_cache_dir
    pairs: preference.PairSettings  # prefix_sharing
    model: models.ModelSettings  # dtype, compile, enable_activation_checkpointing, ...
    pipeline: models.PipelineSettings  # pipeline_parallel_schedule, ...
    optimizer: optim.OptimizerSettings  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    run: training.RunSettings  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...
    data: DataSettings  # batch_size (pairs), global_batch_size, microbatching, num_workers, ...
    ranks: parallel.RankSettings  # device, data_parallel_shard_dim, tensor_parallel_dim, ...
    loss: Component
    """torchtune's ``DPOLoss`` or ``RSOLoss``, one of ``recipe_utils.preference.losses``, or yours."""
    ref_checkpointer: Component | None = None
    """Loads the reference's weights; null uses ``checkpointer``, also when training resumes."""

    def problems(self) -> Iterator[Problem]:
        """Yields keys that exclude each other."""
        yield from training.problems_between(self)
        yield from self.pairs.problems_of_pairs(self.data)
        yield from self.pipeline.problems_with_split_backward()


class FullDPORecipe:
    """Tunes a model, or its adapters, on a map-style dataset of pairs of answers."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = self.settings.ranks.join()  # device, mesh, process groups, coordinates
        self.run = training.Run(RECIPE_NAME, self.settings.run, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds all parts. Weights are loaded after all other checks."""
        settings, ranks, run, schedule = self.settings, self.ranks, self.run, cfg.get("lr_scheduler")

        # ---- Components: errors name the key
        self.tokenizer = build("tokenizer", instantiate, cfg.tokenizer)
        loss_fn = build("loss", preference.make_preference_loss, partial(instantiate, cfg.loss))
        pair_loss = preference.PreferenceLoss(loss_fn, settings.preference.tokens_per_chunk)
        meta_model = build("model", models.build_on_meta, partial(instantiate, cfg.model), settings.model)
        self.checkpointer = build("checkpointer", instantiate, cfg.checkpointer)
        small = models.small_model(meta_model, settings.model, ranks)  # whose parameters are sharded as the model's
        build("optimizer", optim.check_optimizer, cfg.optimizer, schedule, settings.optimizer, small)
        cfg_reference = cfg.get("ref_checkpointer")
        ref_checkpointer = build(
            "ref_checkpointer", models.reference_checkpointer, cfg_reference, meta_model, self.checkpointer
        )

        # ---- Data: the collator makes rows that this model can compute
        prefix_sharing = settings.pairs.prefix_sharing
        kernel = settings.model.packed_attention
        limits = models.limits_of(meta_model, ranks.device, ranks.dims.tp, packed_attention=kernel)
        collator = preference.pair_collator(settings.data, self.tokenizer, limits, prefix_sharing)
        load = partial(text.load_dataset, tokenizer=self.tokenizer, check=preference.check_is_pair)
        datasets = data.load_datasets(cfg, load)
        num_to_run = models.num_to_run(settings.pipeline, ranks)
        self.loader, self.val_loader = data.build_loaders(*datasets, collator, settings.data, ranks, num_to_run)

        # ---- Model: each pipeline stage is changed, then parallelized, then gets its weights
        with naming():
            self.model = models.build_stages(meta_model, settings.pipeline, ranks)
            for stage in models.local_stages(self.model):
                models.attend_within_documents(stage, limits.attentions[0], collator.longest_row)
                if models.has_output(stage):
                    losses.attach_loss(stage, pair_loss, compiles=settings.model.compile)
                models.parallelize(stage, settings.model, ranks)
        run.open_log(cfg, meta_model, self.model, self.loader)
        fingerprints = models.load_model(  # of frozen weights
            self.model, self.checkpointer, cfg.checkpointer, settings.model, ranks, run.seed
        )
        self.pipeline = models.build_pipeline(
            self.model, settings.pipeline, settings.model.torch_dtype, ranks, len(METRICS)
        )
        self.offloading = settings.model.offloading(self.model)
        self.attached, of_reference, cache = preference.build_reference(  # a pass before the pass
            settings.reference,
            settings.model,
            ranks,
            pair_loss,
            ref_checkpointer,
            meta_model,
            self.model,
            self.pipeline,
            longest_row=collator.longest_row,
            start=settings.components.checkpointer,
            context={"model": settings.components.model, "layout": preference.layout_of(settings.data, prefix_sharing)},
            output_dir=settings.run.output_dir,
        )

        # ---- Optimizer, parts of the training, and resume
        self.optimizer = optim.build_optimizer(cfg.optimizer, self.model, settings.optimizer)
        models.speed_up_adapters(self.model, self.optimizer)
        self.nonfinite = optim.NonfiniteGuard(self.optimizer, ranks.device, settings.optimizer)
        parts, every = run.parts, settings.run
        parts.add("budget", training.StepMemory(run, self.loader, self.optimizer))
        if settings.data.sample_losses:
            parts.add("sample_losses", training.SampleLosses(run, self.loader, pair_loss))
        validation = training.Validation(run, self.validate)
        parts.add_every(every.run_val_every_n_steps, "validation", validation, at_ends=True)
        parts.add_every(every.sample_every_n_steps, "answers", training.Answers(run, self.model, self.tokenizer))
        parts.add_every(every.export_every_n_steps, "exports", training.Exports(run))
        trained = training.Trained(
            self.model, self.optimizer, self.nonfinite, self.loader, self.checkpointer, fingerprints | of_reference
        )
        self.lr_scheduler = optim.build_lr_scheduler(schedule, self.optimizer, *run.resume(trained))
        if cache is not None:
            cache.precompute(settings.run.epochs, self.loader, self.val_loader)

    # ---- Objective and update -------------------------------------------------------------------

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Returns sums of METRICS over pairs, the last one over chosen targets, [8] in fp64."""
        with self.offloading, record_function("forward"):
            return self.model(**microbatch.inputs, targets=microbatch.targets)

    def objective(self, metrics: Tensor) -> Tensor:
        """Returns the objective. METRICS are divided by their counts."""
        return metrics[0] + self.settings.preference.sft_loss_weight * metrics[-1]

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
                    with gradient_sync(self.model, is_last, self.settings.ranks.gradient_sync):
                        scaled = self.sums(microbatch) * scale
                        with record_function("backward"):
                            self.objective(scaled).backward()
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
        """Returns METRICS of ``dataset_val``, ratios of sums over all ranks."""
        sums, totals = training.sum_over(
            self.val_loader, self.model, self.sums, len(METRICS), self.pipeline, self.ranks.device, self.attached
        )
        found, counts = dict(zip(METRICS, sums, strict=True)), dict.fromkeys(METRICS, "pairs")
        counts["sft_loss"] = "chosen_tokens"
        found = parallel.means_over_ranks(found, totals, counts, self.ranks.dp_degree)
        return self.named(torch.stack([*found.values()]), prefix="val_")

    def named(self, metrics: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Returns METRICS [8] by name, and the objective as ``loss``."""
        found = {"loss": self.objective(metrics), **dict(zip(METRICS, metrics, strict=True))}
        if self.settings.preference.sft_loss_weight == 0:
            del found["preference_loss"], found["sft_loss"]
        return {f"{prefix}{name}": value for name, value in found.items()}

    # ---- Training loop --------------------------------------------------------------------------

    def train(self) -> None:
        """Trains until the last epoch or a requested stop."""
        for step in self.run.steps(self.loader, divisor="pairs", reported=preference.PAIRS):
            metrics, grad_norm = self.update(step)
            self.run.finish(step, metrics, grad_norm, num_left_out=step.totals["skipped_samples"])


@training.entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Trains with a config; ``key=value`` on the command line overrides its keys."""
    recipe = FullDPORecipe(cfg)
    with recipe.run:  # closes files and process groups, also after an error
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
