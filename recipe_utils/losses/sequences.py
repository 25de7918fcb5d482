"""Sums over the targets of each sequence, however they lie in a row.

Example: of the targets A C B with the owners 0 1 0, sequence 0 has A + B and sequence 1 has C.
Shapes: n targets, p sequences.
"""

import torch
from torch import Tensor

from recipe_utils.update_steps.step import Targets


def sums_of_sequences(of_targets: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Returns the sum [p] in fp64 of ``of_targets`` [n] over the targets of each sequence, and their numbers [p].

    In fp64, because a loss takes differences of large sums; in a fixed order, so that equal models give equal sums.
    """
    assert targets.samples is not None
    num_sequences = len(targets.samples)
    owners = targets.of_targets(torch.arange(num_sequences, device=of_targets.device))
    numbers = torch.zeros(num_sequences, dtype=torch.int64, device=of_targets.device)
    numbers.index_add_(0, owners, torch.ones_like(owners))
    in_order = of_targets.double().index_select(0, owners.argsort(stable=True))
    # unsafe: the check would synchronize with the device, and fails without sequences.
    return torch.segment_reduce(in_order, "sum", lengths=numbers, unsafe=True, initial=0), numbers
