"""Fine-tuning whose loop goes over update steps. One process or many.

Trains all weights; or the adapters alone, if the model's builder gave it some (LoRA, DoRA, QLoRA).

An update step is everything that one optimizer step needs, decided on the CPU before its first
forward: the samples, their microbatches, and the number of target tokens over all data-parallel
ranks. Each microbatch's summed loss is multiplied by one scale; gradients are never scaled. They are
those of one big batch, however it is split over microbatches and ranks.

    tune run full_finetune_update_step --config llama3_2/5M_full_update_step
    tune run --nproc_per_node 2 full_finetune_update_step --config llama3_2/5M_full_update_step

Read ``update`` for the mathematics, ``train`` for the order of things, ``setup`` for what is trained
on what. To change any of it: ``tune cp full_finetune_update_step my_recipe.py``. Every object that
``setup`` makes can be replaced by your own; nothing in ``recipe_utils`` calls back into this file but
``prepare`` and a pipeline's objective. All keys: ``python -m recipe_utils.settings full_finetune_update_step``.
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

import recipe_utils
from recipe_utils.checkpoint.stock import load_checkpoint
from recipe_utils.data.loader.loader import UpdateStep, UpdateStepLoader
from recipe_utils.data.loader.microbatch import Microbatch, mark_last
from recipe_utils.data.loader.samples import load_dataset
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.data.loader.to_device import to_device_ahead
from recipe_utils.data.text.collator import TextCollator
from recipe_utils.evaluation.generation import generate
from recipe_utils.loss.attach_loss import attach_loss, compile_loss
from recipe_utils.model.adapters.adapted_linear import speed_up_adapters
from recipe_utils.model.attention.document_mask import attend_within_documents
from recipe_utils.model.build.build import ModelSettings, build_model, build_on_meta
from recipe_utils.model.build.sizes import limits_of
from recipe_utils.model.build.weights import load_weights
from recipe_utils.model.pipeline.pipeline import build_pipeline
from recipe_utils.model.pipeline.schedule import PipelineSettings
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

RECIPE_NAME = "full_finetune_update_step"
recipe_utils.check_version("0.4", RECIPE_NAME)  # that this file was written for
OfTokenizer = Annotated[dict[str, Any], MadeWith(num_positional=1)]


@dataclass(frozen=True, config=ROOM)
class Settings:
    """The config's keys. The YAML is flat; each room documents, defaults and checks its own."""

    data: DataSettings  # batch_size, global_batch_size, microbatching, num_workers, ...
    ranks: RankSettings  # device, data_parallel_shard_dim, pipeline_parallel_dim, ...
    modules: ModelSettings  # dtype, compile, enable_activation_checkpointing, ...
    pipeline: PipelineSettings  # pipeline_parallel_schedule, ...
    updates: OptimizerSettings  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    run: RunSettings  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...

    model: Component
    """A torchtune decoder, or a fusion model with one at ``decoder``."""
    tokenizer: Component
    """That of the model; its ``max_seq_len`` truncates samples."""
    dataset: OfTokenizer | list[OfTokenizer]
    """Map-style; a list is one dataset after the other. All ranks must see the same."""
    checkpointer: Annotated[dict[str, Any], MadeWith(keywords=("should_load_recipe_state",))]
    """Loads the weights to start from and saves exported models; any of torchtune's."""
    loss: Component
    """``recipe_utils.loss.LinearCrossEntropyLoss``: target positions only, in chunks; or a stock one."""
    dataset_val: OfTokenizer | list[OfTokenizer] | None = None
    """For ``run_val_every_n_steps``; its loss is exact over all ranks."""

    def problems(self) -> Iterator[str]:
        """What is wrong between keys of different rooms."""
        yield from self.data.problems_with(self.ranks)
        yield from self.modules.problems_with(self.ranks)
        yield from self.pipeline.problems_with(self.ranks, self.data)
        yield from self.updates.problems_with(self.data, self.ranks)
        yield from self.run.problems_with(self.ranks, self.dataset_val)


class FullFinetuneRecipe:
    """Fine-tunes a model, or its adapters, on a map-style dataset."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = join_ranks(self.settings.ranks)  # device, mesh, process groups, coordinates
        self.run = Run(RECIPE_NAME, self.settings.run, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds everything; the weights are read once all the rest has been checked."""
        settings, ranks, run = self.settings, self.ranks, self.run
        modules, updates = settings.modules, settings.updates
        make_model = partial(config.instantiate, cfg.model)
        make_optimizer = partial(config.instantiate, cfg.optimizer)
        make_lr_scheduler = partial(config.instantiate, cfg.get("lr_scheduler"))
        self.tokenizer, loss_fn, self.checkpointer, whole, _ = make_all(
            tokenizer=partial(config.instantiate, cfg.tokenizer),
            loss=partial(config.instantiate, cfg.loss),
            checkpointer=partial(config.instantiate, cfg.checkpointer, **run.from_stock),
            model=partial(build_on_meta, make_model, modules),
            optimizer=partial(try_out, make_optimizer, make_lr_scheduler),
        )

        # ---- Data: what a sample is, and how update steps are made of them
        validates = run.validates_on(settings.dataset_val)
        dataset, dataset_val, _ = make_all(
            dataset=partial(load_dataset, cfg.dataset, self.tokenizer),
            dataset_val=partial(
                load_dataset, cfg.dataset_val if validates else None, self.tokenizer
            ),
            loraplus_lr_ratio=partial(updates.check_model, whole),
        )
        limits = limits_of(whole, ranks.device, modules.compile)
        fill = settings.pipeline.fill(ranks)
        text = TextCollator(settings.data, self.tokenizer, loss_fn.ignore_index, limits)
        self.loader = UpdateStepLoader(dataset, text, settings.data, ranks, "dataset", fill)
        self.loader.log_epoch_size()
        self.val_loader = None
        if validates:
            data = settings.data.of_validation()
            val_text = TextCollator(data, self.tokenizer, loss_fn.ignore_index, limits)
            self.val_loader = UpdateStepLoader(
                dataset_val, val_text, data, ranks, "dataset_val", fill
            )

        # ---- Model: change modules in prepare(), before they are wrapped, sharded and filled
        def prepare(decoder: nn.Module, has_output: bool) -> None:
            attend_within_documents(decoder, ranks.device, text.longest_row)
            if has_output:
                attach_loss(decoder, loss_fn, settings.pipeline.splits_backward)

        with naming():
            self.model = build_model(make_model, prepare, modules, ranks, settings.pipeline)
        run.open_log(cfg)
        with naming("checkpointer"):
            checkpoint = load_checkpoint(self.checkpointer, settings.checkpointer)
            frozen = load_weights(self.model, checkpoint, modules, ranks.device, run.seed)
        if modules.compile:
            compile_loss(loss_fn, verbose=ranks.is_zero)
        # None for a model in one piece
        self.pipeline = build_pipeline(self.model, settings.pipeline, modules.torch_dtype, ranks)
        self.offloading = training.get_act_offloading_ctx_manager(
            self.model, modules.enable_activation_offloading
        )

        # ---- Optimizer, and back to where the training was
        self.optimizer = build_optimizer(make_optimizer, self.model, updates)
        speed_up_adapters(self.model, self.optimizer)
        self.nonfinite = NonfiniteGuard(self.optimizer, ranks.device, *updates.nonfinite)
        self.moved = WeightsMoved(self.optimizer, ranks.device)
        run.resume(self.model, self.optimizer, self.loader, checkpoint, frozen)
        self.lr_scheduler = build_lr_scheduler(
            make_lr_scheduler,
            self.optimizer,
            num_training_steps=settings.run.epochs * self.loader.steps_per_epoch,
            last_epoch=run.global_step - 1,
        )

    # ---- The mathematics ------------------------------------------------------------------------

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Cross-entropy summed over the microbatch's target tokens [nats], shape [1].

        The loss is the model's head (``attach_loss`` above): there FSDP2 has gathered the output weight.
        """
        with self.offloading:
            return self.model(**microbatch.inputs, targets=microbatch.targets)

    def update(self, step: UpdateStep) -> tuple[Tensor, Tensor | None]:
        """One optimizer step.

        Returns:
            This rank's part of the loss, shape [1]; its mean over all ranks is the mean loss per target
            token [nats]. And the gradient norm before clipping; None where the backward steps.
        """
        # dp_degree / target tokens of all microbatches on all ranks: FSDP2 averages over the dp ranks,
        # so every target weighs the same and the accumulated gradient is final.
        scale = step.scale("target_tokens")
        loss = torch.zeros(1, device=self.ranks.device)
        if self.pipeline is not None:
            # One schedule for all microbatches, so that its bubble is paid once per update step.
            sums = self.pipeline.forward_backward(step.microbatches, lambda sums: sums[0] * scale)
            loss += sums * scale
        else:
            microbatches = mark_last(step.microbatches)
            for microbatch, is_last in to_device_ahead(microbatches, self.ranks.device):
                with gradient_sync(self.model, is_last, self.settings.ranks.gradient_sync):
                    scaled_loss = self.sums(microbatch) * scale
                    scaled_loss.backward()
                loss += scaled_loss.detach()

        grad_norm = clip_grad_norm_(self.model, self.settings.updates.clip_grad_norm, self.pipeline)
        # With a fused optimizer the host does not wait for the device here.
        if self.nonfinite.admits(grad_norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm

    @torch.no_grad()
    def validate(self) -> Tensor:
        """Mean loss per target token of ``dataset_val`` [nats], exact over all ranks."""
        self.model.eval()
        sums = torch.zeros(1, device=self.ranks.device)
        num_target_tokens = 0
        with self.val_loader.epoch(0) as steps:
            for step in steps:
                if self.pipeline is not None:
                    sums += self.pipeline.forward(step.microbatches)
                else:
                    for microbatch in to_device_ahead(step.microbatches, self.ranks.device):
                        sums += self.sums(microbatch)
                num_target_tokens += step.totals["target_tokens"]
        self.model.train()
        return mean_over_ranks(sums)[0] * self.ranks.dp_degree / max(num_target_tokens, 1)

    # ---- The order of things --------------------------------------------------------------------

    def train(self) -> None:
        """Runs all epochs, or until it is asked to stop; exports the model after each."""
        run = self.run
        self.model.train()
        for epoch in run.epochs():
            with self.loader.epoch(epoch, run.samples_consumed, run.stop) as steps:
                for step in run.progress(steps):
                    if step.totals["target_tokens"] == 0:
                        run.skip(step, "none of its samples has a target token")
                        continue
                    lr = self.optimizer.param_groups[0]["lr"]
                    loss, grad_norm = self.update(step)
                    if self.lr_scheduler is not None:
                        self.lr_scheduler.step()
                    run.advance(step)

                    if run.should_log():
                        # Read once the device has the next update step to do: nobody waits for it.
                        run.log(
                            loss=mean_over_ranks(loss)[0],
                            lr=lr,
                            grad_norm=grad_norm,
                            num_tokens=step.totals["target_tokens"],
                            num_nonfinite_steps=self.nonfinite.read_and_restart(run.global_step),
                            **self.moved.read(step),
                            **run.throughput(),
                        )
                    if self.nonfinite.look(run.global_step, waits=run.must_know(step)):
                        run.save(self.model, self.optimizer)
                        raise NonfiniteError(self.nonfinite.description)
                    run.profiler.step()
                    if run.should_validate():
                        run.log_validation(val_loss=self.validate())
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
                        run.save(self.model, self.optimizer)
            # Raises if it is the last and cannot be exported.
            problem = run.export(self.checkpointer, self.model, f"epoch_{epoch}")
            run.finish_epoch(self.model, self.optimizer, problem)


@entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Entry point: the config's keys, overridden by ``key=value`` on the command line."""
    recipe = FullFinetuneRecipe(cfg)
    with recipe.run:  # SIGTERM and SIGINT ask it to stop; every way out closes files and groups
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
