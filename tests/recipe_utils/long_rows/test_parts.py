"""Parts of a padded row contain each of its positions and targets once."""

import pytest
import tiny
import torch

from recipe_utils.long_rows.parts import cut
from recipe_utils.plans.rounds import Part


def joined(parts):
    """Interleaves tensors [b, s] of parts."""
    return torch.stack(parts, dim=2).flatten(1)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("multiple", [None, 16])
def test_parts_of_a_row_are_the_row_padded_by_one_more_document(num_ranks, multiple):
    samples = tiny.make_samples(4)
    row = tiny.packed_row(samples, row_multiple=multiple)
    parts = [cut(row, Part(i, num_ranks), len(samples), multiple) for i in range(num_ranks)]
    size, targets = row.targets.labels.numel(), [part.targets for part in parts]
    num_positions = joined([t.labels for t in targets]).numel()
    assert 0 <= num_positions - size < num_ranks * (multiple or 1)
    assert all(t.labels.numel() % (multiple or 1) == 0 for t in targets)
    for key in ("tokens", "input_pos"):
        found = joined([part.inputs[key] for part in parts])
        assert torch.equal(found[:, :size], row.inputs[key])
    labels = joined([t.labels for t in targets])
    assert torch.equal(labels[:, :size], row.targets.labels)
    assert (labels[:, size:] == tiny.IGNORE).all()
    owners = joined([t.owners for t in targets])
    assert torch.equal(owners[:, :size], row.targets.owners)
    assert (owners[:, size:] == -1).all()
    of_parts = torch.cat([t.of_targets(t.samples) for t in targets])
    assert torch.equal(of_parts.sort()[0], row.targets.of_targets(row.targets.samples))
    assert all(t.ends is None for t in targets)  # a part has few of them
    for i, t in enumerate(targets):
        assert torch.equal(t.labels.flatten()[t.positions], row.targets.labels.flatten()[i + num_ranks * t.positions])  # fmt: skip
    assert sum(len(t.positions) for t in targets) == len(row.targets.positions)
    documents = parts[0].inputs["document_lengths"]
    padding = [num_positions - size] if num_positions > size else []
    assert documents.lengths == [[*row.inputs["document_lengths"][0], *padding]]
    assert parts[0].counts == {**row.counts, "positions": num_positions, "spanning_samples": 4}
    assert not any(any(part.counts.values()) for part in parts[1:])
