"""Layouts of rows: packed (documents one after the other) and padded (each in a row of its own).

Shapes: b rows, s positions per row, n positions of a piece.

What PyTorch computes in parallel (repeat_interleave, indexing and nonzero of long rows) is left to NumPy: OpenMP threads
of the data thread, beside the training's, would make both sleep between operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipe_utils.text.documents import Document, Documents, length_of
from recipe_utils.text.trees import TREE_KEYS, Piece, share_beginnings
from recipe_utils.update_steps.samples import Sample
from recipe_utils.update_steps.step import Microbatch, Targets

LOADER_KEYS = ("dataset_index", "step_position")
"""Keys that the loader adds to samples."""

CollateFn = Callable[[Sequence[Sample]], dict[str, Any]]
"""torchtune's ``collate_fn``: samples -> tensors of a batch."""


# ---- Layouts --------------------------------------------------------------------------------------


def packed(
    pieces: Sequence[Piece], ignore_index: int, padding_idx: int = 0, row_multiple: int | None = None
) -> Microbatch:
    """Makes a microbatch of one row, padded to a multiple of ``row_multiple`` with one more document.

    One position is padded to two, because compiled layers would be compiled again for it.
    """
    columns = [piece.columns for piece in pieces]
    documents = [document for piece in pieces for document in piece.documents]
    num_real = sum(column.size(1) for column in columns)
    num_padding = max(-num_real % (row_multiple or 1), 2 - num_real)
    if num_padding > 0:
        documents.append(num_padding)
        columns.append(torch.tensor([[padding_idx], [ignore_index], [0]]).expand(3, num_padding))
    rows = torch.cat(columns, dim=1).unsqueeze(1)
    return _microbatch(rows, [documents], num_real, ignore_index)


def padded(samples: Sequence[Sample], collate_fn: CollateFn, ignore_index: int) -> Microbatch:
    """Makes a microbatch of the rows of a ``collate_fn``. Raises ValueError if its labels do not match the tokens."""
    inputs = dict(collate_fn([{k: v for k, v in sample.items() if k not in LOADER_KEYS} for sample in samples]))
    if "labels" not in inputs or inputs["labels"].shape != inputs["tokens"].shape:
        got = {key: tuple(value.shape) for key, value in inputs.items() if hasattr(value, "shape")}
        raise ValueError(f"collate_fn: labels must have the shape of tokens; it returned {got}")
    labels = inputs.pop("labels").roll(-1, dims=1)
    labels[:, -1] = ignore_index
    return _with_targets(inputs, labels, sum(len(s["tokens"]) for s in samples), ignore_index)


def _microbatch(rows: Tensor, documents: Sequence[Sequence[Document]], num_real: int, ignore_index: int) -> Microbatch:
    """Makes a microbatch of tokens, labels and positions [3, b, s] of rows of documents."""
    tokens, labels, positions = rows
    inputs = {"tokens": tokens, "input_pos": positions, "document_lengths": Documents(documents)}
    return _with_targets(inputs, labels, num_real, ignore_index)


def _with_targets(inputs: dict[str, Any], labels: Tensor, num_real: int, ignore_index: int) -> Microbatch:
    """Makes a microbatch; ``labels`` [b, s] are those of the next positions."""
    positions = torch.from_numpy(np.flatnonzero(labels.numpy() != ignore_index))
    counts = {"target_tokens": len(positions), "real_tokens": num_real, "positions": labels.numel()}
    return Microbatch(inputs, Targets(labels, positions), counts)


# ---- Text -----------------------------------------------------------------------------------------


def collate_microbatch(
    samples: Sequence[Sample],
    collate_fn: CollateFn,
    ignore_index: int,
    of_targets: Sequence[str] = (),
) -> Microbatch:
    """Makes a microbatch of padded rows, or of the rows of a packed dataset, for which ``collate_fn`` is not called.

    It returns ``tokens`` and ``labels``, both [b, s], and further arguments of the model's forward. ``of_targets`` are
    names of values per target. Raises ValueError if its labels have another shape than the tokens, or other targets.
    """
    if "seq_lens" not in samples[0]:
        microbatch = padded(samples, collate_fn, ignore_index)
    else:
        pieces = [piece_of(sample, ignore_index, has_padding=True) for sample in samples]
        rows = torch.stack([piece.columns for piece in pieces], dim=1)
        num_real = sum(num_real_tokens(sample, ignore_index) for sample in samples)
        microbatch = _microbatch(rows, [piece.documents for piece in pieces], num_real, ignore_index)
    num_rows, length = microbatch.targets.labels.shape
    return _with_values(microbatch, samples, [length] * num_rows, of_targets, ignore_index)


def collate_packed_microbatch(
    samples: Sequence[Sample],
    ignore_index: int,
    padding_idx: int = 0,
    row_multiple: int | None = None,
    shares_beginnings: bool = False,
    of_targets: Sequence[str] = (),
) -> Microbatch:
    """Makes a microbatch of one row, padded to a multiple of ``row_multiple``; a packed dataset's own padding is removed.

    With ``shares_beginnings``, samples that begin with the same tokens may become one tree, see
    :func:`recipe_utils.text.trees.share_beginnings`. Raises ValueError for images; other keys are ignored.
    """
    if any("encoder_input" in sample for sample in samples):
        raise ValueError(
            "microbatching=packed: rows contain only text, and a sample has encoder_input; set "
            "microbatching=least_padding, and collate_fn for images"
        )
    pieces: Sequence[Piece] = [piece_of(sample, ignore_index) for sample in samples]
    num_saved = 0
    if shares_beginnings and len(pieces) > 1:
        order, pieces, num_saved = share_beginnings(pieces, ignore_index)
        samples = [samples[i] for i in order]
    row = packed(pieces, ignore_index, padding_idx, row_multiple)
    row = _with_values(row, samples, [piece.columns.size(1) for piece in pieces], of_targets, ignore_index)
    if shares_beginnings or any("documents" in sample for sample in samples):
        num_shared = num_saved + sum(sum(sample.get("num_shared", ())) for sample in samples)
        num_real = row.counts["real_tokens"] + num_shared
        row = replace(row, counts={**row.counts, "real_tokens": num_real, "shared_tokens": num_shared})
    return row


def piece_of(sample: Sample, ignore_index: int, has_padding: bool = False) -> Piece:
    """Returns the documents of a sample; without a packed dataset's padding unless ``has_padding``."""
    lengths = document_lengths_of(sample)
    num_tokens = len(sample["tokens"])
    if not has_padding and (num_real := num_real_tokens(sample, ignore_index)) < num_tokens:
        num_tokens, lengths = num_real, lengths[:-1]
    # The second part of a document that the dataset cut in two has later positions.
    positions = sample.get("input_pos", torch.arange(num_tokens))
    columns = (sample["tokens"], sample["labels"], positions)
    tokens, labels, positions = (torch.as_tensor(column)[:num_tokens] for column in columns)
    labels = labels.roll(-1)
    labels[torch.tensor(list(map(length_of, lengths))).cumsum(0) - 1] = ignore_index
    return Piece(torch.stack([tokens, labels, positions]), lengths)


def _with_values(
    row: Microbatch, samples: Sequence[Sample], lengths: Sequence[int], names: Sequence[str], ignore_index: int
) -> Microbatch:
    """Adds each target's sample, if samples have a position, its values by name, and the sum of each name.

    ``lengths`` are the samples' positions in rows; where a ``collate_fn`` made another number of rows than samples,
    targets have no sample. Where a sample has no value, it is 1. Raises ValueError if a ``collate_fn`` made other
    targets.
    """
    targets, values, num_targets = row.targets, {}, len(row.targets.positions)
    if "step_position" in samples[0] and len(lengths) == len(samples):
        samples_of_row = np.repeat([sample["step_position"] for sample in samples], lengths)
        targets = targets._replace(samples=torch.from_numpy(samples_of_row[targets.positions.numpy()]))
    for name in names:
        if any(name in sample for sample in samples):
            values[name] = torch.cat([_values_of(sample, name, ignore_index) for sample in samples])
            if len(values[name]) != num_targets:
                raise ValueError(
                    f"collate_fn: it made {num_targets} targets of {len(values[name])}, so {name} of samples have no "
                    "place; leave the key out"
                )
    sums = {name: float(values[name].sum()) if name in values else num_targets for name in names}
    return replace(row, targets=targets._replace(values=values), counts={**row.counts, **sums})


def _values_of(sample: Sample, name: str, ignore_index: int) -> Tensor:
    """Returns ``sample[name]`` at its targets, [targets] fp64: the value beside a label is that of its target."""
    is_target = piece_of(sample, ignore_index).columns[1] != ignore_index
    values = torch.as_tensor(sample.get(name, np.ones(len(sample["tokens"]))), dtype=torch.float64)
    return values.roll(-1)[: len(is_target)][is_target]


def collate_dummy(
    sample: Sample, collate: Callable[..., Microbatch], ignore_index: int, of_targets: Sequence[str] = ()
) -> Microbatch:
    """Makes a dummy microbatch: a sample whose targets are all ignored.

    Its loss is zero, with a graph through every parameter. Plain text and trees are cut to one token;
    other samples (images, packed rows) keep their shape.
    """
    sample = {key: value for key, value in sample.items() if key not in of_targets}
    if "documents" in sample:
        sample = {key: value for key, value in sample.items() if key not in TREE_KEYS}
    if set(sample) <= {"tokens", "labels", "mask", *LOADER_KEYS}:
        sample = {**sample, "tokens": list(sample["tokens"][:1]), "labels": [ignore_index]}
    else:
        ignored = torch.full_like(torch.as_tensor(sample["labels"]), ignore_index)
        sample = {**sample, "labels": ignored if "seq_lens" in sample else ignored.tolist()}
    return replace(collate([sample]), counts={})


def document_lengths_of(sample: Sample) -> Sequence[Document]:
    """Returns documents, one unless the sample is packed or a tree was cut; padding is the last."""
    if "documents" in sample:
        documents: Sequence[Document] = sample["documents"]
        return documents
    if "seq_lens" not in sample:
        return [len(sample["tokens"])]
    return [length for length in torch.as_tensor(sample["seq_lens"]).tolist() if length]


def num_real_tokens(sample: Sample, ignore_index: int) -> int:
    """Returns the number of tokens that are not padding.

    Only samples of a packed dataset contain padding: torchtune appends it as one more "document" of
    a repeated token without targets.
    """
    if "seq_lens" not in sample:
        return len(sample["tokens"])
    last = length_of(document_lengths_of(sample)[-1])
    tokens, labels = sample["tokens"][-last:], sample["labels"][-last:]
    is_padding = bool((tokens == tokens[-1]).all() and (labels == ignore_index).all())
    return len(sample["tokens"]) - (last if is_padding else 0)
