"""Checkpoints and exports of a run, and its summary."""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtune.training.precision import PRECISION_STR_TO_DTYPE
from tqdm import tqdm

from recipe_utils.checkpoint.export import export, write_generation_config
from recipe_utils.checkpoint.load import TrainingState
from recipe_utils.checkpoint.save import CheckpointWriter, SaveOutcome
from recipe_utils.checkpoint.tensors import optimizer_contents
from recipe_utils.models.adapters.merge import contents_of_export
from recipe_utils.models.pipeline.stages import adapters_of
from recipe_utils.models.weights import gather_weights
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import ConfigError
from recipe_utils.training.log import METRICS_FILE, Log, read_metrics
from recipe_utils.training.resume import TrainingParts
from recipe_utils.training.settings import RunSettings

_EXPORT = re.compile(r"(epoch|export_step)_\d+")


class Saves:
    """Checkpoints and exports of a run. All ranks call its methods together.

    ``config`` is resolved; ``group`` is a CPU group of all ranks.
    """

    parts: TrainingParts
    """Training state that is saved and exported; set before the first save."""

    def __init__(
        self, settings: RunSettings, config: Mapping[str, Any], ranks: Ranks, group: dist.ProcessGroup, log: Log
    ) -> None:
        self._settings, self._ranks, self._group, self._log = settings, ranks, group, log
        dtype = settings.export_dtype or config.get("dtype")
        self._export_dtype = PRECISION_STR_TO_DTYPE.get(dtype)
        self.has_checkpoint = False
        self.num_failed = 0
        self.last_export: Path | None = None  # on rank 0

    def open(self) -> None:
        """Removes files of killed runs from ``output_dir``. Call it first."""
        self._writer = CheckpointWriter(
            self._settings.output_dir,
            keep_last_n=self._settings.keep_last_n_checkpoints,
            group=self._group,
            asynchronous=self._settings.enable_async_checkpointing,
        )

    def check(self) -> None:
        """Raises ConfigError if checkpoints cannot hold the optimizer's state after its first step."""
        try:
            optimizer_contents(self.parts.model, self.parts.optimizer)
        except ValueError as error:
            remedy = "set recipe_utils.optim.AdamW8bit or another one, or epochs=1 without save_every_* and resume_from_checkpoint"
            raise ConfigError(f"{error}; {remedy}") from error

    def save(self, state: TrainingState) -> None:
        """Saves a checkpoint. Warns if it fails: the last complete one is kept."""
        try:
            outcome = self._writer.save(self.parts.model, self.parts.optimizer, state)
        except ValueError as error:  # the state cannot be saved; raised on all ranks
            outcome = SaveOutcome(state.global_step, None, error=str(error))
        self._report(outcome)

    def export(self, name: str) -> str | None:
        """Exports the model atomically in the checkpointer's format, with adapters merged or alone.

        Returns the error message on all ranks, None on success.
        """
        self.wait()  # the writer uses the same group and disk
        parts, ranks, log = self.parts, self._ranks, self._log
        model = parts.model if parts.exported is None else parts.exported
        adapters = adapters_of(model)
        only_adapters = self._settings.save_adapter_weights_only and adapters.modules
        what = model, ranks.device, ranks.dp_rank == 0, self._group
        weights = gather_weights(*what, only=adapters.trained if only_adapters else None)
        error = None
        if nonfinite := [key for key, weight in weights.items() if not weight.isfinite().all()]:
            num_nonfinite = f"{len(nonfinite)} of {len(weights)} weights"
            error = f"{name}: not exported, {num_nonfinite} are NaN or infinite ({nonfinite[0]}, ...)"
        elif ranks.is_zero:
            try:
                contents, lost = contents_of_export(weights, adapters, self._export_dtype)
                self.last_export = export(parts.checkpointer, contents, name, parts.frozen)
                log.info(f"Exported to {self.last_export}")
                source = getattr(parts.checkpointer, "_checkpoint_dir", None)
                if source is not None and not Path(source).is_dir():
                    log.warn(f"{name}: without config.json and tokenizer, because {source} is gone")
                if lost > 0.01:
                    log.warn(
                        f"{name}: rounding the merged weights loses {lost:.0%} of the adapters' change; "
                        f"export_dtype=fp32 keeps it, and so do the adapters in {name}/adapter"
                    )
                if (keep_last_n := self._settings.keep_last_n_exports) is not None:
                    remove_old_exports(self.last_export.parent, keep_last_n, log)
            except Exception as failure:  # any: the other ranks wait for the result
                error = str(failure)
        error = gather_objects(error, self._group)[0]
        log.warn(error or "")
        return error

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
            self._log.warn(f"update step {outcome.global_step}: no checkpoint could be saved ({outcome.error}); {kept}")
            self.num_failed += 1
        else:
            self.has_checkpoint = True
        self._log.warn(outcome.warning or "")


def remove_old_exports(folder: Path, keep_last_n: int, log: Log) -> None:
    """Removes all but the newest exports of epochs and update steps in a folder; ``best`` is kept."""
    exports = [each for each in folder.iterdir() if _EXPORT.fullmatch(each.name)]
    for each in sorted(exports, key=lambda path: path.stat().st_mtime_ns)[:-keep_last_n]:
        try:
            shutil.rmtree(each)
        except OSError as error:
            log.warn(f"keep_last_n_exports={keep_last_n}: {error}")


def log_model(folder: Path, output_dir: Path, config: Mapping[str, Any], device: str, log: Log) -> None:
    """Logs validation results, the exported folder, and a command that samples from the model."""
    path, metrics = output_dir / "generation.yaml", output_dir / "logs" / METRICS_FILE
    try:
        log.info(summary_of_validation(read_metrics(metrics) if metrics.exists() else []))
        log.info(f"Model: {folder}")
        if write_generation_config(config, folder, path, device):
            log.info(f"Sample from it: tune run generate --config {path} prompt.user='...'")
    except OSError as error:
        log.warn(f"output_dir: {error}")


def summary_of_training(first: TrainingState, last: TrainingState, seconds: float) -> str:
    """Returns a sentence with update steps, data, time and rate from one state to another.

    After a resume, when ``first`` is not the start, it ends with those of the whole training.
    """

    def seen(state: TrainingState) -> tuple[int, str]:
        counted = "images" if last.num_images_seen else "target tokens"
        return state.num_images_seen or state.num_tokens_seen, counted

    (all_seen, counted), time = seen(last), tqdm.format_interval(seconds)
    num_steps, num_seen = last.global_step - first.global_step, all_seen - seen(first)[0]
    rate = f"{num_seen / max(seconds, 1e-9):,.0f} {counted.split()[-1]}/s"
    text = f"{num_steps} update steps, {num_seen:,} {counted} in {time} ({rate})"
    if first.global_step:
        text += f"; {last.global_step} and {all_seen:,} in all, before the resume included"
    if last.num_samples_skipped:
        text += f"; skipped samples: {last.num_samples_skipped}"
    return text


def summary_of_validation(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Returns first, last and best ``val_loss`` or ``knn_accuracy`` as text, empty without any."""
    for name, best_of in (("val_loss", min), ("knn_accuracy", max)):
        found = {line["step"]: line[name] for line in metrics if line.get(name) is not None}
        if found:
            values = list(found.values())
            step = best_of(found, key=found.__getitem__)
            best = f"{found[step]:.3f} (update step {step})"
            return f"{name}: first {values[0]:.3f}, last {values[-1]:.3f}, best {best}"
    return ""
