"""Samples, loaded and checked by DataLoader workers.

A sample is a mapping. Text has ``tokens`` and ``labels`` of one length, as torchtune's datasets
return it; a sample of a packed dataset also has ``input_pos`` and ``seq_lens``.
"""

import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.utils.data import Dataset
from torchtune import config
from torchtune.datasets import ConcatDataset
from torchtune.utils import get_logger, log_rank_zero

from recipe_utils.parallel.random_state import get_random_state, seed_generators, set_random_state
from recipe_utils.settings.components import may_mean_subset, split_entry
from recipe_utils.text.mixture import Mixture, entries_of, mixture_of
from recipe_utils.update_steps.order import StepIndex
from recipe_utils.update_steps.permutation import seed_of
from recipe_utils.update_steps.workers import load_batches

Sample = Mapping[str, Any]

_log = get_logger("INFO")


class SampleError(ValueError):
    """Raised for a sample that cannot be trained on; the message starts with its name."""


class SkippedSampleError(SampleError):
    """Raised for a valid sample without targets, which is skipped for any ``on_bad_sample``."""


_NUM_NAMED = 20
"""Maximum number of skipped samples that are logged."""


def check_keys(sample: Any, keys: Sequence[str], name: str) -> None:
    """Raises a SampleError unless ``sample`` is a mapping with all keys."""
    if not isinstance(sample, Mapping):
        raise SampleError(f"{name}: it is a {type(sample).__name__}, not a mapping with {', '.join(keys)}")
    for key in keys:
        if key not in sample:
            raise SampleError(f"{name}: it has no '{key}', only {sorted(map(str, sample))}")


def whole_numbers(sample: Sample, key: str, name: str) -> np.ndarray:
    """Returns ``sample[key]``, a list, array or tensor, as int64 [n]; otherwise raises SampleError."""
    values = sample[key]
    try:
        numbers = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SampleError(f"{name}: its '{key}' is not a list of integers ({error})") from None
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        shown = repr(values) if len(repr(values)) < 60 else f"{repr(values)[:50]}..."
        raise SampleError(f"{name}: its '{key}' is not a list of integers but {shown}")
    return numbers.astype(np.int64)


class CheckedDataset(Dataset[Sample]):
    """Map-style dataset whose samples are checked as they are loaded.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        name: config key of the dataset, for errors.
        prepare: collator's ``prepare``; it gets names such as ``"sample 17 of dataset"``.
        skips_bad: True if :func:`load_samples` skips bad samples.

    Global random generators that a dataset draws from are seeded for each sample, by its position in
    the training, and restored: draws are the same in any worker, on any layout and after a resume.
    """

    def __init__(
        self, dataset: Any, name: str, prepare: Callable[[Sample, str], Sample], skips_bad: bool = False
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.prepare = prepare
        self.skips_bad = skips_bad
        self.mixture = mixture_of(dataset)
        self._takes_step_index = hasattr(dataset, "takes_step_index")
        self._named: set[str] = set()
        self.adds_positions = False
        """Samples have a ``step_position``, which loss modules sum by."""
        self.draws = False
        """The dataset draws from a global generator; set by :meth:`find_draws`."""

    def __len__(self) -> int:
        return len(self.dataset)

    def find_draws(self) -> bool:
        """Returns True if the first sample draws from a global generator of Python, NumPy or PyTorch."""
        before = get_random_state()
        for _ in range(2):  # imports and caches of the first call are no draws of a sample
            state = get_random_state()
            with suppress(Exception):  # raised again when the sample is loaded
                self[0]
        after = get_random_state()
        set_random_state(before)
        self.draws = not all(torch.equal(state[name], after[name]) for name in state)
        return self.draws

    def __getitem__(self, at: int | StepIndex) -> Sample:
        """Returns the prepared sample; an error of the dataset is chained to a SampleError.

        A sample of a mixture has ``dataset_index``, the position of its dataset in the list.
        """
        at = at if isinstance(at, StepIndex) else StepIndex(at)
        if not self.draws:
            return self._get(at)
        state = get_random_state()
        seed_generators(seed_of(at.item, at.epoch, at.step, at.position))
        try:
            return self._get(at)
        finally:
            set_random_state(state)

    def _get(self, at: StepIndex) -> Sample:
        index = at.item
        name = self.name_of(index)
        try:
            sample = self.dataset[at if self._takes_step_index else index]
        except SampleError as error:  # from a dataset that checks its files
            raise type(error)(f"{name}: {error}") from error.__cause__
        except Exception as error:
            text = f"{name}: {type(error).__name__}: {error}{self._row(index)}"
            raise SampleError(text) from error
        prepared = self.prepare(sample, name)
        if self.adds_positions:
            prepared = {**prepared, "step_position": at.position}
        if self.mixture is None:
            return prepared
        return {**prepared, "dataset_index": self.mixture.dataset_of(index)}

    def name_of(self, index: int) -> str:
        """Returns the name of a sample, such as ``sample 17 of dataset``."""
        if self.mixture is None:
            return f"sample {index} of {self.name}"
        which = self.mixture.dataset_of(index)
        local = index - self.mixture.starts[which]
        return f"sample {local} of {self.name}.{self.mixture.names[which]}"

    def _row(self, index: int) -> str:
        """Returns the row behind a sample of torchtune's datasets, shortened; empty for others."""
        try:
            row = repr(self.dataset._data[index])
        except Exception:  # another dataset, or the row itself cannot be read
            return ""
        return f"; its row {index + 1} is {row if len(row) < 200 else f'{row[:200]}...'}"

    def __getitems__(self, indices: Sequence[int | StepIndex]) -> list[Sample | SampleError]:
        """Returns samples for a DataLoader, with the error in place of a bad one."""
        samples: list[Sample | SampleError] = []
        for index in indices:
            try:
                samples.append(self[index])
            except SampleError as error:
                if error.__cause__ is not None:  # lost when the error is pickled in a worker
                    error.add_note("".join(traceback.format_exception(error.__cause__)))
                samples.append(error)
        return samples

    def skips(self, error: SampleError) -> bool:
        """Returns True if training skips a sample with this error."""
        return self.skips_bad or isinstance(error, SkippedSampleError)

    def warn_skipped(self, error: SampleError) -> None:
        """Logs a skipped sample once, up to a maximum number of samples."""
        if str(error) in self._named or len(self._named) > _NUM_NAMED:
            return
        self._named.add(str(error))
        if len(self._named) > _NUM_NAMED:
            _log.warning(f"{self.name}: further skipped samples are not logged")
        else:
            reason = "" if isinstance(error, SkippedSampleError) else ", on_bad_sample=skip"
            _log.warning(f"{error} (skipped{reason})")


def load_dataset(
    cfg: DictConfig | ListConfig, tokenizer: Any = None, check: Callable[[Any], None] | None = None
) -> Any:
    """Instantiates a dataset from a component, or from a list of components.

    A list with names or weights is a :class:`.Mixture`; others are concatenated. ``tokenizer`` is
    the positional argument of each; None if they take none. ``check`` raises ValueError if the
    first sample is of a wrong kind.
    """
    given = () if tokenizer is None else (tokenizer,)
    if not isinstance(cfg, ListConfig):
        dataset = _instantiate(cfg, *given)
    else:
        parts: Any = OmegaConf.to_container(cfg, resolve=True)
        made, own = zip(*map(split_entry, parts), strict=True)
        for name in (part["name"] for part in parts if may_mean_subset(part)):
            text = f"name={name} is the name of a dataset in the log; set subset={name} for a subset of the hub"
            log_rank_zero(_log, text, logging.WARNING)
        several = [_instantiate(OmegaConf.create(part), *given) for part in made]
        is_mixture = any(own)
        dataset = Mixture(several, entries_of(parts)) if is_mixture else ConcatDataset(several)
    if check is not None:
        try:
            sample = dataset[0]
        except Exception:  # an empty dataset or a bad sample is reported when it is loaded
            return dataset
        check(sample)
    return dataset


def _instantiate(cfg: DictConfig, *given: Any) -> Any:
    """Builds a dataset; raises ValueError with the files if the library ``datasets`` cannot read them."""
    try:
        dataset = config.instantiate(cfg, *given)
    except Exception as error:
        if isinstance(error, OSError):
            missing = str(error.filename)
            for name in (str(key) for key, value in cfg.items() if str(value) == missing):
                raise ValueError(f"{name}={missing}: {os.strerror(error.errno or 0)}") from None
        is_of_datasets = type(error).__module__.partition(".")[0] == "datasets"
        if not is_of_datasets and not isinstance(error, StopIteration):
            raise
        causes = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)  # type: ignore[arg-type]
        reason = "; ".join(dict.fromkeys(str(each) for each in causes[1:] if str(each))) or "it is empty"
        raise ValueError(f"{cfg.get('data_files') or cfg.get('source')} cannot be read: {reason}") from error
    try:
        len(dataset)
    except TypeError:
        raise ValueError(
            f"a {type(getattr(dataset, '_data', dataset)).__name__} has no length; set it to a map-style dataset "
            "(streaming=False: files are memory-mapped, not loaded), because a shuffle buffer cannot be resumed exactly"
        ) from None
    return dataset


def load_samples(
    dataset: CheckedDataset, indices_per_step: Sequence[list[Any]], num_workers: int = 0
) -> Iterator[list[Sample]]:
    """Yields the samples of each update step in the order of their indices, without skipped ones.

    Raises a SampleError for a bad sample that is not skipped.
    """
    for samples in load_batches(dataset, indices_per_step, num_workers):
        for sample in samples:
            if isinstance(sample, SampleError):
                if not dataset.skips(sample):
                    raise sample
                dataset.warn_skipped(sample)
        yield [sample for sample in samples if not isinstance(sample, SampleError)]
