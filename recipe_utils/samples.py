"""Samples: checked as they come out of the dataset, loaded by DataLoader workers.

A sample is a mapping with ``tokens`` and ``labels`` of one length, as torchtune's datasets return
it. A sample of a packed dataset also has ``input_pos`` and ``seq_lens``.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

Sample = Mapping[str, Any]


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
    """

    def __init__(
        self, dataset: Any, name: str, ignore_index: int, vocab_size: int, max_seq_len: int
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.ignore_index = ignore_index
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len

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
        The samples of the next update step, in the order of its indices.
    """
    yield from DataLoader(
        dataset,
        batch_sampler=indices_per_step,
        num_workers=num_workers,
        collate_fn=_keep_as_list,
        # Of its own: from a background thread the global generator would be drawn from at any moment.
        generator=torch.Generator(),
    )


def _keep_as_list(samples: list[Sample]) -> list[Sample]:
    return samples
