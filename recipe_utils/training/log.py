"""Output of a run: messages, progress bar, metrics and answers to prompts."""

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from recipe_utils.files import write_atomically
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import naming
from recipe_utils.torchtune_names import LOGGERS, instantiate, logger
from recipe_utils.training.settings import RunSettings

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Reported:
    """Units and main metrics of an objective, for metrics, progress bar, summary and the best model.

    With ``rates={"images": "images", "crop_tokens": "crop_tokens"}`` metrics contain ``num_images_seen``,
    ``images_per_second_per_gpu`` and ``crop_tokens_per_second_per_gpu``; the summary is ``64 update steps, 4,096 images
    in 00:58 (70 images/s)``. With ``metrics=("mean_reward",)`` the bar contains ``reward 0.412``.
    """

    rates: Mapping[str, str] = field(
        default_factory=lambda: {"target_tokens": "tokens", "real_tokens": "real_tokens", "images": "images"}
    )
    """Totals of update steps whose rates are logged, and their names there. The first one counts the data seen."""
    abbreviation: str = "tok"
    """Its unit in the progress bar."""
    validation: Sequence[str] = ("val_loss",)
    """Metrics of validations. The first one that is logged decides which model is the best: the one of the lowest loss,
    of other metrics the highest value."""
    metrics: Sequence[str] = ("loss",)
    """Metrics of update steps in the bar and the summary, besides those that every objective has."""

    @property
    def unit(self) -> str:
        """Name of the data seen."""
        return next(iter(self.rates.values()))

    @property
    def data(self) -> str:
        """The data seen, in words."""
        return "target tokens" if self.unit == "tokens" else self.unit.replace("_", " ")


TEXT = Reported()


def best_of(name: str) -> Callable[[Iterable[float]], float]:
    """Returns the function that selects the best of a metric's values."""
    return min if name.endswith("loss") else max


class Log:
    """Messages and metrics of a run, written by rank 0 only. Each failing writer warns once."""

    def __init__(self, folder: Path, is_shown: bool) -> None:
        self._folder = folder
        self._is_shown = is_shown
        self._writers: dict[str, Any] = {}
        self._failed: set[str] = set()

    def info(self, text: str) -> None:
        """Logs a line unless it is empty."""
        if text and self._is_shown:
            logger.info(text)

    def warn(self, text: str) -> None:
        """Logs a warning unless it is empty."""
        if text and self._is_shown:
            logger.warning(text)

    def add(self, name: str, metric_logger: Any) -> None:
        """Adds a torchtune metric logger. Warnings refer to it as ``name``."""
        self._writers[name] = metric_logger

    def open_metrics(self, global_step: int, run_id: str) -> None:
        """Opens the metrics file at the position of the run."""
        if self._is_shown:
            try:
                self.add(METRICS_FILE, MetricsFile(self._folder / METRICS_FILE, global_step, run_id))
            except OSError as error:
                self._report(METRICS_FILE, error)

    def open(self, recipe: str, cfg: DictConfig, settings: RunSettings) -> None:
        """Builds ``metric_logger``, writes the config to ``config.yaml``, and passes it to the logger, on rank 0.

        Raises ConfigError if the logger cannot be built.
        """
        if self._is_shown:
            if settings.metric_logger is not None:
                with naming("metric_logger"):
                    self.add("metric_logger", instantiate(cfg.metric_logger))
            if settings.log_config:
                config.log_config(recipe, cfg)
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_atomically(self._folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True).encode())
            except OSError as error:
                self._report("config.yaml", error)
        for name in self._writers:
            self._call(name, "log_config", cfg)

    def write(self, step: int, metrics: Mapping[str, Any], also: Mapping[str, Any]) -> None:
        """Writes metrics of an update step; ``also`` only to the file."""
        for name in self._writers:
            position = also if name == METRICS_FILE else {}
            self._call(name, "log_dict", {**position, **metrics}, step=step)

    def write_answers(self, step: int, prompts: Sequence[str | Mapping[str, str]], answers: Sequence[str]) -> None:
        """Logs answers to prompts and appends them to ``samples.jsonl``."""
        if not self._is_shown:
            return
        lines = ""
        for prompt, answer in zip(prompts, answers, strict=True):
            self.info(f"update step {step} | {prompt} -> {' '.join(answer.split())}")
            line = {"step": step, "prompt": prompt, "answer": answer}
            lines += json.dumps(line, ensure_ascii=False) + "\n"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "samples.jsonl").open("a") as file:
                file.write(lines)
        except OSError as error:
            self._report("samples.jsonl", error)

    def close(self) -> None:
        """Closes the loggers."""
        for name in self._writers:
            self._call(name, "close")

    def _call(self, name: str, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(self._writers[name], method)(*args, **kwargs)
        except Exception as error:
            self._report(name, error)

    def _report(self, name: str, error: Exception) -> None:
        if name not in self._failed:
            self.warn(f"{name}: {error}; training continues, further errors are not reported")
        self._failed.add(name)


class MetricsFile:
    """Metrics file with one JSON object per update step.

    A run at step 0 renames an existing file to ``NAME_before_RUN``. A resumed run removes lines of
    later steps and truncated lines.
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
        self._last_offset = self._file.tell() - len(_as_line(self._last).encode()) * bool(kept)

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """Extends the last line if it is of the same update step, else appends a line."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in payload.items()
        }
        if step == self._last.get("step"):
            self._last = {**self._last, **finite}
        else:
            self._last = {"step": step, "time": round(time.time(), 3), **finite}
            self._last_offset = self._file.seek(0, os.SEEK_END)
        self._file.seek(self._last_offset)
        self._file.write(_as_line(self._last).encode())
        self._file.truncate()
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _as_line(metrics: Mapping[str, Any]) -> str:
    return json.dumps(metrics) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file without truncated ones."""
    lines = []
    for text in path.read_text("utf-8", "replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


# ---- Terminal ----------------------------------------------------------------------------------

_NOISE = (
    " Profiling disabled.",
    # These contain a temporary folder; Run logs the final one.
    "Model checkpoint of size",
    "Adapter checkpoint of size",
    "Saving final epoch checkpoint",
    "The full model checkpoint, including all weights",
    "Please note that you have set adapter_only=True",
)
"""Prefixes of torchtune's messages that are not shown."""


class _ByLevel(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno > logging.INFO else text


def set_up_screen() -> None:
    """Configures both loggers to mark warnings, and drops noise."""
    for each in LOGGERS:
        for handler in each.handlers:
            handler.setFormatter(_ByLevel())
        each.addFilter(lambda record: not record.getMessage().startswith(_NOISE))


@contextmanager
def progress_bar(
    total: int, initial: int, num_epochs: int, metrics: Mapping[str, Any], ranks: Ranks, reported: Reported
) -> Iterator[Callable[[int], None]]:
    """Shows the progress of all update steps on rank 0. ``TQDM_DISABLE=1`` hides it, too.

    Yields a function to call after each update step with its epoch; the bar shows the present ``metrics``.
    """
    layout = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
    hidden = {} if ranks.is_zero else {"disable": True}
    with logging_redirect_tqdm([*LOGGERS]), tqdm(total=total, initial=initial, bar_format=layout, **hidden) as bar:

        def advance(epoch: int) -> None:
            is_cuda = ranks.device.type == "cuda"
            peak_bytes = torch.cuda.max_memory_allocated(ranks.device) if is_cuda else 0
            text = bar_text(epoch, num_epochs, metrics, reported, ranks.world_size, peak_bytes)
            bar.set_description_str(text, refresh=False)  # bar.update shows it
            bar.update(1)

        yield advance


def bar_text(
    epoch: int, num_epochs: int, metrics: Mapping[str, Any], reported: Reported, world_size: int, peak_bytes: int = 0
) -> str:
    """Returns a bar's text.

    Such as ``epoch 1 of 3 | loss 5.732 | norm 0.84 | lr 1.2e-4 | 12.3k tok/s | 41.2 GiB | val 5.81``.
    Rates in ``metrics`` are per rank; ``peak_bytes`` is the device's peak memory, 0 on a CPU.
    """
    parts = [f"epoch {epoch + 1} of {num_epochs}"]
    parts += [f"{re.split('[_/]', name)[-1]} {metrics[name]:.3f}" for name in reported.metrics if name in metrics]
    if metrics.get("grad_norm") is not None:
        parts.append(f"norm {metrics['grad_norm']:.3g}")
    # Short forms, so that all fits beside the bar: 1.2e-4 and not 1.2e-04.
    if "lr" in metrics:
        mantissa, exponent = f"{metrics['lr']:.1e}".split("e")
        parts.append(f"lr {mantissa}e{int(exponent)}" if metrics["lr"] else "lr 0")
    rate = metrics.get(f"{reported.unit}_per_second_per_gpu")
    if rate is not None:
        parts.append(f"{tqdm.format_sizeof(rate * world_size)} {reported.abbreviation}/s")
    if peak_bytes:
        parts.append(f"{peak_bytes / 2**30:.1f} GiB")
    for name in [name for name in reported.validation if name in metrics][:1]:
        num_digits = 2 if name.endswith("loss") else 3
        parts.append(f"{name.partition('_')[0]} {metrics[name]:.{num_digits}f}")
    return " | ".join(parts) + " "
