"""Policy gradients on given rollouts, of all weights or of adapters, on one or several processes.

Rollouts are answers of a policy with rewards or advantages (GRPO, Dr. GRPO, DAPO, GSPO, CISPO, RLOO, on-policy distillation).
All of an update step is known before its first forward, so what divides the loss is a total over all ranks. Packed rows compute
the prompt of a group once.

    tune run full_policy_update_step --config llama3_2/5M_policy_update_step
"""

import sys
from collections.abc import Iterator

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.profiler import record_function

from recipe_utils import check_version, data, models, optim, parallel, policy, training
from recipe_utils.parallel import gradient_sync, to_device_ahead
from recipe_utils.reference import ReferenceSettings, build_reference
from recipe_utils.settings import STRICT, Component, Problem, build, instantiate, read_settings
from recipe_utils.update_steps import DataSettings, UpdateStep, declared_by, mark_last

RECIPE_NAME = "policy_update_step"
check_version("0.7", RECIPE_NAME)  # this file was written for it


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Keys of the config, where those of all groups stand side by side. Each class documents and checks its own."""

    components: training.TextComponents  # model, tokenizer, dataset, dataset_val, checkpointer
    reference: ReferenceSettings  # reference, reference_cache_dir
    rounds: policy.RoundSettings  # wait_seconds, sampler, sampler_val
    model: models.ModelSettings  # dtype, compile, enable_activation_checkpointing, ...
    pipeline: models.PipelineSettings  # pipeline_parallel_schedule, ...
    optimizer: optim.OptimizerSettings  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    run: training.RunSettings  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...
    data: DataSettings  # batch_size (groups), global_batch_size, microbatching, num_workers, ...
    ranks: parallel.RankSettings  # device, data_parallel_shard_dim, pipeline_parallel_dim, ...
    loss: Component
    """``recipe_utils.policy.PolicyLoss``, with ``kind``, ``normaliser``, ``kl_weight`` and others."""
    ref_checkpointer: Component | None = None
    """Loads the reference's weights; null uses ``checkpointer``, also when training resumes."""

    def problems(self) -> Iterator[Problem]:
        """Yields keys that exclude each other."""
        yield from training.problems_between(self, validates_otherwise=self.rounds.sampler_val is not None)
        yield from self.rounds.problems_of_rounds(self.ranks, self.components.dataset_val)
        yield from self.data.problems_of_long_rows(self.ranks)
        yield from policy.problems_with_loss(self.loss, self.data)


class PolicyRecipe:
    """Trains a model, or its adapters, on rollouts."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = self.settings.ranks.join()  # device, mesh, process groups, coordinates
        self.run = training.Run(RECIPE_NAME, self.settings.run, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds all parts. Weights are loaded after all other checks."""
        settings, ranks, run = self.settings, self.ranks, self.run
        self.built = built = training.build_components(cfg, settings, run, drops=False)  # tokenizer, meta_model, ...
        self.loss_fn = loss_fn = build("loss", policy.build_policy_loss, cfg.loss)
        self.declared = build("", declared_by, loss_fn)  # columns beside tokens, the divisor and further totals, sums
        sampler, self.sampler_val = (build(key, instantiate, cfg.get(key)) for key in ("sampler", "sampler_val"))

        # Data: the collator makes rows that this model can compute.
        datasets = data.load_datasets(cfg, built.tokenizer)
        limits = models.limits_of(built.meta_model, ranks.device, ranks.dims.tp, settings.model.packed_attention)
        collator = policy.group_collator(built, limits, datasets, loss_fn, self.declared)
        self.loader, self.val_loader = data.build_loaders(*datasets, collator, settings.data, ranks, built.num_to_run)

        # Model: it ends in the loss. Its passes before the pass, its optimizer, what training does besides, and resume.
        rows = models.rows_of(limits, collator.longest_row, ranks, settings.data.max_ranks_per_row)
        self.model = training.build_model(built, self.loader, rows, lambda stage: loss_fn, self.declared.sums)
        run.parts.add("ratios", policy.Ratios(run, loss_fn, self.loader))
        policy.add_rounds(built, datasets[0], settings.rounds, sampler, self.model)  # what rows have decides the next
        is_needed = policy.needs_reference(built, loss_fn, datasets)
        reference = build_reference(settings.reference, built, self.model, loss_fn, rows, collator, is_needed)
        start = policy.RoundStart(run, self.model, loss_fn, self.loader)
        self.attached = models.one_after_the_other(reference.attached, start.attached)
        self.stepper = training.build_stepper(built, self.model)
        run.parts.add("round_start", start)
        training.add_usual_parts(built, self.model, self.stepper, self.validate, self.loader, self.val_loader, loss_fn)
        training.resume_run(built, self.model, self.stepper, self.loader, reference.fingerprints)
        reference.precompute(settings.run.epochs, self.loader, self.val_loader)

    def objective(self, scaled: Tensor) -> Tensor:
        """Returns what is differentiated, [], of a microbatch's scaled sums [k]: the first, all weighted terms."""
        return scaled[0]

    def update(self, step: UpdateStep) -> tuple[dict[str, Tensor], Tensor | None]:
        """Computes gradients and makes one optimizer step.

        Returns this rank's part of the sums by name, whose means over ranks are ratios of sums, and the gradient norm
        before clipping, None with ``optimizer_in_bwd``.
        """
        # dp_degree / counts on all ranks: FSDP2 averages gradients over data-parallel ranks.
        metrics = torch.zeros(len(self.declared.sums), dtype=torch.float64, device=self.ranks.device)
        scale = torch.full_like(metrics, step.scale("measured"))
        scale[:1].fill_(step.scale(self.declared.divisor))  # no copy to the device
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
        names = self.declared.sums if step.totals["measured"] else self.declared.sums[:1]  # no group was computed
        return dict(zip(names, metrics, strict=False)), self.stepper.clip_and_step()

    def validate(self) -> dict[str, Tensor | float]:
        """Returns the reward of ``sampler_val``, and the sums of ``dataset_val`` over their counts, over all ranks."""
        rewards = policy.sampled_reward(self.sampler_val, self.built, self.model)
        if self.val_loader is None:
            return rewards
        sums, totals = training.sum_over(self.val_loader, self.model, self.attached)
        metrics = {f"val_{name}": value for name, value in zip(self.declared.sums, sums, strict=True)}
        counts = {**dict.fromkeys(metrics, "measured"), "val_loss": self.declared.divisor}
        return {**rewards, **parallel.means_over_ranks(metrics, totals, counts, self.ranks.dp_degree)}

    def train(self) -> None:
        """Trains until the last epoch or a requested stop."""
        for step in self.run.steps(self.loader, self.declared.divisor, policy.ROLLOUTS):
            metrics, grad_norm = self.update(step)
            self.run.finish(step, metrics, grad_norm, **policy.counts_of(step))


@training.entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Trains with a config; ``key=value`` on the command line overrides its keys."""
    recipe = PolicyRecipe(cfg)
    with recipe.run:  # closes files and process groups, also after an error
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
