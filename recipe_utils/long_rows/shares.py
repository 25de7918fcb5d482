"""Shares of a row: rank 0 of 2 computes the tokens 0, 2, 4, ..., rank 1 the tokens 1, 3, 5, ...

Example: a row of 7 tokens becomes 8 with one of padding, and each rank has 4. A target at position 5 is that of position
2 on rank 1.

Shares are stripes, so that each has about as many targets: of a long prompt with a short answer, the
last of a few blocks would have them all.
"""

from typing import Any

import torch
from torch import Tensor

from recipe_utils.plans.rounds import Share
from recipe_utils.text.documents import Documents
from recipe_utils.update_steps.step import Microbatch


def cut(row: Microbatch, share: Share, num_samples: int, row_multiple: int | None) -> Microbatch:
    """Returns a share of the microbatch of one packed row of ``num_samples``; share 0 counts the whole row.

    The row is padded with one more document, so that each share has a multiple of ``row_multiple``
    positions. Labels are those of the whole row's next positions.
    """
    first, num_ranks = share
    labels, documents = row.targets.labels, row.inputs["document_lengths"].lengths[0]
    num_missing = -labels.numel() % ((row_multiple or 1) * num_ranks)
    if num_missing:
        documents = [*documents, num_missing]

    def share_of_row(column: Tensor) -> Tensor:
        # The last position has no target, so copies of it are padding.
        padded = torch.cat([column, column[:, -1:].expand(-1, num_missing)], dim=1)
        return padded[:, first::num_ranks]

    inputs: dict[str, Any] = {key: share_of_row(x) for key, x in row.inputs.items() if key != "document_lengths"}
    inputs["document_lengths"] = Documents([documents], num_ranks)
    is_here = row.targets.positions % num_ranks == first
    owners = row.targets.owners
    assert owners is not None
    if num_missing:
        owners = torch.cat([owners, owners.new_full((1, num_missing), -1)], dim=1)
    targets = row.targets._replace(
        labels=share_of_row(labels),
        positions=row.targets.positions[is_here] // num_ranks,
        owners=owners[:, first::num_ranks],
        ends=None,
        values={name: values[is_here] for name, values in row.targets.values.items()},
    )
    # Counts are summed over ranks, so one share has those of the whole row.
    counts: dict[str, float] = dict.fromkeys((*row.counts, "spanning_samples"), 0)
    if first == 0:
        num_positions = labels.numel() + num_missing
        counts = {**row.counts, "positions": num_positions, "spanning_samples": num_samples}
    return Microbatch(inputs, targets, counts, row.names)
