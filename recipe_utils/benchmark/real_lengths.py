"""Pairs of random tokens with the lengths of real preference data."""

import math
import random
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from recipe_utils.benchmark.token_audit import IGNORE_INDEX
from recipe_utils.data.loader.samples import Sample


class Lengths(NamedTuple):
    """Medians [tokens] and spreads of the shared prefix and both answers."""

    shared: int
    chosen: int
    rejected: int
    shared_spread: float
    """Standard deviation of the logarithm."""
    answer_spread: float
    longest: int
    """Maximum length of a side; longer ones are truncated."""


PRESETS = {
    "hh_rlhf": Lengths(98, 20, 25, 1.0, 1.1, longest=512),
    "english_mix": Lengths(182, 272, 290, 1.0, 0.9, longest=1024),
}
"""Fitted to medians of chosen sides, rejected sides and shared prefixes: 135, 142 and 98 tokens in
HH-RLHF, 546, 563 and 182 in a mix of UltraFeedback, Capybara and Orca. The quartiles' ratios are 3
and 2.5."""

_SHARE_ALIKE = 0.25
"""Share of pairs whose answers start with the same tokens."""
_MOST_ALIKE = 8
_CORRELATION = 0.5
"""Correlation of the logarithms of both answers' lengths."""


class PairsOfRealLengths(Dataset[Sample]):
    """Pairs with torchtune's keys. Prompts are masked, answers are targets.

    ``tokenizer`` is unused; ``preset`` is a key of :data:`PRESETS`; tokens are below
    ``num_token_ids``.
    """

    def __init__(
        self,
        tokenizer: Any,
        preset: str = "hh_rlhf",
        num_pairs: int = 512,
        num_token_ids: int = 4096,
        seed: int = 0,
    ) -> None:
        if preset not in PRESETS:
            raise ValueError(f"preset={preset}: unknown; set it to one of {', '.join(PRESETS)}")
        rng = random.Random(seed)
        self._pairs = [_draw(rng, PRESETS[preset], num_token_ids) for _ in range(num_pairs)]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Sample:
        return self._pairs[index]


def _draw(rng: random.Random, lengths: Lengths, num_token_ids: int) -> Sample:
    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, num_token_ids) for _ in range(number)]

    def length(median: int, deviation: float) -> int:
        return max(round(median * math.exp(deviation)), 1)

    # Leaves space for an answer.
    most_shared = lengths.longest * 3 // 4
    shared = min(length(lengths.shared, lengths.shared_spread * rng.gauss()), most_shared)
    prompt = tokens(shared)
    alike = tokens(rng.randrange(1, _MOST_ALIKE) if rng.random() < _SHARE_ALIKE else 0)
    of_both = math.sqrt(_CORRELATION) * rng.gauss()
    pair: dict[str, list[int]] = {}
    for first, side in enumerate(("chosen", "rejected"), start=1):
        of_side = of_both + math.sqrt(1 - _CORRELATION) * rng.gauss()
        number = length(getattr(lengths, side), lengths.answer_spread * of_side)
        # A different token makes the sides differ.
        answer = [*alike, first, *tokens(number)][: max(number, len(alike) + 1)]
        pair[f"{side}_input_ids"] = (prompt + answer)[: lengths.longest]
        pair[f"{side}_labels"] = ([IGNORE_INDEX] * shared + answer)[: lengths.longest]
    return pair
