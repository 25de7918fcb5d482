"""Checks of what datasets of text return, in DataLoader workers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from recipe_utils.text.images.sample import ImageInputs
from recipe_utils.text.limits import NO_BOUNDS, ModelLimits, RowBounds
from recipe_utils.text.samples import FIRST, TextSample, beside_predictors, beside_tokens
from recipe_utils.text.trees import merge, sequences_of
from recipe_utils.torchtune_names import IGNORE_INDEX
from recipe_utils.update_steps.order import StepIndex
from recipe_utils.update_steps.samples import (
    Sample,
    SampleError,
    SkippedSampleError,
    UnusedError,
    check_has,
    whole_numbers,
)

_KEYS = {"tokens", "labels", "mask", "image_inputs"}
KNOWN_KEYS = {*_KEYS, "seq_lens", "input_pos", "is_cut"}
"""Keys of torchtune's datasets and of ours."""
_WEIGHTS = ("weights", "weight", "loss_weight")


@dataclass(frozen=True)
class TextReader:
    """Checks of samples of ``tokens`` and ``labels``, or of ``sequences`` of both; DataLoader workers have a copy of it."""

    ignore_index: int = IGNORE_INDEX
    bounds: RowBounds = NO_BOUNDS
    """Before a search has found a budget."""
    columns: Mapping[str, float | None] = field(default_factory=dict)
    """Default of each column; None if a sample without it is an error."""
    of_samples: Sequence[str] = ()
    """Names of the values of samples."""
    totals: Sequence[str] = ()
    """Names of columns and values whose sums are counts."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end a text."""
    has_trees: bool = False
    """A sample may have ``sequences``, which become a tree, or several."""
    keeps_types: bool = False
    """Keeps the types of the dataset for a user's ``collate_fn``."""
    has_own_positions: bool = True
    """``input_pos`` is the project's, not a user's ``collate_fn``'s."""
    drops_columns: bool = False
    """Samples are only looked at: what no loss takes is no error."""
    changes: Sequence[Callable[[Sample, str], Sample]] = ()
    """Functions of a sample and its name that return it in another form, such as a pair as ``sequences``."""
    couples_sequences: bool = False
    """The sequences of a sample are in one microbatch, however long they are."""
    has_fingerprints: bool = False
    """Sequences have the value ``fingerprint`` [2] of their tokens, labels and temperatures, by which a cache finds them."""
    shares: bool = True
    """Sequences of a packed sample that begin alike become one tree."""

    @property
    def is_of_pairs(self) -> bool:
        """Returns True if the value ``common_tokens`` is the number of targets that the first sequence has for both."""
        return "common_tokens" in self.of_samples

    @property
    def counts(self) -> Sequence[str]:
        """Names of counts; real tokens exclude padding, positions include it; samples with values."""
        samples = ("samples",) if self.of_samples else ()
        images = ("images", "image_tokens") if self.bounds.limits.joins else ()
        return (*samples, "target_tokens", "real_tokens", "positions", *images, *self.totals)

    def prepare(self, sample: Sample, name: str, at: StepIndex = FIRST) -> TextSample:
        """Returns the sample with tokens, labels, columns and values as arrays.

        A user's ``collate_fn`` gets the types of the dataset, such as lists, as in torchtune.
        """
        for change in self.changes:
            sample = change(sample, name)
        if isinstance(sample, Mapping) and "sequences" in sample:
            return self._tree_of(sample["sequences"], name, at)
        return self._sequence_of(sample, name, at)

    def _sequence_of(self, sample: Sample, name: str, at: StepIndex, in_group: bool = False) -> TextSample:
        tokens, labels = check_sample(sample, name, self.ignore_index, self.bounds.limits)
        if self.has_own_positions and "input_pos" in sample and "seq_lens" not in sample:
            text = "only samples with 'seq_lens', of packed datasets, set positions; remove it"
            raise SampleError(f"{name}: it has 'input_pos'; {text}")
        # Whatever the loss takes must be there, of the right length.
        required = [key for key, default in self.columns.items() if default is None]
        if missing := [key for key in (*required, *self.of_samples) if key not in sample]:
            given = ", ".join(sorted(map(str, sample)))
            beside = "beside labels" if missing[0] in self.columns else "of the sample"
            raise SampleError(f"{name}: it has no '{missing[0]}' {beside}, which the loss takes; it has {given}")
        present = [key for key in self.columns if key in sample]
        # What belongs to an answer, such as its reward, is one number: a value of the sequence until rows are laid out.
        ones = [key for key in present if in_group and isinstance(sample[key], int | float)]
        columns = {key: check_column(sample[key], key, len(labels), name) for key in present if key not in ones}
        values = {key: _finite(sample[key], key, name)[None] for key in self.of_samples}
        numbers = np.array([float(sample[key]) for key in ones])
        if "weights" in ones or not np.isfinite(numbers).all():
            for key in ones:
                _finite(sample[key], key, name)
        values |= {key: numbers[index : index + 1] for index, key in enumerate(ones)}
        # The rest is kept for a collate_fn.
        unused = {"mask"} if self.keeps_types else {*_KEYS, *columns, *values}
        others = {key: value for key, value in sample.items() if key not in unused}
        if self.keeps_types:  # PyTorch lacks operations for uint16, the type of many memory-mapped tokens
            arrays = {"tokens": tokens, "labels": labels, **columns}
            others |= {key: array for key, array in arrays.items() if np.asarray(sample[key][:1]).dtype != np.int64}
        elif not self.drops_columns:
            check_all_taken(others, tokens, labels, name)
        images: ImageInputs | None = sample.get("image_inputs")
        made = TextSample(name, at, tokens, labels, [len(tokens)], columns, values=values, images=images, others=others)
        if images is not None and not self.bounds.limits.joins and not self.drops_columns:
            text = (
                "the data have images, and the model takes none; set model.images=True, or remove dataset.image_folder"
            )
            raise UnusedError(f"{name}: {text}")
        if self.has_fingerprints:
            temperatures = {**values, **columns}.get("temperatures", labels[:0])
            values["fingerprint"] = fingerprint_of(made.keys, labels, temperatures)[None]
        made = _with_documents(made, self.ignore_index) if made.is_row else made
        return beside_predictors(made, self.ignore_index)

    def _tree_of(self, sequences: Sequence[Sample] | Mapping[str, Sample], name: str, at: StepIndex) -> TextSample:
        if not self.has_trees:
            text = "it has 'sequences'; return Facts(has_sequences=True) from a method facts() of its dataset"
            raise SampleError(f"{name}: {text}")
        # A sequence without a target would only cost time.
        kept = []
        if not isinstance(sequences, Mapping):
            sequences = {f"sequence {i}": sequence for i, sequence in enumerate(sequences)}
        for which, sequence in sequences.items():
            made = self._sequence_of(sequence, f"{name}, {which}", at, in_group=True)
            if self.is_of_pairs or (made.labels != self.ignore_index).any():
                kept.append(made)
        # What one sequence has, all have: as a column if one has it as that, else as a number.
        shapes = {name: column.shape[1:] for made in kept for name, column in made.columns.items()}
        given = shapes.keys() | {name for made in kept for name in made.values.keys() & self.columns.keys()}
        for index, made in enumerate(kept):
            missing = {name: (1, *shapes.get(name, ())) for name in given - made.columns.keys() - made.values.keys()}
            values = {name: np.full(shape, self.columns[name], dtype=np.float64) for name, shape in missing.items()}
            kept[index] = made._replace(values={**made.values, **values}).with_columns(shapes)
        # One tree, or several if the sequences are longer than a row; ranks of one row would wait for the others.
        if not kept:
            raise SkippedSampleError(f"{name}: none of its sequences has a target")
        most: int | None = self.bounds.of_tree
        if self.couples_sequences and self.bounds.settings.is_packed:
            most = None if self.shares else 1
        sample = merge(kept, most, self.ignore_index)._replace(name=name)
        if len(sample.documents) > 1 and self.bounds.settings.max_ranks_per_row > 1:
            text = f"its sequences need rows of more than {self.bounds.of_tree} positions, which max_ranks_per_row"
            raise SampleError(f"{name}: {text} does not cut; set max_tokens_per_microbatch higher")
        return sample

    def content(self, sample: TextSample) -> tuple[Sequence[np.ndarray], Mapping[str, Any]]:
        """Returns tokens and labels, and all other values that are trained on, by key: those of the data in any layout."""
        others = {key: value for key, value in sample.others.items() if key not in (*_KEYS, "is_cut")}
        values = {} if self.is_of_pairs else {name: sample.values[name] for name in self.of_samples}
        if not sample.num_shared:
            columns = beside_tokens(sample, self.ignore_index)
            return (sample.keys, columns.pop("labels")), {**others, **columns, **values}
        sample = sample.with_columns(self.columns)
        made = self._answers_of(sample)
        columns = {name: np.concatenate([each[name] for each in made]) for name in sample.columns}
        return [each[name] for each in made for name in ("tokens", "labels")], {**columns, **values}

    def count(self, counts: Mapping[str, float], values: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        """Returns the counts with the number of samples with values, and the sums of values that are totals."""
        sums = {name: float(values[name].sum()) for name in self.of_samples if name in self.totals}
        samples = {"samples": len(values[self.of_samples[0]])} if self.of_samples else {}
        num_twice = float(values["common_tokens"].sum()) if self.is_of_pairs else 0
        return {**counts, **sums, **samples, "target_tokens": counts["target_tokens"] + num_twice}

    def remarks(self, sample: TextSample) -> Iterator[str]:
        """Yields a text if a sample is probably truncated, or needs several ranks.

        torchtune's ``text_completion_dataset`` cuts to ``max_seq_len`` - 1 tokens without an end token, also
        before it packs; all others to ``max_seq_len``.
        """
        if sample.num_shared:
            yield from self._remarks_on_group(sample)
            return
        most, tokens = self.bounds.max_seq_len or 0, sample.tokens
        # Last tokens that should end a text: of a sample cut by torchtune, and of each document of a packed row.
        lasts = [most - 2] if len(tokens) == most - 1 else []
        if sample.is_row:  # the last document may continue in the next row
            lasts = (np.cumsum(np.asarray(sample.others["seq_lens"]))[:-1] - 1).tolist()
        ends = [int(tokens[i]) for i in lasts if i and sample.labels[i - 1] == tokens[i]]
        if self.end_ids and not self.end_ids.issuperset(ends):
            text = "no end token, probably truncated; a text_pieces_dataset trains all of a text"
            yield f"{most - 1} tokens (tokenizer.max_seq_len={most}) with {text}"
        if sample.is_row:
            return
        if len(tokens) == most and sample.others.get("is_cut", True):
            yield f"tokenizer.max_seq_len={most} tokens, probably truncated"
        keys, of_a_rank = self.bounds.settings, self.bounds.max_tokens or 0
        if keys.max_ranks_per_row > 1 and not keys.is_searched and len(tokens) > of_a_rank:
            yield f"more than {of_a_rank} tokens, computed by several ranks"

    def _answers_of(self, sample: TextSample) -> list[dict[str, np.ndarray]]:
        """Returns tokens, labels and columns of each sequence, with the targets that stand once for several."""
        first, *others = made = [*sequences_of(sample, self.ignore_index)]
        common = sample.values["common_tokens"] if self.is_of_pairs else [0]
        places = np.flatnonzero(first["labels"] != self.ignore_index)[: common[0]]
        for other in others:
            other["labels"][places] = first["labels"][places]
        return made

    def _remarks_on_group(self, sample: TextSample) -> Iterator[str]:
        """Yields a text if a group is cut, an answer of a pair is probably truncated, or they are not to one prompt."""
        if self.bounds.settings.is_packed and len(sample.num_shared) > 1 and not self.couples_sequences:
            yield f"more than {self.bounds.of_tree} positions, cut into several microbatches"
        if not self.is_of_pairs:
            return
        sequences = self._answers_of(sample)
        if (most := self.bounds.max_seq_len) in [len(each["tokens"]) for each in sequences]:
            yield f"a side of tokenizer.max_seq_len={most} tokens, probably truncated"
        prompts = [each["tokens"][: int((each["labels"] != self.ignore_index).argmax())] for each in sequences]
        if any(not np.array_equal(prompts[0], prompt) for prompt in prompts):
            yield "its two sides differ before their first target"


def fingerprint_of(*arrays: np.ndarray) -> np.ndarray:
    """Returns a hash [2] int64 of arrays."""
    digest = blake2b(digest_size=16)
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little") + array.tobytes())
    return np.frombuffer(digest.digest(), dtype=np.int64)


def end_ids_of(tokenizer: Any) -> frozenset[int]:
    """Returns the tokens that end a text: ``eos_id`` and ``stop_tokens``, as far as a tokenizer has them."""
    return frozenset({getattr(tokenizer, "eos_id", None), *(getattr(tokenizer, "stop_tokens", None) or ())} - {None})


def _with_documents(sample: TextSample, ignore_index: int) -> TextSample:
    """Returns a row of a packed dataset with its documents.

    torchtune appends padding as one more "document" of a repeated token without targets. The second part of a document
    that the dataset cut in two has later positions.
    """
    lengths = [length for length in np.asarray(sample.others["seq_lens"]).tolist() if length]
    owners, ends = sample._replace(documents=lengths).owners_and_ends()
    tokens, labels = sample.tokens[-lengths[-1] :], sample.labels[-lengths[-1] :]
    if (tokens == tokens[-1]).all() and (labels == ignore_index).all():
        owners, ends = np.where(owners == len(ends) - 1, -1, owners), ends[:-1]
    positions = sample.others.get("input_pos")
    return sample._replace(
        documents=lengths,
        sequences=(owners, ends),
        positions=None if positions is None else np.asarray(positions),
        values={key: value.repeat(len(ends), axis=0) for key, value in sample.values.items()},
    )


def check_sample(sample: Sample, name: str, ignore_index: int, limits: ModelLimits) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and labels, [n] int64 each. Raises SampleError if there are none, too many, or unknown ids."""
    check_has(sample, ("tokens", "labels"), name)
    tokens, labels = (whole_numbers(sample, key, name) for key in ("tokens", "labels"))
    # One label for each token, and no more tokens than the model takes.
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
            if outside[0] == IGNORE_INDEX:
                instead = f"set loss.ignore_index={IGNORE_INDEX}"
            raise SampleError(
                f"{name}: {noun} {outside[0]} is outside the model's vocabulary of {limits.vocab_size}; {instead}"
            )
    return tokens, labels


def check_all_taken(others: Sample, tokens: np.ndarray, labels: np.ndarray, name: str) -> None:
    """Raises UnusedError for numbers that could decide what is trained, and that the loss does not take.

    These are weights, and numbers beside labels [t]; all but ones, positions, and copies of ``tokens`` and ``labels``.
    """
    for key in others.keys() - KNOWN_KEYS:
        try:
            numbers = np.asarray(others[key])
        except (TypeError, ValueError, RuntimeError):  # such as an image
            continue
        is_beside = numbers.dtype.kind in "biuf" and (key in _WEIGHTS or numbers.shape == labels.shape)
        copies = np.ones_like(numbers), tokens, labels, np.arange(len(labels))
        if is_beside and not any(np.array_equal(numbers, copy) for copy in copies):
            instead = "remove them, or set loss to one that declares them as a column"
            if key in _WEIGHTS:
                instead = (
                    "set weight to 0 or 1 in all turns, or fine-tune with recipe_utils.losses.LinearCrossEntropyLoss"
                )
            value = numbers[numbers != 1][0]
            raise UnusedError(f"{name}: its '{key}' contains {value:g}, which this loss does not take; {instead}")


def check_column(values: Any, key: str, num_labels: int, name: str) -> np.ndarray:
    """Returns a column [t] or [t, k] fp64; raises SampleError unless it is finite, and ``weights`` at least 0."""
    numbers = _finite(values, key, name)
    if numbers.shape[:1] != (num_labels,) or numbers.ndim > 2:
        raise SampleError(f"{name}: {numbers.shape} {key} for {num_labels} labels; each label needs one")
    return numbers.astype(np.float64)


def _finite(values: Any, key: str, name: str) -> np.ndarray:
    """Returns numbers as an array, integers as int64 and others as fp64; raises SampleError unless they are finite."""
    try:
        numbers = np.asarray(values)
        numbers = numbers.astype(np.int64 if numbers.dtype.kind in "iu" else np.float64)
    except (TypeError, ValueError) as error:
        raise SampleError(f"{name}: its {key} are not a list of numbers ({error})") from None
    least = 0 if key == "weights" else -np.inf
    if len(wrong := numbers[~(np.isfinite(numbers) & (numbers >= least))]):
        text = f"set them to finite numbers{' of at least 0' * (least == 0)}"
        raise SampleError(f"{name}: its {key} contain {wrong[0]:g}; {text}")
    return numbers
