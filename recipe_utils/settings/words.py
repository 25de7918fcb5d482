"""Keys of torchtune's configs that are no keys of a recipe, and are accepted without effect."""

from collections.abc import Mapping
from typing import Any

from recipe_utils.settings.problems import Problem

_ROWS = (
    "here a row spans ranks only where it is too long for one; set it to 1, microbatching=packed, "
    "max_tokens_per_microbatch=<tokens that fit on one rank> and max_ranks_per_row=2 or more"
)
WITHOUT_EFFECT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "context_parallel_dim": ((1,), _ROWS),
    "low_cpu_ram": ((True, False), "take it out"),
    "memory_efficient_fsdp_wrap": ((False,), "it must be False"),
}
"""Keys -> values that are accepted, and what to do about any other."""


def problem_with_word(key: str, value: Any) -> Problem | None:
    """Returns the problem of a key without effect that must keep its value."""
    accepted, text = WITHOUT_EFFECT.get(key, ((value,), ""))
    return None if value in accepted else Problem(key, text, value)
