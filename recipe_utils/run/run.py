"""State and output of a training run: position, log, checkpoints and exports."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torchtune import config, training
from torchtune.training.precision import PRECISION_STR_TO_DTYPE

from recipe_utils.checkpoint.export import ExportError
from recipe_utils.checkpoint.save import CheckpointWriter, SaveOutcome
from recipe_utils.checkpoint.tensors import AnyOptimizer
from recipe_utils.data.loader.loader import UpdateStep, UpdateStepLoader
from recipe_utils.model.pipeline.stages import adapters_of
from recipe_utils.optim.moved import ChangedWeights
from recipe_utils.optim.nonfinite import NonfiniteError, NonfiniteGuard
from recipe_utils.optim.optimizer import build_lr_scheduler
from recipe_utils.parallel.process_group import gather_objects, start_any
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.run.entry_point import set_on_signals
from recipe_utils.run.exports import export_model, log_model, summary_of_training
from recipe_utils.run.lock import FolderLock, LockedError
from recipe_utils.run.log import Log, bar_text, progress_bar
from recipe_utils.run.metrics import Metrics, Throughput, build_profiler
from recipe_utils.run.resume import Resume
from recipe_utils.run.settings import RunSettings
from recipe_utils.settings.problems import ConfigError, naming

_POSITION = ("epoch", "samples_consumed", "global_step", "num_tokens_seen", "num_images_seen")
"""Attributes of a run that are saved in checkpoints."""


class Run:
    """State and output of a training run.

    As a context manager it closes writer, logger, profiler and process groups, also after an error.
    On entry it raises ConfigError if another run writes to ``output_dir``, or as
    :class:`recipe_utils.run.resume.Resume`. The whole ``cfg`` is saved with each checkpoint.
    """

    def __init__(self, recipe: str, settings: RunSettings, ranks: Ranks, cfg: DictConfig) -> None:
        self.settings = settings
        self.epoch = 0
        self.samples_consumed = 0  # within the epoch, over all ranks
        self.global_step = 0
        self.seed = training.set_seed(settings.seed, settings.cudnn_deterministic_mode)
        self.run_id = ""  # set by resume()
        self.num_tokens_seen = 0  # target tokens
        self.num_images_seen = 0
        self.stop = threading.Event()  # requests a checkpoint and the end of training
        self._stop_requested: Callable[[], bool] = self.stop.is_set  # of all ranks by advance()
        self._recipe = recipe
        self._ranks = ranks
        self._config: dict[str, Any] = dict(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
        is_async = settings.enable_async_checkpointing
        self._group = ranks.checkpoint_group if is_async else ranks.cpu_group
        self._log = Log(Path(settings.output_dir) / "logs", ranks.is_zero)
        self._is_best = False
        self._is_stopped = False
        self._num_unsaved = 0
        self._most_spanning_samples = 0
        self._best_val_loss: float | None = None
        self._last_export: Path | None = None
        self._throughput = Throughput(ranks.world_size)
        self.metrics = Metrics(self._log, self._throughput, reads_late=ranks.device.type != "cpu")
        self._unsaved_since_seconds = math.inf  # first update step since, by rank 0's clock
        self._at_exit = ExitStack()
        self._signals = ExitStack()  # closed last: signals also stop a write in progress

        if ranks.is_zero:
            config.log_config(recipe, cfg)

    def __enter__(self) -> "Run":
        self._at_exit.enter_context(self._signals)
        self._at_exit.callback(self._ranks.leave)
        try:
            self._lock_folder()
            # After the lock, because the writer removes files of killed runs; before the search for
            # checkpoints, because it also restores one that was being replaced.
            self._checkpoints = CheckpointWriter(
                self.settings.output_dir,
                keep_last_n=self.settings.keep_last_n_checkpoints,
                group=self._group,
                asynchronous=self.settings.enable_async_checkpointing,
            )
            # Raises before anything is built.
            self._has_checkpoint = self._resume.path is not None
        except BaseException:
            self._at_exit.close()
            raise
        self._at_exit.callback(lambda: self._report(self._checkpoints.close()))
        self._at_exit.callback(self.metrics.close)
        return self

    def __exit__(self, *reason: Any) -> None:
        self._at_exit.__exit__(*reason)

    # ---- Position -------------------------------------------------------------------------------

    @property
    def resumes_from_stock(self) -> bool:
        """The run resumes from a ``recipe_state.pt`` of a stock recipe."""
        return self._resume.from_stock

    @property
    def saved_fingerprint(self) -> Mapping[str, Any]:
        """Fingerprint of the data that training resumes with; see :class:`.Resume`."""
        return self._resume.saved_fingerprint

    @cached_property
    def _resume(self) -> Resume:
        return Resume(
            self._recipe, self.settings, self._config, self._ranks, self._group, self._log
        )

    def resume(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer,
        checkpointer: Any,
        loader: UpdateStepLoader,
        stock_checkpoint: Mapping[str, Any],
        frozen: Mapping[str, str],
        exported: nn.Module | None = None,
    ) -> None:
        """Resumes training if configured, also within an epoch; see :meth:`.Resume.restore`.

        From then on checkpoints contain ``model`` and ``optimizer``, and ``checkpointer`` exports
        ``exported`` (default: ``model``).
        """
        self._model, self._optimizer, self._checkpointer = model, optimizer, checkpointer
        self._exported = model if exported is None else exported
        self.num_steps = self.settings.epochs * loader.steps_per_epoch
        self._changed_weights = ChangedWeights(optimizer)
        adapters = adapters_of(model).modules.values()
        if self.settings.save_adapter_weights_only and not adapters:
            key = "save_adapter_weights_only=True"
            self._log.warn(f"{key}: the model has no adapters; exports all weights")
        modules, names = list(model.modules()), ("attn_dropout", "attention_dropout")
        found = {name: [getattr(module, name, 0) for module in modules] for name in names}
        found["lora_dropout"] = [adapter.dropout for adapter in adapters]
        found["dropout"] = [m.p for m in modules if type(m) is nn.Dropout and not adapters]
        for name, rates in found.items():
            if (rate := max((r for r in rates if isinstance(r, float)), default=0)) > 0:
                self._log.warn(
                    f"model.{name}={rate}: dropout depends on microbatches and ranks, so the losses of "
                    "two layouts are equal in the mean only; 0 is exact"
                )
        self._state = self._resume.restore(
            model, optimizer, loader, stock_checkpoint, frozen, self.seed
        )
        for name in _POSITION:
            setattr(self, name, getattr(self._state, name))
        self.run_id = self._state.run_id
        self._best_val_loss = self._state.best_val_loss

    def open_log(self, cfg: DictConfig) -> None:
        """Builds ``metric_logger`` and ``profiler``. Call it after all other checks."""
        with naming("profiler"):
            self.profiler = build_profiler(self.settings.profiler, self._ranks)
        if self._ranks.is_zero and self.settings.metric_logger is not None:
            with naming("metric_logger"):
                self._log.add("metric_logger", config.instantiate(cfg.metric_logger))
            self._log.log_config(cfg)

    def epochs(self) -> Iterator[int]:
        """Yields the remaining epochs. SIGTERM and SIGINT request a stop from here on."""
        self._signals.enter_context(set_on_signals(self.stop))
        self._at_exit.callback(self.profiler.stop)
        self._log.open_metrics(self.global_step, self.run_id)
        self.profiler.start()
        first = self.global_step, self.num_tokens_seen, self.num_images_seen, time.perf_counter()
        for epoch in range(self.epoch, self.settings.epochs):
            yield epoch
            if self._is_stopped:
                return
        self._log_summary(*first)

    def steps(self, loader: UpdateStepLoader, epoch: int, counted: str) -> Iterator[UpdateStep]:
        """Yields the remaining update steps of an epoch until a stop. Rank 0 shows a progress bar.

        Update steps whose total of ``counted`` is 0 are skipped on all ranks.
        """
        self._throughput.restart()
        self._changed_weights.restart()
        with (
            loader.epoch(epoch, self.samples_consumed) as steps,
            progress_bar(
                total=loader.steps_per_epoch,
                initial=self.samples_consumed // loader.global_batch_size,
                shown=self._ranks.is_zero,
            ) as bar,
        ):
            for step in steps:
                self._wait_seconds = steps.wait_seconds
                if step.totals[counted] == 0:
                    self.samples_consumed = step.samples_consumed
                    self._log.warn(
                        f"epoch {epoch + 1}, update step {step.index + 1}: it has no "
                        f"{counted.replace('_', ' ')}; skipped, weights and schedule are unchanged"
                    )
                else:
                    yield step
                if self._is_stopped:
                    return
                epochs, world_size = self.settings.epochs, self._ranks.world_size
                text = bar_text(epoch, epochs, self.metrics.shown, world_size)
                bar.set_description_str(text, refresh=False)  # bar.update shows it
                bar.update(1)

    def advance(self, step: UpdateStep) -> None:
        """Counts an enqueued update step and writes the metrics of the previous one."""
        self.metrics.write_held()
        # All ranks get the same answer, while the device computes. Earlier, and a request during
        # the update step would cost another one.
        self._stop_requested = start_any(self.stop.is_set(), self._ranks.cpu_group)
        self._unsaved_since_seconds = min(self._unsaved_since_seconds, step.clock_seconds)
        self._step = step
        self.global_step += 1
        self.samples_consumed = step.samples_consumed
        self.num_tokens_seen += step.totals.get("target_tokens", 0)
        self.num_images_seen += step.totals.get("images", 0)
        num_spanning = step.totals.get("spanning_samples", 0)
        self._most_spanning_samples = max(self._most_spanning_samples, num_spanning)
        self._throughput.add(step, self._wait_seconds)

    # ---- Log ------------------------------------------------------------------------------------

    def _is_due(self, every_n_steps: int | None) -> bool:
        return every_n_steps is not None and self.global_step % every_n_steps == 0

    def should_log(self) -> bool:
        """Returns True if metrics of this update step are logged."""
        return self._is_due(self.settings.log_every_n_steps or 1)

    def should_validate(self) -> bool:
        """Returns True if a validation is due."""
        return self._is_due(self.settings.run_val_every_n_steps)

    def should_sample(self) -> bool:
        """Returns True if answers to ``sample_prompts`` are due."""
        return self._is_due(self.settings.sample_every_n_steps)

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of :func:`recipe_utils.evaluation.generation.generate`."""
        return {
            "prompts": self.settings.sample_prompts or [],
            "max_new_tokens": self.settings.sample_max_new_tokens,
            "device": self._ranks.device,
        }

    def build_checkpointer(self, cfg: DictConfig) -> Any:
        """Builds a checkpointer. It loads a stock recipe's state if training resumes from one."""
        return config.instantiate(cfg, should_load_recipe_state=self.resumes_from_stock)

    def build_lr_scheduler(self, cfg: DictConfig | None, optimizer: AnyOptimizer) -> Any:
        """Builds the learning-rate schedule at the current step; None for a constant rate."""
        return build_lr_scheduler(cfg, optimizer, self.num_steps, self.global_step)

    def validates_on(self, dataset_val: Any) -> bool:
        """Returns True if training validates. Warns if ``dataset_val`` is unused."""
        validates = self.settings.run_val_every_n_steps is not None
        if not validates and dataset_val is not None:
            self._log.warn("dataset_val: not used, because run_val_every_n_steps is not set")
        return validates

    def log(
        self,
        sums: Mapping[str, Tensor],
        guard: NonfiniteGuard,
        lr: float,
        grad_norm: Tensor | None,
        **metrics: Any,
    ) -> None:
        """Logs metrics of this update step, with throughput, skipped steps and changed weights.

        On an accelerator they are read after the next update step is enqueued, or before anything
        else is logged, saved or exported. ``sums`` are this rank's parts of metrics, [] each, of
        one dtype; their means over ranks are logged. Metrics that are None are not logged.
        """
        metrics = {"lr": lr, "grad_norm": grad_norm, **metrics, **self._step.token_shares}
        fraction = self._changed_weights.fraction(self._step.is_last_of_epoch)
        metrics["weights_moved_fraction"] = fraction
        metrics["num_spanning_samples"] = self._step.totals.get("spanning_samples")
        if self.settings.log_peak_memory_stats and self._ranks.device.type != "cpu":
            metrics |= training.get_memory_stats(device=self._ranks.device)
        self.metrics.hold(self.global_step, self._position(), sums, guard, metrics)

    def log_validation(self, metrics: Mapping[str, Tensor]) -> None:
        """Logs validation metrics. The validation is excluded from the training time."""
        found = {name: value.item() for name, value in metrics.items()}
        self.metrics.write(self.global_step, self._position(), found)
        val_loss, best = found.get("val_loss", math.nan), self._best_val_loss
        is_lower = math.isfinite(val_loss) and (best is None or val_loss < best)
        self._best_val_loss = val_loss if is_lower else best
        self._is_best = is_lower and self.settings.keep_best_checkpoint
        self._throughput.restart()

    def log_answers(self, answers: Sequence[str]) -> None:
        """Logs answers to ``sample_prompts``. Generation is excluded from the training time."""
        self._log.write_answers(self.global_step, self.settings.sample_prompts or [], answers)
        self._throughput.restart()

    def stop_if_nonfinite(self, guard: NonfiniteGuard, step: UpdateStep) -> None:
        """Saves a checkpoint and raises NonfiniteError after too many non-finite gradients.

        Synchronizes with the device only before a checkpoint, export, validation or sampling.
        """
        saves = self.should_save(step) or self.should_export(step) or self._stop_requested()
        if saves or self.should_validate() or self.should_sample() or step.is_last_of_epoch:
            self.metrics.write_held()
            guard.check(self.global_step)
        if guard.problem:
            self.save()
            raise NonfiniteError(guard.problem)

    def _position(self) -> dict[str, Any]:
        if self.num_images_seen:
            return {"epoch": self.epoch, "num_images_seen": self.num_images_seen}
        return {"epoch": self.epoch, "num_tokens_seen": self.num_tokens_seen}

    def _log_summary(self, first_step: int, tokens: int, images: int, began: float) -> None:
        num_steps = self.global_step - first_step
        if num_steps:
            num_images = self.num_images_seen - images
            counted = "images" if num_images else "target tokens"
            num_seen = num_images or self.num_tokens_seen - tokens
            seconds = time.perf_counter() - began
            self._log.info(summary_of_training(num_steps, num_seen, seconds, counted))
            if self._most_spanning_samples:
                self._log.info(
                    f"Rows of several ranks: at most {self._most_spanning_samples} samples of an update step"
                )
        elif self._last_export is None:
            self._log.info(
                f"All {self.epoch} epochs are complete; set epochs={self.epoch + 1} to train longer"
            )
        if self._num_unsaved:
            self._log.warn(f"{self._num_unsaved} checkpoints could not be saved, see above")
        if self._last_export is not None:  # on rank 0
            output_dir, device = Path(self.settings.output_dir), self._ranks.device.type
            log_model(self._last_export, output_dir, self._config, device, self._log)

    # ---- Checkpoints and exports ----------------------------------------------------------------

    def should_export(self, step: UpdateStep) -> bool:
        """Returns True if an export within the epoch is due."""
        return self._is_due(self.settings.export_every_n_steps) and not step.is_last_of_epoch

    def should_save(self, step: UpdateStep) -> bool:
        """Returns True if a checkpoint within the epoch is due, by steps or rank 0's clock."""
        if step.is_last_of_epoch:
            return False
        unsaved_minutes = (step.clock_seconds - self._unsaved_since_seconds) / 60
        is_due_by_clock = unsaved_minutes >= (self.settings.save_every_n_minutes or math.inf)
        return is_due_by_clock or self._is_due(self.settings.save_every_n_steps)

    def finish_step(self, step: UpdateStep) -> None:
        """Exports the best model and stops or exports and saves, as due after an update step."""
        self.profiler.step()
        if self._is_best:
            self.export("best")
            self._is_best = False
        if self._stop_requested():
            self.save()
            self._is_stopped = True
            self._log.info(
                f"Stopped as requested after update step {self.global_step}; the same command with "
                "resume_from_checkpoint=True resumes from there"
            )
            return
        # Exported first: a run that is killed before the checkpoint repeats the export.
        if self.should_export(step):
            self.export(f"export_step_{self.global_step}")
        if self.should_save(step):
            self.save()

    def finish_epoch(self) -> None:
        """Exports the model and saves a checkpoint unless training has stopped.

        The last epoch is saved only with ``save_every_n_steps`` or ``save_every_n_minutes``, or if
        the trained model cannot be exported, which raises ExportError.
        """
        if self._is_stopped:
            return
        problem = self.export(f"epoch_{self.epoch}")
        if problem is not None and self.epoch + 1 == self.settings.epochs:
            self.save()
            self._report(self._checkpoints.wait())
            way_out = "Once it can be, resume_from_checkpoint=True exports the trained model"
            if not self._has_checkpoint:
                way_out = "There is no checkpoint of it either"
            raise ExportError(f"{problem}. {way_out}")
        self.epoch += 1
        self.samples_consumed = 0
        saves = self.settings.save_every_n_steps or self.settings.save_every_n_minutes
        if saves or self.epoch < self.settings.epochs:
            self.save()

    def save(self) -> None:
        """Saves a checkpoint that any number of ranks can resume from."""
        self.metrics.write_held()
        position = {name: getattr(self, name) for name in _POSITION}
        state = replace(self._state, best_val_loss=self._best_val_loss, **position)
        try:
            outcome = self._checkpoints.save(self._model, self._optimizer, state)
        except ValueError as error:  # the state cannot be saved; raised on all ranks
            outcome = SaveOutcome(self.global_step, None, error=str(error))
        self._report(outcome)
        self._unsaved_since_seconds = math.inf

    def export(self, name: str) -> str | None:
        """Exports the model; see :func:`.export_model`. Returns an error message or None."""
        self.metrics.write_held()
        self._report(self._checkpoints.wait())  # it uses the same group and disk
        dtype = PRECISION_STR_TO_DTYPE.get(self.settings.export_dtype or self._config.get("dtype"))
        adapters_only = self.settings.save_adapter_weights_only
        own = self._checkpointer, self._exported, name, dtype, adapters_only, self._state.frozen
        folder, error = export_model(*own, self._ranks, self._group, self._log)
        self._last_export = folder or self._last_export
        return error

    def _report(self, outcome: SaveOutcome | None) -> None:
        """Warns about a failed checkpoint. Training continues: the last complete one is kept."""
        if outcome is None:
            return
        if outcome.error is not None:
            kept = "the previous one is kept" if self._has_checkpoint else "there is none before"
            self._log.warn(
                f"update step {outcome.global_step}: no checkpoint could be saved "
                f"({outcome.error}); {kept}"
            )
            self._num_unsaved += 1
        else:
            self._has_checkpoint = True
        self._log.warn(outcome.warning or "")

    def _lock_folder(self) -> None:
        """Creates and locks ``output_dir``. Raises ConfigError on all ranks if another run writes to it."""
        folder, problem = Path(self.settings.output_dir), None
        if self._ranks.is_zero:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._at_exit.callback(FolderLock(folder).release)
            except LockedError as error:
                problem = (
                    f"output_dir={folder}: another run writes to it ({error}); wait for its end, "
                    "stop it, or set another folder"
                )
            except OSError as error:
                if folder.is_dir():  # no reason not to train
                    self._log.warn(
                        f"output_dir={folder}: it cannot be locked ({error}); run one at a time"
                    )
                else:
                    problem = (
                        f"output_dir={folder}: it cannot be created ({error}); set another folder"
                    )
        problem = gather_objects(problem, self._group)[0]
        if problem is not None:
            raise ConfigError(problem)
