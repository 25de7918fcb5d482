"""What the terminal shows: messages by their level, the progress bar, and none of what helps nobody."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchtune.utils import get_logger
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

_NOISE = (
    " Profiling disabled.",
    # Names a folder that has another name once it is whole; Run says where the model is.
    "Model checkpoint of size",
    "Adapter checkpoint of size",
    "Saving final epoch checkpoint",
    "The full model checkpoint, including all weights",
)
"""What torchtune's messages begin with that are not shown."""


class _ByLevel(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno > logging.INFO else text


def set_up_screen() -> None:
    """Makes torchtune's logger, which ours is, say warnings as such and leave out noise."""
    logger = get_logger()
    for handler in logger.handlers:
        handler.setFormatter(_ByLevel())
    logger.addFilter(_is_no_noise)


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOISE)


@contextmanager
def progress_bar(total: int, initial: int, shown: bool) -> Iterator[tqdm]:
    """A bar of update steps; messages meanwhile get lines of their own.

    Args:
        total: update steps of the epoch.
        initial: of them, those that are done.
        shown: on rank 0; ``TQDM_DISABLE=1`` in the environment hides it, too.
    """
    hidden = {} if shown else {"disable": True}
    with (
        logging_redirect_tqdm([get_logger()]),
        tqdm(
            total=total,
            initial=initial,
            bar_format="{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]",
            **hidden,
        ) as bar,
    ):
        yield bar


def bar_text(epoch: int, num_epochs: int, metrics: Mapping[str, Any], world_size: int) -> str:
    """What stands before the bar, such as ``epoch 1 of 3 | loss 5.732 | lr 1.2e-4 | 12.3k tok/s | val 5.81``.

    Of images ``70.1 img/s | knn 0.881``.

    Args:
        epoch: from 0.
        num_epochs: in all.
        metrics: of the last update step that was logged, and of the last validation; any may be missing.
        world_size: ranks; rates are per rank.
    """
    parts = [f"epoch {epoch + 1} of {num_epochs}"]
    if "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.3f}")
    if "lr" in metrics:
        mantissa, exponent = f"{metrics['lr']:.1e}".split("e")
        parts.append(f"lr {mantissa}e{int(exponent)}" if metrics["lr"] else "lr 0")
    for counted, unit in (("tokens", "tok"), ("images", "img")):
        if f"{counted}_per_second_per_gpu" in metrics:
            rate = tqdm.format_sizeof(metrics[f"{counted}_per_second_per_gpu"] * world_size)
            parts.append(f"{rate} {unit}/s")
    if "val_loss" in metrics:
        parts.append(f"val {metrics['val_loss']:.2f}")
    if "knn_accuracy" in metrics:
        parts.append(f"knn {metrics['knn_accuracy']:.3f}")
    return " | ".join(parts) + " "
