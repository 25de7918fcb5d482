"""Policy gradients on given rollouts, of all weights or of adapters, on one or several processes.

Rollouts are answers of a policy with rewards or advantages (GRPO, Dr. GRPO, DAPO, GSPO, CISPO, RLOO, on-policy distillation).
All of an update step is known before its first forward, so what divides the loss is a total over all ranks. Packed rows compute
the prompt of a group once.

    tune run full_policy_update_step --config llama3_2/5M_policy_update_step

``python -m recipe_utils.settings full_policy_update_step`` prints all keys, and
``tune cp full_policy_update_step my_recipe.py`` copies this file for changes.
"""

import sys
from collections.abc import Iterator
from functools import partial

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.profiler import record_function

from recipe_utils import check_version, data, losses, models, optim, parallel, policy, text, training
from recipe_utils.parallel import gradient_sync, to_device_ahead
from recipe_utils.settings import STRICT, Component, Problem, build, instantiate, naming, read_settings
from recipe_utils.update_steps import DataSettings, Microbatch, UpdateStep, declared_by, mark_last

RECIPE_NAME = "policy_update_step"
check_version("0.6", RECIPE_NAME)  # this file was written for it


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Keys of the config, where those of all groups stand side by side. Each class documents and checks its own."""

    components: training.TextComponents  # model, tokenizer, dataset, dataset_val, checkpointer
    policy: policy.PolicySettings  # reference
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
        settings, ranks, run, schedule = self.settings, self.ranks, self.run, cfg.get("lr_scheduler")

        # ---- Components: errors name the key
        self.tokenizer = build("tokenizer", instantiate, cfg.tokenizer)
        self.loss_fn = loss_fn = build("loss", policy.build_policy_loss, cfg.loss)
        declared = build("", declared_by, loss_fn)  # columns beside tokens, the divisor and further totals, sums
        self.divisor, self.names = declared.divisor, declared.sums
        meta_model = build("model", models.build_on_meta, partial(instantiate, cfg.model), settings.model)
        self.checkpointer = build("checkpointer", instantiate, cfg.checkpointer)
        small = models.small_model(meta_model, settings.model, ranks)  # whose parameters are sharded as the model's
        build("optimizer", optim.check_optimizer, cfg.optimizer, schedule, settings.optimizer, small)
        cfg_reference = cfg.get("ref_checkpointer")
        ref_checkpointer = build(
            "ref_checkpointer", models.reference_checkpointer, cfg_reference, meta_model, self.checkpointer
        )

        sampler, self.sampler_val = (build(key, instantiate, cfg.get(key)) for key in ("sampler", "sampler_val"))

        # ---- Data: the collator makes rows that this model can compute
        datasets = data.load_datasets(cfg, partial(text.load_dataset, tokenizer=self.tokenizer))
        kernel = settings.model.packed_attention
        limits = models.limits_of(meta_model, ranks.device, ranks.dims.tp, packed_attention=kernel)
        has_trees = any(map(text.makes_trees, datasets))
        collator = data.text_collator(
            *(settings.data, self.tokenizer, loss_fn.ignore_index, limits, has_trees, declared), **policy.GROUPS
        )
        computed = [policy.without_equal_groups(dataset, loss_fn) for dataset in datasets]
        num_to_run = models.num_to_run(settings.pipeline, ranks)
        self.loader, self.val_loader = data.build_loaders(*computed, collator, settings.data, ranks, num_to_run)

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
            self.model, settings.pipeline, settings.model.torch_dtype, ranks, len(self.names)
        )
        self.offloading = settings.model.offloading(self.model)

        # ---- Passes before the pass: log-probabilities of the reference, and of the policy at the start of the round
        reference, of_reference = policy.build_reference(
            *(settings.policy, settings.model, ranks, loss_fn, ref_checkpointer, meta_model, self.model, self.pipeline),
            longest_row=collator.longest_row,
            row_groups=groups,
            start=settings.components.checkpointer,
            is_needed=policy.needs_reference(loss_fn, *datasets),
        )
        is_needed = policy.needs_start(loss_fn, self.loader)
        start = policy.RoundStart(run, self.model, self.pipeline, loss_fn, is_needed=is_needed)
        self.attached = models.one_after_the_other(reference, start.attached)

        # ---- Optimizer, parts of the training, and resume
        self.optimizer = optim.build_optimizer(cfg.optimizer, self.model, settings.optimizer)
        models.speed_up_adapters(self.model, self.optimizer)
        self.nonfinite = optim.NonfiniteGuard(self.optimizer, ranks.device, settings.optimizer)
        parts, every = run.parts, settings.run
        if (rounds := policy.rounds_of(datasets[0])) is not None:
            parts.add("rounds", policy.Rounds(run, rounds, settings.rounds, sampler, self.model, self.tokenizer))
        parts.add("budget", training.StepMemory(run, self.loader, self.optimizer))
        parts.add("round_start", start)
        if settings.data.sample_losses:
            parts.add("sample_losses", training.SampleLosses(run, self.loader, loss_fn))
        validation = training.Validation(run, self.validate)
        parts.add_every(every.run_val_every_n_steps, "validation", validation, at_ends=True)
        parts.add_every(every.sample_every_n_steps, "answers", training.Answers(run, self.model, self.tokenizer))
        parts.add_every(every.export_every_n_steps, "exports", training.Exports(run))
        trained = training.Trained(
            self.model, self.optimizer, self.nonfinite, self.loader, self.checkpointer, fingerprints | of_reference
        )
        self.lr_scheduler = optim.build_lr_scheduler(schedule, self.optimizer, *run.resume(trained))

    # ---- Objective and update -------------------------------------------------------------------

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Returns the loss module's sums over the microbatch's targets, [k]: the weighted terms, then metrics."""
        with self.offloading, record_function("forward"):
            return self.model(**microbatch.inputs, targets=microbatch.targets)

    def update(self, step: UpdateStep) -> tuple[dict[str, Tensor], Tensor | None]:
        """Computes gradients and makes one optimizer step.

        Returns this rank's part of the sums by name, whose means over ranks are ratios of sums, and the gradient norm
        before clipping, None with ``optimizer_in_bwd``.
        """
        # dp_degree / counts on all ranks: FSDP2 averages gradients over data-parallel ranks.
        metrics = torch.zeros(len(self.names), dtype=torch.float64, device=self.ranks.device)
        scale = torch.full_like(metrics, step.scale("measured"))
        scale[:1].fill_(step.scale(self.divisor))  # no copy to the device
        with self.attached(step) as microbatches:
            if self.pipeline is not None:
                # One schedule per update step pays the pipeline bubble once.
                metrics += scale * self.pipeline.forward_backward(microbatches, lambda sums: (sums * scale)[0])
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
        names = self.names if step.totals["measured"] else self.names[:1]  # no group was computed
        return dict(zip(names, metrics, strict=False)), grad_norm

    def validate(self) -> dict[str, Tensor | float]:
        """Returns the reward of ``sampler_val``, and the sums of ``dataset_val`` over their counts, over all ranks."""
        rewards = {}
        if self.sampler_val is not None:
            reward = policy.sampled_reward(self.sampler_val, self.model, self.tokenizer, self.ranks)
            rewards = {"val_reward": reward}
        if self.val_loader is None:
            return rewards
        sums, totals = training.sum_over(
            self.val_loader, self.model, self.sums, len(self.names), self.pipeline, self.ranks.device, self.attached
        )
        policy.take_largest_ratio(self.loss_fn, self.ranks)  # it is none of the next update step
        metrics = {f"val_{name}": value for name, value in zip(self.names, sums, strict=True)}
        counts = {**dict.fromkeys(metrics, "measured"), "val_loss": self.divisor}
        return {**rewards, **parallel.means_over_ranks(metrics, totals, counts, self.ranks.dp_degree)}

    # ---- Training loop --------------------------------------------------------------------------

    def train(self) -> None:
        """Trains until the last epoch or a requested stop."""
        for step in self.run.steps(self.loader, divisor=self.divisor, reported=policy.ROLLOUTS):
            metrics, grad_norm = self.update(step)
            largest = policy.take_largest_ratio(self.loss_fn, self.ranks) if len(metrics) > 1 else None
            self.run.finish(step, metrics, grad_norm, ratio_max=largest, **policy.counts_of(step))


@training.entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Trains with a config; ``key=value`` on the command line overrides its keys."""
    recipe = PolicyRecipe(cfg)
    with recipe.run:  # closes files and process groups, also after an error
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
