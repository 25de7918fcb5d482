"""Where a training is, and what it leaves on the disk and in the log."""

import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torchtune import config, training, utils
from torchtune.training.precision import PRECISION_STR_TO_DTYPE
from tqdm import tqdm

from recipe_utils.checkpoint.export import ExportError, export
from recipe_utils.checkpoint.folder import find_newest_whole, put_aside
from recipe_utils.checkpoint.load import DamagedError, TrainingState, changed_options, load
from recipe_utils.checkpoint.save import CheckpointWriter, SaveOutcome
from recipe_utils.checkpoint.stock import check_stock_state, finds_stock_state, load_optimizer_state
from recipe_utils.checkpoint.tensors import AnyOptimizer
from recipe_utils.components import Component, MadeWith
from recipe_utils.data.loader import UpdateStep, UpdateStepLoader
from recipe_utils.data.prefetch import Prefetched
from recipe_utils.files import problems_with_folder
from recipe_utils.model.merge import contents_of_export
from recipe_utils.model.stages import adapters_of
from recipe_utils.model.weights import gather_weights
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.run.profiler import UpdateStepProfiler
from recipe_utils.run.stop_signals import set_on_signals
from recipe_utils.run.throughput import Throughput
from recipe_utils.settings import ROOM, ConfigError, Count, Positive, naming

_log = utils.get_logger("INFO")

_PROFILER = "torchtune.training.setup_torch_profiler"


@dataclass(frozen=True, config=ROOM)
class RunSettings:
    """How long a training goes, what it logs, and when it saves what."""

    output_dir: str
    """Where checkpoints and exported models go; all ranks must see the same folder."""
    epochs: Count = 1
    """Passes over the dataset."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    """Of dropout and the like, not of the order of samples, which is torchtune's; null draws one."""
    cudnn_deterministic_mode: Literal["default", "warn", "error", 0, 1, 2] | None = None
    """As ``torch.set_deterministic_debug_mode`` takes it."""
    log_every_n_steps: Count = 1
    """Update steps; the host waits for the device only on those."""
    metric_logger: Component | None = None
    """Where metrics go, such as torchtune.training.metric_logging.DiskLogger."""
    log_peak_memory_stats: bool = False
    """Logs memory, too, but on a CPU."""
    profiler: Annotated[dict[str, Any], MadeWith(default=_PROFILER)] | None = None
    """torchtune's; one of its steps is one update step."""
    run_val_every_n_steps: Count | None = None
    """Update steps between validations on ``dataset_val``; null for none."""
    save_every_n_steps: Count | None = None
    """Update steps between checkpoints; null saves at epoch ends only."""
    save_every_n_minutes: Positive | None = None
    """A checkpoint by rank 0's clock, too."""
    export_every_n_steps: Count | None = None
    """Exports the model in the checkpointer's format within epochs, too; all are kept."""
    export_dtype: Literal["fp32", "bf16"] | None = None
    """Of exported models; null is ``dtype``. Where adapters are merged into bf16, much of a small change is lost."""
    save_adapter_weights_only: bool = False
    """Exports the adapters without the model that they are merged into."""
    keep_last_n_checkpoints: Count | None = 2
    """How many checkpoints to go on from are kept; null keeps all."""
    enable_async_checkpointing: bool = False
    """Copies to the CPU, and writes checkpoints behind the next update steps."""
    resume_from_checkpoint: bool | Literal["auto"] = False
    """Goes on from the newest whole checkpoint in ``output_dir``; ``auto`` starts anew where there is none, for
    restarts that nobody watches. Where all are damaged neither does."""
    resume_with_other_data: bool = False
    """Goes on although dataset, tokenizer or global batch are not those of the checkpoint."""
    resume_with_other_model: bool = False
    """Goes on although ``model`` is not that of the checkpoint, if its weights fit."""

    def problems(self) -> Iterator[str]:
        """Whether the output folder can be made and written to; makes it."""
        yield from problems_with_folder("output_dir", self.output_dir)


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
        recipe_utils.settings.ConfigError: a stock recipe's state with pipeline stages.
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
        self.stop = threading.Event()  # once set, training saves and ends
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
        self._passed_over: list[tuple[Path, str]] = []  # checkpoints that cannot be used, and why
        self._metric_logger: Any = None
        self._has_failed_to_log = False
        self._throughput = Throughput(ranks.world_size)
        self._loader: UpdateStepLoader | None = None
        self._steps: Prefetched[UpdateStep] | None = None
        self._bar: Any = None
        self._unsaved_since_seconds: float | None = None  # by rank 0's clock, on all ranks
        self._at_exit = ExitStack()
        self._signals = ExitStack()  # left last: what is still being written is waited for

        self._resume_path = self._find_checkpoint() if settings.resume_from_checkpoint else None
        self.resumes_from_stock = (
            settings.resume_from_checkpoint
            and self._resume_path is None
            and finds_stock_state(self._config["checkpointer"])
        )
        if self._resume_path is None and not self.resumes_from_stock:
            self._check_that_nothing_is_lost()
        if self.resumes_from_stock and ranks.dims.pp > 1:
            raise ConfigError(
                f"pipeline_parallel_dim={ranks.dims.pp}: a recipe_state.pt can only be resumed from "
                "without a pipeline; set it to 1 until the next step checkpoint"
            )

    def __enter__(self) -> "Run":
        self._at_exit.enter_context(self._signals)
        self._at_exit.callback(self._ranks.leave)
        self._at_exit.callback(lambda: self._report(self._checkpoints.close()))
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
            recipe_utils.settings.ConfigError: a checkpoint that does not fit.
        """
        self._loader = loader
        self._data_fingerprint = loader.fingerprint()
        self._check_that_ranks_see_the_same()
        self._frozen = dict(frozen)
        if self.settings.save_adapter_weights_only and not adapters_of(model).modules:
            self.warn(
                "save_adapter_weights_only=True: the model has no adapters; exports all weights"
            )
        self.run_id = self._new_run()  # now that nothing else can be refused
        if self._resume_path is not None:
            self._load(self._resume_path, model, optimizer)
        elif self.resumes_from_stock:
            self._load_stock(model, optimizer, loader, stock_checkpoint)
        elif self.settings.resume_from_checkpoint:
            self.info(
                f"resume_from_checkpoint=auto: there is no checkpoint in {self.settings.output_dir} yet; "
                "starts with the checkpointer's weights"
            )

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
        cfg_profiler.setdefault("_component_", _PROFILER)
        with naming("profiler"):
            profiler, settings = config.instantiate(cfg_profiler)
        self.profiler = UpdateStepProfiler(
            profiler,
            settings,
            record_memory_history=self._ranks.is_zero and self._ranks.device.type == "cuda",
        )
        if self._ranks.is_zero and self.settings.metric_logger is not None:
            with naming("metric_logger"):
                self._metric_logger = config.instantiate(cfg.metric_logger)
            self._at_exit.callback(self._logging, "close")
            self._logging("log_config", cfg)

    def epochs(self) -> Iterator[int]:
        """The epochs that are left. From now on SIGTERM and SIGINT ask the training to stop."""
        self._signals.enter_context(set_on_signals(self.stop))
        self._at_exit.callback(self.profiler.stop)
        self.profiler.start()
        yield from range(self.epoch, self.settings.epochs)

    def progress(self, steps: Prefetched[UpdateStep]) -> Iterator[UpdateStep]:
        """The update steps of an epoch, with a progress bar on rank 0."""
        assert self._loader is not None
        self._steps = steps
        self._throughput.restart()
        with tqdm(
            total=self._loader.steps_per_epoch,
            initial=self.samples_consumed // self._loader.global_batch_size,
            disable=not self._ranks.is_zero,
        ) as self._bar:
            for step in steps:
                yield step
                self._bar.update(1)

    def advance(self, step: UpdateStep) -> None:
        """An update step is done."""
        assert self._steps is not None
        self.global_step += 1
        self.samples_consumed = step.samples_consumed
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
        """Whether it is time to ask if gradients were finite: what is logged or left on the disk rests on it."""
        return (
            self.should_log()
            or self.should_save(step)
            or self.should_export(step)
            or step.is_last_of_epoch
            or step.stop_requested
        )

    def should_validate(self) -> bool:
        """Whether a validation is due."""
        every = self.settings.run_val_every_n_steps
        return every is not None and self.global_step % every == 0

    def log(self, **metrics: float | Tensor | None) -> None:
        """Logs metrics of this update step, those that are None left out; waits for the device."""
        found = {
            name: value.item() if isinstance(value, Tensor) else value
            for name, value in metrics.items()
            if value is not None
        }
        if not found.get("num_nonfinite_steps", 1):
            del found["num_nonfinite_steps"]  # there are hardly ever any
        if "loss" in found:
            self._bar.set_description(f"{self.epoch + 1}|{self.global_step}|Loss: {found['loss']}")
        if self.settings.log_peak_memory_stats and self._ranks.device.type != "cpu":
            found |= training.get_memory_stats(device=self._ranks.device)
        self._log_dict(found)

    def log_validation(self, **metrics: float) -> None:
        """Logs what a validation found; its time is no training time."""
        self._log_dict(metrics)
        self._throughput.restart()

    def throughput(self) -> dict[str, float]:
        """Figures since the last time; see :class:`recipe_utils.run.throughput.Throughput`."""
        return self._throughput.read_and_restart()

    def warn(self, text: str) -> None:
        """Logs a warning on rank 0, unless it is empty."""
        if text and self._ranks.is_zero:
            _log.warning(text)

    def info(self, text: str) -> None:
        """Logs a line on rank 0."""
        if self._ranks.is_zero:
            _log.info(text)

    def _log_dict(self, metrics: Mapping[str, Any]) -> None:
        if self._metric_logger is not None:
            self._logging("log_dict", metrics, step=self.global_step)

    def _logging(self, method: str, *args: Any, **kwargs: Any) -> None:
        """A log that cannot be written is no reason to stop."""
        try:
            getattr(self._metric_logger, method)(*args, **kwargs)
        except Exception as error:
            if not self._has_failed_to_log:
                self.warn(
                    f"metric_logger: {error}; training goes on, further failures are not told"
                )
            self._has_failed_to_log = True

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
            dtype = PRECISION_STR_TO_DTYPE.get(self.settings.export_dtype)
            try:
                contents, lost = contents_of_export(weights, adapters, dtype)
                self.info(f"Exported to {export(checkpointer, contents, name)}")
                if lost > 0.01:
                    self.warn(
                        f"{name}: {lost:.0%} of what the adapters change is lost by rounding the merged "
                        "weights; export_dtype=fp32 keeps it, and so do the adapters beside them"
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

    # ---- Going on ---------------------------------------------------------------------------------

    def _find_checkpoint(self, older_than: Path | None = None) -> Path | None:
        """The newest whole checkpoint, by names and sizes; the same on all ranks."""
        found = None
        if self._ranks.is_zero:
            found = find_newest_whole(Path(self.settings.output_dir), self._recipe, older_than)
        path, skipped = gather_objects(found, self._group)[0]
        self._passed_over = skipped
        for other, reason in skipped:
            self.warn(f"resume_from_checkpoint: {other} is passed over: {reason}")
        return path

    def _new_run(self) -> str:
        """What a run is known by; puts aside what another one has left, unless that is gone on from."""
        run_id, problem = "", None
        if self._ranks.is_zero:
            run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
            try:
                if not self.settings.resume_from_checkpoint:
                    self._put_aside(run_id)
            except OSError as error:
                problem = (
                    f"output_dir: checkpoints of an earlier run could not be put aside: {error}"
                )
        run_id, problem = gather_objects((run_id, problem), self._group)[0]
        if problem is not None:
            raise ConfigError(problem)
        return run_id

    def _put_aside(self, run_id: str) -> None:
        aside = put_aside(Path(self.settings.output_dir), run_id)
        if aside is not None:
            found = ", ".join(sorted(path.name for path in aside.iterdir()))
            self.warn(
                f"output_dir={self.settings.output_dir}: it holds checkpoints of an earlier run ({found}), which "
                f"are in {aside} now; resume_from_checkpoint=True goes on from them, once they are back"
            )

    def _check_that_nothing_is_lost(self) -> None:
        """There is no whole checkpoint to go on from. Raises ConfigError, unless that was to be expected."""
        key = f"resume_from_checkpoint={self.settings.resume_from_checkpoint}"
        folder = self.settings.output_dir
        if self.settings.resume_from_checkpoint and self._passed_over:
            raise ConfigError(
                f"{key}: none of the checkpoints in {folder} can be used ("
                + "; ".join(f"{path.name}: {reason}" for path, reason in self._passed_over[:3])
                + f"; {len(self._passed_over)} in all); resume_from_checkpoint=False starts anew"
            )
        if self.settings.resume_from_checkpoint is True:
            raise ConfigError(
                f"{key}: there is no checkpoint in {folder}; set resume_from_checkpoint=auto to start where "
                "there is none"
            )

    def _load(self, path: Path, model: nn.Module, optimizer: AnyOptimizer) -> None:
        """Goes on from a step checkpoint, or from an older one."""
        try:
            with_data = None if self.settings.resume_with_other_data else self._data_fingerprint
            config = dict(self._config)
            if self.settings.resume_with_other_model:
                del config["model"]
            state = load(
                path,
                model,
                optimizer,
                recipe=self._recipe,
                data_fingerprint=with_data,
                frozen=self._frozen,
                config=config,
                group=self._group,
            )
        except DamagedError as error:
            older = self._find_checkpoint(older_than=path)
            if older is None:
                raise DamagedError(
                    f"{error}; there is no older one. resume_from_checkpoint=False starts anew"
                ) from error
            self.warn(f"{error}; passed over")
            self._load(older, model, optimizer)
            return
        assert self._loader is not None
        num_samples = len(self._loader.dataset)
        if state.samples_consumed >= num_samples + self._loader.global_batch_size:
            raise ConfigError(
                f"resume_from_checkpoint: {path} has consumed {state.samples_consumed} samples of an epoch, the "
                f"dataset has {num_samples}; set the dataset that it was saved with"
            )
        self.run_id = state.run_id or self.run_id
        self.epoch = state.epoch
        self.samples_consumed = state.samples_consumed
        self.global_step = state.global_step
        if state.seed != self.seed:
            self.warn(f"seed={self.seed}: the checkpoint was saved with {state.seed}")
        self.info(
            f"Goes on from {path}: run {self.run_id}, epoch {state.epoch + 1}, after update step "
            f"{state.global_step}"
        )
        for key in sorted(changed_options(state.config, self._config)):
            then, now = (
                config["optimizer"].get(key, "its default")
                for config in (state.config, self._config)
            )
            self.info(f"optimizer.{key}: {then} in the checkpoint, {now} from now on")

    def _load_stock(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer,
        loader: UpdateStepLoader,
        saved: Mapping[str, Any],
    ) -> None:
        """Goes on at the end of an epoch, from the recipe state that a stock recipe has saved."""
        check_stock_state(saved)
        load_optimizer_state(model, optimizer, saved[training.OPT_KEY], self._ranks.device)
        for key, here in (
            (training.SEED_KEY, self.seed),
            (training.MAX_STEPS_KEY, loader.settings.max_steps_per_epoch),
        ):
            if saved[key] != here:
                self.warn(f"{key}={here}: the checkpoint was saved with {saved[key]}")
        self.epoch = saved[training.EPOCHS_KEY]
        self.global_step = self.epoch * loader.steps_per_epoch
