"""Losses of each sample in each epoch: the file that training writes, and the highest of them."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torchtune import config

from recipe_utils.losses.by_sample import LossesBySample
from recipe_utils.parallel.process_group import mean_over_ranks
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.text.datasets import load_dataset
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.samples import unread
from recipe_utils.update_steps.step import UpdateStep

FILE, DATASETS = "sample_losses.npy", "sample_losses.json"
_NUM_SHOWN, _NUM_CHARACTERS = 20, 60


class SampleLosses:
    """Writes mean losses per target token, or of a pair, [nats] to ``logs/sample_losses.npy``.

    The file is a float32 array [epochs, samples], NaN where a sample was not trained; of a sample
    that a mixture takes twice in an epoch it contains the later loss. Beside it, a JSON file maps
    names of datasets to their first index. An update step's losses are read from the device after
    the next one is enqueued.
    """

    def __init__(self, by_sample: LossesBySample, loader: UpdateStepLoader, ranks: Ranks, log: Any) -> None:
        self._by_sample, self._loader, self._ranks, self._log = by_sample, loader, ranks, log
        self._held: Callable[[], None] | None = None
        self._file: np.ndarray | None = None
        mixture = loader.dataset.parts
        self._starts: dict[str, int] = {}
        if mixture is not None:
            self._starts = dict(zip(mixture.names, mixture.starts, strict=True))

    def open(self, settings: Any, is_new: bool) -> None:
        """Opens the file on rank 0; unless ``is_new`` with the losses that it contains."""
        if not self._ranks.is_zero:
            return
        path = Path(settings.output_dir) / "logs" / FILE
        shape = (settings.epochs, len(self._loader.dataset))
        try:
            before = None if is_new or not path.exists() else np.load(path)
            new = np.lib.format.open_memmap(path, "w+", np.float32, shape)
            new[:] = np.nan
            if before is not None and before.ndim == 2:
                rows, columns = (min(pair) for pair in zip(before.shape, shape, strict=True))
                new[:rows, :columns] = before[:rows, :columns]
            path.with_name(DATASETS).write_text(json.dumps(self._starts))
            self._file = new
        except (OSError, ValueError) as error:
            self._log.warn(f"{path}: {error}; training continues without it")

    def take(self, step: UpdateStep, epoch: int) -> None:
        """Sums an enqueued update step over the ranks, and writes the one before. Collective."""
        self.write_held()
        # All ranks of a pipeline have samples, and one of them has their losses.
        means = mean_over_ranks(torch.cat([self._by_sample.sums, self._by_sample.numbers])).view(2, -1)
        losses = torch.where(means[1] > 0, means[0] / means[1], torch.nan)
        on_host = losses.to("cpu", non_blocking=losses.is_cuda)
        arrived = torch.cuda.current_stream().record_event() if losses.is_cuda else None
        indices = np.asarray(self._loader.order.samples(epoch, step.index))

        def write() -> None:
            if arrived is not None:
                arrived.synchronize()
            self.write(epoch, indices, on_host[: len(indices)])

        self._held = write
        if self._ranks.device.type == "cpu":
            self.write_held()

    def write_held(self) -> None:
        """Writes the losses of the latest update step."""
        held, self._held = self._held, None
        if held is not None:
            held()

    def write(self, epoch: int, indices: np.ndarray, losses: Tensor) -> None:
        """Writes losses [n] of the samples ``indices`` [n]."""
        if self._file is not None:
            self._file[epoch, indices] = losses.numpy()

    def report(self, cfg: Mapping[str, Any]) -> Iterator[str]:
        """Yields the samples of highest loss, and of the highest rise."""
        if self._file is not None:
            yield from report_of(self._file, self._starts, unread(self._loader.dataset.dataset), cfg)


def report_of_run(output_dir: Path) -> Iterator[str]:
    """Yields the lines of :meth:`SampleLosses.report` for a training that has ended or still runs.

    Raises OSError if it wrote no losses of samples.
    """
    logs = output_dir / "logs"
    losses, names = np.load(logs / FILE, "r"), json.loads((logs / DATASETS).read_text())
    cfg: Any = OmegaConf.load(logs / "config.yaml")
    dataset = load_dataset(cfg.dataset, tokenizer=config.instantiate(cfg.tokenizer))
    yield from report_of(losses, names, dataset, cfg)


def report_of(losses: np.ndarray, names: Mapping[str, int], dataset: Any, cfg: Any) -> Iterator[str]:
    """Yields lines with losses [epochs, samples], datasets, indices and beginnings of answers."""
    tokenizer = config.instantiate(OmegaConf.create(cfg)["tokenizer"])
    is_trained = ~np.isnan(losses)
    epochs = np.arange(len(losses))[:, None]
    first = np.where(is_trained, epochs, len(losses)).min(0).clip(max=len(losses) - 1)
    last, every = np.where(is_trained, epochs, 0).max(0), np.arange(losses.shape[1])
    now, before = losses[last, every], losses[first, every]
    rise = np.where(last > first, now - before, np.nan)

    def lines(order: np.ndarray, of: np.ndarray) -> Iterator[str]:
        for index in order[~np.isnan(of[order])][:_NUM_SHOWN].tolist():
            name = max((n for n in names if names[n] <= index), key=names.__getitem__, default="")
            change = f" (was {before[index]:.3f})" if last[index] > first[index] else ""
            answer = _answer(dataset, tokenizer, index)
            yield (
                f"  {now[index]:.3f}{change} sample {index - names.get(name, 0)} of "
                f"{f'dataset.{name}' if name else 'dataset'}: {answer}"
            )

    yield f"Highest losses of {int(is_trained.any(0).sum()):,} trained samples:"
    yield from lines(np.argsort(np.nan_to_num(-now, nan=np.inf)), now)
    if np.nanmax(rise, initial=0) > 0:
        yield "Losses that rose most from the first to the last epoch:"
        yield from lines(np.argsort(np.nan_to_num(-rise, nan=np.inf)), np.where(rise > 0, now, np.nan))


def _answer(dataset: Any, tokenizer: Any, index: int) -> str:
    """Returns the first characters of a sample's targets."""
    try:
        sample = dataset[index]
        sample = sample["sequences"][-1] if "sequences" in sample else sample
        labels = sample["labels"] if "labels" in sample else sample["chosen_labels"]
        text = tokenizer.decode([int(label) for label in labels if label >= 0][: 2 * _NUM_CHARACTERS])
    except Exception as error:  # any: a dataset of others, and only a report
        return f"({type(error).__name__}: {error})"
    return " ".join(text.split())[:_NUM_CHARACTERS]
