"""Every sample that cannot be trained on is refused by name; workers change nothing."""

import re

import pytest
import tiny
import torch

from recipe_utils.data.samples import CheckedDataset, SampleError, check_sample, load_samples


def checked(samples):
    return CheckedDataset(tiny.Samples(samples), "dataset", tiny.IGNORE, tiny.VOCAB_SIZE, 64)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"tokens": [1, 2]}, "has no 'labels'"),
        ({"labels": [1, 2]}, "has no 'tokens'"),
        ({"tokens": [], "labels": []}, "has no tokens"),
        ({"tokens": [1, 2, 3], "labels": [1, 2]}, "2 labels for 3 tokens"),
        ({"tokens": [1] * 65, "labels": [1] * 65}, "65 tokens .* max_seq_len=64"),
        ({"tokens": [1, tiny.VOCAB_SIZE], "labels": [1, 1]}, "token 67 is outside .* 67"),
        ({"tokens": [1, -1], "labels": [1, 1]}, "token -1 is outside"),
        ({"tokens": [1, 1], "labels": [1, 99]}, "label 99 is outside"),
        ({"tokens": [1, 1], "labels": [1, -1]}, "label -1 is outside"),
    ],
)
def test_an_untrainable_sample_is_refused_by_name(sample, message):
    with pytest.raises(SampleError, match=f"^sample 17 of dataset: .*{message}"):
        check_sample(sample, "sample 17 of dataset", tiny.IGNORE, tiny.VOCAB_SIZE, 64)


@pytest.mark.parametrize("make", [list, torch.tensor])
def test_samples_at_the_limits_are_accepted(make):
    tokens = [0, tiny.VOCAB_SIZE - 1] * 32
    for labels in (tokens, [tiny.IGNORE] * 64):
        sample = {"tokens": make(tokens), "labels": make(labels)}
        check_sample(sample, "sample", tiny.IGNORE, tiny.VOCAB_SIZE, 64)


def test_packed_samples_are_accepted():
    packed = tiny.tiny_dataset(None, num_samples=9, packed=True)
    dataset = CheckedDataset(packed, "dataset", tiny.IGNORE, tiny.VOCAB_SIZE, 64)
    assert all(dataset[i] is not None for i in range(len(dataset)))


def test_what_a_dataset_raises_is_named_with_the_sample_and_chained():
    class Unreadable:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            raise FileNotFoundError("page.txt")

    dataset = CheckedDataset(Unreadable(), "dataset", tiny.IGNORE, tiny.VOCAB_SIZE, 64)
    with pytest.raises(
        SampleError, match=r"sample 2 of dataset: FileNotFoundError: page\.txt"
    ) as e:
        dataset[2]
    assert isinstance(e.value.__cause__, FileNotFoundError)


def test_samples_come_in_the_order_of_the_indices_with_and_without_workers():
    samples = tiny.make_samples(12)
    indices_per_step = [[3, 0, 7], [], [11], [5, 5, 2, 1], [4]]
    expected = [[samples[i] for i in step] for step in indices_per_step]
    for num_workers in (0, 2):
        assert list(load_samples(checked(samples), indices_per_step, num_workers)) == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_callers_error_names_the_sample_that_a_worker_could_not_load(num_workers):
    samples = tiny.make_samples(4)
    samples[2] = {"tokens": [1, 2], "labels": [1]}
    steps = load_samples(checked(samples), [[0, 1], [3, 2]], num_workers)
    assert next(steps) == samples[:2]
    with pytest.raises(SampleError, match=re.escape("sample 2 of dataset: 1 labels for 2 tokens")):
        next(steps)
