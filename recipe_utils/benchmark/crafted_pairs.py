"""Update steps of pairs that are hard, and their loss computed pair by pair."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchtune import config as torchtune_config

from recipe_utils.benchmark.shared_by_peers import IGNORE_INDEX
from recipe_utils.data.loader.samples import Sample

SIDES = ("chosen", "rejected")


class Sizes(NamedTuple):
    """Of a pair [tokens]."""

    masked: int
    """That both sides begin with, no targets."""
    shared_targets: int
    """In the middle of these."""
    chosen: int
    rejected: int
    """Targets of the answers; 0 is an answer that is equal to the chosen one."""


CASES: dict[str, list[Sizes]] = {
    "uneven": [
        Sizes(9, 0, 3, 40), Sizes(4, 0, 5, 1), Sizes(30, 0, 120, 7), Sizes(12, 0, 2, 100),
        Sizes(7, 0, 1, 1), Sizes(3, 0, 40, 33), Sizes(21, 0, 90, 110), Sizes(5, 0, 2, 9),
    ],
    "targets_in_the_shared_part": [
        Sizes(20, 9, 3, 30), Sizes(4, 30, 15, 1), Sizes(8, 1, 60, 7), Sizes(12, 40, 2, 80),
        Sizes(2, 2, 1, 1), Sizes(13, 3, 40, 3), Sizes(50, 20, 20, 11), Sizes(5, 5, 2, 9),
    ],
    "an_equal_pair_left_out": [
        Sizes(6, 0, 12, 30), Sizes(11, 0, 4, 4), Sizes(3, 0, 25, 0), Sizes(8, 0, 60, 9),
        Sizes(17, 0, 5, 1), Sizes(40, 0, 8, 70), Sizes(5, 0, 110, 100), Sizes(9, 0, 2, 2),
    ],
    "short_last_step": [Sizes(6, 0, 12, 3), Sizes(10, 0, 70, 80), Sizes(2, 0, 1, 50)],
}  # fmt: skip
"""Update steps in the order of the epoch; only the last one may be short. A pair of equal sides has no
gradient of its own, so all that it can do is to count among those that losses are divided by."""


class CraftedPairs(Dataset[Sample]):
    """The pairs of :data:`CASES`, case by case.

    Args:
        tokenizer: not used; recipes hand it over.
        num_token_ids: tokens are drawn from 3 to ``num_token_ids - 1``; answers begin with 1 or 2.
        max_seq_len: sides are cut to it [tokens].
        num_ranks: every pair comes so many times, with other tokens.
    """

    def __init__(
        self, tokenizer: Any, num_token_ids: int, max_seq_len: int, num_ranks: int = 1
    ) -> None:
        rng = random.Random(0)
        self._cases = {
            case: [
                _pair(rng, each, num_token_ids, max_seq_len)
                for each in sizes
                for _ in range(num_ranks)
            ]
            for case, sizes in CASES.items()
        }
        self._pairs = [pair for pairs in self._cases.values() for pair in pairs]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Sample:
        return self._pairs[index]

    def cases(self) -> dict[str, list[Sample]]:
        """The pairs of each case, of all ranks."""
        return self._cases

    def loss(self, model: nn.Module, pairs: Sequence[Sample], config: DictConfig) -> Tensor:
        """Mean over the pairs whose sides differ, a forward for each side, in fp64 [nats].

        The reference is the model itself: a peer starts from it, and its learning rate is 0.
        """
        loss_fn = torchtune_config.instantiate(config.loss)
        losses = []
        for pair in pairs:
            if pair["chosen_input_ids"] == pair["rejected_input_ids"]:
                continue
            sums = [_log_prob(model, pair, side).view(1) for side in SIDES]
            losses.append(loss_fn(*sums, *[each.detach() for each in sums])[0])
        return torch.cat(losses).mean()


def _pair(rng: random.Random, sizes: Sizes, num_token_ids: int, max_seq_len: int) -> Sample:
    def draw(number: int) -> list[int]:
        return [rng.randrange(3, num_token_ids) for _ in range(number)]

    half = sizes.masked // 2
    before, targets, after = draw(half), draw(sizes.shared_targets), draw(sizes.masked - half)
    shared = [*before, *targets, *after]
    labels = [IGNORE_INDEX] * half + targets + [IGNORE_INDEX] * len(after)
    shared, labels = shared[: max_seq_len // 2], labels[: max_seq_len // 2]
    chosen = [1, *draw(sizes.chosen - 1)]
    rejected = [2, *draw(sizes.rejected - 1)] if sizes.rejected else chosen
    pair = {}
    for side, answer in zip(SIDES, (chosen, rejected), strict=True):
        pair[f"{side}_input_ids"] = (shared + answer)[:max_seq_len]
        pair[f"{side}_labels"] = (labels + answer)[:max_seq_len]
    return pair


def _log_prob(model: nn.Module, pair: Sample, side: str) -> Tensor:
    """Of an answer, summed over its targets, in fp64, shape []."""
    device = next(model.parameters()).device
    tokens = torch.tensor(pair[f"{side}_input_ids"], device=device)
    labels = torch.tensor(pair[f"{side}_labels"], device=device)
    logits = model(tokens[None])[0, :-1].double()
    return -F.cross_entropy(logits, labels[1:], reduction="sum")
