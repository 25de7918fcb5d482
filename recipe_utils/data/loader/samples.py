"""Samples: checked as they come out of the dataset, loaded by DataLoader workers.

A sample is a mapping. What else it must be is its kind's to say: text (:mod:`recipe_utils.data.text.collator`)
has ``tokens`` and ``labels`` of one length, as torchtune's datasets return it; a sample of a packed
dataset also ``input_pos`` and ``seq_lens``.
"""

import hashlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig
from torch.utils.data import Dataset
from torchtune import config
from torchtune.datasets import ConcatDataset
from torchtune.utils import get_logger

from recipe_utils.data.loader.workers import load_batches

Sample = Mapping[str, Any]

_log = get_logger("INFO")


class SampleError(ValueError):
    """A sample that cannot be trained on; the message names it and says what is wrong."""


class SkippedSampleError(SampleError):
    """A sample with nothing wrong, from which nothing can be learned; it is left out, whatever bad ones are."""


_NUM_NAMED = 20
"""Samples that are left out may be a tenth of the data; those after so many are only counted."""


def check_keys(sample: Any, keys: Sequence[str], name: str) -> None:
    """Refuses what is no mapping with all of these keys.

    Raises:
        SampleError: says which is missing, by the sample's name.
    """
    if not isinstance(sample, Mapping):
        raise SampleError(
            f"{name}: it is a {type(sample).__name__}, no mapping with {', '.join(keys)}"
        )
    for key in keys:
        if key not in sample:
            raise SampleError(f"{name}: it has no '{key}', only {sorted(map(str, sample))}")


def whole_numbers(sample: Sample, key: str, name: str) -> np.ndarray:
    """What a sample has at a key, a list, array or tensor, as an array [n] of int64.

    Raises:
        SampleError: it is something else; says what, by the sample's name.
    """
    values = sample[key]
    try:
        numbers = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SampleError(f"{name}: its '{key}' is no list of whole numbers ({error})") from None
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        shown = repr(values) if len(repr(values)) < 60 else f"{repr(values)[:50]}..."
        raise SampleError(f"{name}: its '{key}' is no list of whole numbers but {shown}")
    return numbers.astype(np.int64)


class CheckedDataset(Dataset[Sample]):
    """A map-style dataset whose samples are checked as they are loaded.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        name: how errors call the dataset; the config key it comes from.
        prepare: takes a sample and its name, such as ``"sample 17 of dataset"``; returns what is made of
            it, and raises a :class:`SampleError` where it cannot be trained on.
        skips_bad: :func:`load_samples` leaves bad samples out instead of raising.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        prepare: Callable[[Sample, str], Sample],
        skips_bad: bool = False,
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.prepare = prepare
        self.skips_bad = skips_bad
        self._named: set[str] = set()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        """Returns the sample at ``index``.

        Raises:
            SampleError: the dataset failed on it (the cause is chained), or it fails the check.
        """
        name = f"sample {index} of {self.name}"
        try:
            sample = self.dataset[index]
        except SampleError as error:  # of a dataset that checks what it makes samples of
            raise type(error)(f"{name}: {error}") from error.__cause__
        except Exception as error:
            raise SampleError(f"{name}: {type(error).__name__}: {error}") from error
        return self.prepare(sample, name)

    def __getitems__(self, indices: Sequence[int]) -> list[Sample | SampleError]:
        """What a DataLoader calls: the samples, with the error in place of a bad one."""
        samples: list[Sample | SampleError] = []
        for index in indices:
            try:
                samples.append(self[index])
            except SampleError as error:
                if error.__cause__ is not None:  # which does not come along from a worker
                    error.add_note("".join(traceback.format_exception(error.__cause__)))
                samples.append(error)
        return samples

    def skips(self, error: SampleError) -> bool:
        """Whether training goes on without this sample."""
        return self.skips_bad or isinstance(error, SkippedSampleError)

    def warn_skipped(self, error: SampleError) -> None:
        """Logs a sample that is left out, each once however many epochs there are."""
        if str(error) in self._named or len(self._named) > _NUM_NAMED:
            return
        self._named.add(str(error))
        if len(self._named) > _NUM_NAMED:
            _log.warning(f"{self.name}: further samples that are left out are not named")
        elif isinstance(error, SkippedSampleError):
            _log.warning(f"{error} (left out)")
        else:
            _log.warning(f"{error} (left out, on_bad_sample=skip)")

    def any_sample(self) -> Sample:
        """A sample that is not bad, if there is one.

        Raises:
            SampleError: of the last sample; all are bad.
        """
        for index in range(len(self) - 1):
            try:
                return self[index]
            except SampleError as error:
                if not self.skips(error):
                    raise
        return self[len(self) - 1]


def fingerprint(dataset: CheckedDataset, keys: Sequence[str]) -> dict[str, Any]:
    """What tells a dataset and its tokenizer from others: its length, and a hash of three samples.

    Args:
        dataset: of at least one sample.
        keys: of a sample's whole numbers, which are hashed.
    """
    indices = {0, len(dataset) // 2, len(dataset) - 1}
    digest = hashlib.sha256()
    for index in sorted(indices):
        try:
            sample = dataset[index]
        except SampleError as error:  # found again, and raised, when its update step is prepared
            digest.update(str(error).encode())
            continue
        for key in keys:
            digest.update(torch.as_tensor(sample[key], dtype=torch.int64).numpy().tobytes())
    return {"num_samples": len(dataset), "hash_of_samples": digest.hexdigest()[:16]}


def load_dataset(cfg: DictConfig | ListConfig, tokenizer: Any = None) -> Any:
    """Builds a dataset of its component, or of a list of components one after the other.

    Args:
        cfg: component, or a list of components.
        tokenizer: positional argument of each; None if they take none.
    """
    given = () if tokenizer is None else (tokenizer,)
    if isinstance(cfg, ListConfig):
        return ConcatDataset(datasets=[config.instantiate(part, *given) for part in cfg])
    return config.instantiate(cfg, *given)


def load_samples(
    dataset: CheckedDataset, indices_per_step: Sequence[list[int]], num_workers: int = 0
) -> Iterator[list[Sample]]:
    """Loads the samples of one update step after the other.

    Args:
        dataset: names what is left out.
        indices_per_step: dataset indices of each update step of this rank.
        num_workers: worker processes; 0 loads in the calling thread.

    Yields:
        The samples of the next update step, in the order of its indices, without those that are left out.

    Raises:
        SampleError: of the first sample that is bad, unless such are skipped; as it is loaded.
        recipe_utils.data.loader.workers.WorkerDiedError: see :func:`recipe_utils.data.loader.workers.load_batches`.
    """
    for samples in load_batches(dataset, indices_per_step, num_workers):
        for sample in samples:
            if isinstance(sample, SampleError):
                if not dataset.skips(sample):
                    raise sample
                dataset.warn_skipped(sample)
        yield [sample for sample in samples if not isinstance(sample, SampleError)]
