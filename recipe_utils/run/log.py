"""What a training says: messages, metrics for the logger of the config and in a file, answers to prompts."""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune.utils import get_logger

from recipe_utils.files import write_atomically

_log = get_logger("INFO")

METRICS_FILE = "metrics.jsonl"


class Log:
    """Only rank 0's says anything. What cannot be written is told once, and is no reason to stop.

    Args:
        folder: of the files.
        is_shown: whether this is rank 0.
    """

    def __init__(self, folder: Path, is_shown: bool) -> None:
        self._folder = folder
        self._is_shown = is_shown
        self._writers: dict[str, Any] = {}
        self._failed: set[str] = set()
        self._begins_at: tuple[int, str] | None = None

    def info(self, text: str) -> None:
        """Says a line, unless it is empty."""
        if text and self._is_shown:
            _log.info(text)

    def warn(self, text: str) -> None:
        """Says a warning, unless it is empty."""
        if text and self._is_shown:
            _log.warning(text)

    def add(self, name: str, metric_logger: Any) -> None:
        """Takes a logger of torchtune's interface, called ``name`` where it fails."""
        self._writers[name] = metric_logger

    def begin(self, global_step: int, run_id: str) -> None:
        """Says where the run is when metrics come: their file is made, or gone on with, at the first of them."""
        self._begins_at = (global_step, run_id) if self._is_shown else None

    def log_config(self, cfg: Any) -> None:
        """Gives the config to the loggers."""
        for name in self._writers:
            self._call(name, "log_config", cfg)

    def write(self, step: int, metrics: Mapping[str, Any], also: Mapping[str, Any]) -> None:
        """Metrics of an update step; those in ``also`` go to the file alone."""
        if self._begins_at is not None:
            begins_at, self._begins_at = self._begins_at, None
            try:
                self.add(METRICS_FILE, MetricsFile(self._folder / METRICS_FILE, *begins_at))
            except OSError as error:
                self._tell(METRICS_FILE, error)
        for name in self._writers:
            own = also if name == METRICS_FILE else {}
            self._call(name, "log_dict", {**own, **metrics}, step=step)

    def write_answers(self, step: int, prompts: Sequence[str], answers: Sequence[str]) -> None:
        """Says what a model makes of prompts, and keeps it in ``samples.jsonl``."""
        for prompt, answer in zip(prompts, answers, strict=True):
            self.info(f"update step {step} | {prompt} -> {' '.join(answer.split())}")
        if self._is_shown:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with (self._folder / "samples.jsonl").open("a") as file:
                    for prompt, answer in zip(prompts, answers, strict=True):
                        line = {"step": step, "prompt": prompt, "answer": answer}
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
            except OSError as error:
                self._tell("samples.jsonl", error)

    def close(self) -> None:
        """Closes the loggers."""
        for name in self._writers:
            self._call(name, "close")

    def _call(self, name: str, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(self._writers[name], method)(*args, **kwargs)
        except Exception as error:
            self._tell(name, error)

    def _tell(self, name: str, error: Exception) -> None:
        if name not in self._failed:
            self.warn(f"{name}: {error}; training goes on, further failures are not told")
        self._failed.add(name)


class MetricsFile:
    """All metrics as one JSON object a line and update step, in the order of steps.

    A training that goes on drops what the file says of later steps, and a line that a kill has cut off.

    Args:
        path: of the file.
        global_step: where the training is; 0 renames a file that is there, as ``NAME_before_RUN``.
        run_id: of the run.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, global_step: int, run_id: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if path.exists() and global_step == 0:
            path.rename(path.with_name(f"{path.stem}_before_{run_id}{path.suffix}"))
        elif path.exists():
            kept = [line for line in read_metrics(path) if line["step"] <= global_step]
        write_atomically(path, "".join(map(_as_line, kept)).encode())
        self._file = path.open("r+b")
        self._last: Mapping[str, Any] = kept[-1] if kept else {}
        self._file.seek(0, os.SEEK_END)
        self._last_begins = self._file.tell() - len(_as_line(self._last).encode()) * bool(kept)

    def log_config(self, cfg: Any) -> None:
        """Is in the checkpoints and in ``torchtune_config.yaml``."""

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """Adds to the update step's line, if that is the last, or begins it."""
        found = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in payload.items()
        }
        if step == self._last.get("step"):
            self._last = {**self._last, **found}
        else:
            self._last = {"step": step, "time": round(time.time(), 3), **found}
            self._last_begins = self._file.seek(0, os.SEEK_END)
        self._file.seek(self._last_begins)
        self._file.write(_as_line(self._last).encode())
        self._file.truncate()
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _as_line(metrics: Mapping[str, Any]) -> str:
    return json.dumps(metrics) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, but for one that a kill has cut off.

    Raises:
        OSError: it cannot be read.
    """
    lines = []
    for text in path.read_text("utf-8", "replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
