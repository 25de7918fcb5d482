"""Named values per target reach the targets that they stand beside, in every layout."""

import numpy as np
import pytest
import tiny
import torch
from torchtune.datasets import PackedDataset

from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.text.collator import TextCollator
from recipe_utils.text.limits import ModelLimits
from recipe_utils.update_steps.samples import SampleError
from recipe_utils.update_steps.settings import DataSettings

LIMITS = ModelLimits(tiny.VOCAB_SIZE, 64, MicrobatchCost())
LAYOUTS = ("in_order", "least_padding", "packed")


def collator_of(microbatching, **options):
    settings = DataSettings(batch_size=12, microbatching=microbatching)
    return TextCollator(settings, tiny.tiny_tokenizer(), tiny.IGNORE, LIMITS, **options)


def prepared(collator, samples):
    samples = [collator.prepare(sample, f"sample {index} of dataset") for index, sample in enumerate(samples)]
    return [{**sample, "step_position": index} for index, sample in enumerate(samples)]


def by_label(samples, value_of=lambda sample, i: sample.get("weights", [1.0] * 99)[i]):
    """Returns the sample, label and value of each target, sorted."""
    return sorted(
        (index, sample["labels"][i], float(value_of(sample, i)))
        for index, sample in enumerate(samples)
        for i in range(1, len(sample["labels"]))
        if sample["labels"][i] != tiny.IGNORE
    )


@pytest.mark.parametrize("num_common", [0, 20])
@pytest.mark.parametrize("microbatching", LAYOUTS)
def test_values_reach_the_targets_that_they_stand_beside(microbatching, num_common):
    """With 20 common tokens, samples of a packed row become trees, in another order."""
    samples = tiny.make_samples(12, 2, False, num_common=num_common, has_weights=True)
    collator = collator_of(microbatching, of_targets=("weights",))
    row = collator.collate(prepared(collator, samples))
    targets = row.targets
    labels, values = targets.labels.flatten()[targets.positions], targets.values["weights"]
    found = zip(targets.samples.tolist(), labels.tolist(), values.tolist(), strict=True)
    assert sorted(found) == by_label(samples)
    assert row.counts["weights"] == pytest.approx(sum(value for *_, value in by_label(samples)))


def test_values_of_a_packed_dataset_lose_its_padding():
    samples = [{key: sample[key] for key in ("tokens", "labels")} for sample in tiny.make_samples(6)]
    (pack,) = PackedDataset(tiny.Samples(samples), max_seq_len=140)
    pack = {**pack, "weights": torch.arange(140.0)}
    collator = collator_of("packed", of_targets=("weights",))
    collator.limits = collator.limits._replace(max_seq_len=140)
    targets = collator.collate(prepared(collator, [pack])).targets
    assert targets.values["weights"].tolist() == (targets.positions + 1).tolist()


@pytest.mark.parametrize("microbatching", LAYOUTS)
def test_without_values_each_target_counts_one(microbatching):
    collator = collator_of(microbatching, of_targets=("weights",))
    row = collator.collate(prepared(collator, tiny.make_samples(12)))
    assert row.targets.values == {}
    assert row.counts["weights"] == row.counts["target_tokens"]


@pytest.mark.parametrize("microbatching", LAYOUTS)
def test_a_value_that_no_loss_takes_is_one_warning(microbatching, caplog):
    collator = collator_of(microbatching)
    samples = prepared(collator, [{**sample, "rewards": [0.5]} for sample in tiny.make_samples(3)])
    for _ in range(2):
        collator.collate(samples)
    assert [text for text in caplog.messages if "rewards of samples is ignored" in text] == [
        f"microbatching={microbatching}: rows contain only text; rewards of samples is ignored"
    ]


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        ([1.0, -2.0, 1.0], "its weights contain -2; set them to finite numbers of at least 0"),
        ([1.0, np.inf, 1.0], "its weights contain inf"),
        ([1.0, np.nan, 1.0], "its weights contain nan"),
        ([1.0, 1.0], r"\(2,\) weights for 3 labels; each label needs one"),
        ("abc", "its weights are not a list of numbers"),
    ],
)
def test_wrong_values_are_named(weights, error):
    collator = collator_of("packed", of_targets=("weights",))
    with pytest.raises(SampleError, match=f"^sample 0 of dataset: {error}"):
        prepared(collator, [{"tokens": [1, 2, 3], "labels": [1, 2, 3], "weights": weights}])


def test_other_values_may_be_negative():
    collator = collator_of("packed", of_targets=("rewards",))
    row = collator.collate(prepared(collator, [{"tokens": [1, 2, 3], "labels": [1, 2, 3], "rewards": [0, -2, 1]}]))
    assert (row.targets.values["rewards"].tolist(), row.counts["rewards"]) == ([-2, 1], -1)


def test_trees_refuse_values():
    collator = collator_of("packed", of_targets=("weights",), has_trees=True)
    sequences = [{"tokens": [1, 2, 3], "labels": [-100, 2, 3], "weights": [1, 1, 0.5]}] * 2
    with pytest.raises(SampleError, match=r"it has weights, which rows of shared beginnings do not keep; set dataset"):
        prepared(collator, [{"sequences": sequences}])
