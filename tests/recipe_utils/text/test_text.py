"""Labels become targets of the position before them, never across a border, padded or packed."""

import pickle
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from torch.utils._pytree import tree_leaves
from torchtune.data import padded_collate_sft
from torchtune.datasets import PackedDataset

from recipe_utils.data.collators import text_collator
from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.text.limits import ModelLimits, PackedAttention
from recipe_utils.text.reader import TextReader, check_sample
from recipe_utils.text.row_tensors import collated, padded
from recipe_utils.update_steps.objective import Declaration
from recipe_utils.update_steps.samples import SampleError
from recipe_utils.update_steps.settings import DataSettings

IGNORE = tiny.IGNORE
COLLATE = partial(padded_collate_sft, padding_idx=0, ignore_idx=IGNORE)
LIMITS = ModelLimits(tiny.VOCAB_SIZE, 64, MicrobatchCost())
SPLIT = pytest.mark.parametrize("split_across_pack", [False, True])


def collate(samples):
    return padded(tiny.read(samples), TextReader(IGNORE))


def num_targets(samples):
    return sum(label != IGNORE for sample in samples for label in sample["labels"][1:])


def packed_rows(samples, split_across_pack=False):
    samples = tiny.Samples(samples)
    return list(PackedDataset(samples, max_seq_len=64, split_across_pack=split_across_pack))


def test_padded_rows_have_the_label_of_the_next_position_as_target():
    samples = tiny.make_samples(9, num_without_targets=2)
    samples.append({"tokens": [1, 2, 3], "labels": [1, IGNORE, IGNORE]})  # the first never counts
    microbatch = collate(samples)
    labels = microbatch.targets.labels
    for row, sample in zip(labels.tolist(), samples, strict=True):
        expected = sample["labels"][1:]
        assert row == expected + [IGNORE] * (len(row) - len(expected))
    positions = [i for i, label in enumerate(labels.flatten().tolist()) if label != IGNORE]
    assert microbatch.targets.positions.tolist() == positions
    assert set(microbatch.inputs) == {"tokens"}  # labels do not go to the model
    lengths = [len(sample["tokens"]) for sample in samples]
    assert microbatch.counts == {
        "target_tokens": num_targets(samples),
        "real_tokens": sum(lengths),
        "positions": max(lengths) * len(lengths),
        "shared_tokens": 0,
    }
    assert microbatch.inputs["tokens"].shape == (len(lengths), max(lengths))


@SPLIT
def test_a_target_never_crosses_a_document_border(split_across_pack):
    rows = packed_rows(tiny.make_samples(20, mask_prompts=False), split_across_pack)
    microbatch = collate(rows)
    for i, row in enumerate(rows):
        lengths = [length for length in row["seq_lens"].tolist() if length]
        assert microbatch.inputs["document_lengths"][i] == lengths
        targets = microbatch.targets.labels[i].split(lengths)
        for labels, found in zip(row["labels"].split(lengths), targets, strict=True):
            assert found.tolist() == [*labels[1:].tolist(), IGNORE]


def test_padding_of_a_packed_dataset_is_not_counted():
    samples = tiny.make_samples(20, num_without_targets=3)
    counts = collate(packed_rows(samples)).counts
    assert counts["target_tokens"] == num_targets(samples)
    assert counts["real_tokens"] == sum(len(sample["tokens"]) for sample in samples)
    assert counts["positions"] > counts["real_tokens"]
    full = [{"tokens": list(range(1, 33)), "labels": [IGNORE] * 32}] * 2
    assert collate(packed_rows(full)).counts["real_tokens"] == 64


def documents_of(microbatch):
    """Tokens and targets of each document of a microbatch of one row."""
    (lengths,) = microbatch.inputs["document_lengths"]
    (tokens,), (labels,) = microbatch.inputs["tokens"], microbatch.targets.labels
    parts = zip(tokens.split(lengths), labels.split(lengths), strict=True)
    return [(tokens.tolist(), labels.tolist()) for tokens, labels in parts]


def test_a_packed_microbatch_is_its_samples_one_after_the_other():
    samples = tiny.make_samples(9, num_without_targets=2, mask_prompts=False)
    microbatch = tiny.packed_row(samples)
    assert documents_of(microbatch) == [(sample["tokens"], [*sample["labels"][1:], IGNORE]) for sample in samples]
    positions = [i for sample in samples for i in range(len(sample["tokens"]))]
    assert microbatch.inputs["input_pos"].tolist() == [positions]
    assert microbatch.counts["positions"] == microbatch.counts["real_tokens"] == len(positions)
    assert microbatch.counts["target_tokens"] == num_targets(samples)


def test_a_row_is_padded_to_a_multiple_by_a_document_of_its_own():
    samples = tiny.make_samples(3)
    unpadded = tiny.packed_row(samples)
    num_real = unpadded.counts["real_tokens"]
    for multiple in (num_real + 7, (num_real + 7) // 2, num_real):
        padded = tiny.packed_row(samples, pad_id=5, row_multiple=multiple)
        rest = -num_real % multiple
        padding = [([5] * rest, [IGNORE] * rest)] if rest else []
        assert documents_of(padded) == documents_of(unpadded) + padding
        assert padded.counts["real_tokens"] == num_real
        assert padded.counts["positions"] == num_real + rest


@SPLIT
def test_merged_rows_of_a_packed_dataset_lose_their_padding_and_nothing_else(split_across_pack):
    rows = packed_rows(tiny.make_samples(20, mask_prompts=False), split_across_pack)
    stacked = collate(rows)
    merged = tiny.packed_row(rows)
    num_real = [int((sample.owners_and_ends()[0] >= 0).sum()) for sample in tiny.read(rows)]

    def without_padding(tensor):
        return torch.cat([row[:n] for row, n in zip(tensor, num_real, strict=True)])[None]

    for name in ("tokens", "input_pos"):
        assert torch.equal(merged.inputs[name], without_padding(stacked.inputs[name]))
    assert torch.equal(merged.targets.labels, without_padding(stacked.targets.labels))
    assert sum(merged.inputs["document_lengths"][0]) == merged.counts["positions"]
    assert merged.counts["positions"] == merged.counts["real_tokens"] == sum(num_real)
    assert stacked.counts["real_tokens"] == sum(num_real)


def test_every_target_has_the_position_of_its_sample():
    """Rows are padded, packed, packed and padded, or of a packed dataset with cut documents."""
    samples = tiny.make_samples(20, num_without_targets=3, mask_prompts=False)
    for rows in (samples, packed_rows(samples, split_across_pack=True)):
        alone = [tiny.packed_row([row]).counts["target_tokens"] for row in rows]
        expected = [i for i, n in enumerate(alone) for _ in range(n)]
        packed = [tiny.packed_row(rows, row_multiple=multiple) for multiple in (None, 128)]
        for microbatch in (collate(rows), *packed):
            targets = microbatch.targets
            assert targets.of_targets(targets.samples).tolist() == expected
            is_real = (targets.owners >= 0).flatten()
            assert is_real.sum() == microbatch.counts["real_tokens"]
            # The last token of a sequence is real, and no longer owned by it one position later.
            following = torch.cat([targets.owners.flatten(), torch.tensor([-1])])[targets.ends + 1]
            assert is_real[targets.ends].all()
            assert not (following == torch.arange(len(targets.ends))).any()


def test_targets_have_no_sample_where_a_collate_function_joins_rows():
    collator = text_collator(DataSettings(collate_fn="tiny.collate_joined"), tiny.tiny_tokenizer(), IGNORE, LIMITS)
    (joined,) = collator.collate([collator.prepare(sample, "sample") for sample in tiny.make_samples(4)])
    assert joined.targets.labels.shape[0] == 1
    assert joined.targets.samples is joined.targets.owners is joined.targets.ends is None


def test_rows_of_a_users_collate_function_have_what_those_of_the_default_have():
    samples = tiny.make_samples(4, has_weights=True)
    read = tiny.read(samples, columns={"weights": 1.0})
    reader = TextReader(IGNORE, columns={"weights": 1.0})
    own, expected = collated(read, reader, COLLATE), padded(read, reader)
    assert own.counts == expected.counts
    assert torch.equal(own.inputs["tokens"], expected.inputs["tokens"])
    for mine, its in zip(tree_leaves(own.targets), tree_leaves(expected.targets), strict=True):
        assert torch.equal(mine, its) if isinstance(its, torch.Tensor) else mine == its


def test_samples_with_images_are_not_packed():
    with pytest.raises(ValueError, match="a sample has encoder_input"):
        tiny.packed_row([{**tiny.make_samples(1)[0], "encoder_input": 0}])


@pytest.mark.parametrize("kind", ["text", "packed", "with_image"])
def test_a_dummy_microbatch_has_no_targets_and_counts_nothing(kind):
    sample = tiny.make_samples(1, mask_prompts=False, seed=3)[0]
    length, collate_fn = len(sample["tokens"]), DataSettings.collate_fn
    if kind == "packed":
        sample, length = packed_rows([sample])[0], 64
    if kind == "with_image":
        sample, collate_fn = {**sample, "image": torch.ones(3, 4, 4)}, "tiny.collate_images"
    takes = Declaration({"weights": None}, ["rewards"], "weights", totals=["weights"])
    limits = LIMITS._replace(attentions=(PackedAttention(other_attention="Gemma2Attention"),))
    settings = DataSettings(collate_fn=collate_fn)
    collator = text_collator(settings, tiny.tiny_tokenizer(), IGNORE, limits, declared=takes)
    sample = {**sample, "weights": [1.0] * len(sample["labels"]), "rewards": [1.0, 2.0]}
    prepared = collator.prepare(sample, "sample 0")
    labels = prepared.labels.copy()
    microbatch = collator.dummy(prepared)
    assert np.array_equal(prepared.labels, labels)  # the sample is unchanged
    assert microbatch.counts == {}
    targets = microbatch.targets
    assert (targets.owners == -1).all()
    assert (targets.values["weights"].shape, targets.of_samples["rewards"].shape) == ((0,), (0, 2))
    assert len(targets.samples) == len(targets.items) == len(targets.ends) == 0
    assert len(microbatch.targets.positions) == 0
    assert bool((microbatch.targets.labels == IGNORE).all())
    assert length > 1
    assert microbatch.inputs["tokens"].shape == (1, 1 if kind == "text" else length)
    assert ("encoder_input" in microbatch.inputs) == (kind == "with_image")


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
        collated(tiny.read(tiny.make_samples(2)), TextReader(IGNORE), collate_fn)


# ---- The collator -------------------------------------------------------------------------------


def make_collator(name, max_tokens=80, max_seq_len=64, **limits):
    max_tokens = None if name == "in_order" else max_tokens
    settings = DataSettings(batch_size=2, microbatching=name, max_tokens_per_microbatch=max_tokens)
    tokenizer = tiny.TinyTokenizer(max_seq_len)
    return text_collator(settings, tokenizer, IGNORE, LIMITS._replace(**limits))


def microbatches(name, **options):
    collator, samples = make_collator(name, **options), tiny.read(tiny.make_samples(9))
    (parts,) = collator.layout.plan([collator.length(sample) for sample in samples], 1)
    return [row for part in parts for row in collator.collate([samples[i] for i in part])]


@pytest.mark.parametrize("name", ["in_order", "least_padding", "packed"])
def test_all_targets_are_in_the_microbatches_of_every_plan(name):
    made = microbatches(name)
    assert sum(m.counts["target_tokens"] for m in made) == num_targets(tiny.make_samples(9))
    assert all(m.counts["positions"] <= 80 for m in made)
    padding = sum(m.counts["positions"] - m.counts["real_tokens"] for m in made)
    assert (padding == 0) == (name == "packed")
    collator = make_collator(name)
    assert set(collator.counts) <= set(made[0].counts)
    assert collator.dummy(*tiny.read(tiny.make_samples(1))).counts == {}


@pytest.mark.parametrize(
    ("kernel", "row_multiple", "allowed"),
    [("flex", None, {20, 40, 60, 80}), ("varlen", 16, range(0, 256, 16)), ("flex", 16, {32, 64, 96})],
)
def test_packed_rows_have_the_lengths_of_the_model(kernel, row_multiple, allowed):
    attention = PackedAttention(kernel)
    limits = {"attentions": (attention,), "row_multiple": row_multiple}
    made = microbatches("packed", **limits)
    lengths = {m.counts["positions"] for m in made}
    assert lengths <= set(allowed)
    assert max(lengths) <= make_collator("packed", **limits).longest_row
    assert all(sum(m.inputs["document_lengths"][0]) == m.counts["positions"] for m in made)


@pytest.mark.parametrize(("kernel", "row_multiple"), [("varlen", 16), ("flex", None), ("flex", 16)])
def test_rows_of_another_bound_have_at_most_so_many_positions_with_padding(kernel, row_multiple):
    attention = PackedAttention(kernel)
    collator = make_collator("packed", attentions=(attention,), row_multiple=row_multiple)
    for bound in range(64, 200):
        other = collator.with_budget(bound)
        kept = other.bounds.max_tokens
        assert bound - 48 < kept <= bound
        assert kept % other.layout.row_multiple == 0
    assert collator.with_budget(7).bounds.max_tokens <= 7


@pytest.mark.parametrize("name", ["least_padding", "packed"])
def test_a_microbatch_has_batch_size_times_max_seq_len_positions_by_default(name):
    by_default, given = (
        max(m.counts["positions"] for m in microbatches(name, max_tokens=most, max_seq_len=40)) for most in (None, 160)
    )
    assert by_default <= 80 < given <= 160


@pytest.mark.parametrize("other", [None, "Gemma2Attention"])
def test_rows_of_a_packed_dataset_are_merged_if_the_model_supports_documents(other):
    rows = packed_rows(tiny.make_samples(20))
    attentions = (PackedAttention(other_attention=other),)
    (merged,) = make_collator("in_order", attentions=attentions).collate(tiny.read(rows[:2]))
    assert len(merged.inputs["tokens"]) == (2 if other else 1)


@pytest.mark.parametrize(
    ("max_tokens", "max_seq_len", "warns"), [(63, 64, True), (64, 64, False), (64, None, True), (None, None, False)]
)
def test_samples_that_may_exceed_a_microbatch_are_warned_of(max_tokens, max_seq_len, warns):
    warnings = list(make_collator("least_padding", max_tokens, max_seq_len).remarks())
    assert len(warnings) == warns
    assert all(f"max_tokens_per_microbatch={max_tokens}: " in text for text in warnings)


def test_validation_has_a_batch_size_of_its_own():
    """Three samples of 64 tokens per microbatch instead of two."""
    settings = DataSettings(batch_size=2, batch_size_val=3, microbatching="least_padding")
    training = text_collator(settings, tiny.tiny_tokenizer(), IGNORE, LIMITS)
    validation = replace(training, settings=settings.of_validation())
    assert [len(part) for part in training.layout.plan([64] * 6, 1)[0]] == [2, 2, 2]
    assert [len(part) for part in validation.layout.plan([64] * 6, 1)[0]] == [3, 3]
    assert training.longest_row == validation.longest_row


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
        ({"tokens": 7, "labels": 7}, "its 'tokens' is not a list of integers but 7"),
        ({"tokens": ["a", "b"], "labels": [1, 1]}, r"its 'tokens' is not a list .* \['a', 'b'\]"),
        ({"tokens": [1, 2], "labels": [1, 2**63]}, "its 'labels' is not a list of integers"),
        ({"tokens": [[1], [1, 2]], "labels": [1, 1]}, "its 'tokens' is not a list of integers"),
        ({"tokens": torch.ones(1, 2).long(), "labels": [1]}, "its 'tokens' is not a list"),
        ({"tokens": [1, 1], "labels": [True, False]}, "its 'labels' is not a list of integers"),
        ({"tokens": torch.ones(2).bfloat16(), "labels": [1, 1]}, "its 'tokens' is not a list"),
    ],
)
def test_an_untrainable_sample_is_refused_by_name(sample, message):
    with pytest.raises(SampleError, match=f"^sample 17 of dataset: .*{message}"):
        check_sample(sample, "sample 17 of dataset", IGNORE, LIMITS)


@pytest.mark.parametrize("make", [list, torch.tensor])
def test_samples_are_checked_by_the_limits_of_the_model(make):
    limits = LIMITS._replace(vocab_size=9, max_seq_len=3)
    collator = text_collator(DataSettings(), SimpleNamespace(pad_id=0), IGNORE, limits)
    for labels in ([0, 8, 8], [IGNORE] * 3):
        collator.prepare({"tokens": make([0, 8, 8]), "labels": make(labels)}, "sample")
    for tokens in ([1, 9], [1, 1, 1, 1]):
        with pytest.raises(SampleError, match=r"^sample 3: "):
            collator.prepare({"tokens": make(tokens), "labels": make(tokens)}, "sample 3")


@pytest.mark.parametrize("name", ["in_order", "least_padding", "packed"])
def test_every_plan_takes_tokens_of_uint16_and_refuses_positions(name):
    collator, (sample,) = make_collator(name), tiny.make_samples(1, mask_prompts=False)
    (expected,) = collator.collate([collator.prepare(sample, "sample 0")])
    for make in (np.uint16, lambda ids: list(np.uint16(ids))):
        ids = {key: make(sample[key]) for key in ("tokens", "labels")}
        (found,) = collator.collate([collator.prepare(ids, "sample 0")])
        torch.testing.assert_close(found.inputs["tokens"], expected.inputs["tokens"])
        torch.testing.assert_close(found.targets.labels, expected.targets.labels)
    with pytest.raises(SampleError, match="sample 3: it has 'input_pos'"):
        collator.prepare({**sample, "input_pos": sample["tokens"]}, "sample 3")


def test_samples_travel_as_arrays_but_a_user_s_own_collate_fn_gets_lists():
    tokens = list(range(1, 65))
    sample = {"tokens": tokens, "labels": list(np.array(tokens)), "mask": [False] * 64}
    prepared = make_collator("in_order").prepare(sample, "sample 0")
    assert (type(prepared.tokens), type(prepared.labels), prepared.others) == (np.ndarray, np.ndarray, {})
    assert len(pickle.dumps(prepared)) <= 16 * 64 + 900
    own = DataSettings(collate_fn="tiny.collate_images")
    collator = text_collator(own, tiny.tiny_tokenizer(), IGNORE, LIMITS)
    assert collator.prepare(sample, "sample 0").others == {key: sample[key] for key in ("tokens", "labels")}
