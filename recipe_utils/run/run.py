"""Where a training is, and what it leaves on the disk and in the log."""

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torchtune import config, training
from torchtune.training.precision import PRECISION_STR_TO_DTYPE

from recipe_utils.checkpoint.export import ExportError, export
from recipe_utils.checkpoint.load import TrainingState
from recipe_utils.checkpoint.save import CheckpointWriter, SaveOutcome
from recipe_utils.checkpoint.tensors import AnyOptimizer
from recipe_utils.data.loader.loader import UpdateStep, UpdateStepLoader
from recipe_utils.data.loader.prefetch import Prefetched
from recipe_utils.data.loader.to_host import Late, LateNumber
from recipe_utils.model.adapters.merge import contents_of_export
from recipe_utils.model.build.weights import gather_weights
from recipe_utils.model.pipeline.stages import adapters_of
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.run.lock import FolderLock, LockedError
from recipe_utils.run.log import METRICS_FILE, Log, read_metrics
from recipe_utils.run.profiler import UpdateStepProfiler
from recipe_utils.run.resume import Resume
from recipe_utils.run.screen import bar_text, progress_bar
from recipe_utils.run.settings import PROFILER, RunSettings
from recipe_utils.run.stop_signals import set_on_signals
from recipe_utils.run.summary import (
    what_validation_said,
    what_was_done,
    write_generation_config,
)
from recipe_utils.run.throughput import Throughput
from recipe_utils.settings.settings import ConfigError, naming


class _Line(NamedTuple):
    """Metrics of an update step that may still be on their way."""

    step: int
    metrics: dict[str, float | Late]
    also: dict[str, Any]


class Run:
    """A notebook: it is called and never calls.

    It knows the position, and whatever it decides is a ``should_`` in sight of the loop. Nothing in it
    touches a gradient, the order of samples, or what is trained; it holds neither model nor optimizer.
    As a context manager it closes writer, logger, profiler and process groups on every way out.

    Args:
        recipe: its name; a checkpoint of another one is passed over.
        settings: of the run.
        ranks: of the job, which leave at the end.
        cfg: the whole config, to be saved with each checkpoint.

    Raises:
        recipe_utils.settings.settings.ConfigError: see :class:`recipe_utils.run.resume.Resume`; on entering, another run
            that writes to ``output_dir``.
    """

    def __init__(self, recipe: str, settings: RunSettings, ranks: Ranks, cfg: DictConfig) -> None:
        self.settings = settings
        self.epoch = 0
        self.samples_consumed = 0  # of the epoch, over all ranks
        self.global_step = 0
        self.seed = training.set_seed(
            seed=settings.seed, debug_mode=settings.cudnn_deterministic_mode
        )
        self.run_id = ""  # from resume() on
        self.num_tokens_seen = 0  # target tokens of the update steps that are done
        self.num_images_seen = 0  # where images are counted
        self.is_best = False  # the last validation is, and keep_best_checkpoint asks for it
        self.stop = threading.Event()  # once set, training saves and ends
        # What an accelerator has just been given to do nobody waits for.
        self.reads_late = ranks.device.type != "cpu"
        self._recipe = recipe
        self._ranks = ranks
        self._config: dict[str, Any] = dict(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
        self._group = ranks.new_cpu_group(has_timeout=False)  # may wait for the slowest disk
        self._checkpoints = CheckpointWriter(
            settings.output_dir,
            keep_last_n=settings.keep_last_n_checkpoints,
            group=self._group,
            asynchronous=settings.enable_async_checkpointing,
        )
        self._log = Log(Path(settings.output_dir) / "logs", ranks.is_zero)
        self._shown: dict[str, Any] = {}  # metrics before the bar
        self._held: _Line | None = None
        self._best_val_loss: float | None = None
        self._last_export: Path | None = None
        self._throughput = Throughput(ranks.world_size)
        self._loader: UpdateStepLoader | None = None
        self._steps: Prefetched[UpdateStep] | None = None
        self._unsaved_since_seconds: float | None = None  # by rank 0's clock, on all ranks
        self._at_exit = ExitStack()
        self._signals = ExitStack()  # left last: what is still being written is waited for

        self._resume = Resume(recipe, settings, self._config, ranks, self._group, self._log)
        self.resumes_from_stock = self._resume.from_stock
        if ranks.is_zero:
            config.log_config(recipe, cfg)

    def __enter__(self) -> "Run":
        self._at_exit.enter_context(self._signals)
        self._at_exit.callback(self._ranks.leave)
        self._lock_folder()
        self._at_exit.callback(lambda: self._report(self._checkpoints.close()))
        self._at_exit.callback(self._close_log)
        return self

    def __exit__(self, *reason: Any) -> None:
        self._at_exit.__exit__(*reason)

    # ---- Where it is ------------------------------------------------------------------------------

    def resume(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer,
        loader: UpdateStepLoader,
        stock_checkpoint: Mapping[str, Any],
        frozen: Mapping[str, str],
    ) -> None:
        """Goes to where the training was, if it is to be resumed; in the middle of an epoch if need be.

        Args:
            model: loaded into in place.
            optimizer: likewise.
            loader: of the training's update steps, whose data must be those of the checkpoint.
            stock_checkpoint: what the checkpointer has loaded besides weights.
            frozen: what the weights that are not trained are known by; those of the checkpoint, too.

        Raises:
            recipe_utils.settings.settings.ConfigError: a checkpoint that does not fit.
        """
        self._loader = loader
        self._data_fingerprint = loader.fingerprint()
        self._check_that_ranks_see_the_same()
        self._frozen = dict(frozen)
        if self.settings.save_adapter_weights_only and not adapters_of(model).modules:
            self.warn(
                "save_adapter_weights_only=True: the model has no adapters; exports all weights"
            )
        self.run_id = self._resume.new_run()  # now that nothing else can be refused
        if self._resume.path is not None:
            state = self._resume.load(
                model, optimizer, loader, self._data_fingerprint, self._frozen
            )
            self._go_to(state)
        elif self.resumes_from_stock:
            self.epoch = self._resume.load_stock(
                model, optimizer, loader, stock_checkpoint, self.seed
            )
            self.global_step = self.epoch * loader.steps_per_epoch
        else:
            self.info(f"Run {self.run_id} begins in {self.settings.output_dir}")
        if self.settings.resume_from_checkpoint == "auto" and not self.global_step:
            self.info(
                f"resume_from_checkpoint=auto: there is no checkpoint in {self.settings.output_dir} yet; "
                "starts with the checkpointer's weights"
            )

    def _go_to(self, state: TrainingState) -> None:
        self.run_id = state.run_id or self.run_id
        self.epoch = state.epoch
        self.samples_consumed = state.samples_consumed
        self.global_step = state.global_step
        self.num_tokens_seen = state.num_tokens_seen
        self.num_images_seen = state.num_images_seen
        self._best_val_loss = state.best_val_loss
        if state.seed != self.seed:
            self.warn(f"seed={self.seed}: the checkpoint was saved with {state.seed}")
        self._resume.say_where(state, self.run_id)

    def _check_that_ranks_see_the_same(self) -> None:
        of_ranks = gather_objects(self._data_fingerprint, self._group)
        others = [rank for rank, found in enumerate(of_ranks) if found != of_ranks[0]]
        if others:
            hashes = [of_ranks[rank]["hash_of_samples"] for rank in (0, others[0])]
            raise ConfigError(
                f"dataset: ranks {', '.join(map(str, others))} see other samples than rank 0 (hash "
                f"{hashes[1]} instead of {hashes[0]}); give all ranks the same files and the same tokenizer"
            )

    def open_log(self, cfg: DictConfig) -> None:
        """Makes ``metric_logger`` and ``profiler``; once nothing else can be refused any more."""
        cfg_profiler = OmegaConf.create(self.settings.profiler or {"enabled": False})
        cfg_profiler.setdefault("_component_", PROFILER)
        with naming("profiler"):
            profiler, settings = config.instantiate(cfg_profiler)
        self.profiler = UpdateStepProfiler(
            profiler,
            settings,
            record_memory_history=self._ranks.is_zero and self._ranks.device.type == "cuda",
        )
        if self._ranks.is_zero and self.settings.metric_logger is not None:
            with naming("metric_logger"):
                self._log.add("metric_logger", config.instantiate(cfg.metric_logger))
            self._log.log_config(cfg)

    def epochs(self) -> Iterator[int]:
        """The epochs that are left. From now on SIGTERM and SIGINT ask the training to stop."""
        self._signals.enter_context(set_on_signals(self.stop))
        self._at_exit.callback(self.profiler.stop)
        self._log.begin(self.global_step, self.run_id)
        self.profiler.start()
        first_step, first_tokens, first_images = (
            self.global_step,
            self.num_tokens_seen,
            self.num_images_seen,
        )
        began_seconds = time.perf_counter()
        yield from range(self.epoch, self.settings.epochs)
        self._say_what_was_done(first_step, first_tokens, first_images, began_seconds)

    def progress(self, steps: Prefetched[UpdateStep]) -> Iterator[UpdateStep]:
        """The update steps of an epoch, with a progress bar on rank 0."""
        assert self._loader is not None
        self._steps = steps
        self._throughput.restart()
        num_epochs, world_size = self.settings.epochs, self._ranks.world_size
        with progress_bar(
            total=self._loader.steps_per_epoch,
            initial=self.samples_consumed // self._loader.global_batch_size,
            shown=self._ranks.is_zero,
        ) as bar:
            for step in steps:
                yield step
                text = bar_text(self.epoch, num_epochs, self._shown, world_size)
                bar.set_description_str(text, refresh=False)  # with the step that it is of
                bar.update(1)

    def advance(self, step: UpdateStep) -> None:
        """An update step is done, or on its way on the device; metrics of the one before are written."""
        assert self._steps is not None
        self._write_held()
        self.global_step += 1
        self.samples_consumed = step.samples_consumed
        self.num_tokens_seen += step.totals.get("target_tokens", 0)
        self.num_images_seen += step.totals.get("images", 0)
        self._throughput.add(step, self._steps.wait_seconds)

    def skip(self, step: UpdateStep, why: str) -> None:
        """An update step is left out; weights and schedule stay as they are."""
        self.samples_consumed = step.samples_consumed
        self.warn(
            f"epoch {self.epoch + 1}, update step {step.index + 1}: {why}; skipped, weights and "
            "schedule stay as they are"
        )

    # ---- What it says -----------------------------------------------------------------------------

    def should_log(self) -> bool:
        """Whether metrics of this update step are logged."""
        return self.global_step % self.settings.log_every_n_steps == 0

    def should_look(self, step: UpdateStep) -> bool:
        """Of copied recipes: :meth:`must_know`, and wherever metrics are logged."""
        return self.should_log() or self.must_know(step)

    def must_know(self, step: UpdateStep) -> bool:
        """Whether to wait until it is known if gradients were finite: what is left on the disk rests on it.

        So does what is logged, but where that is read late, this is known by then.
        """
        return (
            (self.should_log() and not self.reads_late)
            or self.should_save(step)
            or self.should_export(step)
            or (self.settings.keep_best_checkpoint and self.should_validate())
            or step.is_last_of_epoch
            or step.stop_requested
        )

    def should_validate(self) -> bool:
        """Whether a validation is due."""
        every = self.settings.run_val_every_n_steps
        return every is not None and self.global_step % every == 0

    @property
    def from_stock(self) -> dict[str, bool]:
        """What a checkpointer is told besides its own arguments."""
        return {"should_load_recipe_state": self.resumes_from_stock}

    def validates_on(self, dataset_val: Any) -> bool:
        """Whether there are validations at all; says so if there are data but none."""
        validates = self.settings.run_val_every_n_steps is not None
        if not validates and dataset_val is not None:
            self.warn("dataset_val: not used, because run_val_every_n_steps is not set")
        return validates

    @property
    def questions(self) -> tuple[list[str], int]:
        """``sample_prompts``, and how many tokens an answer may have."""
        return self.settings.sample_prompts or [], self.settings.sample_max_new_tokens

    def should_sample(self) -> bool:
        """Whether the model is to be asked ``sample_prompts``."""
        every = self.settings.sample_every_n_steps
        return every is not None and self.global_step % every == 0

    def log(self, **metrics: float | Tensor | Late | None) -> None:
        """Logs metrics of this update step, those that are None left out.

        Where the device is no CPU, they are read, in this order, and written once it has been given the next
        update step, or before anything else is logged, saved or exported.
        """
        found: dict[str, float | Late] = {
            name: LateNumber(value) if isinstance(value, Tensor) else value
            for name, value in metrics.items()
            if value is not None
        }
        if self.settings.log_peak_memory_stats and self._ranks.device.type != "cpu":
            found |= training.get_memory_stats(device=self._ranks.device)
        self._write_held()
        self._held = _Line(self.global_step, found, self._position())
        if not self.reads_late:
            self._write_held()

    def log_validation(self, **metrics: float | Tensor) -> None:
        """Logs what a validation found; its time is no training time. Says whether it :attr:`is_best`."""
        self._write_held()
        found = {k: v.item() if isinstance(v, Tensor) else v for k, v in metrics.items()}
        self._write(_Line(self.global_step, {**found}, self._position()))
        val_loss, best = found.get("val_loss", math.nan), self._best_val_loss
        is_lower = math.isfinite(val_loss) and (best is None or val_loss < best)
        self._best_val_loss = val_loss if is_lower else best
        self.is_best = is_lower and self.settings.keep_best_checkpoint
        self._throughput.restart()

    def log_answers(self, answers: Sequence[str]) -> None:
        """Logs what the model answers to ``sample_prompts``; its time is no training time."""
        self._write_held()
        self._log.write_answers(self.global_step, self.settings.sample_prompts or [], answers)
        self._throughput.restart()

    def throughput(self) -> dict[str, Late | float]:
        """Figures since the last time; see :class:`recipe_utils.run.throughput.Throughput`."""
        return self._throughput.read_and_restart()

    def warn(self, text: str) -> None:
        """Logs a warning on rank 0, unless it is empty."""
        self._log.warn(text)

    def info(self, text: str) -> None:
        """Logs a line on rank 0."""
        self._log.info(text)

    def _position(self) -> dict[str, Any]:
        if self.num_images_seen:
            return {"epoch": self.epoch, "num_images_seen": self.num_images_seen}
        return {"epoch": self.epoch, "num_tokens_seen": self.num_tokens_seen}

    def _write_held(self) -> None:
        """Writes the metrics that are still on their way, on all ranks alike; waits for their update step."""
        held, self._held = self._held, None
        if held is not None:
            self._write(held)

    def _write(self, line: _Line) -> None:
        read = {
            name: value.read() if isinstance(value, Late) else value
            for name, value in line.metrics.items()
        }
        found = {name: value for name, value in read.items() if value is not None}
        if not found.get("num_nonfinite_steps", 1):
            del found["num_nonfinite_steps"]  # there are hardly ever any
        self._shown |= found
        self._log.write(line.step, found, line.also)

    def _close_log(self) -> None:
        held = self._held
        try:
            self._write_held()
        except Exception as error:  # the device's, which is told already if it ends the training
            self.warn(f"update step {held.step if held else 0}: its metrics are lost ({error})")
        self._log.close()

    def _say_what_was_done(
        self, first_step: int, first_tokens: int, first_images: int, began_seconds: float
    ) -> None:
        num_steps = self.global_step - first_step
        epochs, folder = self.settings.epochs, Path(self.settings.output_dir)
        if num_steps:
            seconds = time.perf_counter() - began_seconds
            num_tokens = self.num_tokens_seen - first_tokens
            num_images = self.num_images_seen - first_images
            if num_images:
                self.info(what_was_done(num_steps, num_images, seconds, "images"))
            else:
                self.info(what_was_done(num_steps, num_tokens, seconds))
        elif self._last_export is None:
            self.info(
                f"Nothing left: {self.epoch} of {epochs} epochs are done; epochs={self.epoch + 1} goes on"
            )
        if self._last_export is None:  # or another rank's to tell
            return
        path, metrics = folder / "generation.yaml", folder / "logs" / METRICS_FILE
        try:
            self.info(what_validation_said(read_metrics(metrics) if metrics.exists() else []))
            self.info(f"Model: {self._last_export}")
            device = self._ranks.device.type
            if write_generation_config(self._config, self._last_export, path, device):
                self.info(f"Ask it: tune run generate --config {path} prompt.user='...'")
        except OSError as error:
            self.warn(f"output_dir: {error}")

    # ---- What it leaves on the disk ---------------------------------------------------------------

    def should_export(self, step: UpdateStep) -> bool:
        """Whether an export within the epoch is due; :meth:`finish_epoch` comes after its last step."""
        every = self.settings.export_every_n_steps
        return every is not None and self.global_step % every == 0 and not step.is_last_of_epoch

    def should_save(self, step: UpdateStep) -> bool:
        """Whether a checkpoint within the epoch is due, by steps or by rank 0's clock; alike on all ranks."""
        if step.is_last_of_epoch:
            return False
        if self._unsaved_since_seconds is None:
            self._unsaved_since_seconds = step.clock_seconds
        unsaved_minutes = (step.clock_seconds - self._unsaved_since_seconds) / 60
        every, minutes = self.settings.save_every_n_steps, self.settings.save_every_n_minutes
        return (every is not None and self.global_step % every == 0) or (
            minutes is not None and unsaved_minutes >= minutes
        )

    def save(self, model: nn.Module, optimizer: AnyOptimizer) -> None:
        """Saves all that is needed to go on from here, on any number of ranks."""
        self._write_held()
        state = TrainingState(
            recipe=self._recipe,
            global_step=self.global_step,
            epoch=self.epoch,
            samples_consumed=self.samples_consumed,
            seed=self.seed,
            data_fingerprint=self._data_fingerprint,
            config=self._config,
            frozen=self._frozen,
            run_id=self.run_id,
            num_tokens_seen=self.num_tokens_seen,
            num_images_seen=self.num_images_seen,
            best_val_loss=self._best_val_loss,
        )
        try:
            outcome = self._checkpoints.save(model, optimizer, state)
        except ValueError as error:  # a state that no checkpoint can hold, on all ranks alike
            outcome = SaveOutcome(self.global_step, None, error=str(error))
        self._report(outcome)
        self._unsaved_since_seconds = None

    def save_and_stop(self, model: nn.Module, optimizer: AnyOptimizer) -> None:
        """Saves, and says how to go on."""
        self.save(model, optimizer)
        self.info(
            f"Stopped as asked after update step {self.global_step}; the same command with "
            "resume_from_checkpoint=True goes on from there"
        )

    def export(self, checkpointer: Any, model: nn.Module, name: str) -> str | None:
        """Saves the model as a folder in the checkpointer's own format, whole or not at all.

        Adapters are merged into it and saved beside it, or alone.

        Returns:
            Why it could not, on all ranks alike; None if it could.
        """
        self._write_held()
        self._report(self._checkpoints.wait())  # which uses the group and the disk
        adapters = adapters_of(model)
        adapters_only = self.settings.save_adapter_weights_only and adapters.modules
        weights = gather_weights(
            model,
            self._ranks.device,
            keeps=self._ranks.dp_rank == 0,
            group=self._group,
            only=adapters.trained if adapters_only else None,
        )
        error = None
        if nonfinite := [name for name, weight in weights.items() if not weight.isfinite().all()]:
            error = (
                f"{name}: not exported, {len(nonfinite)} of {len(weights)} weights are NaN or infinite, "
                f"{nonfinite[0]} among them"
            )
        elif self._ranks.is_zero:
            asked = self.settings.export_dtype or self._config.get("dtype")
            dtype = PRECISION_STR_TO_DTYPE.get(asked)
            try:
                contents, lost = contents_of_export(weights, adapters, dtype)
                self._last_export = export(checkpointer, contents, name)
                self.info(f"Exported to {self._last_export}")
                if lost > 0.01:
                    self.warn(
                        f"{name}: {lost:.0%} of what the adapters change is lost by rounding the merged "
                        f"weights; export_dtype=fp32 keeps it, and so do the adapters in {name}/adapter"
                    )
            except Exception as failure:  # of any kind: the other ranks wait for it
                error = str(failure)
        error = gather_objects(error, self._group)[0]
        self.warn(error or "")
        return error

    def finish_epoch(
        self, model: nn.Module, optimizer: AnyOptimizer, export_problem: str | None
    ) -> None:
        """Goes to the next epoch, and saves unless this was the last and nobody asked for checkpoints.

        Raises:
            ExportError: the trained model could not be exported. Its epoch is saved first, so that
                exporting is all that is left to do.
        """
        if export_problem is not None and self.epoch + 1 == self.settings.epochs:
            self.save(model, optimizer)
            raise ExportError(
                f"{export_problem}. Once it can be, resume_from_checkpoint=True exports the trained model"
            )
        self.epoch += 1
        self.samples_consumed = 0
        asked = (self.settings.save_every_n_steps, self.settings.save_every_n_minutes) != (
            None,
            None,
        )
        if asked or self.epoch < self.settings.epochs:
            self.save(model, optimizer)

    def _report(self, outcome: SaveOutcome | None) -> None:
        """A checkpoint that cannot be saved is no reason to stop: the last whole one is there."""
        if outcome is not None and outcome.error is not None:
            self.warn(
                f"update step {outcome.global_step}: no checkpoint could be saved ({outcome.error}); "
                "the one before stays"
            )
        if outcome is not None:
            self.warn(outcome.warning or "")

    def _lock_folder(self) -> None:
        """Keeps other runs out of ``output_dir`` until this one's end.

        Raises:
            recipe_utils.settings.settings.ConfigError: one is there, on all ranks.
        """
        folder, problem = self.settings.output_dir, None
        if self._ranks.is_zero:
            try:
                self._at_exit.callback(FolderLock(Path(folder)).release)
            except LockedError as error:
                problem = (
                    f"output_dir={folder}: another run writes to it ({error}); wait for its end, stop it, or set "
                    "another folder"
                )
            except OSError as error:  # no reason not to train
                self.warn(f"output_dir={folder}: it cannot be locked ({error}); run one at a time")
        problem = gather_objects(problem, self._group)[0]
        if problem is not None:
            self._at_exit.close()
            raise ConfigError(problem)
