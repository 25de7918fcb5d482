"""A training run: its position, its loop, and its end.

An epoch of 3 update steps, with a validation every 2 and ``save_every_n_steps: 2``::

    steps()   yields update step 1       the recipe's update() enqueues it
    finish()  log line 1
    steps()   yields update step 2
    finish()  log line 2, validation, checkpoint step_2
    steps()   yields update step 3
    finish()  log line 3
    steps()   export epoch_0, summary

What is validated, sampled, exported within the epoch and searched for are parts (:mod:`.parts.protocol`), which the
recipe's ``setup`` lists.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from recipe_utils.checkpoint.export import ExportError
from recipe_utils.checkpoint.load import TrainingState
from recipe_utils.cli.advice import how_to_resume
from recipe_utils.data.inspect_samples import log_data
from recipe_utils.models.construct import describe_model
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.parallel.stop import Stop, all_reduce_any
from recipe_utils.settings.problems import naming
from recipe_utils.torchtune_names import set_seed
from recipe_utils.training.checkpointing import Checkpointing, log_end
from recipe_utils.training.lock import lock_folder
from recipe_utils.training.log import TEXT, Log, Reported, progress_bar
from recipe_utils.training.metrics import Metrics, build_profiler
from recipe_utils.training.parts.protocol import Metric, Parts
from recipe_utils.training.resume import Trained, norms_of_frozen_rows, warnings_of
from recipe_utils.training.settings import RunSettings
from recipe_utils.training.skipped_steps import SkippedSteps
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.order import num_done
from recipe_utils.update_steps.step import UpdateStep


class Run:
    """Position and loop of a training run.

    A recipe enters it, adds parts and calls :meth:`resume` once all is built, iterates over :meth:`steps`, and
    calls :meth:`finish` after each update step. As a context manager it closes writer, parts, loggers, profiler
    and process groups, also after an error. On entry it raises ConfigError if another run writes to
    ``output_dir``, or as :class:`recipe_utils.training.resume.Resume`.
    """

    state: TrainingState
    """Position of the run; the whole config is saved with it."""
    num_steps: int
    """Update steps of the whole training."""
    ends_early = False
    """True if the training ends after this update step, which all ranks must set together."""

    def __init__(self, recipe: str, settings: RunSettings, ranks: Ranks, cfg: DictConfig) -> None:
        self.settings, self.ranks = settings, ranks
        self.seed = set_seed(settings.seed, settings.cudnn_deterministic_mode)
        self.stop = Stop()
        """Requests a checkpoint and the end of training."""
        self.log = Log(Path(settings.output_dir) / "logs", ranks.is_zero)
        self.metrics = Metrics(self.log, ranks)
        self.parts = Parts()
        """Parts of the training; add them before :meth:`resume`."""
        config_of_run: Any = OmegaConf.to_container(cfg, resolve=True)
        self.checkpointing = Checkpointing(recipe, settings, config_of_run, ranks, self.log, self.parts)
        self._at_exit = ExitStack()

    def __enter__(self) -> "Run":
        # Left in the reverse order: signals also stop a write in progress, and parts are closed before the
        # process group, whose end ends the other ranks.
        self._at_exit.callback(self.stop.close)
        self._at_exit.callback(self.ranks.leave)
        try:
            # First the lock, because the writer removes files of killed runs.
            self._at_exit.enter_context(lock_folder(self.settings, self.ranks, self.log))
            self.checkpointing.open()  # raises before anything is built
            if self.settings.seed is None and (saved := self.checkpointing.resume.saved) is not None:
                self.seed = set_seed(saved.seed)
        except BaseException:
            self._at_exit.close()
            raise
        self._at_exit.callback(self.checkpointing.close)
        self._at_exit.callback(self.metrics.close)
        self._at_exit.push(lambda _, error, __: self.parts.close(error))
        return self

    def __exit__(self, *reason: Any) -> None:
        self._at_exit.__exit__(*reason)

    # ---- Before training ------------------------------------------------------------------------

    def open_log(self, cfg: DictConfig, meta_model: nn.Module, model: nn.Module, loader: UpdateStepLoader) -> None:
        """Logs the model and its data. Builds ``metric_logger`` and ``profiler``. All ranks together.

        Call it after all other checks; ``meta_model`` is whole, ``model`` is the one that is trained, or its stages.
        """
        with naming("profiler"):
            self.profiler = build_profiler(self.settings, self.ranks)
        self.log.open(self.checkpointing.resume.recipe, cfg, self.settings)
        self.log.info(describe_model(meta_model, model, cfg, self.ranks))
        log_data(loader, self.settings.epochs, cfg.get("microbatching", "in_order"))

    def resume(self, trained: Trained) -> None:
        """Resumes training if configured, also within an epoch; see :meth:`.Resume.restore`.

        The learning-rate schedule begins at the update step that is reached.
        """
        self.checkpointing.trained, loader = trained, trained.loader
        self.num_steps = sum(map(loader.order.num_steps, range(self.settings.epochs)))
        for text in (*self.settings.warnings(self.num_steps), *warnings_of(trained.model, self.settings)):
            self.log.warn(text)
        stops = sorted(getattr(getattr(loader.budget.collator(), "reader", None), "end_ids", ()))  # none of images
        for text in norms_of_frozen_rows(trained.model, stops, self.ranks):
            self.log.info(text)
        self.state = self.checkpointing.resume.restore(trained, self.seed)
        self.checkpointing.log_exports(self.state)
        trained.stepper.begin(self.num_steps, self.global_step)

    @property
    def global_step(self) -> int:
        """Completed update steps."""
        return self.state.global_step

    # ---- Loop -----------------------------------------------------------------------------------

    def steps(self, loader: UpdateStepLoader, divisor: str, reported: Reported = TEXT) -> Iterator[UpdateStep]:
        """Yields the remaining update steps of all epochs until a stop. Rank 0 shows a progress bar.

        SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 request a stop from here on. After each epoch, also one that
        :attr:`ends_early`, the model is exported and a checkpoint saved. Update steps whose total ``divisor``, which the loss is divided by, is 0 are skipped on
        all ranks.

        Raises:
            SampleError: all samples of three update steps in a row were bad, or nothing was trained in an epoch.
            ExportError: the trained model cannot be exported.
        """
        # Until here a signal ends the process at once: there is nothing to save.
        self.stop.listen()
        self._at_exit.callback(self.profiler.stop)
        self.log.open_metrics(self.global_step, self.state.run_id)
        self.profiler.start()
        self.metrics.divisor, self.metrics.reported = divisor, reported
        # A resumed run begins within an epoch, and its bar at the update steps that are done.
        first, began, skipped = self.state, time.perf_counter(), SkippedSteps(loader, divisor, self.log)
        done = sum(map(loader.order.num_steps, range(first.epoch)))
        done += num_done(loader.order, first.epoch, first.samples_consumed)
        bar = progress_bar(self.num_steps, done, self.settings.epochs, self.metrics.shown, self.ranks, reported)
        with bar as advance_bar:
            for epoch in range(first.epoch, self.settings.epochs):
                if not self.ends_early:  # a resumed run may have ended before its export
                    yield from self._steps_of(loader, epoch, skipped, advance_bar)
                if self.stop.is_agreed:
                    return
                skipped.check(self.state)
                self._finish_epoch()
                if self.ends_early:
                    break
        log_end(first, self.state, time.perf_counter() - began, self.checkpointing, self.metrics)

    def _steps_of(
        self, loader: UpdateStepLoader, epoch: int, skipped: SkippedSteps, advance_bar: Callable[[int], None]
    ) -> Iterator[UpdateStep]:
        """Yields the remaining update steps of an epoch until a stop, or until the training :attr:`ends_early`."""
        # A part may make what the epoch's samples are read from, and wait for it: no training time.
        self.parts.begin(epoch)
        if self.stop.is_agreed:
            return
        self.metrics.throughput.restart()
        with loader.epoch(epoch, self.state.samples_consumed) as steps:
            for step in steps:
                # All ranks have the same totals, so they skip together.
                if step.totals[self.metrics.divisor] == 0:
                    self.state = replace(self.state, samples_consumed=step.samples_consumed)
                    skipped.add(step, epoch)
                else:
                    skipped.num_bad_in_a_row = 0
                    # Now, because the recipe's schedule steps with the optimizer.
                    self.metrics.start(steps.wait_seconds, self.checkpointing.trained.stepper.optimizer.param_groups)
                    for part in self.parts.due(0, is_last=False) if self.global_step == 0 else ():
                        self.metrics.measure(self.state, part, step)
                    self.parts.before(step)
                    yield step
                if self.stop.is_agreed or self.ends_early:
                    return
                advance_bar(epoch)

    def finish(
        self, step: UpdateStep, sums: Mapping[str, Tensor], grad_norm: Tensor | None, **more: Metric | None
    ) -> None:
        """Logs an enqueued update step, calls the parts that are due, saves and stops.

        Args:
            step: update step whose gradient the optimizer has applied.
            sums: this rank's parts of metrics, [] each, of one dtype; their means over ranks are logged.
            grad_norm: gradient norm before clipping; None with ``optimizer_in_bwd``.
            more: further metrics; None is not logged.

        Raises:
            NonfiniteError: too many gradients were not finite. A checkpoint is saved first.
            ConfigError: after the first update step, if checkpoints cannot hold the optimizer's state.
        """
        settings, guard = self.settings, self.checkpointing.trained.stepper.nonfinite
        # The device computes while the host counts, and logs what it read late.
        wait, of_parts = self.advance(step)
        if self.global_step == 1 and settings.saves_checkpoints:
            self.checkpointing.check()  # before more than one update step is lost
        if self.global_step % (settings.log_every_n_steps or 1) == 0:
            left_out = step.totals["skipped_samples"]
            metrics = {"grad_norm": grad_norm, "num_left_out": left_out, **more, **of_parts}
            self.metrics.hold(self.state, step, sums, guard, metrics, settings.log_peak_memory_stats)

        # Ranks have clocks and signals of their own: what follows is what they have agreed on.
        self.stop.is_agreed, is_save_due = wait()
        is_save_due |= self.global_step % (settings.save_every_n_steps or math.inf) == 0
        due = self.parts.due(self.global_step, step.is_last_of_epoch and self.state.epoch + 1 == settings.epochs)
        # Weights that are not finite are neither measured nor saved. The check waits for the device, so the time
        # of the parts is theirs alone.
        if due or is_save_due or self.stop.is_agreed or step.is_last_of_epoch:
            self.metrics.late.read()
            guard.check(self.global_step)
        if guard.problem:
            self.save()
            raise NonfiniteError(guard.problem)
        for part in due:
            self.metrics.measure(self.state, part, step)
        self.profiler.step()
        # After exports: a run that is killed before the checkpoint repeats them. Epochs end with one of their own.
        if self.stop.is_agreed or (is_save_due and not step.is_last_of_epoch):
            self.save()
        if self.stop.is_agreed:
            again = how_to_resume(f"step_{self.global_step}", settings.resume_from_checkpoint)
            if self.state.epoch == 0 and self.checkpointing.last_export is None:
                again += "; no model is exported yet"
            self.log.info(f"Stopped as requested after update step {self.global_step}; {again}")

    def advance(self, step: UpdateStep) -> tuple[Callable[[], list[bool]], dict[str, Metric]]:
        """Counts an enqueued update step and writes the metrics of the previous one, while the device computes.

        Returns a function that waits for what all ranks agree on, a stop and a checkpoint, and metrics of parts.
        """
        self.metrics.late.read()
        state, totals, reported = self.state, step.totals, self.metrics.reported
        num_seen = state.num_seen.get(reported.unit, 0) + int(totals.get(next(iter(reported.rates)), 0))
        self.metrics.stop(step)
        # Not earlier: a request during the update step would cost another one.
        wait = all_reduce_any([self.stop.is_set(), self.checkpointing.is_due_by_clock()], self.ranks.cpu_group)
        self.state = replace(
            state,
            global_step=state.global_step + 1,
            samples_consumed=step.samples_consumed,
            num_seen={**state.num_seen, reported.unit: num_seen},
            num_samples_skipped=state.num_samples_skipped + int(totals["skipped_samples"]),
        )
        return wait, self.parts.after(step)

    # ---- Checkpoints, exports and the end -------------------------------------------------------

    def save(self) -> None:
        """Saves a checkpoint that any number of ranks can resume from."""
        self.metrics.late.read()
        with self.stop.saving():
            self.checkpointing.save(self.state)

    def export(self, name: str) -> str | None:
        """Exports the model with the weights of :attr:`.Parts.weights`; see :meth:`.Checkpointing.export`."""
        self.metrics.late.read()
        with self.parts.weights():
            return self.checkpointing.export(name)

    def _finish_epoch(self) -> None:
        """Exports the model and saves a checkpoint.

        The last epoch is saved only with ``save_every_n_steps`` or ``save_every_n_minutes``, or if
        the trained model cannot be exported, which raises ExportError. One that :attr:`ends_early` is the last, and its
        checkpoint contains the position in it, from which a resume with more patience continues.
        """
        state, settings = self.state, self.settings
        problem = self.export(f"epoch_{state.epoch}")
        is_last = self.ends_early or state.epoch + 1 == settings.epochs
        if problem is not None and is_last:
            self.save()
            self.checkpointing.wait()
            raise ExportError(f"{problem}. {self.checkpointing.way_out}")
        if not self.ends_early:
            self.state = replace(state, epoch=state.epoch + 1, samples_consumed=0)
        if settings.save_every_n_steps or settings.save_every_n_minutes or not is_last:
            self.save()
