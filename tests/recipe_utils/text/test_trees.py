"""Merged sequences have all their targets once, after the tokens of their sequences."""

import pickle
from collections import Counter

import numpy as np
import pytest
import tiny
import torch
from forests import mask_of
from hypothesis import given
from hypothesis import strategies as st

from recipe_utils.data.collators import text_collator
from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.settings.problems import ConfigError
from recipe_utils.text.documents import chains, length_of, tree
from recipe_utils.text.limits import ModelLimits, PackedAttention
from recipe_utils.text.reader import TextReader
from recipe_utils.text.trees import merge, split_trees
from recipe_utils.update_steps.objective import NOTHING_DECLARED, Declaration
from recipe_utils.update_steps.samples import SampleError, SkippedSampleError
from recipe_utils.update_steps.settings import DataSettings

IGNORE = tiny.IGNORE
LIMITS = ModelLimits(tiny.VOCAB_SIZE, 64, MicrobatchCost())


def sequence(tokens, are_targets):
    labels = [t if is_target else IGNORE for t, is_target in zip(tokens, are_targets, strict=True)]
    return TextReader(IGNORE).prepare({"tokens": tokens, "labels": labels}, "sample")


def targets_of(sequences):
    """Returns each target with the tokens before it, and how often it occurs."""
    return Counter(
        (tuple(each.tokens[: i + 1].tolist()), int(each.labels[i]))
        for each in sequences
        for i in range(len(each.tokens))
        if each.labels[i] != IGNORE
    )


def targets_in_row(sample):
    row = tiny.laid_out([sample])
    inputs, (labels,) = row.inputs, row.targets.labels.tolist()
    (tokens,), (positions,) = (inputs[key][:, : len(sample.tokens)].tolist() for key in ("tokens", "input_pos"))
    found = Counter()
    for q, seen in enumerate(mask_of(sample.documents)):
        before = tuple(token for token, is_seen in zip(tokens, seen, strict=True) if is_seen)
        assert positions[q] == len(before) - 1
        if labels[q] != IGNORE:
            found[before, labels[q]] += 1
    return found


some_sequence = st.lists(st.tuples(st.integers(1, 2), st.booleans()), min_size=1, max_size=9)
some_sequences = st.lists(some_sequence, min_size=1, max_size=7)


@given(some_sequences, st.none() | st.integers(1, 30), st.randoms())
def test_every_target_occurs_once_behind_its_tokens(drawn, max_tokens, random):
    sequences = [sequence(*zip(*each, strict=True)) for each in drawn]
    random.shuffle(sequences)
    sample = merge(sequences, max_tokens, IGNORE)
    assert targets_in_row(sample) == targets_of(sequences)
    sizes = list(map(length_of, sample.documents))
    assert sum(sizes) == len(sample.tokens)
    assert sum(sizes) + sum(sample.num_shared) == sum(len(s.tokens) for s in sequences)
    longest = max(len(s.tokens) for s in sequences)
    assert max(sizes) <= max(max_tokens or sum(sizes), longest)
    trees = split_trees(sample)
    assert sum((targets_in_row(tree) for tree in trees), Counter()) == targets_of(sequences)
    assert sum(len(tree.sequences[1]) for tree in trees) == len(sequences)


@given(some_sequences, st.integers(1, 30))
def test_columns_values_owners_and_ends_are_those_of_the_sequences(drawn, max_tokens):
    """A column numbers all tokens, a value the sequences; whole and cut, each target has those of its sequence."""
    sequences, start = [], 0
    for number, each in enumerate(drawn):
        column = np.arange(start, start + len(each), dtype=float)
        made = sequence(*zip(*each, strict=True))
        sequences.append(made._replace(columns={"number": column}, values={"sequence": np.array([[number, -number]])}))
        start += len(each)
    expected = sorted(
        (int(s.labels[i]), s.columns["number"][i], number, len(s.tokens) - 1, int(s.tokens[-1]))
        for number, s in enumerate(sequences)
        for i in range(len(s.tokens))
        if s.labels[i] != IGNORE
    )
    sample = merge(sequences, max_tokens, IGNORE)
    for split in ([sample], split_trees(sample)):
        found = []
        for one in split:
            row = tiny.laid_out([one], TextReader(IGNORE, columns={"number": None}))
            targets, inputs = row.targets, row.inputs
            labels, numbers = targets.labels.flatten()[targets.positions], targets.of_samples["sequence"]
            assert torch.equal(numbers[:, 0], -numbers[:, 1])
            of_ends = [each.flatten()[targets.ends] for each in (inputs["input_pos"], inputs["tokens"])]
            columns = [targets.values["number"], *map(targets.of_targets, (numbers[:, 0], *of_ends))]
            found += zip(labels.tolist(), *(column.tolist() for column in columns), strict=True)
        assert sorted(found) == expected


def test_turns_that_drop_nothing_are_one_plain_document_with_all_targets():
    are_targets = [False, False, True, True, False, True]
    whole = sequence([1, 2, 3, 4, 5, 6], are_targets)
    first = sequence([1, 2, 3, 4], are_targets[:4])
    last = sequence([1, 2, 3, 4, 5, 6], [False] * 5 + [True])
    for sequences in ([first, last], [last, first]):
        sample = merge(sequences, None, IGNORE)
        assert sample.documents == [6]
        assert sample.labels.tolist() == whole.labels.tolist()
        assert sample.num_shared == [4]


def test_the_longest_branch_follows_its_parent():
    turns = [
        sequence([1, 2, 9, 3], [0, 0, 1, 1]),
        sequence([1, 2, 3, 4, 8, 5], [0, 0, 0, 0, 1, 1]),
        sequence([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 1, 1]),
    ]
    sample = merge(turns, None, IGNORE)
    assert sample.documents == [tree(2, tree(2, 3, 2), 2)]
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 5, 9, 3]
    assert [tree.tokens.tolist() for tree in split_trees(merge(turns, 9, IGNORE))] == [
        [1, 2, 3, 4, 5, 6, 7, 8, 5], [1, 2, 9, 3],
    ]  # fmt: skip


@pytest.mark.slow
def test_a_conversation_of_1500_turns_is_merged():
    """Each turn drops the thinking of the turn before. Depth needs no recursion."""
    history, turns = [1], []
    for i in range(1500):
        history = [*history, 2 + i % 7]
        turns.append(sequence([*history, 10, 11], [False] * len(history) + [True] * 2))
    sample = merge(turns, None, IGNORE)
    assert len(sample.tokens) == 1501 + 2 * 1500
    assert len(sample.documents[0]) == 1500 + 1499
    assert pickle.loads(pickle.dumps(sample)).documents == sample.documents
    assert (sample.labels != IGNORE).sum() == 2 * 1500
    cut = merge(turns, 3000, IGNORE)
    assert max(map(length_of, cut.documents)) <= 3000


# ---- Collator ------------------------------------------------------------------------------------


def collator_of(limits=LIMITS, declared=NOTHING_DECLARED, **settings):
    keys = {"microbatching": "packed", "batch_size": 4, **settings}
    return text_collator(DataSettings(**keys), tiny.tiny_tokenizer(), IGNORE, limits, has_trees=True, declared=declared)


def test_counts_are_those_of_separate_sequences():
    groups = tiny.make_trees(20)
    prepare = pickle.loads(pickle.dumps(collator_of().prepare))  # as in a worker
    collator, samples = collator_of(), [prepare(each, "sample") for each in groups]
    counts = {name: collator.collate(samples)[0].counts[name] for name in collator.counts}
    kept = [s for g in groups for s in g["sequences"] if set(s["labels"][1:]) - {IGNORE}]
    assert counts["real_tokens"] == sum(len(each["tokens"]) for each in kept)
    assert counts["positions"] == counts["real_tokens"] - counts["shared_tokens"]
    assert counts["shared_tokens"] > 0.3 * counts["real_tokens"]
    assert counts["target_tokens"] == sum(targets_of(tiny.read(kept)).values())
    assert tuple(counts) == ("target_tokens", "real_tokens", "positions", "shared_tokens")


def test_a_dummy_is_one_token_with_padding_and_a_cut_sample_several_microbatches():
    collator = collator_of(max_tokens_per_microbatch=16)
    samples = [collator.prepare(each, "sample") for each in tiny.make_trees(20)]
    dummy = collator.dummy(samples[1])
    assert dummy.inputs["tokens"].shape == (1, 2)
    assert not dummy.counts
    assert len(dummy.targets.positions) == 0
    assert max(len(each.documents) for each in samples) > 1
    for sample in samples:
        made, whole = collator.collate([sample]), tiny.laid_out([sample], collator.reader)
        assert len(made) == len(sample.documents)
        for name, number in whole.counts.items():
            assert sum(each.counts[name] for each in made) == number
    assert len(collator.collate(samples)) == 1  # rows of several samples are never cut


@pytest.mark.parametrize("couples", [False, True])
def test_the_log_says_whether_samples_are_cut(couples):
    collator = collator_of(declared=Declaration(couples_sequences=couples), max_tokens_per_microbatch=16)
    samples = [collator.prepare(each, "sample") for each in tiny.make_trees(20)]
    sizes = [len(collator.collate([each])) for each in samples]
    assert (max(sizes) == 1) == couples
    assert [len([*collator.remarks(each)]) for each in samples] == [int(size > 1) for size in sizes]
    (warning,) = collator.remarks()
    assert warning.endswith("gets a microbatch of its own" if couples else "may be cut into several microbatches")


def test_the_content_of_a_sample_is_that_of_its_sequences_in_any_layout():
    groups = [
        {"sequences": [{**s, "a": np.arange(len(s["labels"])) % 5} for s in g["sequences"]]}
        for g in tiny.make_trees(20)
    ]
    layouts = {"max_tokens_per_microbatch": 16}, {}, {"microbatching": "in_order"}
    for group in groups:
        kept = [s for s in group["sequences"] if set(s["labels"][1:]) - {IGNORE}]
        columns, beside = [], []
        for each in kept:  # nothing predicts the first token
            is_target = np.array([False, *(label != IGNORE for label in each["labels"][1:])])
            columns += [each["tokens"], np.where(is_target, each["labels"], IGNORE).tolist()]
            beside += np.where(is_target, each["a"], 0).tolist()
        for keys in layouts:
            collator = collator_of(declared=Declaration({"a": 0}), **keys)
            integers, others = collator.content(collator.prepare(group, "sample"))
            assert [column.tolist() for column in integers] == columns
            assert {key: value.tolist() for key, value in others.items()} == {"a": beside}


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"microbatching": "least_padding", "collate_fn": "tiny.collate_images"},
            "collate_fn=tiny.collate_images: a sample may have several sequences, each of which is a row; remove it, or "
            "set microbatching=packed",
        ),
        (
            {"declared": Declaration(couples_sequences=True), "max_ranks_per_row": 2, "max_tokens_per_microbatch": 8},
            "max_ranks_per_row=2: the loss takes values of samples (couples_sequences), which a share of a row does not "
            "have; remove it",
        ),
        (
            {"limits": LIMITS._replace(attentions=(PackedAttention(refused={"trees": "X does not"}),))},
            "split_turns=shared: X does not; set dataset.split_turns=True",
        ),
    ],
)  # fmt: skip
def test_what_cannot_have_trees_is_refused_by_name(keys, text):
    with pytest.raises(ConfigError) as error:
        collator_of(**keys)
    assert str(error.value).endswith(f"- {text}")


GOOD = {"tokens": [1, 2], "labels": [IGNORE, 2]}
BAD = {"tokens": [1, 2, 3], "labels": [2, 3]}


@pytest.mark.parametrize(
    ("sequences", "kind", "text"),
    [
        ([GOOD, GOOD, GOOD, BAD], SampleError, "sample 17 of dataset, sequence 3: 2 labels for 3 tokens"),
        ([{"tokens": [1, 2], "labels": [1, IGNORE]}], SkippedSampleError, "none of its sequences has a"),
        ([], SkippedSampleError, "none of its sequences"),
    ],
)  # fmt: skip
def test_a_bad_sequence_is_named(sequences, kind, text):
    with pytest.raises(kind, match=text):
        collator_of().prepare({"sequences": sequences}, "sample 17 of dataset")


def test_trees_are_not_cut_for_ranks_that_compute_a_row_together():
    ranks = {"max_ranks_per_row": 2, "max_tokens_per_microbatch": 8, "data_parallel_shard_dim": 2}
    collator, turns = collator_of(**ranks), tiny.make_trees(20)
    with pytest.raises(SampleError, match="need rows of more than 16 positions, which max_ranks"):
        [collator.prepare(each, "sample") for each in turns]
    assert collator.longest_row >= 16


def test_sequences_of_a_dataset_that_does_not_say_so_are_refused():
    keys = {"microbatching": "packed"}
    collator = text_collator(DataSettings(**keys), tiny.tiny_tokenizer(), IGNORE, LIMITS)
    with pytest.raises(SampleError, match=r"sample: it has 'sequences'; return Facts\(has_sequences=True\)"):
        collator.prepare({"sequences": [GOOD]}, "sample")


def targets_with_contexts(microbatch):
    """Returns the labels of targets with the tokens that they are predicted from."""
    found, tokens = Counter(), microbatch.inputs["tokens"][0]
    labels, positions = microbatch.targets.labels[0], microbatch.inputs["input_pos"][0]
    (row,) = microbatch.inputs["document_lengths"].lengths
    for chain in chains(row):
        indices = [i for low, high in chain.ranges for i in range(low, high)]
        assert positions[indices].tolist() == list(range(len(indices)))
        for end, index in enumerate(indices, start=1):
            if index >= chain.start and labels[index] != IGNORE:
                found[(*tokens[indices[:end]].tolist(), "->", int(labels[index]))] += 1
    return found


def prompted(prompt, group, kept):
    """Returns the sequences of a sample behind a system prompt, of which targets are ``kept``."""
    return {"sequences": [
        {"tokens": prompt + each["tokens"], "labels": [IGNORE] * len(prompt) + each["labels"]}
        for each in group["sequences"][:kept]
    ]}  # fmt: skip


def test_a_row_computes_each_beginning_of_its_samples_once():
    """Samples may be trees. Two prompts begin alike, the second is longer; a third of the samples has none."""
    prompts = [], [*range(1, 21)], [*range(1, 11), *range(20, 0, -1)]
    groups = [prompted(prompts[i % 3], group, 1 + i % 2) for i, group in enumerate(tiny.make_trees(15))]
    alone, together = collator_of(max_tokens_per_microbatch=64), collator_of()
    samples = [alone.prepare(each, "sample") for each in groups]
    samples = [each for each in samples if len(each.documents) == 1]
    order = np.random.default_rng(0).permutation(len(samples))
    (row,) = together.collate([samples[i] for i in order])
    expected = sum((targets_with_contexts(*alone.collate([each])) for each in samples), Counter())
    assert targets_with_contexts(row) == expected
    counts = Counter(
        next((p for p in (1, 2) if each.tokens[: len(prompts[p])].tolist() == prompts[p]), 0) for each in samples
    )
    assert min(counts.values()) > 1
    saved = sum(len(each.tokens) for each in samples) - row.counts["positions"]
    assert saved >= 20 * (counts[1] - 1) + 30 * (counts[2] - 1)
    assert row.counts["shared_tokens"] == saved + sum(sum(each.num_shared) for each in samples)
    rows_alone = [alone.collate([each])[0].counts["real_tokens"] for each in samples]
    assert row.counts["real_tokens"] == sum(rows_alone)


def test_targets_of_shared_rows_keep_their_samples_and_short_beginnings_are_not_shared():
    keys = {"microbatching": "packed", "batch_size": 4}
    collator = text_collator(DataSettings(**keys), tiny.tiny_tokenizer(), IGNORE, LIMITS)
    for num_common, saved in ((40, 2 * 39), (9, 0)):  # the last of 40 has a target
        samples = []
        for end in [[41, 42], [43], [44, 45, 46]]:
            samples.append({"tokens": [*range(1, num_common + 1), *end], "labels": [IGNORE] * num_common + end})
        (row,) = collator.collate(tiny.read(samples))
        assert row.counts["real_tokens"] == 3 * num_common + 6
        assert row.counts["shared_tokens"] == saved
        labels = row.targets.labels.flatten()[row.targets.positions].tolist()
        owners = row.targets.of_targets(row.targets.samples).tolist()
        assert sorted(zip(labels, owners, strict=True)) == [
            (41, 0), (42, 0), (43, 1), (44, 2), (45, 2), (46, 2),
        ]  # fmt: skip
