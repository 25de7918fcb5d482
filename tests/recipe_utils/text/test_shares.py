"""Shares of a padded row contain each of its positions and targets once."""

import pytest
import tiny
import torch

from recipe_utils.plans.rounds import Share
from recipe_utils.text.row_tensors import share_of_row


def joined(shares):
    """Interleaves tensors [b, s] of shares."""
    return torch.stack(shares, dim=2).flatten(1)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("multiple", [None, 16])
def test_shares_of_a_row_are_the_row_padded_by_one_more_document(num_ranks, multiple):
    samples = tiny.make_samples(4)
    row = tiny.packed_row(samples, row_multiple=multiple)
    shares = [share_of_row(row, Share(i, num_ranks), len(samples), multiple) for i in range(num_ranks)]
    size, targets = row.targets.labels.numel(), [share.targets for share in shares]
    num_positions = joined([t.labels for t in targets]).numel()
    assert 0 <= num_positions - size < num_ranks * (multiple or 1)
    assert all(t.labels.numel() % (multiple or 1) == 0 for t in targets)
    for key in ("tokens", "input_pos"):
        found = joined([share.inputs[key] for share in shares])
        assert torch.equal(found[:, :size], row.inputs[key])
    labels = joined([t.labels for t in targets])
    assert torch.equal(labels[:, :size], row.targets.labels)
    assert (labels[:, size:] == tiny.IGNORE).all()
    owners = joined([t.owners for t in targets])
    assert torch.equal(owners[:, :size], row.targets.owners)
    assert (owners[:, size:] == -1).all()
    of_shares = torch.cat([t.of_targets(t.samples) for t in targets])
    assert torch.equal(of_shares.sort()[0], row.targets.of_targets(row.targets.samples))
    assert all(t.ends is None for t in targets)  # a share has few of them
    for i, t in enumerate(targets):
        assert torch.equal(t.labels.flatten()[t.positions], row.targets.labels.flatten()[i + num_ranks * t.positions])  # fmt: skip
    assert sum(len(t.positions) for t in targets) == len(row.targets.positions)
    documents = shares[0].inputs["document_lengths"]
    padding = [num_positions - size] if num_positions > size else []
    assert documents.lengths == [[*row.inputs["document_lengths"][0], *padding]]
    assert shares[0].counts == {**row.counts, "positions": num_positions, "spanning_samples": 4}
    assert not any(any(share.counts.values()) for share in shares[1:])
