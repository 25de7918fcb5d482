"""Samples are checked as they are loaded, by their name; workers change nothing."""

import re

import pytest
import tiny

from recipe_utils.data.loader.plan import MicrobatchCost
from recipe_utils.data.loader.samples import (
    CheckedDataset,
    SampleError,
    SkippedSampleError,
    fingerprint,
    load_samples,
)
from recipe_utils.data.text.collator import check_sample
from recipe_utils.data.text.limits import ModelLimits

LIMITS = ModelLimits(tiny.VOCAB_SIZE, 64, MicrobatchCost())


def prepare(sample, name):
    check_sample(sample, name, tiny.IGNORE, LIMITS)
    return sample


def checked(samples, **options):
    return CheckedDataset(tiny.Samples(samples), "dataset", prepare, **options)


def test_packed_samples_are_accepted():
    packed = tiny.tiny_dataset(None, num_samples=9, packed=True)
    dataset = CheckedDataset(packed, "dataset", prepare)
    assert all(dataset[i] is not None for i in range(len(dataset)))


def test_what_a_dataset_raises_is_named_with_the_sample_and_chained():
    class Unreadable:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            raise FileNotFoundError("page.txt")

    dataset = CheckedDataset(Unreadable(), "dataset", prepare)
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


def test_what_is_made_of_a_sample_is_the_callers_own():
    def prepare(sample, name):
        return {"made of": sample["tokens"], "name": name}

    dataset = CheckedDataset(tiny.Samples([{"tokens": [3]}]), "dataset_val", prepare)
    assert dataset[0] == {"made of": [3], "name": "sample 0 of dataset_val"}


def test_bad_samples_are_left_out_where_asked_for():
    samples = tiny.make_samples(4)
    samples[2] = {"tokens": [1, 2], "labels": [1]}
    dataset = checked(samples, skips_bad=True)
    assert list(load_samples(dataset, [[0, 2], [2], [3]])) == [[samples[0]], [], [samples[3]]]


def teaches_nothing(sample, name):
    if sample["tokens"] == [0]:
        raise SkippedSampleError(f"{name}: it teaches nothing")
    return prepare(sample, name)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_teach_nothing_are_left_out_and_named_once_up_to_twenty(num_workers, caplog):
    samples = [{"tokens": [0], "labels": [0]} for _ in range(25)]
    samples[3:3] = tiny.make_samples(2)
    dataset = CheckedDataset(tiny.Samples(samples), "dataset", teaches_nothing)
    for _ in range(2):
        steps = [list(range(9)), list(range(9, 27))]
        assert list(load_samples(dataset, steps, num_workers)) == [samples[3:5], []]
    named = [text for text in caplog.messages if "teaches nothing (skipped)" in text]
    assert len(named) == len(set(named)) == 20
    assert caplog.messages[-1] == "dataset: further skipped samples are not logged"
    assert len(caplog.messages) == 21
    assert dataset.any_sample() == samples[3]


def test_any_sample_is_a_good_one_if_there_is_one():
    bad, good = {"tokens": [1, 2], "labels": [1]}, tiny.make_samples(1)[0]
    assert checked([bad, good, bad], skips_bad=True).any_sample() == good
    for samples, skips in (([bad, bad], True), ([bad, good], False)):
        with pytest.raises(SampleError, match="1 labels for 2 tokens"):
            checked(samples, skips_bad=skips).any_sample()


def test_a_fingerprint_tells_datasets_apart_by_length_and_by_the_keys_asked_for():
    samples = tiny.make_samples(5)
    relabelled = [dict(sample) for sample in samples]
    relabelled[-1]["labels"] = [1] * len(samples[-1]["labels"])
    of_samples = fingerprint(checked(samples), ["tokens", "labels"])
    assert of_samples == fingerprint(checked(samples), ["tokens", "labels"])
    assert of_samples["num_samples"] == 5
    assert of_samples != fingerprint(checked(relabelled), ["tokens", "labels"])
    assert fingerprint(checked(relabelled), ["tokens"]) == fingerprint(checked(samples), ["tokens"])
    assert of_samples != fingerprint(checked(samples[:4]), ["tokens", "labels"])
