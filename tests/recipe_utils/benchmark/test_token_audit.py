import pytest
import torch
from torch import nn
from torchtune.datasets import PackedDataset

from recipe_utils.benchmark.token_audit import (
    FedTokens,
    contents_of,
    contents_of_groups,
    contents_of_pairs,
    fingerprint,
)

IGNORE = -100
SAMPLES = [{"tokens": [5, 6, 7], "labels": [IGNORE, 6, 7]}, {"tokens": [8, 9, 10, 11], "labels": [8, 9, IGNORE, 11]}]


@pytest.fixture
def fed_tokens(monkeypatch):
    monkeypatch.setattr(nn.Embedding, "forward", nn.Embedding.forward)  # put back afterwards
    fed_tokens = FedTokens(pad_id=1)
    fed_tokens.install()
    return fed_tokens


def test_the_first_token_of_a_sample_is_no_target():
    contents = contents_of(SAMPLES, pad_id=1)
    assert (contents.num_target_tokens, contents.num_real_tokens) == (4, 7)
    assert contents.document_lengths == (3, 4)


def test_rows_of_torchtunes_packed_dataset_have_the_targets_and_tokens_of_their_samples():
    """The last row has one token of padding, the first label of a sample is no target."""
    rows = PackedDataset(SAMPLES, max_seq_len=4, padding_idx=1)
    assert [row["seq_lens"].tolist() for row in rows] == [[3, 1], [4]]
    assert contents_of(rows, pad_id=1) == contents_of(SAMPLES, pad_id=1)
    assert contents_of(PackedDataset(SAMPLES, max_seq_len=9), pad_id=1) == contents_of(SAMPLES, pad_id=1)


def test_fingerprints_see_tokens_but_neither_order_nor_padding():
    tokens = torch.tensor([[5, 6, 7], [8, 9, 1]])
    other_grouping = torch.tensor([[9, 8, 7, 0], [6, 5, 1, 1]])
    assert fingerprint(tokens, pad_id=1) == fingerprint(other_grouping, pad_id=1)
    assert fingerprint(tokens, pad_id=1) != fingerprint(tokens + 1, pad_id=1)


def test_tokens_are_counted_while_gradients_are_recorded(fed_tokens):
    embedding = nn.Embedding(12, 2)
    tokens = torch.tensor([[5, 6, 7, 1], [8, 9, 10, 11]])
    embedding(tokens)
    with torch.no_grad():
        embedding(tokens)
    assert fed_tokens.read_and_restart() == (8, contents_of(SAMPLES, pad_id=1).fingerprint)
    assert fed_tokens.read_and_restart() == (0, 0)
    embedding(torch.tensor([[5]]))  # a dummy microbatch is a position and no sample
    assert fed_tokens.read_and_restart() == (1, 0)


def test_what_the_sides_of_a_pair_share_is_counted_once():
    pair = {
        "chosen_input_ids": [5, 6, 7, 8], "chosen_labels": [-100, -100, -100, 8],
        "rejected_input_ids": [5, 6, 7, 9, 10], "rejected_labels": [-100, -100, -100, 9, 10],
    }  # fmt: skip
    whole = contents_of_pairs([pair], 0, shares_prefixes=False)
    shared = contents_of_pairs([pair], 0, shares_prefixes=True)
    assert (whole.num_target_tokens, whole.num_real_tokens) == (3, 9)
    # All shared tokens but the last one, which predicts different tokens.
    assert (shared.num_target_tokens, shared.num_real_tokens) == (3, 7)
    once = [{**pair, "rejected_input_ids": [7, 9, 10], "rejected_labels": [-100, 9, 10]}]
    fed = contents_of_pairs(once, 0, shares_prefixes=False).fingerprint
    assert fed + shared.fingerprint_of_shared == whole.fingerprint == shared.fingerprint


def test_the_prompt_of_a_group_is_counted_once_where_it_is_shared():
    answers = [{"tokens": [5, 6, *own], "labels": [IGNORE, IGNORE, *own]} for own in ([7, 8], [9], [10, 11, 12])]
    alone, shared = (contents_of_groups([{"sequences": answers}], 0, shares_prompts=shares) for shares in (False, True))
    assert (alone.num_target_tokens, alone.num_real_tokens) == (6, 12)
    # The last token of the prompt predicts another one in each answer.
    computed = torch.tensor([5, 6, 7, 8, 6, 9, 6, 10, 11, 12])
    assert (shared.num_target_tokens, shared.num_real_tokens) == (6, len(computed))
    assert fingerprint(computed, 0) + shared.fingerprint_of_shared == alone.fingerprint == shared.fingerprint
