"""Checkpoints and exports of a run, and its summary."""

import json
import math
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from torch import nn
from tqdm import tqdm

from recipe_utils.checkpoint import own_modules
from recipe_utils.checkpoint.export import export, write_generation_config
from recipe_utils.checkpoint.load import TrainingState
from recipe_utils.checkpoint.save import CheckpointWriter, SaveOutcome
from recipe_utils.checkpoint.tensors import optimizer_contents
from recipe_utils.models.adapters.lora import Adapters
from recipe_utils.models.adapters.merge import contents_of_export
from recipe_utils.models.pipeline.stages import adapters_of, local_stages
from recipe_utils.models.weights import gather_weights
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import ConfigError
from recipe_utils.torchtune_names import DTYPES
from recipe_utils.training.log import METRICS_FILE, Log, Reported, best_of, read_metrics
from recipe_utils.training.metrics import Metrics
from recipe_utils.training.parts.protocol import Parts
from recipe_utils.training.resume import Resume, Trained
from recipe_utils.training.settings import RunSettings

_EXPORT = re.compile(r"(epoch|export_step)_\d+")


class Checkpointing:
    """Checkpoints and exports of a run. All ranks call its methods together.

    ``config`` is resolved; ``group`` is a CPU group of all ranks.
    """

    trained: Trained
    """Training state that is saved and exported; set before the first save."""

    def __init__(
        self, recipe: str, settings: RunSettings, config: Mapping[str, Any], ranks: Ranks, log: Log, parts: Parts
    ) -> None:
        self.settings, self.ranks, self.log, self.parts = settings, ranks, log, parts
        self._group = ranks.checkpoint_group if settings.enable_async_checkpointing else ranks.cpu_group
        self._export_dtype = DTYPES.get(settings.export_dtype or config.get("dtype") or "")
        self._unsaved_since_seconds = math.inf  # first update step since the last checkpoint, by this rank's clock
        self.resume = Resume(recipe, settings, config, ranks, self._group, log, parts)
        """Checkpoint that training resumes from."""
        self.has_checkpoint = False
        self.num_failed = 0
        self.last_export: Path | None = None  # on rank 0

    def open(self) -> None:
        """Removes files of killed runs from ``output_dir``. Call it first.

        Raises ConfigError if the checkpoint that training should resume from does not exist.
        """
        # Before the search for checkpoints, because it also restores one that was being replaced.
        self._writer = CheckpointWriter(
            self.settings.output_dir,
            keep_last_n=self.settings.keep_last_n_checkpoints,
            group=self._group,
            asynchronous=self.settings.enable_async_checkpointing,
        )
        self.has_checkpoint = self.resume.path is not None

    def is_due_by_clock(self) -> bool:
        """Returns True on rank 0 if the first update step without a checkpoint is ``save_every_n_minutes`` old.

        Call it after each update step.
        """
        now = time.monotonic()
        self._unsaved_since_seconds = min(self._unsaved_since_seconds, now)
        seconds = (self.settings.save_every_n_minutes or math.inf) * 60
        return self.ranks.is_zero and now - self._unsaved_since_seconds >= seconds

    def check(self) -> None:
        """Raises ConfigError if checkpoints cannot hold the state of the optimizer, after its first step, or of a part."""
        try:
            optimizer_contents(self.trained.model, self.trained.stepper.optimizer)
        except ValueError as error:
            remedy = "set recipe_utils.optim.AdamW8bit or another one, or epochs=1 without save_every_* and resume_from_checkpoint"
            raise ConfigError(f"{error}; {remedy}") from error
        try:
            json.dumps(self.parts.values())
        except TypeError as error:
            text = f"parts: checkpoints cannot hold the state of one ({error}); return tensors and JSON values"
            raise ConfigError(text) from error

    def save(self, state: TrainingState) -> None:
        """Saves a checkpoint. Warns if it fails: the last complete one is kept."""
        state = replace(state, parts=self.parts.values())
        try:
            outcome = self._writer.save(self.trained.model, self.trained.stepper.optimizer, state, self.parts.tensors())
        except ValueError as error:  # the state cannot be saved; raised on all ranks
            outcome = SaveOutcome(state.global_step, None, error=str(error))
        self._report(outcome)
        self._unsaved_since_seconds = math.inf

    def export(self, name: str) -> str | None:
        """Exports the model atomically in the checkpointer's format, with adapters merged or alone.

        Returns the error message on all ranks, None on success.
        """
        self.wait()  # the writer uses the same group and disk
        trained, ranks, log = self.trained, self.ranks, self.log
        model, adapters, only = self._exported()
        weights = gather_weights(model, ranks.device, ranks.dp_rank == 0, self._group, only)
        error = None
        if nonfinite := [key for key, weight in weights.items() if not weight.isfinite().all()]:
            num_nonfinite = f"{len(nonfinite)} of {len(weights)} weights"
            error = f"{name}: not exported, {num_nonfinite} are NaN or infinite ({nonfinite[0]}, ...)"
        elif ranks.is_zero:
            try:
                contents, lost = contents_of_export(weights, adapters, self._export_dtype)
                self.last_export = export(trained.checkpointer, contents, name, trained.fingerprints)
                log.info(f"Exported to {self.last_export}")
                source = getattr(trained.checkpointer, "_checkpoint_dir", None)
                if source is not None and not Path(source).is_dir():
                    log.warn(f"{name}: without config.json and tokenizer, because {source} is gone")
                if lost > 0.01:
                    log.warn(
                        f"{name}: rounding the merged weights loses {lost:.0%} of the adapters' change; "
                        f"export_dtype=fp32 keeps it, and so do the adapters in {name}/adapter"
                    )
                if (keep_last_n := self.settings.keep_last_n_exports) is not None:
                    remove_old_exports(self.last_export.parent, keep_last_n, log)
            except Exception as failure:  # any: the other ranks wait for the result
                error = str(failure)
        error = gather_objects(error, self._group)[0]
        log.warn(error or "")
        return error

    def _exported(self) -> tuple[nn.Module, Adapters, Collection[str] | None]:
        """Returns the model that is exported, its adapters, and the names of its weights that are; None for all."""
        model = self.trained.model if self.trained.exported is None else self.trained.exported
        adapters = adapters_of(model)
        only_adapters = self.settings.save_adapter_weights_only and adapters.modules
        return model, adapters, adapters.trained if only_adapters else None

    def log_exports(self, state: TrainingState) -> None:
        """Logs how many exports follow ``state``, and their size, if there are several. All ranks together."""
        settings, (model, adapters, only) = self.settings, self._exported()
        ends = [*accumulate(map(self.trained.loader.order.num_steps, range(settings.epochs)))]
        every = settings.export_every_n_steps or ends[-1]
        within_epochs = {*range(every, ends[-1], every)}.difference(ends)
        number = len(ends) - state.epoch + sum(step > state.global_step for step in within_epochs)
        own = adapters.trained if adapters.modules else ()  # these keep their precision
        sizes = {
            name: weight.numel() * ((None if name in own else self._export_dtype) or weight.dtype).itemsize
            for stage in local_stages(model)
            for name, weight in stage.state_dict().items()
            if only is None or name in only
        }
        size = sum(dict(chain.from_iterable(each.items() for each in gather_objects(sizes, self._group))).values())
        if number > 1:
            kept = settings.keep_last_n_exports or "1 would keep the newest only"
            self.log.info(f"Exports: {number} of {size / 1e9:.3g} GB each; keep_last_n_exports={kept}")

    @property
    def way_out(self) -> str:
        """Returns what a failed export of the trained model can be repeated from."""
        if self.has_checkpoint:
            return "Once it can be, resume_from_checkpoint=True exports the trained model"
        return "There is no checkpoint of it either"

    def wait(self) -> None:
        """Waits for a checkpoint that is being written."""
        self._report(self._writer.wait())

    def close(self) -> None:
        """Waits for the last checkpoint and closes the writer."""
        self._report(self._writer.close())

    def _report(self, outcome: SaveOutcome | None) -> None:
        if outcome is None:
            return
        if outcome.error is not None:
            kept = "the previous one is kept" if self.has_checkpoint else "there is none before"
            self.log.warn(f"update step {outcome.global_step}: no checkpoint could be saved ({outcome.error}); {kept}")
            self.num_failed += 1
        else:
            self.has_checkpoint = True
        self.log.warn(outcome.warning or "")


def remove_old_exports(folder: Path, keep_last_n: int, log: Log) -> None:
    """Removes all but the newest exports of epochs and update steps in a folder; ``best`` is kept."""
    exports = [path for path in folder.iterdir() if _EXPORT.fullmatch(path.name)]
    for path in sorted(exports, key=lambda path: path.stat().st_mtime_ns)[:-keep_last_n]:
        try:
            shutil.rmtree(path)
        except OSError as error:
            log.warn(f"keep_last_n_exports={keep_last_n}: {error}")


def log_end(
    first: TrainingState, last: TrainingState, seconds: float, checkpointing: Checkpointing, run_metrics: Metrics
) -> None:
    """Logs what a complete training has done from ``first`` to ``last``: data, validation, and how to sample."""
    log, reported = checkpointing.log, run_metrics.reported
    if last.global_step > first.global_step:
        log.info(summary_of_training(first, last, seconds, reported))
        if most_spanning := run_metrics.most_spanning_samples:
            log.info(f"Up to {most_spanning} samples of an update step were computed by several ranks each")
    elif checkpointing.last_export is None:
        text = f"All {last.epoch} epochs are complete: nothing is trained, validated or exported"
        log.info(f"{text}; set epochs={last.epoch + 1} to train longer")
    for line in checkpointing.parts.summary():
        log.info(line)
    if checkpointing.num_failed:
        many = "1 checkpoint" if checkpointing.num_failed == 1 else f"{checkpointing.num_failed} checkpoints"
        log.warn(f"{many} could not be saved, see above")
    if (folder := checkpointing.last_export) is None:  # on rank 0
        return
    output_dir, device = checkpointing.settings.output_dir, checkpointing.ranks.device.type
    path, metrics = output_dir / "generation.yaml", output_dir / "logs" / METRICS_FILE
    try:
        for line in summary_of_metrics(read_metrics(metrics) if metrics.exists() else [], reported):
            log.info(line)
        if checkpointing.settings.run_val_every_n_steps is None:
            log.info("No validation: run_val_every_n_steps is not set")
        log.info(f"Model: {folder}")
        # A decoder with modules beside it, as a reward model, may not be trained to answer.
        if not (folder / own_modules.FOLDER).is_dir() and write_generation_config(last.config, folder, path, device):
            log.info(f"Sample from it: tune run generate --config {path} prompt.user='...'")
    except OSError as error:
        log.warn(f"output_dir: {error}")


def summary_of_training(first: TrainingState, last: TrainingState, seconds: float, reported: Reported) -> str:
    """Returns a sentence with update steps, data, time and rate from one state to another.

    After a resume, when ``first`` is not the start, it ends with those of the whole training.
    """
    unit, time = reported.unit, tqdm.format_interval(seconds)
    all_seen, num_steps = last.num_seen.get(unit, 0), last.global_step - first.global_step
    num_seen = all_seen - first.num_seen.get(unit, 0)
    data = f"{num_seen:,} {reported.data}"
    text = f"{num_steps} update steps, {data} in {time} ({num_seen / max(seconds, 1e-9):,.0f} {unit}/s)"
    if first.global_step:
        text += f"; {last.global_step} and {all_seen:,} in all, before the resume included"
    if last.num_samples_skipped:
        text += f"; skipped samples: {last.num_samples_skipped}"
    return text


def summary_of_metrics(lines: Sequence[Mapping[str, Any]], reported: Reported) -> Iterator[str]:
    """Yields texts with the first and last values of the main metrics, and the best validations."""
    for name in (*reported.metrics, *reported.validation):
        values_by_step = {line["step"]: line[name] for line in lines if line.get(name) is not None}
        if not (values := [*values_by_step.values()]):
            continue
        # Single update steps differ by their data: a tenth of them at each end is compared.
        num = 1 if name in reported.validation else -(-len(values) // 10)
        first, last = (sum(some) / num for some in (values[:num], values[-num:]))
        text = f"{name}: first {first:.3f}, last {last:.3f}"
        if name in reported.validation:
            best = best_of(name)(values)
            step = next(step for step, value in values_by_step.items() if value == best)
            text += f", best {best:.3f} (update step {step})"
        yield text + f" (means of {num} log lines)" * (num > 1)
