"""Sums over the targets of each sequence, however they lie in a row.

Example: of the targets A C B with the owners 0 1 0, sequence 0 has A and B, and sequence 1 has C.
Shapes: n targets, p sequences.
"""

import torch
from torch import Tensor

from recipe_utils.update_steps.step import Targets


def sums_of_sequences(of_targets: Tensor, targets: Targets, firsts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sums [p, 2] in fp64 of ``of_targets`` [n] over the targets of each sequence, and their numbers [p, 2].

    Of each sequence, over the ``firsts`` [p] of its targets and over the rest, in the order of its tokens.
    In fp64, because a loss takes differences of large sums; in a fixed order, so that equal models give equal sums.
    """
    owners = targets.sequences
    numbers = torch.zeros_like(firsts).index_add_(0, owners, torch.ones_like(owners))
    numbers = torch.stack([firsts, numbers - firsts], dim=1)
    in_order = of_targets.double().index_select(0, owners.argsort(stable=True))
    # unsafe: the check would synchronize with the device, and fails without sequences.
    sums = torch.segment_reduce(in_order, "sum", lengths=numbers.flatten(), unsafe=True, initial=0)
    return sums.view(-1, 2), numbers
