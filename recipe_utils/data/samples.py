"""Samples: checked as they come out of the dataset, loaded by DataLoader workers.

A sample is a mapping with ``tokens`` and ``labels`` of one length, as torchtune's datasets return
it. A sample of a packed dataset also has ``input_pos`` and ``seq_lens``.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchtune.utils import get_logger

Sample = Mapping[str, Any]

_log = get_logger("INFO")


class SampleError(ValueError):
    """A sample that cannot be trained on; the message names it and says what is wrong."""


def check_sample(
    sample: Sample, name: str, ignore_index: int, vocab_size: int, max_seq_len: int
) -> None:
    """Refuses a sample that would be trained on wrongly or would fail deep inside the model.

    Args:
        sample: what the dataset returned.
        name: how the error calls it, such as ``"sample 17 of dataset"``.
        ignore_index: the label of positions that are no targets.
        vocab_size: number of token embeddings of the model.
        max_seq_len: longest sequence the model takes [tokens].

    Raises:
        SampleError: no labels, other than one label per token, no tokens, more than ``max_seq_len``
            tokens, or a token or label outside the vocabulary.
    """
    for key in ("tokens", "labels"):
        if key not in sample:
            raise SampleError(f"{name}: it has no '{key}', only {sorted(sample)}")
    num_tokens, num_labels = len(sample["tokens"]), len(sample["labels"])
    if num_tokens == 0:
        raise SampleError(f"{name}: it has no tokens; filter empty samples out of the dataset")
    if num_tokens != num_labels:
        raise SampleError(f"{name}: {num_labels} labels for {num_tokens} tokens; give one each")
    if num_tokens > max_seq_len:
        raise SampleError(
            f"{name}: {num_tokens} tokens are more than the model's max_seq_len={max_seq_len}; set "
            f"tokenizer.max_seq_len={max_seq_len} to truncate samples"
        )
    tokens, labels = torch.as_tensor(sample["tokens"]), torch.as_tensor(sample["labels"])
    targets = labels[labels != ignore_index]
    for what, ids in (("token", tokens), ("label", targets)):
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise SampleError(
                f"{name}: {what} {outside[0].item()} is outside the model's vocabulary of "
                f"{vocab_size}; use the tokenizer that belongs to the model"
            )


class CheckedDataset(Dataset[Sample]):
    """A map-style dataset whose samples are checked as they are loaded.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        name: how errors call the dataset; the config key it comes from.
        ignore_index: the label of positions that are no targets.
        vocab_size: number of token embeddings of the model.
        max_seq_len: longest sequence the model takes [tokens].
        skips_bad: :func:`load_samples` leaves bad samples out instead of raising.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        ignore_index: int,
        vocab_size: int,
        max_seq_len: int,
        skips_bad: bool = False,
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.ignore_index = ignore_index
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.skips_bad = skips_bad

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        """Returns the sample at ``index``.

        Raises:
            SampleError: the dataset failed on it (the cause is chained), or it fails
                :func:`check_sample`.
        """
        name = f"sample {index} of {self.name}"
        try:
            sample = self.dataset[index]
        except Exception as error:
            raise SampleError(f"{name}: {type(error).__name__}: {error}") from error
        check_sample(sample, name, self.ignore_index, self.vocab_size, self.max_seq_len)
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Sample | SampleError]:
        """What a DataLoader calls: the samples, with the error in place of a bad one that is skipped."""
        samples: list[Sample | SampleError] = []
        for index in indices:
            try:
                samples.append(self[index])
            except SampleError as error:
                if not self.skips_bad:
                    raise
                samples.append(error)
        return samples

    def any_sample(self) -> Sample:
        """A sample that is not bad, if there is one.

        Raises:
            SampleError: of the last sample; all are bad.
        """
        for index in range(len(self) - 1):
            try:
                return self[index]
            except SampleError:
                if not self.skips_bad:
                    raise
        return self[len(self) - 1]


def fingerprint(dataset: CheckedDataset) -> dict[str, Any]:
    """What tells a dataset and its tokenizer from others: its length, and a hash of three samples."""
    indices = {0, len(dataset) // 2, len(dataset) - 1}
    digest = hashlib.sha256()
    for index in sorted(indices):
        try:
            sample = dataset[index]
        except SampleError as error:  # found again, and raised, when its update step is prepared
            digest.update(str(error).encode())
            continue
        for key in ("tokens", "labels"):
            digest.update(torch.as_tensor(sample[key], dtype=torch.int64).numpy().tobytes())
    return {"num_samples": len(dataset), "hash_of_samples": digest.hexdigest()[:16]}


def load_samples(
    dataset: Dataset[Sample], indices_per_step: Sequence[list[int]], num_workers: int = 0
) -> Iterator[list[Sample]]:
    """Loads the samples of one update step after the other.

    With workers, each loads whole update steps of its own, a few of them ahead.

    Args:
        dataset: map-style dataset.
        indices_per_step: dataset indices of each update step of this rank.
        num_workers: worker processes; 0 loads in the calling thread.

    Yields:
        The samples of the next update step, in the order of its indices; bad ones are left out with a
        warning if the dataset skips them.
    """
    for samples in DataLoader(
        dataset,
        batch_sampler=indices_per_step,
        num_workers=num_workers,
        collate_fn=_keep_as_list,
        # Of its own: from a background thread the global generator would be drawn from at any moment.
        generator=torch.Generator(),
    ):
        for sample in samples:
            if isinstance(sample, SampleError):
                _log.warning(f"{sample} (left out, on_bad_sample=skip)")
        yield [sample for sample in samples if not isinstance(sample, SampleError)]


def _keep_as_list(samples: list[Any]) -> list[Any]:
    return samples
