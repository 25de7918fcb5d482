"""Collators of text as the keys of a config describe them."""

from typing import Any

from recipe_utils.settings.components import component_at
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.text.collator import RowCollator
from recipe_utils.text.limits import NO_LIMITS, ModelLimits, RowBounds
from recipe_utils.text.reader import TextReader, end_ids_of
from recipe_utils.torchtune_names import IGNORE_INDEX
from recipe_utils.update_steps.objective import NOTHING_DECLARED, Declaration
from recipe_utils.update_steps.settings import DataSettings


def text_collator(
    settings: DataSettings,
    tokenizer: Any,
    ignore_index: int = IGNORE_INDEX,
    limits: ModelLimits = NO_LIMITS,
    has_trees: bool = False,
    declared: Declaration = NOTHING_DECLARED,
    shares_beginnings: bool = True,
    trees: tuple[str, str] | None = ("split_turns=shared", "set dataset.split_turns=True"),
) -> RowCollator:
    """Returns the collator of text, whose update steps count target tokens.

    Args:
        settings: data settings.
        tokenizer: has ``pad_id`` and, if it truncates samples, ``max_seq_len``.
        ignore_index: label of positions that are not targets.
        limits: limits of the model; by default none.
        has_trees: accepts samples with ``sequences``; without ``packed``, each of these is a row.
        declared: columns and values of samples that a loss takes.
        shares_beginnings: samples of a packed row that begin alike may become one tree. False for objectives that take
            other positions than targets, such as noise by sample: a position that is shared exists once.
        trees: the ``key=value`` that makes trees and what to set instead, for errors; None if
            sequences stay apart.

    Raises:
        ConfigError: the model does not support ``microbatching: packed``, or rows of trees; or ``declared`` is divided
            by something that is not counted.
    """
    # What the layout of rows does not have is refused before a dataset is read.
    if has_trees and not settings.is_packed and settings.collate_fn != DataSettings.collate_fn:
        text = "a sample may have several sequences, each of which is a row; remove it, or set microbatching=packed"
        raise ConfigError(Problem("collate_fn", text, settings.collate_fn))
    is_alone = settings.max_ranks_per_row == 1
    if (declared.of_samples or declared.couples_sequences) and not is_alone:
        names = ", ".join(declared.of_samples) or "couples_sequences"
        text = f"the loss takes values of samples ({names}), which a share of a row does not have"
        raise ConfigError(Problem("max_ranks_per_row", f"{text}; remove it", settings.max_ranks_per_row))
    # The reader checks samples in workers; it has no tokenizer.
    reader = TextReader(
        ignore_index,
        RowBounds(settings, limits, getattr(tokenizer, "max_seq_len", None)),
        declared.columns,
        declared.of_samples,
        tuple(name for name in declared.totals if name in {*declared.columns, *declared.of_samples}),
        end_ids_of(tokenizer),
        has_trees,
        keeps_types=not settings.collate_fn.startswith("torchtune."),
        has_own_positions=settings.collate_fn == DataSettings.collate_fn,
        couples_sequences=declared.couples_sequences,
    )
    shares = settings.is_packed and is_alone and shares_beginnings and limits.shares_beginnings
    collate_fn = None if reader.has_own_positions else component_at(settings.collate_fn)
    collator = RowCollator(settings, reader, tokenizer.pad_id, trees if has_trees else None, shares, collate_fn)
    if declared.divisor not in collator.counts:
        names = ", ".join(collator.counts)
        raise ConfigError(f"loss: its divisor {declared.divisor} is no count; set it to a column, or one of {names}")
    return collator
