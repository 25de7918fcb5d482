"""Pairs become microbatches with every target of each answer once, after its own tokens."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from forests import sequences_of
from hypothesis import given
from hypothesis import strategies as st
from torchtune.data import padded_collate_dpo

from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.preference.pairs import mask_shared_turns, pair_collator
from recipe_utils.text.limits import ModelLimits
from recipe_utils.update_steps.samples import SampleError, SkippedSampleError
from recipe_utils.update_steps.settings import DataSettings

LIMITS = ModelLimits(tiny.VOCAB_SIZE, 64, MicrobatchCost())
SIDES = ("chosen", "rejected")
LAYOUTS = [("in_order", None), ("packed", True), ("packed", False)]


def collator_of(microbatching="packed", prefix_sharing=None, limits=LIMITS, **settings):
    data = DataSettings(microbatching=microbatching, **settings)
    return pair_collator(data, tiny.tiny_tokenizer(), limits, prefix_sharing)


def prepared(collator, pairs):
    return [collator.prepare(pair, f"sample {i} of dataset") for i, pair in enumerate(pairs)]


def pair(chosen, rejected, masked=1):
    labels = [[tiny.IGNORE] * masked + list(side[masked:]) for side in (chosen, rejected)]
    return {
        "chosen_input_ids": chosen, "chosen_labels": labels[0],
        "rejected_input_ids": rejected, "rejected_labels": labels[1],
    }  # fmt: skip


answers = st.lists(st.integers(1, 3), min_size=2, max_size=12)


@given(answers, answers, st.lists(st.booleans(), min_size=12, max_size=12))
def test_turns_that_both_sides_share_are_masked_but_for_the_last(chosen, rejected, are_targets):
    """The answers' common first tokens are targets of both."""
    sample = pair(chosen, rejected, masked=0)
    for side in SIDES:
        ids = sample[f"{side}_input_ids"]
        masked = [t if m else tiny.IGNORE for t, m in zip(ids[:-1], are_targets, strict=False)]
        sample[f"{side}_labels"] = [*masked, ids[-1]]
    tokens, labels = ([np.array(sample[f"{side}_{key}"]) for side in SIDES] for key in ("input_ids", "labels"))
    mask_shared_turns(tokens, labels)
    expected = tiny.without_shared_turns(sample)
    assert [ids.tolist() for ids in labels] == [expected[f"{side}_labels"] for side in SIDES]


def targets_read_back(microbatch):
    """Returns (tokens up to the target, target) of each pair and side, from the microbatch alone."""
    inputs, targets = microbatch.inputs, microbatch.targets
    tokens, labels, owners = (each.flatten().tolist() for each in (inputs["tokens"], targets.labels, targets.owners))
    length, found = targets.labels.size(1), []
    if "document_lengths" in inputs:
        paths = [*sequences_of(inputs["document_lengths"][0])]
        positions = inputs["input_pos"][0].tolist()
        assert all([positions[i] for i in path] == list(range(len(path))) for path in paths)
    else:
        paths = [list(range(start, start + length)) for start in range(0, len(tokens), length)]
    for sequence, end in enumerate(targets.ends.tolist()):
        path = next(path[: path.index(end) + 1] for path in paths if end in path)
        places = [(n, i) for n, i in enumerate(path) if owners[i] == sequence and labels[i] != tiny.IGNORE]
        found.append([([tokens[i] for i in path[: n + 1]], labels[i]) for n, i in places])
    # What chosen and rejected have in common is a part of chosen's sequence alone.
    numbers = targets.of_samples["common_tokens"].tolist()
    rejected = [
        chosen[:number] + own for chosen, own, number in zip(found[::2], found[1::2], numbers[::2], strict=True)
    ]
    return list(zip(found[::2], rejected, strict=True))


@pytest.mark.parametrize("pair_kind", tiny.PAIR_KINDS)
@pytest.mark.parametrize(("microbatching", "sharing"), LAYOUTS)
def test_every_target_stands_behind_its_own_tokens(microbatching, sharing, pair_kind):
    pairs = tiny.make_pairs(9, pair_kind)
    collator = collator_of(microbatching, sharing)
    (microbatch,) = collator.collate(prepared(collator, pairs))
    pairs = map(tiny.without_shared_turns, pairs)
    for sample, of_sides in zip(pairs, targets_read_back(microbatch), strict=True):
        for side, found in zip(SIDES, of_sides, strict=True):
            ids, labels = sample[f"{side}_input_ids"], sample[f"{side}_labels"]
            targets = [(ids[:i], label) for i, label in enumerate(labels) if label != tiny.IGNORE]
            assert found == [(before, label) for before, label in targets if before]


@pytest.mark.parametrize("pair_kind", tiny.PAIR_KINDS)
def test_counts_do_not_depend_on_the_layout_but_for_slots_and_what_is_shared(pair_kind):
    pairs = tiny.make_pairs(9, pair_kind)
    of_layouts = []
    for layout in LAYOUTS:
        collator = collator_of(*layout)
        counts = dict(collator.collate(prepared(collator, pairs))[0].counts)
        assert {*counts} == {*collator.counts}
        num_shared, slots = counts.pop("shared_tokens"), counts.pop("positions")
        if layout[0] == "packed":
            assert slots == counts["real_tokens"] - num_shared
        assert (num_shared > 0) == (layout[1] is True and pair_kind != "nothing_common")
        of_layouts.append(counts)
    assert of_layouts[0] == of_layouts[1] == of_layouts[2]
    targets = {
        side: sum(
            label != tiny.IGNORE for p in map(tiny.without_shared_turns, pairs) for label in p[f"{side}_labels"][1:]
        )
        for side in SIDES
    }
    assert of_layouts[0]["chosen_tokens"] == targets["chosen"]
    assert of_layouts[0]["target_tokens"] == sum(targets.values())
    assert of_layouts[0]["pairs"] == 9


def test_padded_rows_are_those_of_torchtune_in_another_order():
    pairs = tiny.make_pairs(5)
    tokens, labels = padded_collate_dpo(pairs, padding_idx=0, ignore_idx=tiny.IGNORE)
    collator = collator_of("in_order")
    (microbatch,) = collator.collate(prepared(collator, pairs))
    order = [5, 0, 6, 1, 7, 2, 8, 3, 9, 4]
    assert torch.equal(microbatch.inputs["tokens"], tokens[order])
    assert torch.equal(microbatch.targets.labels[:, :-1], labels[order, 1:])


def test_lengths_are_what_a_pair_takes_in_a_row():
    for microbatching, sharing in LAYOUTS:
        collator = collator_of(microbatching, sharing)
        for sample in prepared(collator, tiny.make_pairs(20, "alike_beginnings")):
            tokens = collator.collate([sample])[0].inputs["tokens"]
            assert collator.length(sample) == tokens.shape[1]


@given(st.integers(1, 4), st.sampled_from(["in_order", "least_padding", "packed"]), st.integers(0, 20))
def test_every_pair_is_in_one_microbatch_of_one_rank(num_ranks, microbatching, num_pairs):
    bound = {} if microbatching == "in_order" else {"max_tokens_per_microbatch": 90}
    collator = collator_of(microbatching, batch_size=2, **bound)
    samples = prepared(collator, tiny.make_pairs(num_pairs, seed=num_pairs))
    planned = collator.layout.plan([collator.length(sample) for sample in samples], num_ranks)
    assert len(planned) == num_ranks
    parts = [part for of_rank in planned for part in of_rank]
    assert sorted(i for part in parts for i in part) == list(range(num_pairs))
    for part in parts if bound else ():
        tokens = collator.collate([samples[i] for i in part])[0].inputs["tokens"]
        assert tokens.numel() <= 90 or len(part) == 1


def test_an_answer_has_a_fingerprint_of_all_its_tokens_and_labels():
    own = pair([1, 2, 3], [1, 2, 4])
    others = [pair([1, 2, 5], [1, 2, 6]), pair([1, 2, 3], [1, 2, 4], masked=2), pair([1, 2, 3, 1], [2, 4])]
    prepare = pickle.loads(pickle.dumps(collator_of().prepare))  # as in a worker
    again = [pair([1, 2, 4], [1, 2, 3]), pair([1, 2, 3], np.array([1, 2, 4]))]
    samples = prepared(SimpleNamespace(prepare=prepare), [own, *others, *again])
    rows = collator_of().collate(samples)[0].targets.of_samples["fingerprint"].numpy()
    fingerprints = [row.tobytes() for row in rows]
    assert [len(each) for each in fingerprints] == [16] * 12
    assert len({*fingerprints[:8]}) == 8
    assert fingerprints[8:] == [fingerprints[1], fingerprints[0], fingerprints[0], fingerprints[1]]


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        ({"chosen_input_ids": [1, 2]}, "sample 3: it has no 'chosen_labels', only"),
        (pair([1, 2], [1, 3]) | {"rejected_labels": [1]}, "sample 3, rejected: 1 labels for 2 tokens"),
        (pair(["a", "b"], [1, 3]), "sample 3: its 'chosen_input_ids' is no"),
        (
            pair([1, 2], [1, 3]) | {"weight": 0.5},
            "sample 3, chosen: its 'weight' contains 0.5, which this loss does not take",
        ),
    ],
)
def test_a_bad_pair_is_named(sample, text):
    with pytest.raises(SampleError, match=f"^{text}") as error:
        collator_of().prepare(sample, "sample 3")
    assert not isinstance(error.value, SkippedSampleError)


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (pair([1, 2, 3], [1, 2], masked=2), "its rejected side has no target"),
        (pair([4], [4, 3], masked=0), "its chosen side has no target"),
        (pair([1, 2, 3], [1, 2, 3]), "its sides are equal"),
    ],
)
def test_a_pair_that_cannot_be_learned_from_is_skipped(sample, text):
    with pytest.raises(SkippedSampleError, match=f"^sample 3: {text}"):
        collator_of().prepare(sample, "sample 3")
