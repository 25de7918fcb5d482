"""Full fine-tuning whose loop goes over update steps. One process or many.

An update step is everything that one optimizer step needs, decided on the CPU before its first
forward: the samples, their microbatches, and the number of target tokens over all data-parallel
ranks. Each microbatch's summed loss is multiplied by one scale; gradients are never scaled. They are
those of one big batch, however it is split over microbatches and ranks.

    tune run full_finetune_update_step --config llama3_2/5M_full_update_step
    tune run --nproc_per_node 2 full_finetune_update_step --config llama3_2/5M_full_update_step

Read ``update`` for the mathematics and ``train`` for the order of things. To change something:
``tune cp full_finetune_update_step my_recipe.py && tune run my_recipe.py --config my.yaml``.
Written for recipe_utils 0.1 and torchtune 0.6.1.
"""

import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor, nn
from torchtune import config, training, utils
from torchtune.config._utils import _get_component_from_path
from torchtune.datasets import ConcatDataset
from torchtune.training.lr_schedulers import get_lr
from tqdm import tqdm

import recipe_utils.checkpoint.load as checkpoint
from recipe_utils import settings as config_checks
from recipe_utils.checkpoint.export import ExportError, export_weights
from recipe_utils.checkpoint.folder import find_newest_whole
from recipe_utils.checkpoint.save import CheckpointWriter, SaveOutcome
from recipe_utils.data.balance import exchange_samples
from recipe_utils.data.collate import Microbatch
from recipe_utils.data.loader import UpdateStep, prefetch_update_steps
from recipe_utils.data.microbatching import plan_and_collate
from recipe_utils.data.plan import PLANS, MicrobatchCost
from recipe_utils.data.prefetch import Prefetched
from recipe_utils.data.sampler import epoch_permutation, num_update_steps, update_step_indices
from recipe_utils.data.samples import CheckedDataset, fingerprint
from recipe_utils.data.to_device import copy_ahead
from recipe_utils.loss.head import compute_loss_in_forward
from recipe_utils.model.build import (
    build_on_meta,
    equal_attention_length,
    gather_weights,
    load_weights,
    parallelize_model,
    vocab_size_and_max_seq_len,
)
from recipe_utils.model.document_mask import attend_within_documents, other_attention
from recipe_utils.model.pipeline import (
    Pipeline,
    num_microbatches_to_run,
    splits_backward,
    stages_of_rank,
)
from recipe_utils.model.stages import keep_stage, layers_of_stages, ties_output
from recipe_utils.optim.nonfinite import FiniteSteps, NonfiniteError
from recipe_utils.optim.optimizer import (
    OptimizerInBackward,
    build_lr_scheduler,
    load_optimizer_state,
)
from recipe_utils.parallel import ranks as parallelism
from recipe_utils.parallel.ranks import clip_grad_norm_, gradient_sync, mean_over_ranks
from recipe_utils.run.profiler import UpdateStepProfiler
from recipe_utils.run.stop_signals import set_on_signals
from recipe_utils.run.throughput import Throughput

log = utils.get_logger("INFO")

RECIPE_NAME = "full_finetune_update_step"

COMPONENTS = ("model", "tokenizer", "dataset", "loss", "optimizer", "checkpointer")
CONFIG_KEYS = frozenset(
    """
    ac_mode ac_option balance_over_ranks batch_size batch_size_val checkpointer clip_grad_norm collate_fn compile
    context_parallel_dim cudnn_deterministic_mode custom_sharded_layers data_parallel_replicate_dim
    data_parallel_shard_dim dataset dataset_val device dtype enable_activation_checkpointing
    enable_activation_offloading enable_async_checkpointing epochs export_every_n_steps fsdp_cpu_offload
    fsdp_reshard_after_forward global_batch_size gradient_accumulation_steps gradient_sync
    keep_last_n_checkpoints last_update_step log_every_n_steps log_peak_memory_stats loss lr_scheduler max_steps_per_epoch
    max_nonfinite_steps max_tokens_per_microbatch metric_logger microbatching model num_workers on_bad_sample on_nonfinite optimizer optimizer_in_bwd output_dir
    pipeline_parallel_dim pipeline_parallel_schedule pipeline_parallel_split_points prefetch_update_steps process_group_timeout_seconds profiler resume_from_checkpoint
    resume_with_other_data run_val_every_n_steps save_every_n_minutes save_every_n_steps seed shuffle tensor_parallel_dim tensor_parallel_plan tokenizer
    """.split()  # noqa: SIM905
)


class FullFinetuneUpdateStep:
    """Fine-tunes all weights of a model on a map-style dataset.

    Args:
        cfg: the config; its keys are torchtune's where torchtune has one.

    Raises:
        recipe_utils.settings.ConfigError: lists everything in the config that cannot work.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.world_size = parallelism.world_size_from_env()

        # Batch and data
        self.batch_size = cfg.get("batch_size", 1)
        self.batch_size_val = cfg.get("batch_size_val") or self.batch_size
        self.microbatching = cfg.get("microbatching", "in_order")
        self.max_tokens_per_microbatch = cfg.get("max_tokens_per_microbatch")
        self.balance_over_ranks = cfg.get("balance_over_ranks", self.microbatching != "in_order")
        self.last_update_step = cfg.get("last_update_step", "train")
        self.shuffle = cfg.get("shuffle", True)
        self.collate_fn = cfg.get("collate_fn", "torchtune.data.padded_collate_sft")
        self.num_workers = cfg.get("num_workers", 0)
        self.on_bad_sample = cfg.get("on_bad_sample", "raise")
        self.prefetch_update_steps = cfg.get("prefetch_update_steps", 2)

        # Training
        self.total_epochs = cfg.get("epochs", 1)
        self.max_steps_per_epoch = cfg.get("max_steps_per_epoch")
        self.run_val_every_n_steps = cfg.get("run_val_every_n_steps")
        self.log_every_n_steps = cfg.get("log_every_n_steps", 1)
        self.clip_grad_norm = cfg.get("clip_grad_norm")
        self.on_nonfinite = cfg.get("on_nonfinite", "stop")
        self.max_nonfinite_steps = cfg.get("max_nonfinite_steps", 10)
        self.optimizer_in_bwd = cfg.get("optimizer_in_bwd", False)
        self.gradient_sync = cfg.get("gradient_sync", "each_microbatch")
        self.compile = cfg.get("compile", False)
        self.pipeline_schedule = cfg.get("pipeline_parallel_schedule", "1F1B")
        self.pipeline_split_points = cfg.get("pipeline_parallel_split_points")

        # Memory and checkpoints
        self.activation_checkpointing = cfg.get("enable_activation_checkpointing", False)
        self.activation_offloading = cfg.get("enable_activation_offloading", False)
        self.fsdp_cpu_offload = cfg.get("fsdp_cpu_offload", False) and cfg.get("device") != "cpu"
        self.resume_from_checkpoint = cfg.get("resume_from_checkpoint", False)
        self.resume_with_other_data = cfg.get("resume_with_other_data", False)
        self.save_every_n_steps = cfg.get("save_every_n_steps")
        self.save_every_n_minutes = cfg.get("save_every_n_minutes")
        self.export_every_n_steps = cfg.get("export_every_n_steps")
        self.keep_last_n_checkpoints = cfg.get("keep_last_n_checkpoints", 2)
        self.enable_async_checkpointing = cfg.get("enable_async_checkpointing", False)

        self._check_config(cfg)

        self.log_peak_memory_stats = self.device.type != "cpu" and cfg.get("log_peak_memory_stats")
        timeout_seconds = cfg.get("process_group_timeout_seconds")
        self.owns_process_group = parallelism.init_process_group(self.device, timeout_seconds)
        # One group for each background thread: they do not take turns.
        self.count_group = parallelism.new_cpu_group(timeout_seconds)
        self.val_count_group = parallelism.new_cpu_group(timeout_seconds)
        self.checkpoint_group = parallelism.new_cpu_group()  # may wait for the slowest disk
        self.is_rank_zero = dist.get_rank() == 0
        self.seed = training.set_seed(
            seed=cfg.get("seed"), debug_mode=cfg.get("cudnn_deterministic_mode")
        )
        self.stop = threading.Event()  # once set, training saves and ends
        # Where the training is. An update step of the next epoch starts from samples_consumed = 0.
        self.epochs_run = 0
        self.samples_consumed = 0
        self.global_step = 0
        self.num_target_tokens_seen = 0
        self.has_warned_of_few_microbatches = False
        self.unsaved_since_seconds: float | None = None  # by rank 0's clock, on all ranks

    def setup(self, cfg: DictConfig) -> None:
        """Builds everything; the weights are loaded once all the rest has been checked."""
        self.mesh = parallelism.build_mesh(self.device, self.dims)

        self.checkpoints = CheckpointWriter(
            cfg.output_dir,
            keep_last_n=self.keep_last_n_checkpoints,
            group=self.checkpoint_group,
            asynchronous=self.enable_async_checkpointing,
        )

        problems = config_checks.Problems()
        resume_path = self._find_step_checkpoint(cfg.output_dir)
        resumes_from_stock = resume_path is None and self._finds_stock_state(cfg.checkpointer)
        if resumes_from_stock and self.dims.pp > 1:
            problems.add(
                f"pipeline_parallel_dim={self.dims.pp}: a recipe_state.pt can only be resumed from without "
                "a pipeline; set it to 1 until the next step checkpoint"
            )
        with problems.collect("checkpointer: "):
            self.checkpointer = config.instantiate(
                cfg.checkpointer, should_load_recipe_state=resumes_from_stock
            )
        with problems.collect("model: "):
            self.model = build_on_meta(partial(config.instantiate, cfg.model), self.dtype)
        with problems.collect("loss: "):
            self.loss_fn = config.instantiate(cfg.loss)
        with problems.collect("tokenizer: "):
            self.tokenizer = config.instantiate(cfg.tokenizer)
        problems.raise_if_any()
        # What the tokenizer truncates samples to; None if it does not.
        self.max_seq_len = getattr(self.tokenizer, "max_seq_len", None)

        with problems.collect("collate_fn: "):
            _get_component_from_path(self.collate_fn)
        self.dataset = self._load_dataset(cfg, "dataset", problems)
        if self.run_val_every_n_steps is not None:
            self.dataset_val = self._load_dataset(cfg, "dataset_val", problems)
        elif cfg.get("dataset_val") is not None:
            self._warn("dataset_val: not used, because run_val_every_n_steps is not set")
        problems.raise_if_any()

        with problems.collect():
            self.steps_per_epoch = num_update_steps(
                len(self.dataset),
                self.global_batch_size,
                self.last_update_step,
                self.max_steps_per_epoch,
            )
            self._info(
                f"Update step: {self.global_batch_size // self.dims.dp_degree} samples on each of "
                f"{self.dims.dp_degree} data-parallel ranks, {self.global_batch_size} in all; "
                f"{self.steps_per_epoch} update steps per epoch"
            )
        if self.dims.pp > 1 and self.dims.dp_degree > 1 and self.gradient_sync != "last_microbatch":
            self._warn(
                f"gradient_sync={self.gradient_sync}: pipeline stages keep gradients unsharded until the "
                "last microbatch, as with last_microbatch"
            )
        if self.max_tokens_per_microbatch is not None and (
            self.max_seq_len is None or self.max_tokens_per_microbatch < self.max_seq_len
        ):
            self._warn(
                f"max_tokens_per_microbatch={self.max_tokens_per_microbatch}: a sample with more "
                f"tokens (tokenizer.max_seq_len={self.max_seq_len}) gets a microbatch of its own"
            )
        num_left_over = len(self.dataset) % self.global_batch_size
        if self.last_update_step == "drop" and num_left_over:
            self._warn(
                f"last_update_step=drop: {num_left_over} of {len(self.dataset)} samples are left "
                "out of every epoch, other ones each time"
            )
        other = other_attention(self.model)
        # Compiled code and flex attention are made for each shape that they meet.
        self.num_row_lengths = None
        if self.compile or self.device.type != "cpu":
            self.num_row_lengths = 1 if self.compile else 4
        self.merges_packed_rows = other is None and self.num_row_lengths is None
        if self.microbatching == "packed":
            config_checks.check_packing(
                problems,
                other_attention=other,
                row_length=self._max_tokens(self.batch_size),
                needs_row_length=self.num_row_lengths is not None,
            )
        with problems.collect():
            self.microbatch_cost = MicrobatchCost(
                equal_attention_length=equal_attention_length(self.model)
            )
            longest_sample = vocab_size_and_max_seq_len(self.model)[1]
            self.names_of_weights = list(self.model.state_dict())
            parts = {0: self.model}
            if self.dims.pp > 1:
                parts = self._build_stages(cfg.model)
                output_is_tied = ties_output(self.model)
                embed_dim = self.model.tok_embeddings.embedding_dim
            for index, part in parts.items():
                attend_within_documents(
                    part,
                    self.device,
                    max_row_length=(self.max_tokens_per_microbatch or 0)
                    + max(self.batch_size, self.batch_size_val) * longest_sample,
                )
                if index == self.num_stages - 1:
                    compute_loss_in_forward(
                        part,
                        self.loss_fn,
                        backward_in_parts=splits_backward(self.pipeline_schedule),
                    )
                parts[index] = parallelize_model(
                    part,
                    self.mesh,
                    tensor_parallel_plan=config.instantiate(cfg.get("tensor_parallel_plan")),
                    enable_activation_checkpointing=self.activation_checkpointing,
                    ac_mode=cfg.get("ac_mode"),
                    ac_option=cfg.get("ac_option"),
                    compile_layers=self.compile,
                    custom_sharded_layers=cfg.get("custom_sharded_layers"),
                    fsdp_cpu_offload=self.fsdp_cpu_offload,
                    # A stage soon meets the next microbatch.
                    fsdp_reshard_after_forward=cfg.get(
                        "fsdp_reshard_after_forward", self.dims.pp == 1
                    ),
                )
        problems.raise_if_any()

        self.metric_logger = None
        if self.is_rank_zero and cfg.get("metric_logger") is not None:
            self.metric_logger = config.instantiate(cfg.metric_logger)
            self.metric_logger.log_config(cfg)
        if self.compile:
            training.compile_loss(self.loss_fn, verbose=self.is_rank_zero)
        self.activations_handling_ctx = training.get_act_offloading_ctx_manager(
            self.model, self.activation_offloading
        )

        with problems.collect("checkpointer: "):
            stock_checkpoint = self.checkpointer.load_checkpoint()
        problems.raise_if_any()
        weights = stock_checkpoint.pop(training.MODEL_KEY)
        for part in parts.values():
            load_weights(
                part, weights, self.device, self.dtype, self.fsdp_cpu_offload, self.names_of_weights
            )
        del weights

        self.pipeline, self.pp_group, self.counted_elsewhere = None, None, frozenset()
        if self.dims.pp > 1:
            self.pp_group = self.mesh.get_group("pp")
            self.model = nn.ModuleDict({f"stage_{index}": part for index, part in parts.items()})
            self.pipeline = Pipeline(
                parts,
                num_stages=self.num_stages,
                schedule=self.pipeline_schedule,
                embed_dim=embed_dim,
                dtype=self.dtype,
                device=self.device,
                group=self.pp_group,
                output_is_tied=output_is_tied,
            )
            self.counted_elsewhere = self.pipeline.parameters_counted_elsewhere()

        make_optimizer = partial(config.instantiate, cfg.optimizer)
        if self.optimizer_in_bwd:
            self.optimizer = OptimizerInBackward(self.model, make_optimizer)
        else:
            self.optimizer = make_optimizer(self.model.parameters())
            self.finite_steps = FiniteSteps(self.optimizer, self.device)
        self.config = OmegaConf.to_container(cfg, resolve=True)
        self.data_fingerprint = {
            **fingerprint(self.dataset),
            "global_batch_size": self.global_batch_size,
            "shuffle": self.shuffle,
            "last_update_step": self.last_update_step,
        }
        if resume_path is not None:
            self._resume(resume_path)
        elif resumes_from_stock:
            self._resume_from_stock(stock_checkpoint)
        elif self.resume_from_checkpoint:
            self._warn(
                f"resume_from_checkpoint=True: there is no checkpoint in {cfg.output_dir} yet; starts "
                "with the checkpointer's weights"
            )
        self.lr_scheduler = None
        if cfg.get("lr_scheduler") is not None:
            self.lr_scheduler = build_lr_scheduler(
                partial(config.instantiate, cfg.lr_scheduler),
                self.optimizer,
                num_training_steps=self.total_epochs * self.steps_per_epoch,
                last_epoch=self.global_step - 1,
            )

        cfg_profiler = cfg.get("profiler") or DictConfig({"enabled": False})
        cfg_profiler.setdefault("_component_", "torchtune.training.setup_torch_profiler")
        self.profiler = UpdateStepProfiler(
            *config.instantiate(cfg_profiler),
            record_memory_history=self.is_rank_zero and self.device.type == "cuda",
        )

    # ---- The mathematics ------------------------------------------------------------------------

    def loss_sum(self, microbatch: Microbatch) -> Tensor:
        """Cross-entropy summed over the microbatch's target tokens [nats], shape []."""
        with self.activations_handling_ctx:
            return self.model(**microbatch.inputs, targets=microbatch.targets)

    def update(self, step: UpdateStep) -> tuple[Tensor, Tensor | None]:
        """One optimizer step.

        Returns:
            This rank's part of the loss, shape []; its mean over all ranks is the mean loss per
            target token [nats]. And the gradient norm before clipping, unless the backward steps.
        """
        loss = torch.zeros((), device=self.device)
        if self.pipeline is not None:
            # One schedule for all microbatches, so that its bubble is paid once per update step.
            microbatches = [microbatch for microbatch, _ in step]
            sums = self.pipeline.forward_backward(
                microbatches, lambda sums: sums[0] * step.loss_scale
            )
            loss += sums[0] * step.loss_scale
        else:
            for microbatch, is_last in copy_ahead(step, self.device):
                with gradient_sync(self.model, is_last, self.gradient_sync):
                    # The scale holds the target tokens of all microbatches on all ranks, so every
                    # target weighs the same and the accumulated gradient is final.
                    scaled_loss = self.loss_sum(microbatch) * step.loss_scale
                    scaled_loss.backward()
                loss += scaled_loss.detach()

        if self.optimizer_in_bwd:
            return loss, None  # each parameter has been updated as soon as its gradient was there
        max_norm = float("inf") if self.clip_grad_norm is None else float(self.clip_grad_norm)
        grad_norm = clip_grad_norm_(
            self.model.parameters(), max_norm, self.pp_group, self.counted_elsewhere
        )
        self.finite_steps.step(grad_norm)  # the optimizer, unless the norm is NaN or infinite
        self.optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss per target token of ``dataset_val`` [nats], exact over all ranks."""
        self.model.eval()
        loss_sum = torch.zeros((), device=self.device)
        num_target_tokens = 0
        with self._val_update_steps() as steps:
            for step in steps:
                if self.pipeline is not None:
                    loss_sum += self.pipeline.forward([microbatch for microbatch, _ in step])[0]
                else:
                    for microbatch, _ in copy_ahead(step, self.device):
                        loss_sum += self.loss_sum(microbatch)
                num_target_tokens += step.num_target_tokens
        self.model.train()
        return mean_over_ranks(loss_sum) * self.dims.dp_degree / max(num_target_tokens, 1)

    # ---- The order of things --------------------------------------------------------------------

    def train(self) -> None:
        """Runs all epochs, or until it is asked to stop; exports the model after each."""
        throughput = Throughput(self.world_size)
        self.model.train()
        self.profiler.start()
        for epoch in range(self.epochs_run, self.total_epochs):
            first_step = self.samples_consumed // self.global_batch_size
            progress = tqdm(
                total=self.steps_per_epoch, initial=first_step, disable=not self.is_rank_zero
            )
            throughput.restart()
            with self._update_steps(epoch, first_step) as steps:
                for step in steps:
                    self.samples_consumed = (step.index + 1) * self.global_batch_size
                    self.num_target_tokens_seen += step.num_target_tokens
                    if step.num_target_tokens == 0:
                        self._warn(
                            f"epoch {epoch + 1}, update step {step.index + 1}: none of its samples "
                            "has a target token; skipped, weights and schedule stay as they are"
                        )
                        progress.update(1)
                        continue

                    self.global_step += 1
                    should_log = self.global_step % self.log_every_n_steps == 0
                    lr = get_lr(self.optimizer)
                    loss, grad_norm = self.update(step)
                    if self.lr_scheduler is not None:
                        self.lr_scheduler.step()
                    throughput.add(step, steps.wait_seconds)
                    progress.update(1)

                    # With a fused optimizer the host waits for the device here only.
                    if should_log:
                        mean_loss = mean_over_ranks(loss)
                        progress.set_description(
                            f"{epoch + 1}|{self.global_step}|Loss: {mean_loss}"
                        )
                        metrics = {
                            "loss": mean_loss,
                            "lr": lr,
                            "num_tokens": step.num_target_tokens,
                            **throughput.read_and_restart(),
                        }
                        if grad_norm is not None:
                            metrics["grad_norm"] = grad_norm.item()
                            num_left_out, most_in_a_row = self.finite_steps.read_and_restart()
                            if num_left_out > 0:
                                metrics["num_nonfinite_steps"] = num_left_out
                        if self.log_peak_memory_stats:
                            metrics.update(training.get_memory_stats(device=self.device))
                        self._log(metrics)
                        if grad_norm is not None:
                            self._check_nonfinite(num_left_out, most_in_a_row)

                    self.profiler.step()
                    if (
                        self.run_val_every_n_steps is not None
                        and self.global_step % self.run_val_every_n_steps == 0
                    ):
                        self._log({"val_loss": self.validate()})
                        throughput.restart()
                    if step.stop_requested:
                        self._stop()
                        return
                    if step.index + 1 < self.steps_per_epoch:  # or it is done below
                        # Exported first: a run that is killed meanwhile does it again.
                        if (
                            self.export_every_n_steps is not None
                            and self.global_step % self.export_every_n_steps == 0
                        ):
                            self.export_model(f"export_step_{self.global_step}")
                        if self._is_save_due(step):
                            self.save_checkpoint()
            progress.close()
            problem = self.export_model(f"epoch_{epoch}")
            if problem is not None and epoch + 1 == self.total_epochs:
                self._end_unexported(problem)
            self.epochs_run += 1
            self.samples_consumed = 0
            if (
                self.save_every_n_steps is not None
                or self.save_every_n_minutes is not None
                or self.epochs_run < self.total_epochs
            ):
                self.save_checkpoint()
        self.profiler.stop()

    def save_checkpoint(self) -> None:
        """Saves all that is needed to go on from here, on any number of ranks."""
        state = checkpoint.TrainingState(
            recipe=RECIPE_NAME,
            global_step=self.global_step,
            epoch=self.epochs_run,
            samples_consumed=self.samples_consumed,
            num_target_tokens_seen=self.num_target_tokens_seen,
            seed=self.seed,
            data_fingerprint=self.data_fingerprint,
            config=self.config,
        )
        try:
            outcome = self.checkpoints.save(self.model, self.optimizer, state)
        except ValueError as error:  # a state that no checkpoint can hold, on all ranks alike
            outcome = SaveOutcome(self.global_step, None, error=str(error))
        self._report(outcome)
        self.unsaved_since_seconds = None

    def export_model(self, name: str) -> str | None:
        """Saves the weights as a folder in the checkpointer's own format, whole or not at all.

        Returns:
            Why it could not, on all ranks alike; None if it could.
        """
        self._report(self.checkpoints.wait())  # which uses the group and the disk
        weights = gather_weights(
            self.model,
            self.device,
            keeps=parallelism.dp_rank_of(self.mesh) == 0,
            group=self.checkpoint_group,
            names=self.names_of_weights,
        )
        error = None
        if self.is_rank_zero:
            try:
                self._info(f"Exported to {export_weights(self.checkpointer, weights, name)}")
            except ExportError as failure:
                error = str(failure)
        error = parallelism.gather_objects(error, self.checkpoint_group)[0]
        if error is not None:
            self._warn(error)
        return error

    def cleanup(self) -> None:
        """Waits for the last checkpoint, closes the logger and leaves the process group."""
        self._report(self.checkpoints.close())
        if self.metric_logger is not None:
            self.metric_logger.close()
        if self.owns_process_group:
            dist.destroy_process_group()

    # ---- Parts of the above ---------------------------------------------------------------------

    def _check_config(self, cfg: DictConfig) -> None:
        """Raises everything that is wrong with the keys at once; settles device, ranks and batch."""
        problems = config_checks.Problems()
        config_checks.check_keys(
            problems, OmegaConf.to_container(cfg, resolve=False), CONFIG_KEYS, COMPONENTS
        )
        self.device, self.dtype = torch.device("cpu"), torch.float32
        with problems.collect():
            self.device = config_checks.resolve_device(cfg.get("device"))
        with problems.collect():
            self.dtype = config_checks.resolve_dtype(cfg.get("dtype"), self.device)
        pipeline_parallel_dim = cfg.get("pipeline_parallel_dim", 1)
        self.dims = parallelism.ParallelDims(1, self.world_size, 1)
        with problems.collect():
            self.dims = parallelism.resolve_parallel_dims(
                self.world_size,
                cfg.get("data_parallel_replicate_dim", 1),
                cfg.get("data_parallel_shard_dim", -1),
                cfg.get("tensor_parallel_dim", 1),
                pipeline_parallel_dim,
            )
        gradient_accumulation_steps = 1
        with problems.collect():
            gradient_accumulation_steps = config_checks.resolve_gradient_accumulation_steps(
                self.batch_size,
                cfg.get("gradient_accumulation_steps"),
                cfg.get("global_batch_size"),
                self.dims.dp_degree,
            )
        self.global_batch_size = self.batch_size * gradient_accumulation_steps * self.dims.dp_degree
        with problems.collect():
            config_checks.check_writable_dir("output_dir", cfg.get("output_dir"))

        problems.check_at_least(
            0, num_workers=self.num_workers, prefetch_update_steps=self.prefetch_update_steps
        )
        problems.check_at_least(
            1,
            epochs=self.total_epochs,
            max_steps_per_epoch=self.max_steps_per_epoch,
            log_every_n_steps=self.log_every_n_steps,
            run_val_every_n_steps=self.run_val_every_n_steps,
            save_every_n_steps=self.save_every_n_steps,
            export_every_n_steps=self.export_every_n_steps,
            keep_last_n_checkpoints=self.keep_last_n_checkpoints,
            max_nonfinite_steps=self.max_nonfinite_steps,
            batch_size_val=cfg.get("batch_size_val"),
            max_tokens_per_microbatch=self.max_tokens_per_microbatch,
        )
        problems.check_more_than_zero(save_every_n_minutes=self.save_every_n_minutes)
        problems.check_one_of(PLANS, microbatching=self.microbatching)
        config_checks.check_microbatching(
            problems,
            self.microbatching,
            self.max_tokens_per_microbatch,
            self.balance_over_ranks,
            cfg.get("collate_fn"),
        )
        problems.check_one_of(("raise", "skip"), on_bad_sample=self.on_bad_sample)
        problems.check_one_of(("stop", "skip"), on_nonfinite=self.on_nonfinite)
        problems.check_one_of(("train", "drop"), last_update_step=self.last_update_step)
        problems.check_one_of(parallelism.GRADIENT_SYNC, gradient_sync=self.gradient_sync)
        if "left_pad_sequence" in self.collate_fn:
            problems.add(f"collate_fn={self.collate_fn}: it pads for inference; leave the key out")
        if self.run_val_every_n_steps is not None and cfg.get("dataset_val") is None:
            problems.add(
                f"run_val_every_n_steps={self.run_val_every_n_steps}: set dataset_val, too"
            )
        config_checks.check_optimizer_in_bwd(
            problems,
            self.optimizer_in_bwd,
            self.clip_grad_norm,
            gradient_accumulation_steps,
            self.microbatching,
        )
        self.num_stages = 1
        if pipeline_parallel_dim > 1:
            with problems.collect():
                self.num_stages = config_checks.resolve_num_stages(
                    pipeline_parallel_dim, self.pipeline_schedule, self.pipeline_split_points
                )
            config_checks.check_pipeline_parallel(
                problems,
                pipeline_parallel_dim,
                self.num_stages,
                self.pipeline_schedule,
                num_microbatches=gradient_accumulation_steps
                if self.microbatching == "in_order"
                else None,
                tensor_parallel_dim=cfg.get("tensor_parallel_dim", 1),
                optimizer_in_bwd=self.optimizer_in_bwd,
                enable_activation_offloading=self.activation_offloading,
            )
        if cfg.get("context_parallel_dim", 1) != 1:
            problems.add(
                f"context_parallel_dim={cfg.context_parallel_dim}: PyTorch's ring attention has no CPU "
                "kernel, so this could not be tested and is left out; set it to 1"
            )
        config_checks.check_tensor_parallel(
            problems,
            self.dims.tp,
            has_plan=cfg.get("tensor_parallel_plan") is not None,
            fused=bool(OmegaConf.select(cfg, "optimizer.fused")),
        )
        config_checks.check_activation_memory(
            problems,
            self.device,
            self.activation_checkpointing,
            self.activation_offloading,
            cfg.get("ac_mode"),
        )
        problems.raise_if_any()

    def _build_stages(self, cfg_model: DictConfig) -> dict[int, nn.Module]:
        """The pipeline stages on this rank by their index, on the meta device."""
        layers = layers_of_stages(self.model, self.num_stages, self.pipeline_split_points)
        stages = {}
        for index in stages_of_rank(self.mesh.get_local_rank("pp"), self.dims.pp, self.num_stages):
            stages[index] = build_on_meta(partial(config.instantiate, cfg_model), self.dtype)
            keep_stage(stages[index], layers[index])
        self._info(
            f"{self.pipeline_schedule} over {self.dims.pp} ranks; layers of the stages: "
            + ", ".join(f"{of_stage.start} to {of_stage.stop - 1}" for of_stage in layers)
        )
        return stages

    def _load_dataset(
        self, cfg: DictConfig, key: str, problems: config_checks.Problems
    ) -> CheckedDataset | None:
        """The dataset at ``key``, or None where that is noted as a problem."""
        with problems.collect(f"{key}: "):
            if isinstance(cfg[key], ListConfig):
                parts = [config.instantiate(part, self.tokenizer) for part in cfg[key]]
                dataset: Any = ConcatDataset(datasets=parts)
            else:
                dataset = config.instantiate(cfg[key], self.tokenizer)
            if parallelism.agree_on_length(len(dataset), self.count_group) == 0:
                raise ValueError("it holds 0 samples; give it at least 1")
            vocab_size, max_seq_len = vocab_size_and_max_seq_len(self.model)
            return CheckedDataset(
                dataset,
                key,
                self.loss_fn.ignore_index,
                vocab_size,
                max_seq_len,
                skips_bad=self.on_bad_sample == "skip",
            )
        return None

    def _update_steps(self, epoch: int, first_step: int = 0) -> Prefetched[UpdateStep]:
        """This rank's update steps of an epoch, counted over all ranks, prepared ahead."""
        permutation = epoch_permutation(len(self.dataset), epoch, self.shuffle)
        return self._prefetch(
            self.dataset, permutation, range(first_step, self.steps_per_epoch), self.batch_size,
            self.global_batch_size, self.count_group, self.stop,
        )  # fmt: skip

    def _val_update_steps(self) -> Prefetched[UpdateStep]:
        """The same for ``dataset_val``, in its own order."""
        permutation = epoch_permutation(len(self.dataset_val), epoch=0, shuffle=False)
        global_batch_size = self.batch_size_val * self.dims.dp_degree
        num_steps = num_update_steps(len(self.dataset_val), global_batch_size, "train")
        return self._prefetch(
            self.dataset_val, permutation, range(num_steps), self.batch_size_val,
            global_batch_size, self.val_count_group,
        )  # fmt: skip

    def _prefetch(
        self,
        dataset: CheckedDataset,
        permutation: Tensor,
        step_indices: range,
        batch_size: int,
        global_batch_size: int,
        count_group: dist.ProcessGroup,
        stop: threading.Event | None = None,
    ) -> Prefetched[UpdateStep]:
        dp_rank = parallelism.dp_rank_of(self.mesh)
        ignore_index, pad_id = self.loss_fn.ignore_index, self.tokenizer.pad_id
        collate_fn = _get_component_from_path(self.collate_fn)
        plan, collate = plan_and_collate(
            self.microbatching,
            batch_size=batch_size,
            max_tokens=self._max_tokens(batch_size),
            cost=self.microbatch_cost,
            collate_fn=partial(collate_fn, padding_idx=pad_id, ignore_idx=ignore_index),
            ignore_index=ignore_index,
            padding_idx=pad_id,
            merge_packed_rows=self.merges_packed_rows,
            num_row_lengths=self.num_row_lengths,
        )
        exchange = None
        if self.balance_over_ranks and self.dims.dp_degree > 1:
            exchange = partial(
                exchange_samples,
                max_samples=global_batch_size // self.dims.dp_degree,
                dp_peers=parallelism.dp_peers_of(self.mesh),
                group=count_group,
            )
        return prefetch_update_steps(
            dataset,
            [
                update_step_indices(
                    permutation, step, global_batch_size, dp_rank, self.dims.dp_degree
                )
                for step in step_indices
            ],
            first_index=step_indices.start,
            plan=plan,
            collate=collate,
            ignore_index=ignore_index,
            dp_degree=self.dims.dp_degree,
            counts_once=parallelism.counts_its_data(self.mesh),
            group=count_group,
            depth=self.prefetch_update_steps,
            num_microbatches_to_run=self._fill_pipeline if self.dims.pp > 1 else None,
            exchange=exchange,
            stop=stop,
            num_workers=self.num_workers,
            pin_memory=self.device.type == "cuda",
        )

    def _fill_pipeline(self, num_microbatches: int) -> int:
        """How many microbatches the schedule must run where the data make so many."""
        if num_microbatches < self.dims.pp and not self.has_warned_of_few_microbatches:
            self.has_warned_of_few_microbatches = True
            self._warn(
                f"pipeline_parallel_dim={self.dims.pp}: a step of {num_microbatches} microbatches leaves "
                "most ranks idle; set a smaller max_tokens_per_microbatch or batch_size"
            )
        return num_microbatches_to_run(
            num_microbatches,
            schedule=self.pipeline_schedule,
            num_ranks=self.dims.pp,
            num_stages=self.num_stages,
        )

    def _max_tokens(self, batch_size: int) -> int | None:
        """Bound on the slots of a microbatch; None where nothing bounds the samples."""
        if self.max_tokens_per_microbatch is None and self.max_seq_len is not None:
            return batch_size * self.max_seq_len
        return self.max_tokens_per_microbatch

    def _find_step_checkpoint(self, output_dir: str, older_than: Path | None = None) -> Path | None:
        """The newest whole checkpoint to resume from, by names and sizes; the same on all ranks."""
        if not self.resume_from_checkpoint:
            return None
        found = None
        if self.is_rank_zero:
            found = find_newest_whole(Path(output_dir), RECIPE_NAME, older_than)
        path, skipped = parallelism.gather_objects(found, self.checkpoint_group)[0]
        for other, reason in skipped:
            self._warn(f"resume_from_checkpoint: {other} is passed over: {reason}")
        return path

    def _finds_stock_state(self, cfg_checkpointer: DictConfig) -> bool:
        """Whether to resume from the recipe state of a stock recipe."""
        default = Path(cfg_checkpointer.output_dir, "recipe_state", "recipe_state.pt")
        given = cfg_checkpointer.get("recipe_checkpoint") is not None
        return self.resume_from_checkpoint and (given or default.exists())

    def _resume(self, path: Path) -> None:
        """Goes on from a step checkpoint, in the middle of its epoch if need be; or from an older one."""
        try:
            state = checkpoint.load(
                path,
                self.model,
                self.optimizer,
                recipe=RECIPE_NAME,
                data_fingerprint=None if self.resume_with_other_data else self.data_fingerprint,
                group=self.checkpoint_group,
            )
        except checkpoint.DamagedError as error:
            older = self._find_step_checkpoint(str(path.parent), older_than=path)
            if older is None:
                raise checkpoint.DamagedError(
                    f"{error}; there is no older one. resume_from_checkpoint=False starts anew"
                ) from error
            self._warn(f"{error}; passed over")
            self._resume(older)
            return
        self.epochs_run = state.epoch
        self.samples_consumed = state.samples_consumed
        self.global_step = state.global_step
        self.num_target_tokens_seen = state.num_target_tokens_seen
        if state.seed != self.seed:
            self._warn(f"seed={self.seed}: the checkpoint was saved with {state.seed}")
        self._info(
            f"Goes on from {path}: epoch {state.epoch + 1}, after update step {state.global_step}"
        )

    def _resume_from_stock(self, saved: dict[str, Any]) -> None:
        """Goes on at the end of an epoch, from the recipe state that a stock recipe has saved."""
        needed = {training.OPT_KEY, training.SEED_KEY, training.MAX_STEPS_KEY, training.EPOCHS_KEY}
        if needed - saved.keys():
            raise ValueError(
                f"checkpointer.recipe_checkpoint: it has no {', '.join(sorted(needed - saved.keys()))}; "
                "it must be of a full fine-tuning recipe"
            )
        load_optimizer_state(self.model, self.optimizer, saved[training.OPT_KEY], self.device)
        for key, here in (
            (training.SEED_KEY, self.seed),
            (training.MAX_STEPS_KEY, self.max_steps_per_epoch),
        ):
            if saved[key] != here:
                self._warn(f"{key}={here}: the checkpoint was saved with {saved[key]}")
        self.epochs_run = saved[training.EPOCHS_KEY]
        self.global_step = self.epochs_run * self.steps_per_epoch

    def _check_nonfinite(self, num_left_out: int, most_in_a_row: int) -> None:
        """Ends the training, or says how many update steps were left out; alike on all ranks."""
        if num_left_out == 0:
            return
        text = (
            f"{num_left_out} of the last {self.log_every_n_steps} update steps up to {self.global_step} "
            "had a loss or gradient that is not finite; they were left out, the weights are untouched"
        )
        if self.on_nonfinite == "skip" and most_in_a_row <= self.max_nonfinite_steps:
            self._warn(f"{text} (on_nonfinite=skip)")
            return
        self.save_checkpoint()
        self._report(self.checkpoints.close())
        raise NonfiniteError(
            f"{text}. on_nonfinite={self.on_nonfinite}: {most_in_a_row} in a row, "
            f"max_nonfinite_steps={self.max_nonfinite_steps}. resume_from_checkpoint=True goes on from here; "
            "set a lower learning rate, or on_nonfinite=skip and a higher max_nonfinite_steps"
        )

    def _is_save_due(self, step: UpdateStep) -> bool:
        """By the number of update steps or by rank 0's clock; alike on all ranks."""
        if self.unsaved_since_seconds is None:
            self.unsaved_since_seconds = step.clock_seconds
        unsaved_minutes = (step.clock_seconds - self.unsaved_since_seconds) / 60
        return (
            self.save_every_n_steps is not None and self.global_step % self.save_every_n_steps == 0
        ) or (
            self.save_every_n_minutes is not None and unsaved_minutes >= self.save_every_n_minutes
        )

    def _stop(self) -> None:
        """Saves, and says how to go on."""
        self.save_checkpoint()
        self.profiler.stop()
        self._info(
            f"Stopped as asked after update step {self.global_step}; the same command with "
            "resume_from_checkpoint=True goes on from there"
        )

    def _end_unexported(self, problem: str) -> None:
        """Saves an epoch whose export is all that is left to do, and ends the training."""
        self.save_checkpoint()
        self._report(self.checkpoints.close())
        raise ExportError(
            f"{problem}. Once it can be, resume_from_checkpoint=True exports the trained model"
        )

    def _report(self, outcome: SaveOutcome | None) -> None:
        """A checkpoint that cannot be saved is no reason to stop: the last whole one is there."""
        if outcome is not None and outcome.error is not None:
            self._warn(
                f"update step {outcome.global_step}: no checkpoint could be saved ({outcome.error}); "
                "the one before stays"
            )
        if outcome is not None and outcome.warning is not None:
            self._warn(outcome.warning)

    def _log(self, metrics: dict[str, float]) -> None:
        if self.metric_logger is not None:
            self.metric_logger.log_dict(metrics, step=self.global_step)

    def _warn(self, text: str) -> None:
        if self.is_rank_zero:
            log.warning(text)

    def _info(self, text: str) -> None:
        if self.is_rank_zero:
            log.info(text)


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Entry point: the config's keys, overridden by ``key=value`` on the command line."""
    config.log_config(recipe_name="FullFinetuneUpdateStep", cfg=cfg)
    recipe = FullFinetuneUpdateStep(cfg=cfg)
    recipe.setup(cfg=cfg)
    with set_on_signals(recipe.stop):
        recipe.train()
        recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
