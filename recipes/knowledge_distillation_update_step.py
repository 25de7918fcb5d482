"""Distillation of a teacher into a student, whose loop goes over update steps. One process or many.

Trains all weights of a student, or its adapters alone, if the model's builder gave it some (LoRA, DoRA, QLoRA).

Each target token of an update step weighs the same, in cross-entropy and in the divergence from the teacher,
however its samples are split over microbatches and ranks. The teacher says hidden states at the target
positions; both sides' logits exist a chunk at a time. With pipeline stages both go through one schedule per
update step, each cut by its own costs.

    tune run knowledge_distillation_update_step --config llama3_2/5M_to_1M_KD_update_step
    tune run --nproc_per_node 2 knowledge_distillation_update_step \
      --config llama3_2/5M_to_1M_KD_update_step pipeline_parallel_dim=2

Read ``update`` for the mathematics, ``train`` for the order of things, ``setup`` for what is trained
on what. To change any of it: ``tune cp knowledge_distillation_update_step my_recipe.py``; it is called back
for ``prepare`` and a pipeline's objective. All keys: ``python -m recipe_utils.settings RECIPE``.
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
from recipe_utils.loss.distillation import SUMS, LinearDistillationLoss, make_distillation_loss
from recipe_utils.model.adapters.adapted_linear import speed_up_adapters
from recipe_utils.model.attention.document_mask import attend_within_documents
from recipe_utils.model.build.build import ModelSettings, build_model, build_on_meta
from recipe_utils.model.build.sizes import limits_of
from recipe_utils.model.build.weights import load_weights
from recipe_utils.model.frozen.teacher import Teacher, TeacherSettings
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

RECIPE_NAME = "knowledge_distillation_update_step"
recipe_utils.check_version("0.4", RECIPE_NAME)  # that this file was written for
OfTokenizer = Annotated[dict[str, Any], MadeWith(num_positional=1)]
Checkpointer = Annotated[dict[str, Any], MadeWith(keywords=("should_load_recipe_state",))]


@dataclass(frozen=True, config=ROOM)
class Settings:
    """The config's keys. The YAML is flat; each room documents, defaults and checks its own."""

    data: DataSettings  # batch_size, global_batch_size, microbatching, num_workers, ...
    ranks: RankSettings  # device, data_parallel_shard_dim, pipeline_parallel_dim, ...
    modules: ModelSettings  # dtype, compile, enable_activation_checkpointing, ...
    pipeline: PipelineSettings  # pipeline_parallel_schedule, ...
    teacher: TeacherSettings  # kd_ratio, teacher_dtype, teacher_cache, ...
    updates: OptimizerSettings  # optimizer, lr_scheduler, clip_grad_norm, on_nonfinite, ...
    run: RunSettings  # output_dir, epochs, save_every_n_steps, resume_from_checkpoint, ...

    model: Component
    """The student: a torchtune decoder, or a fusion model with one at ``decoder``."""
    tokenizer: Component
    """That of both models; its ``max_seq_len`` truncates samples."""
    dataset: OfTokenizer | list[OfTokenizer]
    """Map-style; a list is one dataset after the other. All ranks must see the same."""
    checkpointer: Checkpointer
    """Loads the weights to start from and saves exported models; any of torchtune's."""
    loss: Component
    """Cross-entropy: ``recipe_utils.loss.LinearCrossEntropyLoss``, or a stock one, of which the kind counts."""
    kd_loss: Component | None = None
    """``recipe_utils.loss.LinearDistillationLoss``, which null is; or one of torchtune's six."""
    teacher_model: Component | None = None
    """A torchtune decoder of any width and depth, with the same tokens; frozen."""
    teacher_checkpointer: Checkpointer | None = None
    """Loads the teacher's weights; any of torchtune's."""
    teacher_tokenizer: Component | None = None
    """Compared with ``tokenizer``; null looks for a tokenizer.json beside the teacher's weights."""
    dataset_val: OfTokenizer | list[OfTokenizer] | None = None
    """For ``run_val_every_n_steps``; its loss is exact over all ranks."""

    def problems(self) -> Iterator[str]:
        """What is wrong between keys of different rooms."""
        yield from self.data.problems_with(self.ranks)
        yield from self.modules.problems_with(self.ranks)
        yield from self.pipeline.problems_with(self.ranks, self.data)
        yield from self.updates.problems_with(self.data, self.ranks)
        yield from self.teacher.problems_with(
            {"teacher_model": self.teacher_model, "teacher_checkpointer": self.teacher_checkpointer}
        )
        if self.ranks.tensor_parallel_dim > 1:
            yield f"tensor_parallel_dim={self.ranks.tensor_parallel_dim}: not with a teacher; set it to 1"
        if self.updates.optimizer_in_bwd:
            yield "optimizer_in_bwd=True: not with a teacher; set it to False"
        yield from self.run.problems_with(self.ranks, self.dataset_val)


class KDRecipe:
    """Trains a student, or its adapters, on a map-style dataset and on what a teacher makes of it."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings = read_settings(cfg, Settings)
        self.ranks = join_ranks(self.settings.ranks)  # device, mesh, process groups, coordinates
        self.run = Run(RECIPE_NAME, self.settings.run, self.ranks, cfg)  # position, log, files

    def setup(self, cfg: DictConfig) -> None:
        """Builds everything; the weights are read once all the rest has been checked."""
        settings, ranks, run = self.settings, self.ranks, self.run
        modules, updates = settings.modules, settings.updates
        self.teacher = Teacher(settings.teacher, ranks, settings.run.output_dir)
        make_model = partial(config.instantiate, cfg.model)
        make_optimizer = partial(config.instantiate, cfg.optimizer)
        make_lr_scheduler = partial(config.instantiate, cfg.get("lr_scheduler"))
        make_teacher = partial(config.instantiate, cfg.get("teacher_model"))
        make_teacher_checkpointer = partial(config.instantiate, cfg.get("teacher_checkpointer"))
        make_teacher_tokenizer = partial(config.instantiate, cfg.get("teacher_tokenizer"))
        tokenizer, loss_fn, kd_loss_fn, self.checkpointer, whole, *_ = make_all(
            tokenizer=partial(config.instantiate, cfg.tokenizer),
            loss=partial(config.instantiate, cfg.loss),
            kd_loss=partial(config.instantiate, cfg.get("kd_loss")),
            checkpointer=partial(config.instantiate, cfg.checkpointer, **run.from_stock),
            model=partial(build_on_meta, make_model, modules),
            optimizer=partial(try_out, make_optimizer, make_lr_scheduler),
            teacher_model=partial(self.teacher.take_model, make_teacher, modules),
            teacher_checkpointer=partial(self.teacher.take_checkpointer, make_teacher_checkpointer),
        )
        if self.teacher.is_asked:
            with naming():
                kd_loss_fn = kd_loss_fn or LinearDistillationLoss()
                loss_fn = make_distillation_loss(loss_fn, kd_loss_fn, settings.teacher.kd_ratio)
        # Without a teacher the loss is that of fine-tuning, and its only metric.
        self.metrics = SUMS if self.teacher.is_asked else SUMS[:1]

        # ---- Data: what a sample is, and how update steps are made of them
        validates = run.validates_on(settings.dataset_val)
        dataset, dataset_val, *_ = make_all(
            dataset=partial(load_dataset, cfg.dataset, tokenizer),
            dataset_val=partial(load_dataset, cfg.dataset_val if validates else None, tokenizer),
            loraplus_lr_ratio=partial(updates.check_model, whole),
            teacher_tokenizer=partial(self.teacher.check_tokens, make_teacher_tokenizer, tokenizer),
        )
        limits = self.teacher.narrow(limits_of(whole, ranks.device, modules.compile))
        fill = settings.pipeline.fill(ranks)
        self.tokenizer = tokenizer
        of_text = (tokenizer, loss_fn.ignore_index, limits, self.teacher.known)
        text = TextCollator(settings.data, *of_text)
        self.loader = UpdateStepLoader(dataset, text, settings.data, ranks, "dataset", fill)
        self.loader.log_epoch_size()
        self.val_loader = None
        if validates:
            data = settings.data.of_validation()
            held_out = (dataset_val, TextCollator(data, *of_text), data, ranks, "dataset_val", fill)
            self.val_loader = UpdateStepLoader(*held_out)

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
        self.pipeline = build_pipeline(
            self.model, settings.pipeline, modules.torch_dtype, ranks, len(self.metrics)
        )
        self.offloading = training.get_act_offloading_ctx_manager(
            self.model, modules.enable_activation_offloading
        )
        frozen |= self.teacher.set_up(whole, loss_fn, text, settings.teacher_model)

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
        self.teacher.fill(settings.run.epochs, self.loader, self.val_loader)

    # ---- The mathematics ------------------------------------------------------------------------

    def sums(self, microbatch: Microbatch) -> Tensor:
        """Sums over the microbatch's target tokens of what ``self.metrics`` names, [5] or [1].

        The first is the loss; it is the model's head (``attach_loss`` above): there FSDP2 holds the
        output weight gathered.
        """
        with self.offloading:
            return self.model(**microbatch.inputs, targets=microbatch.targets)

    def update(self, step: UpdateStep) -> tuple[Tensor, Tensor | None]:
        """One optimizer step along grad[(1 / N) sum_t (1 - r) CE_t + r T^2 KL_t(teacher || student)].

        N target tokens of all microbatches on all ranks, r of ``kd_ratio`` and T the temperature.

        Returns:
            This rank's part of ``self.metrics``, [5] or [1]; their means over all ranks are means per
            target token. And the gradient norm before clipping.
        """
        # dp_degree / target tokens of all microbatches on all ranks: FSDP2 averages over the dp ranks,
        # so every target weighs the same and the accumulated gradient is final.
        scale = step.scale("target_tokens")
        metrics = torch.zeros(len(self.metrics), device=self.ranks.device)
        # The teacher goes first, over all microbatches: with stages in a schedule of its own.
        with self.teacher.teaching(step) as taught:
            if self.pipeline is not None:
                # One schedule for all microbatches, so that its bubble is paid once per update step.
                sums = self.pipeline.forward_backward(taught, lambda sums: sums[0] * scale)
                metrics += sums * scale
            else:
                microbatches = mark_last(taught)
                for microbatch, is_last in to_device_ahead(microbatches, self.ranks.device):
                    with gradient_sync(self.model, is_last, self.settings.ranks.gradient_sync):
                        scaled = self.sums(microbatch) * scale
                        scaled[0].backward()
                    metrics += scaled.detach()

        grad_norm = clip_grad_norm_(self.model, self.settings.updates.clip_grad_norm, self.pipeline)
        # With a fused optimizer the host does not wait for the device here.
        if self.nonfinite.admits(grad_norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics, grad_norm

    @torch.no_grad()
    def validate(self) -> dict[str, Tensor]:
        """Means per target token of ``dataset_val``, exact over all ranks."""
        self.model.eval()
        sums = torch.zeros(len(self.metrics), device=self.ranks.device)
        num_target_tokens = 0
        with self.val_loader.epoch(0) as steps:
            for step in steps:
                with self.teacher.teaching(step) as taught:
                    if self.pipeline is not None:
                        sums += self.pipeline.forward(taught)
                    else:
                        for microbatch in to_device_ahead(taught, self.ranks.device):
                            sums += self.sums(microbatch)
                num_target_tokens += step.totals["target_tokens"]
        self.model.train()
        dp_degree, found = self.ranks.dp_degree, self.named(sums, "val_")
        return {k: value * dp_degree / max(num_target_tokens, 1) for k, value in found.items()}

    def named(self, metrics: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Metrics of all ranks from this rank's part, in one reduction."""
        found = dict(zip(self.metrics, mean_over_ranks(metrics), strict=True))
        if self.settings.teacher.kd_ratio == 1:
            del found["ce_loss"]  # not computed
        return {f"{prefix}{name}": value for name, value in found.items()}

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
                            num_tokens=step.totals["target_tokens"],
                            num_nonfinite_steps=self.nonfinite.read_and_restart(run.global_step),
                            **self.moved.read(step),
                            teacher_seconds=self.teacher.read_seconds(),
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
                        run.save(self.model, self.optimizer)
            # Raises if it is the last and cannot be exported.
            problem = run.export(self.checkpointer, self.model, f"epoch_{epoch}")
            run.finish_epoch(self.model, self.optimizer, problem)


@entry_point
def recipe_main(cfg: DictConfig) -> None:
    """Entry point: the config's keys, overridden by ``key=value`` on the command line."""
    recipe = KDRecipe(cfg)
    with recipe.run:  # SIGTERM and SIGINT ask it to stop; every way out closes files and groups
        recipe.setup(cfg)
        recipe.train()


if __name__ == "__main__":
    sys.exit(recipe_main())
