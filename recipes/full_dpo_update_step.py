"""Preference tuning (DPO and its relatives) whose loop goes over update steps. One process or many.

Trains all weights against a frozen reference, or a model's adapters against the model without them.

A sample is a pair of answers. Each pair weighs the same, however those of an update step are split over
microbatches and ranks: a microbatch's summed losses are multiplied by one scale. Packed, what both answers
begin with is computed once.

    tune run full_dpo_update_step --config llama3_2/5M_full_dpo_update_step
    tune run --nproc_per_node 2 full_dpo_update_step --config llama3_2/5M_full_dpo_update_step

Read ``update`` for the mathematics, ``train`` for the order of things, ``setup`` for what is trained
on what. To change any of it: ``tune cp full_dpo_update_step my_recipe.py``; nothing in ``recipe_utils``
calls back into it but ``prepare``. All keys: ``python -m recipe_utils.settings full_dpo_update_step``.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import torch
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torchtune import config, training
from tqdm import tqdm

import recipe_utils
from recipe_utils.checkpoint.stock import load_checkpoint
from recipe_utils.data.loader.loader import UpdateStep, UpdateStepLoader
from recipe_utils.data.loader.microbatch import Microbatch, mark_last
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.data.loader.to_device import to_device_ahead
from recipe_utils.data.pairs.collator import PairCollator, PairSettings, load_pairs
from recipe_utils.evaluation.generation import generate
from recipe_utils.loss.attach_loss import attach_loss, compile_loss
from recipe_utils.loss.log_probs import LinearLogProbs, num_targets_of_answers, sums_of_answers
from recipe_utils.loss.preference import PreferenceSettings, make_preference_loss
from recipe_utils.model.adapters.adapted_linear import speed_up_adapters
from recipe_utils.model.attention.document_mask import attend_within_documents
from recipe_utils.model.build.build import ModelSettings, build_model, build_on_meta
from recipe_utils.model.build.sizes import limits_of
from recipe_utils.model.build.weights import load_weights
from recipe_utils.model.frozen.reference import Reference, ReferenceSettings
from recipe_utils.optim.grad_norm import clip_grad_norm_
from recipe_utils.optim.moved import WeightsMoved
from recipe_utils.optim.nonfinite import NonfiniteError, NonfiniteGuard
from recipe_utils.optim.optimizer import (
    OptimizerSettings,
    build_lr_scheduler,
    build_optimizer,
    try_out,
)
from recipe_utils.parallel.fsdp import gradient_sync
from recipe_utils.parallel.process_group import mean_over_ranks
from recipe_utils.parallel.ranks import RankSettings, join_ranks
from recipe_utils.run.entry_point import entry_point
from recipe_utils.run.run import Run, RunSettings
from recipe_utils.settings.components import Component, MadeWith
from recipe_utils.settings.settings import ROOM, make_all, naming, read_settings

RECIPE_NAME = "full_dpo_update_step"
recipe_utils.check_version("0.4", RECIPE_NAME)  # that this file was written for
OfTokenizer = Annotated[dict[str, Any], MadeWith(num_positional=1)]
Checkpointer = Annotated[dict[str, Any], MadeWith(keywords=("should_load_recipe_state",))]
METRICS = (
    "preference_loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
    "log_probs/chosen", "log_probs/rejected", "sft_loss",
)  # fmt: skip
"""Means over pairs, but the last: over the targets of chosen answers."""


@dataclass(frozen=True, config=ROOM)
class Settings:
    """The config's keys. The YAML is flat; each room documents, defaults and checks its own."""

    data: DataSettings  # batch_size (pairs), global_batch_size, microbatching, num_workers, ...
    pairs: PairSettings  # prefix_sharing
    preference: PreferenceSettings  # sft_loss_weight, tokens_per_chunk
    ranks: RankSettings  # device, data_parallel_shard_dim, tensor_parallel_dim, ...
    modules: ModelSettings  # dtype, compile, enable_activation_checkpointing, ...
    reference: ReferenceSettings  # reference, reference_cache_dir, precompute_reference
    updates: OptimizerSettings  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    run: RunSettings  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...

    model: Component
    """A torchtune decoder; with adapters it is its own reference, without them."""
    tokenizer: Component
    """That of the model; its ``max_seq_len`` truncates each side."""
    dataset: OfTokenizer | list[OfTokenizer]
    """Of pairs, as torchtune.datasets.preference_dataset; a list is one after the other."""
    checkpointer: Checkpointer
    """Loads the weights to start from and saves exported models; any of torchtune's."""
    loss: Component
    """torchtune's ``DPOLoss`` or ``RSOLoss``, one of ``recipe_utils.loss.preference``, or your own."""
    ref_checkpointer: Checkpointer | None = None
    """Loads the reference's weights; null takes those of ``checkpointer``, also after resuming."""
    dataset_val: OfTokenizer | list[OfTokenizer] | None = None
    """For ``run_val_every_n_steps``; its metrics are exact over all ranks."""

    def problems(self) -> Iterator[str]:
        """What is wrong between keys of different rooms."""
        yield from self.data.problems_with(self.ranks)
        yield from self.pairs.problems_with(self.data)
        yield from self.ranks.problems_without_stages()
        yield from self.modules.problems_with(self.ranks)
        yield from self.updates.problems_with(self.data, self.ranks)
        yield from self.run.problems_with(self.ranks, self.dataset_val)


class FullDPORecipe:
    """Tunes a model, or its adapters, to prefer the chosen answers of a map-style dataset of pairs."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = join_ranks(self.settings.ranks)  # device, mesh, process groups, coordinates
        self.run = Run(RECIPE_NAME, self.settings.run, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds everything; the weights are read once all the rest has been checked."""
        settings, ranks, run = self.settings, self.ranks, self.run
        modules, updates, data = settings.modules, settings.updates, settings.data
        make_model = partial(config.instantiate, cfg.model)
        make_optimizer = partial(config.instantiate, cfg.optimizer)
        make_lr_scheduler = partial(config.instantiate, cfg.get("lr_scheduler"))
        make_ref_checkpointer = partial(config.instantiate, cfg.get("ref_checkpointer"))
        self.tokenizer, self.loss_fn, self.checkpointer, whole, _ = make_all(
            tokenizer=partial(config.instantiate, cfg.tokenizer),
            loss=partial(make_preference_loss, partial(config.instantiate, cfg.loss)),
            checkpointer=partial(config.instantiate, cfg.checkpointer, **run.from_stock),
            model=partial(build_on_meta, make_model, modules),
            optimizer=partial(try_out, make_optimizer, make_lr_scheduler),
        )

        # ---- Data: what a sample is, and how update steps are made of them
        validates = run.validates_on(settings.dataset_val)
        self.reference = Reference(settings.reference, self.loss_fn, settings.run.output_dir, ranks)
        dataset, dataset_val, ref_checkpointer, _ = make_all(
            dataset=partial(load_pairs, cfg.dataset, self.tokenizer),
            dataset_val=partial(load_pairs, cfg.dataset_val if validates else None, self.tokenizer),
            ref_checkpointer=partial(
                self.reference.check, make_ref_checkpointer, whole, run.resumes_from_stock
            ),
            loraplus_lr_ratio=partial(updates.check_model, whole),
        )
        limits = limits_of(whole, ranks.device, modules.compile)
        pairs = PairCollator(data, self.tokenizer, limits, settings.pairs, self.reference)
        self.loader = UpdateStepLoader(dataset, pairs, data, ranks, "dataset")
        self.loader.log_epoch_size()
        held_out = (dataset_val, pairs, data.of_validation(), ranks, "dataset_val")
        self.val_loader = UpdateStepLoader(*held_out) if validates else None

        # ---- Model: change modules in prepare(), before they are wrapped, sharded and filled
        log_probs = LinearLogProbs(settings.preference.tokens_per_chunk)
        if modules.compile:
            compile_loss(log_probs, verbose=ranks.is_zero)

        def prepare(decoder: nn.Module, has_output: bool) -> None:
            attend_within_documents(decoder, ranks.device, pairs.longest_row)
            attach_loss(decoder, log_probs)

        with naming():
            self.model = build_model(make_model, prepare, modules, ranks)
        run.open_log(cfg)
        with naming("checkpointer"):
            checkpoint = load_checkpoint(self.checkpointer, settings.checkpointer)
            frozen = load_weights(self.model, checkpoint, modules, ranks.device, run.seed)
        self.offloading = training.get_act_offloading_ctx_manager(
            self.model, modules.enable_activation_offloading
        )
        frozen |= self.reference.set_up(
            self.model,
            make=partial(build_model, make_model, prepare),
            load=(ref_checkpointer or self.checkpointer).load_checkpoint,
            settings=modules,
            depends_on={"model": settings.model, "layout": pairs.layout},
        )

        # ---- Optimizer, and back to where the training was
        self.optimizer = build_optimizer(make_optimizer, self.model, updates)
        speed_up_adapters(self.model, self.optimizer)
        self.nonfinite = NonfiniteGuard(self.optimizer, ranks.device, *updates.nonfinite)
        self.moved = WeightsMoved(self.optimizer, ranks.device)
        run.resume(self.model, self.optimizer, self.loader, checkpoint, frozen)
        num_steps = settings.run.epochs * self.loader.steps_per_epoch
        self.lr_scheduler = build_lr_scheduler(
            make_lr_scheduler, self.optimizer, num_steps, last_epoch=run.global_step - 1
        )
        if settings.reference.precompute_reference:
            all_pairs = UpdateStepLoader(dataset, pairs, data.of_one_pass(), ranks)
            for each in filter(None, (all_pairs, self.val_loader)):
                with each.epoch(0) as steps:
                    for step in tqdm(steps, "cache", each.steps_per_epoch, disable=ranks.rank > 0):
                        self.with_reference(step)

    # ---- The mathematics ------------------------------------------------------------------------

    def log_probs(self, model: nn.Module, microbatch: Microbatch) -> Tensor:
        """Of chosen and rejected answers [nats], each summed over its targets: [2, p]."""
        of_tokens = model(**microbatch.inputs, targets=microbatch.targets)
        return sums_of_answers(of_tokens, microbatch.targets.pairs)

    def with_reference(self, step: UpdateStep) -> UpdateStep:
        """The update step with the reference's log-probabilities [2, p] in each microbatch.

        Computed before any gradient exists, unless they are known: what is, is agreed on by all ranks.
        """
        found = []
        if unknown := self.reference.unknown(step):
            with torch.no_grad(), self.reference.on_device() as reference:
                microbatches = to_device_ahead(unknown, self.ranks.device)
                found = [self.log_probs(reference, each) for each in microbatches]
        return self.reference.keep(step, found)

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Sums of METRICS over the microbatch's pairs, and over its chosen targets the last, [8] in fp64."""
        with self.offloading:
            policy = self.log_probs(self.model, microbatch)
        given = torch.cat([policy, microbatch.targets.teacher])
        if getattr(self.loss_fn, "normalizes_length", False):
            # Inside the pair: the number of pairs stays what losses are divided by.
            given = given / num_targets_of_answers(microbatch.targets.pairs).repeat(2, 1)
        losses, chosen, rejected = self.loss_fn(*given)
        margins = chosen - rejected
        wins = (margins > 0).double()
        return torch.stack([losses, chosen, rejected, margins, wins, *policy, -policy[0]]).sum(1)

    def objective(self, metrics: Tensor) -> Tensor:
        """What is trained on, of METRICS that are divided by what they are sums over."""
        return metrics[0] + self.settings.preference.sft_loss_weight * metrics[-1]

    def update(self, step: UpdateStep) -> tuple[Tensor, Tensor | None]:
        """One optimizer step along grad[(1 / N) sum_i l_i - sft_loss_weight (1 / T) sum_i log pi(chosen_i)].

        N pairs and T targets of chosen answers, of all microbatches on all ranks.

        Returns:
            This rank's part of METRICS, shape [8], whose means over all ranks are ratios of sums. And the
            gradient norm before clipping; None where the backward steps.
        """
        step = self.with_reference(step)
        # dp_degree / pairs of all microbatches on all ranks: FSDP2 averages over the dp ranks, so every
        # pair weighs the same and the accumulated gradient is final.
        per_pair, per_token = step.scale("pairs"), step.scale("chosen_tokens")
        metrics = torch.zeros(len(METRICS), dtype=torch.float64, device=self.ranks.device)
        for microbatch, is_last in to_device_ahead(mark_last(step.microbatches), self.ranks.device):
            with gradient_sync(self.model, is_last, self.settings.ranks.gradient_sync):
                sums = self.sums(microbatch)
                scaled = torch.cat([sums[:-1] * per_pair, sums[-1:] * per_token])
                self.objective(scaled).backward()
            metrics += scaled.detach()

        grad_norm = clip_grad_norm_(self.model, self.settings.updates.clip_grad_norm, pipeline=None)
        # With a fused optimizer the host does not wait for the device here.
        if self.nonfinite.admits(grad_norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics, grad_norm

    @torch.no_grad()
    def validate(self) -> dict[str, Tensor]:
        """METRICS of ``dataset_val``, ratios of sums over all ranks."""
        self.model.eval()
        sums = torch.zeros(len(METRICS), dtype=torch.float64, device=self.ranks.device)
        num_pairs = num_tokens = 0
        with self.val_loader.epoch(0) as steps:
            for step in map(self.with_reference, steps):
                for microbatch in to_device_ahead(step.microbatches, self.ranks.device):
                    sums += self.sums(microbatch)
                num_pairs += step.totals["pairs"]
                num_tokens += step.totals["chosen_tokens"]
        self.model.train()
        sums[:-1] *= self.ranks.dp_degree / max(num_pairs, 1)
        sums[-1] *= self.ranks.dp_degree / max(num_tokens, 1)
        return self.named(sums, "val_")

    def named(self, metrics: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """METRICS of all ranks from this rank's part, in one reduction; and the loss that they make up."""
        metrics = torch.cat([self.objective(metrics).view(1), metrics])
        found = dict(zip(("loss", *METRICS), mean_over_ranks(metrics), strict=True))
        if self.settings.preference.sft_loss_weight == 0:
            del found["preference_loss"], found["sft_loss"]
        return {f"{prefix}{name}": value for name, value in found.items()}

    # ---- The order of things --------------------------------------------------------------------

    def train(self) -> None:
        """Runs all epochs, or until it is asked to stop; exports the model after each."""
        run = self.run
        self.model.train()
        for epoch in run.epochs():
            with self.loader.epoch(epoch, run.samples_consumed, run.stop) as steps:
                for step in run.progress(steps):
                    if step.totals["pairs"] == 0:
                        run.skip(step, "all of its pairs were left out")
                        continue
                    lr = self.optimizer.param_groups[0]["lr"]
                    metrics, grad_norm = self.update(step)
                    if self.lr_scheduler is not None:
                        self.lr_scheduler.step()
                    run.advance(step)

                    if run.should_log():
                        # Read once the device has the next update step to do: nobody waits for it.
                        run.log(
                            **self.named(metrics),
                            lr=lr,
                            grad_norm=grad_norm,
                            num_pairs=step.totals["pairs"],
                            num_left_out=step.num_skipped,
                            num_nonfinite_steps=self.nonfinite.read_and_restart(run.global_step),
                            **self.moved.read(step),
                            **run.throughput(),
                        )
                    if self.nonfinite.look(run.global_step, waits=run.must_know(step)):
                        run.save(self.model, self.optimizer)
                        raise NonfiniteError(self.nonfinite.description)
                    run.profiler.step()
                    if run.should_validate():
                        run.log_validation(**self.validate())
                        if run.is_best:  # so far, and keep_best_checkpoint
                            run.export(self.checkpointer, self.model, "best")
                    if run.should_sample():
                        run.log_answers(generate(self.model, self.tokenizer, *run.questions))
                    if step.stop_requested:  # on all ranks alike
                        run.save_and_stop(self.model, self.optimizer)
                        return
                    # Neither at an epoch's last step: it is done below. Exported first, so that a run
                    # that is killed meanwhile does it again.
                    if run.should_export(step):
                        run.export(self.checkpointer, self.model, f"export_step_{run.global_step}")
                    if run.should_save(step):
                        self.reference.share()  # a resumed training meets the same digits
                        run.save(self.model, self.optimizer)
            # Raises if it is the last and cannot be exported.
            problem = run.export(self.checkpointer, self.model, f"epoch_{epoch}")
            run.finish_epoch(self.model, self.optimizer, problem)


@entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Entry point: the config's keys, overridden by ``key=value`` on the command line."""
    recipe = FullDPORecipe(cfg)
    with recipe.run:  # SIGTERM and SIGINT ask it to stop; every way out closes files and groups
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
