"""Collators of rows: checks of samples, and plans and layouts of their microbatches."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.utils import get_logger, log_rank_zero

import recipe_utils.text.torchtune_messages  # noqa: F401  corrects torchtune
from recipe_utils.plans.rounds import Plan
from recipe_utils.settings.components import component_at
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.text.limits import NO_LIMITS, ModelLimits
from recipe_utils.text.rows import LOADER_KEYS, collate_dummy, collate_microbatch, collate_packed_microbatch
from recipe_utils.text.trees import TREE_KEYS, merge, split_trees
from recipe_utils.update_steps.objective import Collator
from recipe_utils.update_steps.samples import Sample, SampleError, SkippedSampleError, check_keys, whole_numbers
from recipe_utils.update_steps.settings import DataSettings
from recipe_utils.update_steps.step import Microbatch

FIRST_TOKENS = 2048
"""First budget of a search. Small for any model that needs a GPU; the same on all ranks."""
MOST_TOKENS = 2**20
"""Largest budget of a search."""
OF_DATASET = "target_tokens/"
"""Prefix of the counts of named datasets."""

_TEXT_KEYS = {"tokens", "labels", "mask", "seq_lens", "is_cut", *LOADER_KEYS, *TREE_KEYS}

_log = get_logger("INFO")


class RowCollator(Collator):
    """Collator of samples that are sequences of tokens, in padded or packed rows.

    Args:
        settings: data settings. With ``max_tokens_per_microbatch: auto`` the first budget is FIRST_TOKENS.
        tokenizer: has ``pad_id`` and, if it truncates samples, ``max_seq_len``.
        limits: limits of the model.
        sequences: rows of a sample if padded; the plan counts them as one.
        trees: if packed rows have trees, the ``key=value`` that makes them and what to set instead.

    Raises:
        ConfigError: the model does not support ``microbatching: packed``.
    """

    noun = "sample"
    counts: Sequence[str]
    _datasets: tuple[str, ...] = ()
    _of_targets: tuple[str, ...] = ()

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: Any,
        limits: ModelLimits,
        sequences: int = 1,
        trees: tuple[str, str] | None = None,
    ) -> None:
        self.limits, self.pad_id = limits, tokenizer.pad_id
        self.max_seq_len: int | None = getattr(tokenizer, "max_seq_len", None)
        self._sequences, self._trees = sequences, trees
        self.stop_tokens: Sequence[int] = getattr(tokenizer, "stop_tokens", None) or ()
        self._end_ids = {getattr(tokenizer, "eos_id", None), *self.stop_tokens} - {None}
        if (self.max_seq_len or 0) > limits.max_seq_len:
            text = f"longer samples than {limits.limits_length} max_seq_len={limits.max_seq_len} fail"
            text += f"; set it to {limits.max_seq_len} to truncate them"
            raise ConfigError(Problem("tokenizer.max_seq_len", text, self.max_seq_len))
        if settings.max_ranks_per_row > 1:
            self.counts = (*self.counts, "spanning_samples")
        self.is_searched = settings.max_tokens_per_microbatch == "auto"
        """The budget is found while training."""
        self.moves_samples = settings.moves_samples
        first_tokens = FIRST_TOKENS if self.is_searched else settings.max_tokens_per_microbatch
        self.settings = replace(settings, max_tokens_per_microbatch=first_tokens)
        # A row longer than the budget is one sample, padded to a multiple below the budget.
        most_tokens = 2 * MOST_TOKENS if self.is_searched else self.max_tokens
        most_samples = sequences * max(settings.batch_size, settings.batch_size_val or 0)
        self.longest_row = (most_tokens or 0) + most_samples * limits.max_seq_len + (limits.row_multiple or 0)
        """Upper bound of a row, padding included, also in validation and with any budget [positions]."""
        self.row_multiple, self.plan = self._layout()

    @property
    def max_tokens(self) -> int | None:
        """Returns ``max_tokens_per_microbatch``, a number for each collator."""
        bound = self.settings.max_tokens_per_microbatch
        assert bound != "auto"
        return bound

    def _layout(self) -> tuple[int | None, Plan]:
        """Returns the divisor of the lengths of packed rows, and the plan of this budget."""
        settings, limits, num_rows, bound = self.settings, self.limits, self._sequences, self.max_tokens
        if bound is None and self.max_seq_len is not None:
            bound = num_rows * settings.batch_size * self.max_seq_len
        if not settings.is_packed:
            return None, settings.make_plan(bound, limits.cost, num_rows)
        multiple = limits.multiple_of_packed_rows(bound, self._trees, settings.max_ranks_per_row)
        return multiple, settings.make_plan(bound, limits.cost, fills_rows=multiple != limits.row_multiple)

    def with_budget(self, max_tokens: int) -> Self:
        """Returns a collator of microbatches of at most ``max_tokens``, including padding of packed rows.

        If ``max_tokens`` is below the multiple that rows are padded to, it excludes padding.
        """
        step = self.limits.row_multiple or 1
        for bound in (max_tokens, *range(max_tokens // step * step, 0, -step)):
            other = self._with(replace(self.settings, max_tokens_per_microbatch=bound))
            if bound % (other.row_multiple or 1) == 0:
                return other
        return self._with(replace(self.settings, max_tokens_per_microbatch=max_tokens))

    def for_validation(self) -> Self:
        """Returns a collator for the validation loader: ``batch_size_val`` samples per microbatch."""
        return self._with(self.settings.of_validation())

    def counting(self, datasets: Sequence[str]) -> Self:
        """Returns a collator that also counts the target tokens of named datasets, if it counts target tokens first."""
        if self.counts[0] != "target_tokens":
            return self
        other = self._copy()
        other._datasets = tuple(datasets)
        counts = (self.counts[0], *self._of_targets)
        other.counts = (*self.counts, *(f"{count}/{name}" for count in counts for name in datasets))
        return other

    def _with(self, settings: DataSettings) -> Self:
        other = self._copy()
        other.settings = settings
        other.row_multiple, other.plan = other._layout()
        return other

    def _copy(self) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)  # not by __getstate__
        return other

    @property
    def has_few_lengths(self) -> bool:
        """Returns True if packed rows have few lengths, for which kernels are compiled."""
        return self.row_multiple != self.limits.row_multiple

    def __getstate__(self) -> dict[str, Any]:
        """Omits what DataLoader workers, which only prepare samples, do not use or cannot unpickle."""
        return {**self.__dict__, "settings": None, "plan": None}

    def warnings(self) -> Iterator[str]:
        """Yields a warning about samples longer than a microbatch."""
        longest, num_rows, bound = self.max_seq_len, self._sequences, self.max_tokens
        most = self.settings.max_ranks_per_row
        if not self.is_searched and bound is not None and (longest is None or most * bound < num_rows * longest):
            on_most = f", max_ranks_per_row={most}" if most > 1 else ""
            more = f"more than {most * bound} tokens" if most > 1 else "more tokens"
            yield (
                f"max_tokens_per_microbatch={bound}{on_most}: a {self.noun} with {more} ("
                f"{'twice ' * (num_rows == 2)}tokenizer.max_seq_len={longest}) gets a microbatch of its own"
            )


class TextCollator(RowCollator):
    """Collator of text; update steps count target tokens. Further arguments are those of :class:`RowCollator`.

    Args:
        ignore_index: label of positions that are not targets.
        limits: limits of the model; by default none.
        has_trees: accepts samples with ``sequences``.
        of_targets: names of values per target, [n] floats beside ``labels`` of a sample, that the loss takes: they
            are collated to ``targets.values[name]`` [n], and their sums counted. A target without one has 1.

    Raises:
        ConfigError: the model does not support ``microbatching: packed``, or rows of trees.
    """

    counts: Sequence[str] = ("target_tokens", "real_tokens", "positions")
    """Counts; real tokens exclude padding, positions include it; also samples in rows of several ranks,
    tokens of trees that are not computed again, and target tokens of each named dataset."""
    fingerprint_keys = ("tokens", "labels")

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: Any,
        ignore_index: int = CROSS_ENTROPY_IGNORE_IDX,
        limits: ModelLimits = NO_LIMITS,
        has_trees: bool = False,
        of_targets: Sequence[str] = (),
    ) -> None:
        if has_trees and not settings.is_packed:
            text = "sequences that share a beginning need rows of documents; set microbatching=packed"
            text += ", or dataset.split_turns=True"
            raise ConfigError(Problem("microbatching", text, settings.microbatching))
        trees = ("split_turns=shared", "set dataset.split_turns=True") if has_trees else None
        super().__init__(settings, tokenizer, limits, trees=trees)
        self._ignore_index = ignore_index
        self._has_own_positions = settings.collate_fn == DataSettings.collate_fn
        self._is_stock_collate_fn = settings.collate_fn.startswith("torchtune.")
        self._has_warned = False
        self._of_targets = tuple(of_targets)
        self.counts = (*self.counts, *self._of_targets)
        self._shares = settings.is_packed and settings.max_ranks_per_row == 1 and limits.shares_beginnings
        if self._shares or has_trees:
            self.counts = (*self.counts, "shared_tokens")
        if has_trees:
            self._splits = settings.max_ranks_per_row == 1  # else ranks would wait for another row
            # Trees are cut when they are read, before the budget of their update step is known.
            longest_tree = self._tree_bound(None if self.is_searched else self.max_tokens)
            self._max_positions = longest_tree * settings.max_ranks_per_row
            self.longest_row = max(self.longest_row, self._max_positions + (self.row_multiple or 0))

    def _layout(self) -> tuple[int | None, Plan]:
        row_multiple, plan = super()._layout()
        if self._trees is None:
            return row_multiple, plan
        has_few_lengths, longest = row_multiple != self.limits.row_multiple, self._tree_bound(self.max_tokens)
        return row_multiple, self.settings.make_plan(longest, self.limits.cost, fills_rows=has_few_lengths)

    def _tree_bound(self, max_tokens: int | None) -> int:
        """Returns the positions of a tree, of which a sample may need several."""
        return max_tokens or self.settings.batch_size * self._longest

    @property
    def _longest(self) -> int:
        """Returns the tokens of the longest possible sample."""
        return self.max_seq_len or self.limits.max_seq_len

    def remarks(self, sample: Sample) -> Iterator[str]:
        """Yields a text if a sample is probably truncated, or needs several ranks.

        torchtune's ``text_completion_dataset`` cuts to ``max_seq_len`` - 1 tokens without an end token, also
        before it packs; all others to ``max_seq_len``.
        """
        if "documents" in sample:
            return
        most, tokens, labels = self.max_seq_len or 0, sample["tokens"], sample["labels"]
        lasts = [most - 2] if len(tokens) == most - 1 else []
        if "seq_lens" in sample:  # the last document may continue in the next row
            lasts = (np.cumsum(np.asarray(sample["seq_lens"]))[:-1] - 1).tolist()
        ends = [int(tokens[i]) for i in lasts if labels[i] == tokens[i]]
        if self._end_ids and not self._end_ids.issuperset(ends):
            text = "no end token, probably truncated; a text_pieces_dataset trains all of a text"
            yield f"{most - 1} tokens (tokenizer.max_seq_len={most}) with {text}"
        if "seq_lens" in sample:
            return
        if len(tokens) == most and sample.get("is_cut", True):
            yield f"tokenizer.max_seq_len={most} tokens, probably truncated"
        bound = self.max_tokens or 0
        spans = self.settings.max_ranks_per_row > 1 and not self.is_searched
        if spans and len(sample["tokens"]) > bound:
            yield f"more than {bound} tokens, computed by several ranks"

    def prepare(self, sample: Sample, name: str) -> Sample:
        """Returns the sample with tokens and labels as int64 arrays, without torchtune's ``mask``.

        A user's ``collate_fn`` gets the types of the dataset, such as lists, as in torchtune.
        """
        if isinstance(sample, Mapping) and "sequences" in sample:
            return self._prepare_trees(sample["sequences"], name)
        tokens, labels = check_sample(sample, name, self._ignore_index, self.limits)
        if self._has_own_positions and "input_pos" in sample and "seq_lens" not in sample:
            text = "only samples with 'seq_lens', of packed datasets, set positions; remove it"
            raise SampleError(f"{name}: it has 'input_pos'; {text}")
        arrays = {"tokens": tokens, "labels": labels}
        for key in self._of_targets:
            if key in sample:
                arrays[key] = check_values(sample[key], key, len(labels), name)
        if self._is_stock_collate_fn:
            # DataLoader workers would pickle lists of NumPy integers longer than they tokenize.
            return {key: value for key, value in {**sample, **arrays}.items() if key != "mask"}
        # PyTorch lacks operations for uint16, the type of many memory-mapped tokens.
        others = [key for key in arrays if np.asarray(sample[key][:1]).dtype != np.int64]
        return {**sample, **{key: arrays[key] for key in others}}

    def _prepare_trees(self, sequences: Sequence[Sample], name: str) -> Sample:
        if self._trees is None:
            text = "it has 'sequences'; set makes_trees = True in the class of its dataset"
            raise SampleError(f"{name}: {text}")
        ignore, kept = self._ignore_index, list[Sample]()
        for index, sequence in enumerate(sequences):
            place = f"{name}, sequence {index}"
            if unshared := [key for key in self._of_targets if key in sequence]:
                text = f"it has {unshared[0]}, which rows of shared beginnings do not keep"
                raise SampleError(f"{place}: {text}; set dataset.split_turns=True")
            tokens, labels = check_sample(sequence, place, ignore, self.limits)
            if (labels[1:] != ignore).any():
                kept.append({"tokens": tokens, "labels": labels})
        if not kept:
            raise SkippedSampleError(f"{name}: none of its sequences has a target")
        sample, most = merge(kept, self._max_positions, ignore), self._max_positions
        if len(sample["documents"]) > 1 and not self._splits:
            text = f"its sequences need rows of more than {most} positions, which max_ranks_per_row"
            raise SampleError(f"{name}: {text} does not cut; set max_tokens_per_microbatch higher")
        return sample

    def split(self, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
        """Returns the samples of a row, or one for each tree that a sample was cut into."""
        if len(samples) == 1 and len(samples[0].get("documents", ())) > 1:
            return [[tree] for tree in split_trees(samples[0])]
        return [samples]

    def length(self, sample: Sample) -> int:
        """Returns the number of tokens (of positions in trees)."""
        return len(sample["tokens"])

    def collate(self, samples: Sequence[Sample]) -> Microbatch:
        """Makes a microbatch of at least one sample, see :mod:`recipe_utils.text.rows`."""
        ignore, pad = self._ignore_index, self.pad_id
        if self.settings.is_packed or self._is_stock_collate_fn:
            ignored = samples[0].keys() - _TEXT_KEYS - {*self._of_targets}
            if ignored and not self._has_warned:
                self._has_warned = True
                text = f"rows contain only text; {', '.join(sorted(map(str, ignored)))} of samples is ignored"
                log_rank_zero(_log, f"microbatching={self.settings.microbatching}: {text}", logging.WARNING)
        if self.settings.is_packed or ("seq_lens" in samples[0] and self.limits.merges_rows):
            row = collate_packed_microbatch(samples, ignore, pad, self.row_multiple, self._shares, self._of_targets)
        else:
            collate_fn = partial(component_at(self.settings.collate_fn), padding_idx=pad, ignore_idx=ignore)
            row = collate_microbatch(samples, collate_fn, ignore, self._of_targets)
        return self._with_counts_of_datasets(row, samples) if self._datasets else row

    def _with_counts_of_datasets(self, row: Microbatch, samples: Sequence[Sample]) -> Microbatch:
        if row.targets.samples is None:
            num_rows = len(row.targets.labels)
            text = f"it made {num_rows} rows of {len(samples)} samples, so targets have no dataset"
            raise ValueError(f"collate_fn: {text}; make one row of each sample, or set one dataset")
        dataset_of = {sample["step_position"]: sample["dataset_index"] for sample in samples}
        datasets = torch.tensor([dataset_of[position] for position in row.targets.samples.tolist()]).long()
        counts: dict[str, float] = dict(row.counts)
        for count in (self.counts[0], *self._of_targets):
            sums = datasets.bincount(row.targets.values.get(count), minlength=len(self._datasets))
            counts |= zip([f"{count}/{name}" for name in self._datasets], sums.tolist(), strict=True)
        return replace(row, counts=counts)

    def dummy(self, sample: Sample) -> Microbatch:
        """Makes a dummy microbatch, see :func:`recipe_utils.text.rows.collate_dummy`."""
        if self.settings.is_packed:
            sample = {key: value for key, value in sample.items() if key in _TEXT_KEYS}
        return collate_dummy(sample, self.collate, self._ignore_index, self._of_targets)


def check_sample(sample: Sample, name: str, ignore_index: int, limits: ModelLimits) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and labels, [n] int64 each. Raises SampleError if there are none, too many, or unknown ids."""
    check_keys(sample, ("tokens", "labels"), name)
    tokens, labels = (whole_numbers(sample, key, name) for key in ("tokens", "labels"))
    num_tokens, num_labels = len(tokens), len(labels)
    if num_tokens == 0:
        raise SampleError(f"{name}: it has no tokens; filter empty samples out of the dataset")
    if num_tokens != num_labels:
        raise SampleError(f"{name}: {num_labels} labels for {num_tokens} tokens; each token needs one")
    if num_tokens > limits.max_seq_len:
        raise SampleError(
            f"{name}: {num_tokens} tokens are more than {limits.limits_length} "
            f"max_seq_len={limits.max_seq_len}; set tokenizer.max_seq_len={limits.max_seq_len} to truncate samples"
        )
    # On a device, an id outside the embeddings would be an error without a sample's name.
    targets = labels[labels != ignore_index]
    for noun, ids in (("token", tokens), ("label", targets)):
        outside = ids[(ids < 0) | (ids >= limits.vocab_size)]
        if len(outside):
            instead = "use the tokenizer that belongs to the model"
            if outside[0] == CROSS_ENTROPY_IGNORE_IDX:
                instead = f"set loss.ignore_index={CROSS_ENTROPY_IGNORE_IDX}"
            raise SampleError(
                f"{name}: {noun} {outside[0]} is outside the model's vocabulary of {limits.vocab_size}; {instead}"
            )
    return tokens, labels


def check_values(values: Any, key: str, num_labels: int, name: str) -> np.ndarray:
    """Returns values per target [n] fp64; raises SampleError unless they are finite, and ``weights`` at least 0."""
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SampleError(f"{name}: its {key} are not a list of numbers ({error})") from None
    if numbers.shape != (num_labels,):
        raise SampleError(f"{name}: {numbers.shape} {key} for {num_labels} labels; each label needs one")
    least = 0 if key == "weights" else -np.inf
    if len(wrong := numbers[~(np.isfinite(numbers) & (numbers >= least))]):
        raise SampleError(
            f"{name}: its {key} contain {wrong[0]:g}; set them to finite numbers{' of at least 0' * (least == 0)}"
        )
    return numbers
