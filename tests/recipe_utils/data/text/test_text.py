"""Labels become targets of the position before them, never across a border, padded or packed."""

from functools import partial

import pytest
import tiny
import torch
from torchtune.data import padded_collate_sft
from torchtune.datasets import PackedDataset

from recipe_utils.data.loader.plan import PLANS, MicrobatchCost
from recipe_utils.data.loader.samples import SampleError
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.data.text.collate import (
    collate_dummy,
    collate_microbatch,
    collate_packed_microbatch,
    num_real_tokens,
)
from recipe_utils.data.text.collator import TextCollator, check_sample
from recipe_utils.data.text.limits import ModelLimits
from recipe_utils.settings.problems import ConfigError

COLLATE = partial(padded_collate_sft, padding_idx=0, ignore_idx=tiny.IGNORE)
LIMITS = ModelLimits(tiny.VOCAB_SIZE, 64, MicrobatchCost())


def collate(samples, collate_fn=COLLATE):
    return collate_microbatch(samples, collate_fn, tiny.IGNORE)


def num_targets(sample):
    return sum(label != tiny.IGNORE for label in sample["labels"][1:])


def packed_rows(samples, split_across_pack=False):
    dataset = PackedDataset(
        tiny.Samples(samples), max_seq_len=64, split_across_pack=split_across_pack
    )
    return [dataset[i] for i in range(len(dataset))]


def test_padded_rows_have_the_label_of_the_next_position_as_target():
    samples = tiny.make_samples(9, num_without_targets=2)
    microbatch = collate(samples)
    labels = microbatch.targets.labels
    for row, sample in zip(labels.tolist(), samples, strict=True):
        expected = sample["labels"][1:]
        assert row == expected + [tiny.IGNORE] * (len(row) - len(expected))
    flat = labels.flatten().tolist()
    positions = [i for i, label in enumerate(flat) if label != tiny.IGNORE]
    assert microbatch.targets.positions.tolist() == positions
    assert set(microbatch.inputs) == {"tokens"}  # labels do not go to the model
    lengths = [len(sample["tokens"]) for sample in samples]
    assert microbatch.counts == {
        "target_tokens": len(positions),
        "real_tokens": sum(lengths),
        "positions": max(lengths) * len(lengths),
    }
    assert microbatch.inputs["tokens"].shape == (len(lengths), max(lengths))


def test_the_first_label_of_a_sample_is_never_counted():
    only_first = {"tokens": [1, 2, 3], "labels": [1, tiny.IGNORE, tiny.IGNORE]}
    assert collate([only_first]).counts["target_tokens"] == 0


@pytest.mark.parametrize("split_across_pack", [False, True])
def test_a_target_never_crosses_a_document_border(split_across_pack):
    rows = packed_rows(tiny.make_samples(20, mask_prompts=False), split_across_pack)
    microbatch = collate(rows)
    for row, targets in zip(rows, microbatch.targets.labels.tolist(), strict=True):
        labels, start = row["labels"].tolist(), 0
        for length in row["seq_lens"].tolist():
            end = start + length
            assert targets[start:end] == [*labels[start + 1 : end], tiny.IGNORE][:length]
            start = end
        assert start == len(targets)


class Asked:
    """What is known of samples: their numbers of targets as they were asked for."""

    def find(self, samples, num_targets):
        return [
            (len(sample["tokens"]), number)
            for sample, number in zip(samples, num_targets, strict=True)
        ]


@pytest.mark.parametrize("microbatching", ["in_order", "packed"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_known_of_samples_comes_with_their_targets(packed, microbatching):
    """As many rows of each sample as it has targets, one sample's after the other's."""
    dataset = tiny.tiny_dataset(None, 12, num_without_targets=2, mask_prompts=False, packed=packed)
    samples = [dataset[i] for i in range(len(dataset))]
    kind = TextCollator(
        DataSettings(microbatching=microbatching),
        tiny.tiny_tokenizer(),
        tiny.IGNORE,
        LIMITS,
        Asked(),
    )
    microbatch = kind.collate(samples)
    of_samples = microbatch.targets.teacher
    assert [length for length, _ in of_samples] == [len(sample["tokens"]) for sample in samples]
    assert sum(number for _, number in of_samples) == len(microbatch.targets.positions)
    for sample, (_, number) in zip(samples, of_samples, strict=True):
        assert number == len(kind.collate([sample]).targets.positions)


def test_rows_of_a_packed_dataset_keep_targets_and_documents_and_discount_padding():
    samples = tiny.make_samples(20, num_without_targets=3)
    rows = packed_rows(samples)
    microbatch = collate(rows)
    assert microbatch.counts["target_tokens"] == sum(num_targets(sample) for sample in samples)
    assert microbatch.counts["real_tokens"] == sum(len(sample["tokens"]) for sample in samples)
    assert microbatch.counts["positions"] > microbatch.counts["real_tokens"]
    for row, lengths in zip(rows, microbatch.inputs["document_lengths"], strict=True):
        assert lengths == [length for length in row["seq_lens"].tolist() if length]
        assert sum(lengths) == 64
    full = [{"tokens": list(range(1, 33)), "labels": [tiny.IGNORE] * 32}] * 2
    assert collate(packed_rows(full)).counts["real_tokens"] == 64


def documents_of(microbatch):
    """Tokens and targets of each document of a microbatch of one row."""
    (lengths,) = microbatch.inputs["document_lengths"]
    return [
        (tokens.tolist(), labels.tolist())
        for tokens, labels in zip(
            microbatch.inputs["tokens"][0].split(lengths),
            microbatch.targets.labels[0].split(lengths),
            strict=True,
        )
    ]


def test_a_packed_microbatch_is_its_samples_one_after_the_other():
    samples = tiny.make_samples(9, num_without_targets=2, mask_prompts=False)
    microbatch = collate_packed_microbatch(samples, tiny.IGNORE)
    assert documents_of(microbatch) == [
        (sample["tokens"], [*sample["labels"][1:], tiny.IGNORE]) for sample in samples
    ]
    positions = [i for sample in samples for i in range(len(sample["tokens"]))]
    assert microbatch.inputs["input_pos"].tolist() == [positions]
    assert microbatch.counts["positions"] == microbatch.counts["real_tokens"] == len(positions)
    assert microbatch.counts["target_tokens"] == sum(num_targets(sample) for sample in samples)


def test_a_row_is_padded_to_a_multiple_by_a_document_of_its_own():
    samples = tiny.make_samples(3)
    unpadded = collate_packed_microbatch(samples, tiny.IGNORE)
    num_real = unpadded.counts["real_tokens"]
    for multiple in (num_real + 7, (num_real + 7) // 2):
        padded = collate_packed_microbatch(
            samples, tiny.IGNORE, padding_idx=5, row_multiple=multiple
        )
        rest = -num_real % multiple
        assert documents_of(padded) == [
            *documents_of(unpadded),
            ([5] * rest, [tiny.IGNORE] * rest),
        ]
        assert (padded.counts["real_tokens"], padded.counts["positions"]) == (
            num_real,
            num_real + rest,
        )
    full = collate_packed_microbatch(samples, tiny.IGNORE, row_multiple=num_real)
    assert documents_of(full) == documents_of(unpadded)


@pytest.mark.parametrize("split_across_pack", [False, True])
def test_merged_rows_of_a_packed_dataset_lose_their_padding_and_nothing_else(split_across_pack):
    rows = packed_rows(tiny.make_samples(20, mask_prompts=False), split_across_pack)
    stacked = collate(rows)
    merged = collate_microbatch(rows, COLLATE, tiny.IGNORE, merge_packed_rows=True)
    assert (
        merged.counts["positions"] == merged.counts["real_tokens"] == stacked.counts["real_tokens"]
    )
    expected = {"tokens": [], "input_pos": [], "labels": []}
    for i, row in enumerate(rows):
        num_real = num_real_tokens(row, tiny.IGNORE)
        expected["tokens"] += stacked.inputs["tokens"][i, :num_real].tolist()
        expected["input_pos"] += stacked.inputs["input_pos"][i, :num_real].tolist()
        expected["labels"] += stacked.targets.labels[i, :num_real].tolist()
    assert merged.inputs["tokens"].tolist() == [expected["tokens"]]
    assert merged.inputs["input_pos"].tolist() == [expected["input_pos"]]
    assert merged.targets.labels.tolist() == [expected["labels"]]
    assert sum(merged.inputs["document_lengths"][0]) == merged.counts["positions"]


def test_samples_with_images_are_not_packed():
    with pytest.raises(ValueError, match="a sample has encoder_input"):
        collate_packed_microbatch([{**tiny.make_samples(1)[0], "encoder_input": 0}], tiny.IGNORE)


@pytest.mark.parametrize("kind", ["text", "packed", "with_image"])
def test_an_empty_microbatch_has_no_targets_and_counts_nothing(kind):
    sample = tiny.make_samples(1, mask_prompts=False, seed=3)[0]
    length, collate_fn = len(sample["tokens"]), COLLATE
    if kind == "packed":
        sample, length = packed_rows([sample])[0], 64
    if kind == "with_image":
        sample = {**sample, "image": torch.ones(3, 4, 4)}

        def collate_fn(samples):
            return {**COLLATE(samples), "images": torch.stack([s["image"] for s in samples])}

    microbatch = collate_dummy(sample, lambda samples: collate(samples, collate_fn), tiny.IGNORE)
    assert microbatch.counts == {}
    assert len(microbatch.targets.positions) == 0
    assert bool((microbatch.targets.labels == tiny.IGNORE).all())
    assert length > 1
    assert microbatch.inputs["tokens"].shape == (1, 1 if kind == "text" else length)
    assert ("images" in microbatch.inputs) == (kind == "with_image")


def test_an_empty_microbatch_leaves_its_sample_as_it_was():
    row = packed_rows(tiny.make_samples(3))[0]
    labels = row["labels"].clone()
    collate_dummy(row, collate, tiny.IGNORE)
    assert torch.equal(row["labels"], labels)


@pytest.mark.parametrize(
    "collate_fn",
    [
        lambda samples: {"tokens": COLLATE(samples)["tokens"]},
        lambda samples: {**COLLATE(samples), "labels": COLLATE(samples)["labels"][:, 1:]},
    ],
    ids=["no_labels", "shifted_labels"],
)
def test_a_collate_function_without_labels_for_every_token_is_refused(collate_fn):
    with pytest.raises(ValueError, match=r"collate_fn: .*'tokens': \(2, \d+\)"):
        collate(tiny.make_samples(2), collate_fn)


# ---- The collator -------------------------------------------------------------------------------


def text_samples(name, max_tokens=80, tokenizer=None, **limits):
    settings = DataSettings(
        batch_size=2,
        microbatching=name,
        max_tokens_per_microbatch=None if name == "in_order" else max_tokens,
    )
    tokenizer = tokenizer or tiny.tiny_tokenizer()
    return TextCollator(settings, tokenizer, tiny.IGNORE, LIMITS._replace(**limits))


def microbatches(name, **limits):
    text, samples = text_samples(name, **limits), tiny.make_samples(9)
    (parts,) = text.plan([text.length(sample) for sample in samples], 1)
    return [text.collate([samples[i] for i in part]) for part in parts]


@pytest.mark.parametrize("name", PLANS)
def test_all_targets_are_in_the_microbatches_of_every_plan(name):
    made = microbatches(name)
    expected = sum(num_targets(sample) for sample in tiny.make_samples(9))
    assert sum(m.counts["target_tokens"] for m in made) == expected
    assert all(m.counts["positions"] <= 80 for m in made)
    padding = sum(m.counts["positions"] - m.counts["real_tokens"] for m in made)
    assert (padding == 0) == (name == "packed")
    text = text_samples(name)
    assert set(made[0].counts) == set(text.counts)
    assert text.dummy(tiny.make_samples(1)[0]).counts == {}


@pytest.mark.parametrize(
    ("num_row_lengths", "row_multiple", "allowed"),
    [
        (1, None, {80}),
        (4, None, {20, 40, 60, 80}),
        (None, 16, range(0, 256, 16)),
        (3, 16, {32, 64, 96}),
    ],
)
def test_packed_rows_have_the_lengths_that_the_model_asks_for(
    num_row_lengths, row_multiple, allowed
):
    limits = {"num_row_lengths": num_row_lengths, "row_multiple": row_multiple}
    made = microbatches("packed", **limits)
    lengths = {m.counts["positions"] for m in made}
    assert lengths <= set(allowed)
    assert max(lengths) <= text_samples("packed", **limits).longest_row
    assert all(sum(m.inputs["document_lengths"][0]) == m.counts["positions"] for m in made)


@pytest.mark.parametrize("name", ["least_padding", "packed"])
def test_a_microbatch_holds_the_batch_size_times_the_longest_sample_unless_told(name):
    tokenizer = tiny.tiny_tokenizer(max_seq_len=40)
    by_default, told = (
        max(m.counts["positions"] for m in microbatches(name, max_tokens=most, tokenizer=tokenizer))
        for most in (None, 160)
    )
    assert by_default <= 80 < told <= 160


@pytest.mark.parametrize("limits", [{}, {"other_attention": "Gemma2Attention"}])
def test_rows_of_a_packed_dataset_are_merged_where_the_model_can_keep_documents_apart(limits):
    rows = packed_rows(tiny.make_samples(20))
    merged = text_samples("in_order", **limits).collate(rows[:2])
    assert len(merged.inputs["tokens"]) == (2 if limits else 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"other_attention": "Gemma2Attention"},
            "microbatching=packed: the model's Gemma2Attention",
        ),
        (
            {"max_tokens": None, "tokenizer": tiny.TinyTokenizer(None), "num_row_lengths": 1},
            "microbatching=packed: without max_tokens_per_microbatch",
        ),
    ],
    ids=["attention", "row_length"],
)
def test_packing_that_cannot_be_is_refused_by_key(arguments, words):
    with pytest.raises(ConfigError, match=words):
        text_samples("packed", **arguments)
    assert text_samples("least_padding", **arguments).length({"tokens": [1, 2]}) == 2


@pytest.mark.parametrize(
    ("max_tokens", "max_seq_len", "warns"),
    [(63, 64, True), (64, 64, False), (64, None, True), (None, None, False)],
)
def test_samples_that_may_exceed_a_microbatch_are_warned_of(max_tokens, max_seq_len, warns):
    tokenizer = tiny.TinyTokenizer(max_seq_len)
    told = list(text_samples("least_padding", max_tokens, tokenizer).warnings())
    assert len(told) == warns
    assert all(f"max_tokens_per_microbatch={max_tokens}: " in text for text in told)


@pytest.mark.parametrize(
    ("microbatching", "settings", "warns"),
    [
        ("least_padding", {}, True),
        ("least_padding", {"microbatch_overhead_slots": 300.0}, False),
        ("packed", {}, False),
        ("in_order", {}, False),
    ],
)
def test_plans_by_estimated_costs_are_warned_of(microbatching, settings, warns):
    data = DataSettings(microbatching=microbatching, batch_size=2, **settings)
    tokenizer = tiny.TinyTokenizer(64)
    for are_estimated in (False, True):
        limits = LIMITS._replace(costs_are_estimated=are_estimated)
        told = list(TextCollator(data, tokenizer, tiny.IGNORE, limits).warnings())
        assert len(told) == (warns and are_estimated)
        assert all("microbatch_overhead_slots sets it" in text for text in told)


# ---- Samples that cannot be trained on ------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"tokens": [1, 2]}, "has no 'labels'"),
        ({"labels": [1, 2]}, "has no 'tokens'"),
        ({"tokens": [], "labels": []}, "has no tokens"),
        ({"tokens": [1, 2, 3], "labels": [1, 2]}, "2 labels for 3 tokens"),
        ({"tokens": [1] * 65, "labels": [1] * 65}, "65 tokens .* max_seq_len=64"),
        ({"tokens": [1, tiny.VOCAB_SIZE], "labels": [1, 1]}, "token 67 is outside .* 67"),
        ({"tokens": [1, 1], "labels": [1, 99]}, "label 99 is outside"),
        ({"tokens": [1, 1], "labels": [1, -1]}, "label -1 is outside"),
        (None, "it is a NoneType, not a mapping with tokens, labels"),
        ([1, 2], "it is a list, not a mapping"),
        ({"tokens": None, "labels": None}, "its 'tokens' is not a list of integers but None"),
        ({"tokens": 7, "labels": 7}, "its 'tokens' is not a list of integers but 7"),
        ({"tokens": ["a", "b"], "labels": [1, 1]}, r"its 'tokens' is not a list .* \['a', 'b'\]"),
        ({"tokens": [1, 2], "labels": [1, 2**63]}, "its 'labels' is not a list of integers"),
        ({"tokens": [[1], [1, 2]], "labels": [1, 1]}, "its 'tokens' is not a list of integers"),
        (
            {"tokens": torch.ones(1, 2).long(), "labels": [1]},
            "its 'tokens' is not a list of integers",
        ),
        ({"tokens": [1, 1], "labels": [True, False]}, "its 'labels' is not a list of integers"),
        ({"tokens": torch.ones(2).bfloat16(), "labels": [1, 1]}, "its 'tokens' is not a list"),
    ],
)
def test_an_untrainable_sample_is_refused_by_name(sample, message):
    with pytest.raises(SampleError, match=f"^sample 17 of dataset: .*{message}"):
        check_sample(sample, "sample 17 of dataset", tiny.IGNORE, LIMITS)


@pytest.mark.parametrize("make", [list, torch.tensor])
def test_samples_at_the_limits_are_accepted(make):
    tokens = [0, tiny.VOCAB_SIZE - 1] * 32
    for labels in (tokens, [tiny.IGNORE] * 64):
        sample = {"tokens": make(tokens), "labels": make(labels)}
        check_sample(sample, "sample", tiny.IGNORE, LIMITS)


@pytest.mark.parametrize("make", [list, torch.tensor])
def test_samples_are_checked_by_the_limits_of_the_model(make):
    text = text_samples("in_order", vocab_size=9, max_seq_len=3)
    text.prepare({"tokens": make([1, 8, 2]), "labels": make([1, 8, tiny.IGNORE])}, "sample")
    for tokens in ([1, 9], [1, 1, 1, 1]):
        with pytest.raises(SampleError, match=r"^sample 3: "):
            text.prepare({"tokens": make(tokens), "labels": make(tokens)}, "sample 3")


def test_validation_has_a_batch_size_of_its_own():
    """Three samples of 64 tokens in a row instead of two; known outputs as in training."""
    settings = DataSettings(batch_size=2, batch_size_val=3, microbatching="least_padding")
    arguments = (settings, tiny.tiny_tokenizer(max_seq_len=64), tiny.IGNORE, LIMITS)
    for known in (None, Asked()):
        training = TextCollator(*arguments, known)
        validation = training.for_validation()
        lengths = [64] * 6
        assert [list(map(len, each.plan(lengths, 1)[0])) for each in (training, validation)] == [
            [2, 2, 2],
            [3, 3],
        ]
        assert training.longest_row == validation.longest_row
        teacher = validation.collate(tiny.make_samples(2)).targets.teacher
        assert (teacher is None) == (known is None)
