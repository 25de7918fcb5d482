"""Preference tuning (DPO and others) of all weights or of adapters, on one or several processes.

The reference is frozen; with adapters, it is what training starts from. Every pair of answers has the same
weight for any split. Packed rows compute a common prefix of both answers once.

    tune run full_dpo_update_step --config llama3_2/5M_full_dpo_update_step
"""

import sys
from collections.abc import Iterator

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.profiler import record_function

from recipe_utils import check_version, data, models, optim, parallel, preference, training
from recipe_utils.parallel import gradient_sync, to_device_ahead
from recipe_utils.preference import METRICS
from recipe_utils.reference import ReferenceSettings, build_reference
from recipe_utils.settings import STRICT, Component, Problem, read_settings
from recipe_utils.update_steps import DataSettings, UpdateStep, mark_last

RECIPE_NAME = "full_dpo_update_step"
check_version("0.7", RECIPE_NAME)  # this file was written for it


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Keys of the config, where those of all groups stand side by side. Each class documents and checks its own."""

    components: training.TextComponents  # model, tokenizer, dataset, dataset_val, checkpointer
    objective: preference.PreferenceSettings  # sft_loss_weight, tokens_per_chunk
    reference: ReferenceSettings  # reference, reference_cache_dir
    pairs: preference.PairSettings  # prefix_sharing
    model: models.ModelSettings  # dtype, compile, enable_activation_checkpointing, ...
    pipeline: models.PipelineSettings  # pipeline_parallel_schedule, ...
    optimizer: optim.OptimizerSettings  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    run: training.RunSettings  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...
    data: DataSettings  # batch_size (pairs), global_batch_size, microbatching, num_workers, ...
    ranks: parallel.RankSettings  # device, data_parallel_shard_dim, tensor_parallel_dim, ...
    loss: Component
    """torchtune's ``DPOLoss`` or ``RSOLoss``, a loss of ``recipe_utils.preference``, or yours."""
    ref_checkpointer: Component | None = None
    """Loads the reference's weights; null uses ``checkpointer``, also when training resumes."""

    def problems(self) -> Iterator[Problem]:
        """Yields keys that exclude each other."""
        yield from training.problems_between(self)
        yield from self.pairs.problems_of_pairs(self.data)


class FullDPORecipe:
    """Tunes a model, or its adapters, on a map-style dataset of pairs of answers."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = self.settings.ranks.join()  # device, mesh, process groups, coordinates
        self.run = training.Run(RECIPE_NAME, self.settings.run, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds all parts. Weights are loaded after all other checks."""
        settings, ranks = self.settings, self.ranks
        built = training.build_components(cfg, settings, self.run, drops=False)  # tokenizer, meta_model, ...
        pair_loss = preference.build_loss(cfg, settings.objective.tokens_per_chunk)

        # Data: the collator makes rows that this model can compute.
        datasets = data.load_datasets(cfg, built.tokenizer, check=preference.check_is_pair)
        limits = models.limits_of(built.meta_model, ranks.device, ranks.dims.tp, settings.model.packed_attention)
        collator = preference.pair_collator(settings.data, built.tokenizer, limits, settings.pairs.prefix_sharing)
        self.loader, self.val_loader = data.build_loaders(*datasets, collator, settings.data, ranks, built.num_to_run)

        # Model: it ends in the loss. Its reference, its optimizer, what training does beside update steps, and resume.
        rows = models.rows_of(limits, collator.longest_row, ranks)
        self.model = training.build_model(built, self.loader, rows, lambda stage: pair_loss, METRICS)
        is_needed = pair_loss.needs_reference
        reference = build_reference(settings.reference, built, self.model, pair_loss, rows, collator, is_needed)
        self.attached = reference.attached  # a pass before the pass
        self.stepper = training.build_stepper(built, self.model)
        training.add_usual_parts(
            built, self.model, self.stepper, self.validate, self.loader, self.val_loader, pair_loss
        )
        training.resume_run(built, self.model, self.stepper, self.loader, reference.fingerprints)
        reference.precompute(settings.run.epochs, self.loader, self.val_loader)

    def objective(self, scaled: Tensor) -> Tensor:
        """Returns what is differentiated, [], of METRICS [8] over their counts."""
        return scaled[0] + self.settings.objective.sft_loss_weight * scaled[-1]

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
        """Returns METRICS of ``dataset_val``, ratios of sums over all ranks."""
        sums, totals = training.sum_over(self.val_loader, self.model, self.attached)
        counts = {**dict.fromkeys(METRICS, "pairs"), "sft_loss": "chosen_tokens"}
        found = dict(zip(METRICS, sums, strict=True))
        found = parallel.means_over_ranks(found, totals, counts, self.ranks.dp_degree)
        return self.named(torch.stack([*found.values()]), prefix="val_")

    def named(self, metrics: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Returns METRICS [8] by name, and the objective as ``loss``."""
        found = {"loss": self.objective(metrics), **dict(zip(METRICS, metrics, strict=True))}
        if self.settings.objective.sft_loss_weight == 0:
            del found["preference_loss"], found["sft_loss"]
        return {f"{prefix}{name}": value for name, value in found.items()}

    def train(self) -> None:
        """Trains until the last epoch or a requested stop."""
        for step in self.run.steps(self.loader, "pairs", preference.PAIRS):
            metrics, grad_norm = self.update(step)
            self.run.finish(step, metrics, grad_norm)


@training.entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Trains with a config; ``key=value`` on the command line overrides its keys."""
    recipe = FullDPORecipe(cfg)
    with recipe.run:  # closes files and process groups, also after an error
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
