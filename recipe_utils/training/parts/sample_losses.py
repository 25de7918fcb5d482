"""Losses of samples and of named datasets: metrics, the file that training writes, and the highest of them.

Parts of a training append a function to ``loss_module.records``, which gets the losses of all targets, or pairs. An
update step of 4 samples of two datasets, a and b, with 2, 3, 1 and 4 targets: rank 0 computes samples 0 and 3, and its
loss module records the losses of 6 targets of the samples [0, 0, 3, 3, 3, 3]. ``sums`` are [l0, 0, 0, l3], and those by
dataset [l0, l3]. Sums over ranks, divided by numbers of targets, are each sample's mean, and each dataset's.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from recipe_utils.parallel.process_group import gather_objects, mean_over_ranks
from recipe_utils.parallel.to_device import ToHostLater
from recipe_utils.settings.components import component_at
from recipe_utils.settings.problems import Problem
from recipe_utils.torchtune_names import instantiate
from recipe_utils.training.parts.protocol import Metric, Part
from recipe_utils.training.run import Run
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.samples import NO_DATASET, unread
from recipe_utils.update_steps.settings import DataSettings
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

    def __init__(self, run: Run, loader: UpdateStepLoader, loss_module: Any) -> None:
        self._run, self._loader, self._ranks = run, loader, run.ranks
        loss_module.records = (*loss_module.records, self._add)
        self._sums: Tensor | None = None
        """Losses, and their numbers, of each sample of the update step on this rank [2, samples]."""
        self._is_open, self._late = False, ToHostLater(run.ranks.device)
        self._file: np.ndarray | None = None
        mixture = loader.dataset.sources
        self._starts: dict[str, int] = {}
        if mixture is not None:
            self._starts = dict(zip(mixture.names, mixture.starts, strict=True))

    def before(self, step: UpdateStep) -> None:
        """Opens the file before the first update step, and starts the record of each."""
        self._open()
        self._indices = np.asarray(self._loader.order.samples(self._run.state.epoch, step.index))
        self._sums = torch.zeros(2, len(self._indices), dtype=torch.float64, device=self._ranks.device)

    def _add(self, losses: Tensor, items: Tensor | None, samples: Tensor | None) -> None:
        """Adds losses of targets or pairs, [n]. Raises ValueError if a ``collate_fn`` made other rows than samples."""
        if self._sums is None:  # in a validation
            return
        if samples is None:
            text = "it made another number of rows than samples, so losses have no sample"
            raise ValueError(f"collate_fn: {text}; make one row of each sample, or set sample_losses=False")
        _add_to(self._sums, samples, losses)

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
        self._late.read()
        epoch, indices, sums, self._sums = self._run.state.epoch, self._indices, self._sums, None
        assert sums is not None
        means = mean_over_ranks(sums).view(2, -1)
        losses = torch.where(means[1] > 0, means[0] / means[1], torch.nan)
        self._late.hold(losses, lambda on_host: self.write(epoch, indices, on_host[: len(indices)]))
        return {}

    def write(self, epoch: int, indices: np.ndarray, losses: Tensor) -> None:
        """Writes losses [n] of the samples ``indices`` [n]."""
        if self._file is not None:
            self._file[epoch, indices] = losses.numpy()

    def summary(self) -> Iterator[str]:
        """Yields the samples of highest loss, and of the highest rise."""
        self._open()  # if no update step was left
        self._late.read()
        if self._file is not None:
            cfg = self._run.state.config
            yield "\n".join(report_of(self._file, self._starts, unread(self._loader.dataset.dataset), cfg))

    def close(self, error: BaseException | None) -> None:
        """Writes the losses of the latest update step."""
        self._late.read()


class DatasetLosses(Part):
    """Metrics of named datasets: ``loss/NAME``, per target without weights, and ``token_share/NAME``.

    Does nothing without names. ``loaders`` are those of training and, if a recipe asks for its means, of validation.
    """

    def __init__(self, run: Run, loss_module: Any, *loaders: UpdateStepLoader | None) -> None:
        self._run, self._ranks = run, run.ranks
        # Of training and, if there is one, of validation; now, because a copy to the device waits for it.
        self._mixtures = [None if loader is None else loader.dataset.sources for loader in loaders]
        self._starts = [torch.tensor(m.starts if m else (), device=self._ranks.device) for m in self._mixtures]
        self._records = hasattr(loss_module, "records")
        if self._records and any(self._mixtures):  # else no loss is computed by target
            loss_module.records = (*loss_module.records, self._add)
        self.start()

    def start(self, validates: bool = False) -> None:
        """Starts sums over update steps of training or of validation."""
        self._mixture, self._first = self._mixtures[validates], self._starts[validates]
        self._sums = torch.zeros(2, len(self._first), dtype=torch.float64, device=self._ranks.device)

    def _add(self, losses: Tensor, items: Tensor | None, samples: Tensor | None) -> None:
        """Adds losses of targets [n]. Raises ValueError if a ``collate_fn`` made other rows than samples."""
        if self._mixture is None:
            return
        if items is None:
            raise ValueError(NO_DATASET)
        _add_to(self._sums, torch.bucketize(items.contiguous(), self._first, right=True) - 1, losses)

    def means(self, prefix: str = "val_") -> dict[str, Tensor]:
        """Returns the mean loss over all ranks of each dataset that had targets since :meth:`start`."""
        if self._mixture is None:
            return {}
        sums, numbers = mean_over_ranks(self._sums).view(2, -1)
        names = zip(self._mixture.names, sums / numbers, numbers.tolist(), strict=True)
        return {f"{prefix}loss/{name}": mean for name, mean, number in names if number}

    def before(self, step: UpdateStep) -> None:
        """Starts the sums of an update step. Raises ValueError if a ``collate_fn`` made other rows than samples."""
        self.start()
        if self._mixture is not None:
            datasets = np.concatenate(
                [self._mixture.of_targets(microbatch.targets) for microbatch in step.microbatches]
            )
            self._mine = np.bincount(datasets, minlength=len(self._mixture.names))

    def after(self, step: UpdateStep) -> dict[str, Metric]:
        """Returns the metrics, where they are logged."""
        if self._mixture is None or self._run.global_step % (self._run.settings.log_every_n_steps or 1):
            return {}
        # On the CPU, so that the host knows which datasets are logged without waiting for the device.
        totals = np.sum(gather_objects(self._mine, self._ranks.cpu_group), axis=0)
        sums, numbers = mean_over_ranks(self._sums).view(2, -1)
        metrics: dict[str, Metric] = {}
        for name, total, mean in zip(self._mixture.names, totals.tolist(), sums / numbers, strict=True):
            metrics[f"token_share/{name}"] = total / totals.sum()
            if total and self._records:
                metrics[f"loss/{name}"] = mean
        return metrics


def _add_to(sums: Tensor, places: Tensor, losses: Tensor) -> None:
    """Adds losses [n] and their number to ``sums`` [2, k] at ``places`` [n], without gradients."""
    losses = losses.detach().double()
    sums.index_add_(1, places, torch.stack([losses, torch.ones_like(losses)]))


def problems_with_sample_losses(data: DataSettings, loss: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields ``sample_losses`` of a loss that does not record losses."""
    component = str(loss.get("_component_"))
    with suppress(ValueError):  # another problem
        if data.sample_losses and not hasattr(component_at(component), "records"):
            instead = "set loss._component_ to recipe_utils.losses.LinearCrossEntropyLoss"
            yield Problem("sample_losses", f"{component} does not sum by sample; {instead}", True)


def report_of(losses: np.ndarray, names: Mapping[str, int], dataset: Any, cfg: Any) -> Iterator[str]:
    """Yields lines with losses [epochs, samples], datasets, indices and beginnings of answers."""
    tokenizer = instantiate(OmegaConf.create(cfg)["tokenizer"])
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
