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
from recipe_utils.text.datasets import load_dataset
from recipe_utils.training.parts.protocol import Part
from recipe_utils.training.run import Run
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.samples import unread
from recipe_utils.update_steps.step import UpdateStep

FILE, DATASETS = "sample_losses.npy", "sample_losses.json"
_NUM_SHOWN, _NUM_CHARACTERS = 20, 60


class SampleLosses(Part):
    """Writes mean losses per target token, or of a pair, [nats] to ``logs/sample_losses.npy``.

    The file is a float32 array [epochs, samples], NaN where a sample was not trained; of a sample
    that a mixture takes twice in an epoch it contains the later loss. Beside it, a JSON file maps
    names of datasets to their first index. An update step's losses are read from the device after
    the next one is enqueued.
    """

    def __init__(self, run: Run, loader: UpdateStepLoader, by_sample: LossesBySample) -> None:
        self._run, self._loader, self._ranks, self._by_sample = run, loader, run.ranks, by_sample
        self._is_open = False
        self._held: Callable[[], None] | None = None
        self._file: np.ndarray | None = None
        mixture = loader.dataset.parts
        self._starts: dict[str, int] = {}
        if mixture is not None:
            self._starts = dict(zip(mixture.names, mixture.starts, strict=True))

    def before(self, step: UpdateStep) -> None:
        """Opens the file before the first update step, and starts the record of each."""
        self._open()
        self._by_sample.start(step, self._loader, self._run.state.epoch)

    def _open(self) -> None:
        """Opens the file once, on rank 0; if training resumes, with the losses in it."""
        if self._is_open or not self._ranks.is_zero:
            return
        self._is_open, settings = True, self._run.settings
        path = Path(settings.output_dir) / "logs" / FILE
        shape = (settings.epochs, len(self._loader.dataset))
        try:
            before = None if self._run.global_step == 0 or not path.exists() else np.load(path)
            new = np.lib.format.open_memmap(path, "w+", np.float32, shape)
            new[:] = np.nan
            if before is not None and before.ndim == 2:
                rows, columns = (min(pair) for pair in zip(before.shape, shape, strict=True))
                new[:rows, :columns] = before[:rows, :columns]
            path.with_name(DATASETS).write_text(json.dumps(self._starts))
            self._file = new
        except (OSError, ValueError) as error:
            self._run.log.warn(f"{path}: {error}; training continues without it")

    def after(self, step: UpdateStep) -> dict[str, float]:
        """Sums an enqueued update step over the ranks, and writes the one before. Returns no metrics."""
        self.write_held()
        self._by_sample.stop()
        epoch = self._run.state.epoch
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
        return {}

    def write_held(self) -> None:
        """Writes the losses of the latest update step."""
        held, self._held = self._held, None
        if held is not None:
            held()

    def write(self, epoch: int, indices: np.ndarray, losses: Tensor) -> None:
        """Writes losses [n] of the samples ``indices`` [n]."""
        if self._file is not None:
            self._file[epoch, indices] = losses.numpy()

    def summary(self) -> Iterator[str]:
        """Yields the samples of highest loss, and of the highest rise."""
        self._open()  # if no update step was left
        self.write_held()
        if self._file is not None:
            cfg = self._run.state.config
            yield "\n".join(report_of(self._file, self._starts, unread(self._loader.dataset.dataset), cfg))

    def close(self, error: BaseException | None) -> None:
        """Writes the losses of the latest update step."""
        self.write_held()


def report_of_run(output_dir: Path) -> Iterator[str]:
    """Yields the lines of :meth:`SampleLosses.summary` for a training that has ended or still runs.

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
    # A sample may be trained in some epochs only: its first loss is compared with its last.
    is_trained = ~np.isnan(losses)
    epochs = np.arange(len(losses))[:, None]
    first = np.where(is_trained, epochs, len(losses)).min(0).clip(max=len(losses) - 1)
    last, every = np.where(is_trained, epochs, 0).max(0), np.arange(losses.shape[1])
    now, before = losses[last, every], losses[first, every]
    rise = np.where(last > first, now - before, np.nan)

    # Lines name a sample as errors do: by its index in its own dataset.
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
