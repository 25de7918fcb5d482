"""Samples, loaded and checked by DataLoader workers.

Sample 17 of a file cannot be tokenized: the error is named ``sample 17 of dataset: ...`` in the worker, and ends the
training when its update step is prepared, or is a warning with ``on_bad_sample: skip``; the loss is then a mean over
the targets of the others.

A sample is a mapping. Text has ``tokens`` and ``labels`` of one length, as torchtune's datasets
return it; a sample of a packed dataset also has ``input_pos`` and ``seq_lens``.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch.utils.data import Dataset

from recipe_utils.parallel.random_state import get_random_state, seed_generators, set_random_state
from recipe_utils.torchtune_names import logger
from recipe_utils.update_steps.order import StepIndex
from recipe_utils.update_steps.permutation import seed_of
from recipe_utils.update_steps.step import Targets
from recipe_utils.update_steps.workers import load_batches

Sample = Mapping[str, Any]
Prepared = Any
"""A sample as a collator's ``prepare`` returns it."""


class SampleError(ValueError):
    """Raised for a sample that cannot be trained on; the message starts with its name."""


class SkippedSampleError(SampleError):
    """Raised for a valid sample without targets, which is skipped for any ``on_bad_sample``."""


class UnusedError(SampleError):
    """Raised for a sample with numbers that the loss does not take, which ends the training for any ``on_bad_sample``."""


_MOST_PARTS = 1000
"""Maximum number of datasets in a list; more are samples, which are not copied."""
_NUM_NAMED = 20
"""Maximum number of skipped samples that are logged."""


def check_has(sample: Any, keys: Sequence[str], name: str) -> None:
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


NO_DATASET = (
    "collate_fn: it made another number of rows than samples, so targets have no dataset; make one row of each sample, or "
    "set one dataset"
)
"""Error of a ``collate_fn`` whose rows have no sample."""


class Sources(Protocol):
    """Dataset that consists of named ones, its sources, one after the other."""

    names: tuple[str, ...]
    starts: tuple[int, ...]
    """First index of each."""

    def dataset_of(self, index: int) -> int:
        """Returns the position in ``names`` of the dataset that a sample is from."""

    def of_targets(self, targets: Targets) -> np.ndarray:
        """Returns the same of each target [n]. Raises ValueError if a ``collate_fn`` made other rows than samples."""


class SampleReport(NamedTuple):
    """Facts about a dataset, from some of its samples; see :mod:`recipe_utils.data.inspect_samples`."""

    example: int = 0
    """Index of a sample that can be trained on."""
    hash_of_samples: str = ""
    """Hash of the first, the middle and the last sample of each source of the dataset."""
    other_content_hash: str = ""
    """Hash of their values besides tokens and labels."""
    remarks: Mapping[str, int] = {}
    """Why samples are skipped or doubtful, and how many of ``num_remarked`` are; empty if training
    will stop at one of them."""
    num_remarked: int = 0
    lengths: Sequence[int] = ()
    """Tokens of each good one that was read for remarks."""
    num_targets: int = 0
    """Target tokens of all of them."""
    num_shared: int = 0
    """Tokens of all of them that are not computed again."""


@dataclass(frozen=True)
class CheckedDataset(Dataset[Prepared]):
    """Map-style dataset whose samples are checked as they are loaded.

    Global random generators that a dataset draws from are seeded for each sample, by its
    position in the training, and restored: draws are the same in any worker, on any layout and after a resume.
    """

    dataset: Any
    """Has ``__len__`` and ``__getitem__``."""
    name: str
    """Config key, for errors."""
    prepare: Callable[[Sample, str, StepIndex], Prepared]
    """Collator's ``prepare``; it gets names such as ``"sample 17 of dataset"``, and the place of the sample."""
    skips_bad: bool = False
    """:func:`load_samples` skips bad samples."""
    noun: str = "sample"
    """Collator's ``noun``, for errors."""
    draws: bool = False
    """The dataset draws from a global generator of Python, NumPy or PyTorch."""
    report: SampleReport = field(default_factory=SampleReport)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """Values that must be equal on resume for update steps to contain the same samples."""
    _named: set[str] = field(default_factory=set)
    """Skipped samples that were logged."""

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def sources(self) -> Sources | None:
        """Named datasets that the dataset consists of, or whose samples it transforms."""
        candidates: tuple[Any, ...] = (self.dataset, getattr(self.dataset, "dataset", None))
        return next((dataset for dataset in candidates if hasattr(dataset, "dataset_of")), None)

    def unread(self) -> "CheckedDataset":
        """Returns a copy for one thread or process, see :func:`unread`."""
        return replace(self, dataset=unread(self.dataset))

    def example(self) -> Prepared:
        """Returns a sample that can be trained on."""
        return self.unread()[self.report.example]

    def __getitem__(self, at: int | StepIndex) -> Prepared:
        """Returns the prepared sample; an error of the dataset is chained to a SampleError."""
        at = at if isinstance(at, StepIndex) else StepIndex(at)
        if not self.draws:
            return self._get(at)
        state = get_random_state()
        seed_generators(seed_of(at.item, at.epoch, at.step, at.position))
        try:
            return self._get(at)
        finally:
            set_random_state(state)

    def _get(self, at: StepIndex) -> Prepared:
        index = at.item
        name = self.name_of(index)
        try:
            sample = self.dataset[at if hasattr(self.dataset, "takes_step_index") else index]
        except SampleError as error:  # from a dataset that checks its files
            raise type(error)(f"{name}: {error}") from error.__cause__
        except Exception as error:
            text = f"{name}: {type(error).__name__}: {error}{self._row(index)}"
            raise SampleError(text) from error
        return self.prepare(sample, name, at)

    def name_of(self, index: int) -> str:
        """Returns the name of a sample, such as ``sample 17 of dataset``."""
        if (sources := self.sources) is None:
            return f"{self.noun} {index} of {self.name}"
        which = sources.dataset_of(index)
        return f"{self.noun} {index - sources.starts[which]} of {self.name}.{sources.names[which]}"

    def _row(self, index: int) -> str:
        """Returns the row behind a sample of torchtune's datasets, shortened; empty for others."""
        try:
            row = repr(self.dataset._data[index])
        except Exception:  # another dataset, or the row itself cannot be read
            return ""
        return f"; its row {index + 1} is {row if len(row) < 200 else f'{row[:200]}...'}"

    def __getitems__(self, indices: Sequence[int | StepIndex]) -> list[Prepared | SampleError]:
        """Returns samples for a DataLoader, with the error in place of a bad one."""
        samples: list[Prepared | SampleError] = []
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
        return isinstance(error, SkippedSampleError) or (self.skips_bad and not isinstance(error, UnusedError))

    def warn_skipped(self, error: SampleError) -> None:
        """Logs a skipped sample once, up to a maximum number of samples."""
        if str(error) in self._named or len(self._named) > _NUM_NAMED:
            return
        self._named.add(str(error))
        if len(self._named) > _NUM_NAMED:
            logger.warning(f"{self.name}: further skipped {self.noun}s are not logged")
        else:
            reason = "" if isinstance(error, SkippedSampleError) else ", on_bad_sample=skip"
            logger.warning(f"{error} (skipped{reason})")


def load_samples(
    dataset: CheckedDataset, indices_per_step: Sequence[list[Any]], num_workers: int = 0
) -> Iterator[list[Prepared]]:
    """Yields the samples of each update step in the order of their indices, without skipped ones.

    Raises a SampleError for a bad sample that is not skipped.
    """
    # Workers, and this thread, open files themselves.
    for samples in load_batches(dataset.unread(), indices_per_step, num_workers):
        for sample in samples:
            if isinstance(sample, SampleError):
                if not dataset.skips(sample):
                    raise sample
                dataset.warn_skipped(sample)
        yield [sample for sample in samples if not isinstance(sample, SampleError)]


def unread(dataset: Any) -> Any:
    """Returns a shallow copy of a dataset, and of those that it consists of.

    What a dataset opens at its first read (SQLite, LMDB, h5py) belongs to a thread or process. So each reader
    (inspection, data thread, worker) has a copy of the dataset as it was before. Attributes are shared: a copy
    of a dataset in memory takes no memory.
    """
    if not _is_dataset(dataset):
        return dataset
    try:
        made = copy(dataset)
    except Exception:  # an object that cannot be copied is read as it is
        return dataset
    for name, value in list(vars(dataset).items()):
        if _is_dataset(value):
            object.__setattr__(made, name, unread(value))
        elif isinstance(value, (list, tuple)) and 0 < len(value) <= _MOST_PARTS and _is_dataset(value[0]):
            object.__setattr__(made, name, type(value)(map(unread, value)))
    return made


def _is_dataset(value: Any) -> bool:
    """Returns True for objects that may open files when they are read; ``datasets`` and arrays do not."""
    is_of_library = type(value).__module__.partition(".")[0] in ("datasets", "numpy", "torch")
    return not is_of_library and hasattr(value, "__dict__") and hasattr(value, "__getitem__")
