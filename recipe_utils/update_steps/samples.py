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
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch.utils.data import Dataset, Subset

from recipe_utils.parallel.random_state import get_random_state, seed_generators, set_random_state
from recipe_utils.settings.problems import ConfigError
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


class Facts(NamedTuple):
    """What a dataset says of itself by a method ``facts()``; one without says what it wraps, see :func:`facts_of`."""

    has_sequences: bool = False
    """Samples may have ``sequences``: turns, answers to one prompt."""
    fields: frozenset[str] | None = None
    """What each sample has, so that no model computes it: ``logprobs``, ``ref_logprobs``, ``reward``; None: unknown."""
    needs_reference: bool = False
    """Advantages are differences to the log-probabilities of a reference."""
    content: Mapping[str, str] = {}
    """Hash of all bytes of a file, by the names of the datasets on the way to it: ``""``, ``.code``, ``.code.0``."""
    sources: Sources | None = None
    """Itself, if it consists of named datasets."""
    takes_place: bool = False
    """Items are asked for by a :class:`.StepIndex`."""
    comes_later: tuple[Any, ...] = ()
    """Datasets that may have no sample before the first epoch begins: itself."""


def facts_of(dataset: Any) -> Facts:
    """Returns what a dataset says of itself or, if it says nothing, what the datasets that it wraps say.

    Raises ConfigError for a wrapper of which a sample's index is not that of the wrapped dataset, and that dataset must
    know it.
    """
    own = getattr(type(dataset), "facts", None)
    if callable(own) and isinstance(facts := own(dataset), Facts):
        return facts
    parts = {
        name: merged(dict(enumerate(map(facts_of, part)))) if isinstance(part, list | tuple) else facts_of(part)
        for name, part in _parts_of(dataset)
    }
    parts = {name: facts for name, facts in parts.items() if facts != Facts()}
    is_alone = len(parts) == 1 and not isinstance(dataset, Subset)
    for inner in (getattr(dataset, name) for name, facts in parts.items() if facts.sources or facts.takes_place):
        if not is_alone or len(dataset) != len(inner):
            text = (
                "has other indices, whose names and places are unknown; wrap each dataset of the list, or write facts()"
            )
            raise ConfigError(f"dataset: {type(dataset).__name__} of {type(inner).__name__} {text}")
    return next(iter(parts.values())) if len(parts) == 1 else merged(parts)


def merged(parts: Mapping[Any, Facts]) -> Facts:
    """Returns the facts of datasets one after the other, by name: none of a single one, such as the place of a sample."""
    several = list(parts.values())
    fields = [facts.fields for facts in several if facts.fields is not None]
    return Facts(
        has_sequences=any(facts.has_sequences for facts in several),
        fields=frozenset.intersection(*fields) if several and len(fields) == len(several) else None,
        needs_reference=any(facts.needs_reference for facts in several),
        content={f".{name}{key}": value for name, facts in parts.items() for key, value in facts.content.items()},
    )


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
    num_image_bytes: int = 0
    """Memory of the images of all of them."""


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

    @cached_property
    def _facts(self) -> Facts:
        return facts_of(self.dataset)

    @property
    def sources(self) -> Sources | None:
        """Named datasets that the dataset consists of, or whose samples it transforms."""
        return self._facts.sources

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
            sample = self.dataset[at if self._facts.takes_place else index]
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
    for name, part in _parts_of(dataset):
        several = isinstance(part, list | tuple)
        object.__setattr__(made, name, type(part)(map(unread, part)) if several else unread(part))
    return made


def _parts_of(dataset: Any) -> list[tuple[str, Any]]:
    """Returns the attributes that are datasets, or lists of them."""
    return [
        (name, value)
        for name, value in getattr(dataset, "__dict__", {}).items()
        if _is_dataset(value)
        or (isinstance(value, list | tuple) and 0 < len(value) <= _MOST_PARTS and _is_dataset(value[0]))
    ]


def _is_dataset(value: Any) -> bool:
    """Returns True for objects that may open files when they are read; ``datasets`` and arrays do not."""
    module = type(value).__module__
    is_of_library = module.partition(".")[0] in ("datasets", "numpy", "torch") and "torch.utils.data" not in module
    return not is_of_library and hasattr(value, "__dict__") and hasattr(value, "__getitem__")
