"""A training run: its position and loop, what is due after each update step, and its end."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torchtune import config, training

from recipe_utils.checkpoint.export import ExportError
from recipe_utils.checkpoint.load import TrainingState
from recipe_utils.losses.dataset_weights import token_shares
from recipe_utils.models.construct import describe_model
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.parallel.process_group import start_any
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import naming
from recipe_utils.training.entry_point import set_on_signals
from recipe_utils.training.inspect_samples import log_data
from recipe_utils.training.lock import lock_folder
from recipe_utils.training.log import Log, bar_text, progress_bar
from recipe_utils.training.metrics import Metrics, Throughput, build_profiler
from recipe_utils.training.parts.budget import StepMemory
from recipe_utils.training.parts.sample_losses import SampleLosses
from recipe_utils.training.resume import Resume, TrainingParts, norms_of_frozen_rows, warnings_of
from recipe_utils.training.saves import Saves, log_model, summary_of_training
from recipe_utils.training.settings import Due, RunSettings
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.step import UpdateStep

_COUNTS = {"target_tokens": "num_tokens", "pairs": "num_pairs"}
"""Totals of an update step that are logged, and their metrics."""
_Validate = Callable[[], Mapping[str, Tensor]]
_Answer = Callable[[Sequence[str], int], Sequence[str]]


class Run:
    """Position, loop and output of a training run.

    A recipe enters it, calls :meth:`resume` once all parts are built, iterates over :meth:`steps`,
    and calls :meth:`finish` after each update step. As a context manager it closes writer, logger,
    profiler and process groups, also after an error. On entry it raises ConfigError if another run
    writes to ``output_dir``, or as :class:`recipe_utils.training.resume.Resume`.
    """

    state: TrainingState
    """Position of the run; the whole config is saved with it."""
    num_steps: int
    """Update steps of the whole training."""

    def __init__(self, recipe: str, settings: RunSettings, ranks: Ranks, cfg: DictConfig) -> None:
        self.settings, self._recipe = settings, recipe
        self.seed = training.set_seed(settings.seed, settings.cudnn_deterministic_mode)
        self.stop = threading.Event()  # requests a checkpoint and the end of training
        self._stop_requested: Callable[[], bool] = self.stop.is_set  # of all ranks by advance()
        self._is_stopped = False
        self._ranks = ranks
        config_of_run: Any = OmegaConf.to_container(cfg, resolve=True)
        is_async = settings.enable_async_checkpointing
        group = ranks.checkpoint_group if is_async else ranks.cpu_group
        self._log = Log(Path(settings.output_dir) / "logs", ranks.is_zero)
        shared = settings, config_of_run, ranks, group, self._log
        self._saves, self._resume = Saves(*shared), Resume(recipe, *shared)
        self._throughput = Throughput(ranks.world_size)
        self.metrics = Metrics(self._log, self._throughput, reads_late=ranks.device.type != "cpu")
        self._most_spanning_samples = 0
        self._unsaved_since_seconds = math.inf  # first update step since, by rank 0's clock
        self._validate: _Validate | None = None
        self._answer: _Answer | None = None
        self._at_exit = ExitStack()
        self._signals = ExitStack()  # closed last: signals also stop a write in progress

    def __enter__(self) -> "Run":
        self._at_exit.enter_context(self._signals)
        self._at_exit.callback(self._ranks.leave)
        try:
            self._at_exit.enter_context(lock_folder(self.settings, self._ranks, self._log))
            # After the lock, because the writer removes files of killed runs; before the search for
            # checkpoints, because it also restores one that was being replaced.
            self._saves.open()
            # Raises before anything is built.
            self._saves.has_checkpoint = self._resume.path is not None
            if self.settings.seed is None and (saved := self._resume.saved) is not None:
                self.seed = training.set_seed(saved.seed)
        except BaseException:
            self._at_exit.close()
            raise
        self._at_exit.callback(self._saves.close)
        self._at_exit.callback(self.metrics.close)
        return self

    def __exit__(self, *reason: Any) -> None:
        self._at_exit.__exit__(*reason)

    # ---- Before training ------------------------------------------------------------------------

    def open_log(self, cfg: DictConfig, model: nn.Module, loader: UpdateStepLoader) -> None:
        """Logs the model and its data. Builds ``metric_logger`` and ``profiler``.

        Call it after all other checks; ``model`` is whole, on the meta device.
        """
        with naming("profiler"):
            self.profiler = build_profiler(self.settings.profiler, self._ranks)
        if self._ranks.is_zero and self.settings.metric_logger is not None:
            with naming("metric_logger"):
                self._log.add("metric_logger", config.instantiate(cfg.metric_logger))
        if self._ranks.is_zero and self.settings.log_config:
            config.log_config(self._recipe, cfg)
        self._log.log_config(cfg)
        self._log.info(describe_model(model, cfg, self._ranks.device))
        log_data(loader, self.settings.epochs, cfg.get("microbatching", "in_order"))

    def resume(self, parts: TrainingParts) -> tuple[int, int]:
        """Resumes training if configured, also within an epoch; see :meth:`.Resume.restore`.

        Returns the update steps of the whole training, and the completed ones.
        """
        self._parts = self._saves.parts = parts
        self.num_steps = sum(map(parts.loader.order.num_steps, range(self.settings.epochs)))
        self.sample_losses = None
        if self._resume.config.get("sample_losses") and parts.by_sample is not None:
            self.sample_losses = SampleLosses(parts.by_sample, parts.loader, self._ranks, self._log)
        warnings = *self.settings.warnings(self.num_steps), *warnings_of(parts.model, self.settings)
        for text in warnings:
            self._log.warn(text)
        loader, ranks = parts.loader, self._ranks
        stops = getattr(loader.budget.collator(), "stop_tokens", ())
        for text in norms_of_frozen_rows(parts.model, stops, ranks.device):
            self._log.info(text)
        self._memory = StepMemory(loader, parts.optimizer, ranks, self._log.info)
        # Left before the process group is closed, which ends the other ranks.
        self._at_exit.enter_context(self._memory)
        self.state = self._resume.restore(parts, self.seed)
        self._memory.restore(self.state.token_budget)
        return self.num_steps, self.global_step

    # ---- Loop -----------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Completed update steps."""
        return self.state.global_step

    def steps(
        self, loader: UpdateStepLoader, counted: str, validate: _Validate | None = None, answer: _Answer | None = None
    ) -> Iterator[UpdateStep]:
        """Yields the remaining update steps of all epochs until a stop. Rank 0 shows a progress bar.

        SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 request a stop from here on. The model is validated before the
        first update step; after each epoch it is exported and a checkpoint saved.

        Args:
            loader: loader of the training.
            counted: name of a count; update steps whose total of it is 0 are skipped on all ranks.
            validate: returns validation metrics.
            answer: maps prompts and the maximum number of new tokens to answers.
        """
        self._signals.enter_context(set_on_signals(self.stop))
        self._at_exit.callback(self.profiler.stop)
        self._log.open_metrics(self.global_step, self.state.run_id)
        if self.sample_losses is not None:
            self.sample_losses.open(self.settings, is_new=self.global_step == 0)
            self._at_exit.callback(self.sample_losses.write_held)
        self.profiler.start()
        self._counted, self._validate, self._answer = counted, validate, answer
        if self.global_step == 0 and self.settings.run_val_every_n_steps and validate:
            found = ", ".join(f"{name} {value:.3f}" for name, value in self._validated().items())
            self._log.info(f"Before the first update step: {found}")
        first, began = self.state, time.perf_counter()
        done = sum(map(loader.order.num_steps, range(first.epoch)))
        done += first.samples_consumed // loader.order.end(first.epoch, 0)
        with progress_bar(total=self.num_steps, initial=done, shown=self._ranks.is_zero) as bar:
            for _ in range(self.state.epoch, self.settings.epochs):
                yield from self._steps_of_epoch(loader, bar)
                if self._is_stopped:
                    return
                self._finish_epoch()
        self._log_summary(first, time.perf_counter() - began)

    def _steps_of_epoch(self, loader: UpdateStepLoader, bar: Any) -> Iterator[UpdateStep]:
        epoch, consumed, device = self.state.epoch, self.state.samples_consumed, self._ranks.device
        epochs, world_size = self.settings.epochs, self._ranks.world_size
        self._throughput.restart()
        with loader.epoch(epoch, consumed) as steps:
            for step in steps:
                self._wait_seconds = steps.wait_seconds
                self._lr = self._parts.optimizer.param_groups[0]["lr"]
                if step.totals[self._counted] == 0:
                    self.state = replace(self.state, samples_consumed=step.samples_consumed)
                    self._log.warn(
                        f"epoch {epoch + 1}, update step {step.index + 1}: it has no "
                        f"{self._counted.replace('_', ' ')}; skipped, weights and schedule are unchanged"
                    )
                else:
                    self._memory.start(step, self.global_step + 1)
                    yield step
                if self._is_stopped:
                    return
                on_cuda = device.type == "cuda"
                peak_bytes = torch.cuda.max_memory_allocated(device) if on_cuda else 0
                text = bar_text(epoch, epochs, self.metrics.shown, world_size, peak_bytes)
                bar.set_description_str(text, refresh=False)  # bar.update shows it
                bar.update(1)

    def finish(self, step: UpdateStep, metrics: Mapping[str, Tensor], grad_norm: Tensor | None, **more: Any) -> None:
        """Logs, validates, samples, exports, saves and stops, as due after an enqueued update step.

        The last one is always followed by a validation.

        Args:
            step: update step whose gradient the optimizer has applied.
            metrics: this rank's parts of metrics, [] each, of one dtype; their means over ranks are
                logged.
            grad_norm: gradient norm before clipping; None with ``optimizer_in_bwd``.
            more: further metrics; functions are called if metrics are logged, None is not logged.

        Raises:
            NonfiniteError: too many gradients were not finite. A checkpoint is saved first.
            ConfigError: after the first update step, if checkpoints cannot hold the optimizer's state.
        """
        self.advance(step)
        if self.global_step == 1 and self.settings.saves_checkpoints:
            self._saves.check()  # before more than one update step is lost
        due = self._due(step)
        if due.log:
            self._log_step(step, metrics, grad_norm, more)
        self._stop_if_nonfinite(due, step)
        is_best = due.validation and self._validate is not None and self._is_best(self._validated())
        if due.answers and self._answer is not None:
            prompts = self.settings.sample_prompts or []
            answers = self._answer(prompts, self.settings.sample_max_new_tokens)
            self._log.write_answers(self.global_step, prompts, answers)
            self._throughput.restart()  # training time excludes generation
        self.profiler.step()
        if is_best:
            self.export("best")
        if self._stop_requested():
            self.save()
            self._is_stopped = True
            self._log.info(
                f"Stopped as requested after update step {self.global_step}; the same command with "
                "resume_from_checkpoint=True resumes from there"
            )
            return
        # Exported first: a run that is killed before the checkpoint repeats the export.
        if due.export:
            self.export(f"export_step_{self.global_step}")
        if due.save:
            self.save()

    def advance(self, step: UpdateStep) -> None:
        """Counts an enqueued update step and writes the metrics of the previous one."""
        self._memory.stop(step)
        self.metrics.write_held()
        if self.sample_losses is not None:
            self.sample_losses.take(step, self.state.epoch)
        # All ranks get the same answer, while the device computes. Earlier, and a request during
        # the update step would cost another one.
        self._stop_requested = start_any(self.stop.is_set(), self._ranks.cpu_group)
        self._unsaved_since_seconds = min(self._unsaved_since_seconds, time.monotonic())
        self.state = replace(
            self.state,
            global_step=self.global_step + 1,
            samples_consumed=step.samples_consumed,
            num_tokens_seen=self.state.num_tokens_seen + step.totals.get("target_tokens", 0),
            num_images_seen=self.state.num_images_seen + step.totals.get("images", 0),
            num_samples_skipped=self.state.num_samples_skipped + step.totals["skipped_samples"],
        )
        num_spanning = step.totals.get("spanning_samples", 0)
        self._most_spanning_samples = max(self._most_spanning_samples, num_spanning)
        self._throughput.add(step, self._wait_seconds)

    def _due(self, step: UpdateStep) -> Due:
        unsaved_minutes = (time.monotonic() - self._unsaved_since_seconds) / 60
        is_last = step.is_last_of_epoch and self.state.epoch + 1 == self.settings.epochs
        return self.settings.due(self.global_step, step.is_last_of_epoch, unsaved_minutes, is_last)

    # ---- Log ------------------------------------------------------------------------------------

    def _position(self) -> dict[str, Any]:
        state = self.state
        seen = "num_images_seen" if state.num_images_seen else "num_tokens_seen"
        return {"epoch": state.epoch, seen: getattr(state, seen)}

    def _log_step(
        self, step: UpdateStep, sums: Mapping[str, Tensor], grad_norm: Tensor | None, more: Mapping[str, Any]
    ) -> None:
        """Logs metrics, which on an accelerator are read after the next update step is enqueued."""
        metrics: dict[str, Any] = {"lr": self._lr, "grad_norm": grad_norm}
        if self._counted in _COUNTS:
            metrics[_COUNTS[self._counted]] = step.totals[self._counted]
        metrics |= {name: each() if callable(each) else each for name, each in more.items()}
        metrics |= token_shares(step.totals)
        metrics |= self._memory.metrics()
        metrics["num_spanning_samples"] = step.totals.get("spanning_samples")
        if self.settings.log_peak_memory_stats and self._ranks.device.type != "cpu":
            metrics |= training.get_memory_stats(device=self._ranks.device)
        guard = self._parts.nonfinite
        self.metrics.hold(self.global_step, self._position(), sums, guard, metrics)

    def _validated(self) -> dict[str, float]:
        """Returns and logs validation metrics."""
        assert self._validate is not None
        values = {name: value.item() for name, value in self._validate().items()}
        self.metrics.write(self.global_step, self._position(), values)
        self._throughput.restart()  # training time excludes the validation
        return values

    def _is_best(self, values: Mapping[str, float]) -> bool:
        """Returns True for a new lowest loss with ``keep_best_checkpoint``."""
        val_loss, best = values.get("val_loss", math.nan), self.state.best_val_loss
        is_lower = math.isfinite(val_loss) and (best is None or val_loss < best)
        if is_lower:
            self.state = replace(self.state, best_val_loss=val_loss)
        return is_lower and self.settings.keep_best_checkpoint

    def _stop_if_nonfinite(self, due: Due, step: UpdateStep) -> None:
        """Synchronizes with the device only before a checkpoint, export, validation or sampling."""
        guard = self._parts.nonfinite
        if any(due[1:]) or step.is_last_of_epoch or self._stop_requested():
            self.metrics.write_held()
            guard.check(self.global_step)
        if guard.problem:
            self.save()
            raise NonfiniteError(guard.problem)

    # ---- Checkpoints, exports and the end -------------------------------------------------------

    def save(self) -> None:
        """Saves a checkpoint that any number of ranks can resume from."""
        self.metrics.write_held()
        self._saves.save(replace(self.state, token_budget=self._memory.state()))
        self._unsaved_since_seconds = math.inf

    def export(self, name: str) -> str | None:
        """Exports the model; see :meth:`.Saves.export`. Returns an error message or None."""
        self.metrics.write_held()
        return self._saves.export(name)

    def _finish_epoch(self) -> None:
        """Exports the model and saves a checkpoint.

        The last epoch is saved only with ``save_every_n_steps`` or ``save_every_n_minutes``, or if
        the trained model cannot be exported, which raises ExportError.
        """
        problem = self.export(f"epoch_{self.state.epoch}")
        is_last = self.state.epoch + 1 == self.settings.epochs
        if problem is not None and is_last:
            self.save()
            self._saves.wait()
            way_out = "Once it can be, resume_from_checkpoint=True exports the trained model"
            if not self._saves.has_checkpoint:
                way_out = "There is no checkpoint of it either"
            raise ExportError(f"{problem}. {way_out}")
        self.state = replace(self.state, epoch=self.state.epoch + 1, samples_consumed=0)
        saves = self.settings.save_every_n_steps or self.settings.save_every_n_minutes
        if saves or not is_last:
            self.save()

    def _log_summary(self, first: TrainingState, seconds: float) -> None:
        state, saves = self.state, self._saves
        if state.global_step > first.global_step:
            self._log.info(summary_of_training(first, state, seconds))
            if most := self._most_spanning_samples:
                text = f"Up to {most} samples of an update step were computed by several ranks each"
                self._log.info(text)
        elif saves.last_export is None:
            self._log.info(f"All {state.epoch} epochs are complete; set epochs={state.epoch + 1} to train longer")
        if self.sample_losses is not None:
            self.sample_losses.write_held()
            if self._ranks.is_zero:
                self._log.info("\n".join(self.sample_losses.report(state.config)))
        if saves.num_failed:
            many = "1 checkpoint" if saves.num_failed == 1 else f"{saves.num_failed} checkpoints"
            self._log.warn(f"{many} could not be saved, see above")
        if saves.last_export is not None:  # on rank 0
            output_dir, device = Path(self.settings.output_dir), self._ranks.device.type
            log_model(saves.last_export, output_dir, state.config, device, self._log)
