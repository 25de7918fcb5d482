"""Columns reach the targets that they stand beside, and values their samples, in every layout."""

import numpy as np
import pytest
import tiny
import torch
from torchtune.datasets import PackedDataset

from recipe_utils.data.collators import text_collator
from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.settings.problems import ConfigError
from recipe_utils.text.limits import ModelLimits
from recipe_utils.update_steps.objective import NOTHING_DECLARED, Declaration, declared_by
from recipe_utils.update_steps.order import StepIndex
from recipe_utils.update_steps.samples import SampleError, UnusedError
from recipe_utils.update_steps.settings import DataSettings

LIMITS = ModelLimits(tiny.VOCAB_SIZE, 140, MicrobatchCost())
LAYOUTS = ("in_order", "least_padding", "packed")
WEIGHTS = Declaration({"weights": 1.0}, totals=["weights"])


def collator_of(microbatching, declared=WEIGHTS, **options):
    settings = DataSettings(batch_size=12, microbatching=microbatching)
    return text_collator(settings, tiny.tiny_tokenizer(), tiny.IGNORE, LIMITS, declared=declared, **options)


def prepared(collator, samples):
    return [
        collator.prepare(sample, f"sample {i} of dataset", StepIndex(100 + i, position=i))
        for i, sample in enumerate(samples)
    ]


def row_of(collator, samples):
    (row,) = collator.collate(prepared(collator, samples))
    return row


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
def test_columns_reach_the_targets_that_they_stand_beside(microbatching, num_common):
    """With 20 common tokens, samples of a packed row become trees, in another order."""
    samples = tiny.make_samples(12, 2, False, num_common=num_common, has_weights=True)
    row = row_of(collator_of(microbatching), samples)
    targets = row.targets
    labels, values = targets.labels.flatten()[targets.positions], targets.values["weights"]
    found = zip(targets.of_targets(targets.samples).tolist(), labels.tolist(), values.tolist(), strict=True)
    assert sorted(found) == by_label(samples)
    assert torch.equal(targets.items, targets.samples + 100)
    assert row.counts["weights"] == pytest.approx(sum(value for *_, value in by_label(samples)))
    assert not targets.defaults


@pytest.mark.parametrize("microbatching", ["least_padding", "packed"])
def test_a_number_of_a_sequence_is_a_column_with_it_beside_each_target(microbatching):
    """Of a group, some sequences have a number, and others a column, or the default."""
    samples = tiny.make_samples(9, num_common=20)
    numbers = [0.5, 2.0, 0.25, None, 3.0, [*map(float, range(99))], 1.0, None, None]
    groups: dict[str, list] = {"one": [], "all": []}
    for sample, number in zip(samples, numbers, strict=True):
        size = len(sample["labels"])
        number = number[:size] if isinstance(number, list) else number
        given = {} if number is None else {"weights": number}
        groups["one"].append({**sample, **given})
        groups["all"].append({**sample, "weights": number if isinstance(number, list) else [number or 1.0] * size})
    collator = collator_of(microbatching, has_trees=True)
    one, expected = (
        prepared(collator, [{"sequences": sequences[i : i + 3]} for i in (0, 3, 6)]) for sequences in groups.values()
    )
    rows = [collator.collate(each)[0] for each in (one, expected)]
    assert torch.equal(*(row.targets.values["weights"] for row in rows))
    assert rows[0].counts == rows[1].counts
    assert not rows[0].targets.of_samples
    for mine, other in zip(one[:2], expected[:2], strict=True):  # a resume knows samples by what is beside targets
        (_, found), (_, columns) = collator.content(mine), collator.content(other)
        assert found["weights"].tolist() == columns["weights"].tolist()


@pytest.mark.parametrize("num_common", [0, 20])
@pytest.mark.parametrize("microbatching", LAYOUTS)
def test_values_are_those_of_the_samples_beside_their_last_tokens(microbatching, num_common):
    samples = tiny.make_samples(12, num_common=num_common)
    samples = [{**sample, "grade": [[i, -i]], "kind": i} for i, sample in enumerate(samples)]
    row = row_of(collator_of(microbatching, Declaration(of_samples=["grade", "kind"], totals=["kind"])), samples)
    targets, tokens = row.targets, row.inputs["tokens"].flatten()
    assert targets.of_samples["kind"].tolist() == targets.samples.tolist()
    assert targets.of_samples["kind"].dtype == torch.int64
    assert torch.equal(targets.of_samples["grade"][:, 0, 1], -targets.samples)
    assert tokens[targets.ends].tolist() == [samples[i]["tokens"][-1] for i in targets.samples.tolist()]
    assert row.counts["kind"] == sum(range(12))
    assert row.names == tuple(f"sample {i} of dataset" for i in targets.samples.tolist())


@pytest.mark.parametrize("has_tree", [False, True])
@pytest.mark.parametrize("declared", [Declaration(of_samples=["grade"]), Declaration({"grade": None})])
def test_values_and_columns_of_two_shapes_are_named(declared, has_tree):
    samples = tiny.make_samples(2, mask_prompts=False)
    for number, sample in enumerate(samples):
        sample["grade"] = np.ones((len(sample["tokens"]), 2 + number) if declared.columns else 2 + number)
    first, second = (
        ("sample 0 of dataset, sequence 0", ", sequence 1") if has_tree else ("sample 0", "sample 1 of dataset")
    )
    with pytest.raises(SampleError, match=rf"{second}: its grade has the shape \[3\], and that of {first}"):
        row_of(collator_of("packed", declared, has_trees=has_tree), [{"sequences": samples}] if has_tree else samples)


def test_columns_of_a_packed_dataset_lose_its_padding():
    samples = [{key: sample[key] for key in ("tokens", "labels")} for sample in tiny.make_samples(6)]
    (pack,) = PackedDataset(tiny.Samples(samples), max_seq_len=140)
    targets = row_of(collator_of("packed"), [{**pack, "weights": torch.arange(140.0)}]).targets
    assert targets.values["weights"].tolist() == (targets.positions + 1).tolist()


@pytest.mark.parametrize("microbatching", LAYOUTS)
def test_without_a_column_each_target_has_its_default(microbatching):
    row = row_of(collator_of(microbatching), tiny.make_samples(12))
    assert set(row.targets.values["weights"].tolist()) == {1.0}
    assert row.targets.defaults == {"weights"}
    assert row.counts["weights"] == row.counts["target_tokens"] == len(row.targets.values["weights"])


@pytest.mark.parametrize(("has_tree", "name"), [(False, "sample 1 of"), (True, "sample 1 of dataset, sequence 0")])
@pytest.mark.parametrize(
    ("declared", "beside"),
    [(Declaration({"advantages": None}), "beside labels"), (Declaration(of_samples=["advantages"]), "of the sample")],
)
def test_a_required_column_or_value_that_is_missing_is_named(declared, beside, has_tree, name):
    samples = tiny.make_samples(2)
    samples[0]["advantages"] = [0.5] * len(samples[0]["labels"])
    samples[1]["advantage"] = samples[0]["advantages"]  # misspelled
    samples = [{"sequences": [sample]} for sample in samples] if has_tree else samples
    text = rf"^{name}.*: it has no 'advantages' {beside}, which the loss takes; it has advantage, "
    with pytest.raises(SampleError, match=text):
        prepared(collator_of("packed", declared, has_trees=has_tree), samples)


def test_a_key_that_no_loss_takes_is_one_warning(caplog):
    for microbatching in LAYOUTS:
        collator = collator_of(microbatching, NOTHING_DECLARED)
        collator.collate(prepared(collator, [{**sample, "rewards": [0.5]} for sample in tiny.make_samples(3)]))
    assert [text for text in caplog.messages if "rewards of samples" in text] == [
        "dataset: rewards of samples is not read: rows contain only text, and the loss does not take it"
    ]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (
            {"weights": [1, 2, 0]},
            "its 'weights' contains 2, .* does not take; set weight to 0 or 1 in all turns, or fine-tune",
        ),
        ({"loss_weight": 0.5}, "its 'loss_weight' contains 0.5, .* does not take; set weight"),
        (
            {"advantages": [0, 0.5, 0.5]},
            "its 'advantages' contains 0, .* does not take; remove them, or set loss to one that",
        ),
        ({"loss_mask": [False, False, True]}, "its 'loss_mask' contains 0, .* does not take; remove them"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "position_ids": [0, 1, 2], "weights": [1.0] * 3}, None),
        ({"id": 7, "score": 0.5, "spans": [[0, 1], [1], []], "source": "web", "rewards": [0.5]}, None),
    ],
)
@pytest.mark.parametrize("has_tree", [False, True])
def test_numbers_that_decide_what_is_trained_are_refused_unless_the_loss_takes_them(values, error, has_tree):
    sample = {"tokens": [1, 2, 3], "labels": [-100, 2, 3], **values}
    collator = collator_of("packed", NOTHING_DECLARED, has_trees=has_tree)
    samples = [{"sequences": [sample]} if has_tree else sample]
    if error is None:
        prepared(collator, samples)
        return
    with pytest.raises(UnusedError, match=f"^sample 0 of dataset.*: {error}"):
        prepared(collator, samples)


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
def test_wrong_columns_are_named(weights, error):
    with pytest.raises(SampleError, match=f"^sample 0 of dataset: {error}"):
        prepared(collator_of("packed"), [{"tokens": [1, 2, 3], "labels": [1, 2, 3], "weights": weights}])


@pytest.mark.parametrize(("default", "weight"), [(1.0, 0.5), ([1.0, 1.0], [0.5, 0.25])])
def test_sequences_of_a_tree_have_their_columns_and_defaults(default, weight):
    """Of two answers behind a prompt, the first has no weights of its own; they may be vectors."""
    sequences = [
        {"tokens": [1, 2, 3], "labels": [-100, -100, 3]},
        {"tokens": [1, 2, 4], "labels": [-100, -100, 4], "weights": [default, default, weight]},
    ]
    row = row_of(collator_of("packed", has_trees=True), [{"sequences": sequences}])
    labels = row.targets.labels.flatten()[row.targets.positions].tolist()
    assert dict(zip(labels, row.targets.values["weights"].tolist(), strict=True)) == {3: default, 4: weight}
    assert row.counts["positions"] == 5  # the prompt's last token has a target in both


@pytest.mark.parametrize(
    ("declared", "ranks", "text"),
    [
        (
            Declaration({"advantages": None}, divisor="answers"),
            1,
            "loss: its divisor answers is no count; set it to a col",
        ),
        (Declaration(of_samples=["grade"]), 2, r"max_ranks_per_row=2: the loss takes values of samples \(grade\)"),
    ],
)
def test_what_a_loss_declares_in_vain_is_refused(declared, ranks, text):
    settings = DataSettings(microbatching="packed", max_ranks_per_row=ranks, max_tokens_per_microbatch=64)
    with pytest.raises(ConfigError, match=text):
        text_collator(settings, tiny.tiny_tokenizer(), tiny.IGNORE, LIMITS, declared=declared)


@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    [
        ("columns", {"labels": None}, "takes labels beside tokens and labels; rename it"),
        ("columns", ("advantages",), r".columns is \('advantages',\); set it to a mapping"),
        ("of_samples", "grades", ".of_samples is 'grades'; set it to a tuple of names"),
        ("divisor", 3, ".divisor is 3; set it to a name"),
    ],
)
def test_a_wrong_declaration_is_named(attribute, value, text):
    with pytest.raises(ValueError, match=f"^loss: Loss ?{text}"):
        declared_by(type("Loss", (), {attribute: value})())


def test_other_columns_and_values_of_the_same_tokens_are_another_content():
    def content(declared, has_tree, **values):
        sample = {"tokens": [1, 2, 3], "labels": [-100, 2, 3], **values}
        collator = collator_of("packed", declared, has_trees=has_tree)
        (made,) = prepared(collator, [{"sequences": [sample, sample]} if has_tree else sample])
        tokens, others = collator.content(made)
        return [column.tolist() for column in tokens], {key: np.asarray(others[key]).tolist() for key in ("a",)}

    for declared, values in (
        (Declaration({"a": None}), ([0, 0, 1], [0, 0, 2])),
        (Declaration(of_samples=["a"]), (1, 2)),
    ):
        for has_tree in (False, True):
            (tokens, first), (same, second) = (content(declared, has_tree, a=value) for value in values)
            assert tokens == same
            assert first != second
