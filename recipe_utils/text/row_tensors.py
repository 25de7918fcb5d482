"""Layouts of rows: packed (documents one after the other), padded (each in a row of its own), and shares of packed ones.

Example: the samples ``u v A B`` and ``w C``, targets in capitals, as a packed row padded to a multiple of 4::

    tokens   u  v  A  B  w  C  0  0
    labels   -  A  B  -  C  -  -  -      those of the next positions, never of another document
    owners   0  0  0  0  1  1 -1 -1      ends of the sequences: 3 and 5

Of two ranks that compute it together, rank 0 has the tokens ``u A w 0`` and rank 1 ``v B C 0``. A target at position 5
of the row is at position 2 of rank 1.

Shapes: b rows, s positions per row, n targets, p sequences.

What PyTorch computes in parallel (repeat_interleave, indexing and nonzero of long rows) is left to NumPy: OpenMP threads
of the data thread, beside the training's, would make both sleep between operations.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipe_utils.plans.rounds import Share
from recipe_utils.text.documents import DocumentLengths, Documents, length_of
from recipe_utils.text.images.sample import ImageInputs, join_pixels
from recipe_utils.text.reader import TextReader
from recipe_utils.text.samples import TextSample, beside_tokens, joined
from recipe_utils.text.trees import Shared, apart
from recipe_utils.update_steps.samples import Sample
from recipe_utils.update_steps.step import Microbatch, Targets

CollateFn = Callable[[Sequence[Sample]], dict[str, Any]]
"""torchtune's ``collate_fn``: samples -> tensors of a batch."""


# ---- Layouts --------------------------------------------------------------------------------------


def packed(row: Shared, reader: TextReader, pad_id: int = 0, row_multiple: int | None = None) -> Microbatch:
    """Makes a microbatch of one row, padded to a multiple of ``row_multiple`` with one more document.

    One position is padded to two, because compiled layers would be compiled again for it. Raises ValueError for images;
    other keys are ignored.
    """
    if any("encoder_input" in sample.others for sample in row.samples):
        raise ValueError(
            "microbatching=packed: rows contain only text, and a sample has encoder_input; set "
            "microbatching=least_padding, and collate_fn for images"
        )
    num_real = sum(len(sample.tokens) for sample in row.samples) - row.num_saved
    num_padding = max(-num_real % (row_multiple or 1), 2 - num_real, 0)
    documents = [*row.documents, *[num_padding] * (num_padding > 0)]
    return _lay_out(row, reader, [num_real], num_real + num_padding, pad_id, [documents])


def padded(samples: Sequence[TextSample], reader: TextReader, pad_id: int = 0) -> Microbatch:
    """Makes a microbatch of a row for each document, or for all those of a packed dataset's sample."""
    if samples[0].is_row:
        lengths = [len(sample.tokens) for sample in samples]
        documents: Any = [sample.documents for sample in samples]
    else:
        lengths = [length_of(document) for sample in samples for document in sample.documents]
        documents = None
    return _lay_out(apart(samples), reader, lengths, max(lengths), pad_id, documents)


def _lay_out(
    row: Shared,
    reader: TextReader,
    lengths: Sequence[int],
    row_length: int,
    pad_id: int,
    documents: DocumentLengths | None,
) -> Microbatch:
    """Makes a microbatch of rows of ``row_length`` positions, the first ``lengths`` [b] of each with samples."""
    # Columns of all samples, one after the other, without what a sample shares with the one before.
    tokens, owners, ends, positions, labels = [], [], [], [], []
    num_sequences = num_positions = 0
    for sample, first in zip(row.samples, row.starts, strict=True):
        tokens.append(sample.tokens[first:])
        positions.append(_positions_of(sample)[first:] if documents is not None else tokens[-1])
        labels.append(sample.labels[first:])
        of_sample, lasts = sample.owners_and_ends()
        owners.append(np.where(of_sample < 0, -1, of_sample + num_sequences)[first:])
        ends.append(lasts - first + num_positions)
        num_sequences, num_positions = num_sequences + len(lasts), num_positions + len(tokens[-1])

    # Position i of the samples, one after the other, is places[i] of the flattened rows.
    sizes = np.array(lengths)
    shifts = np.arange(len(sizes)) * row_length - (sizes.cumsum() - sizes)
    places = np.arange(num_positions) + np.repeat(shifts, sizes)

    def rows(pieces: Sequence[np.ndarray], padding: float) -> Tensor:
        flat = np.full(len(sizes) * row_length, padding, dtype=pieces[0].dtype)
        flat[places] = np.concatenate(pieces)
        return torch.from_numpy(flat).view(len(sizes), row_length)

    # Positions and documents are only given where a row has several; else they count from 0.
    inputs: dict[str, Any] = {"tokens": rows(tokens, pad_id)}
    if documents is not None:
        inputs |= {"input_pos": rows(positions, 0), "document_lengths": Documents(documents)}
    if beside := _images_of(row):
        axes = [rows(axis, 0) for axis in zip(*(each.positions for each in beside), strict=True)]
        inputs["input_pos"] = axes[0] if len(axes) == 1 else torch.stack(axes)  # [k, b, s]
        types = {name: rows([each.types[name] for each in beside], 0) for name in beside[0].types}
        pixels = [each for of_sample in beside for each in of_sample.pixels]
        inputs["images"] = {**types, **join_pixels(pixels, reader.bounds.limits.joins)}
    targets = Targets(
        *_with_positions(rows(labels, reader.ignore_index), reader.ignore_index),
        owners=rows(owners, -1),
        ends=torch.from_numpy(places[np.concatenate(ends)]),
    )
    return _microbatch(row.samples, reader, inputs, targets, row.num_saved)


def collated(samples: Sequence[TextSample], reader: TextReader, collate_fn: CollateFn) -> Microbatch:
    """Makes a microbatch of the rows of a ``collate_fn``, which takes samples as the dataset returned them.

    It returns ``tokens`` and ``labels``, both [b, s], and further arguments of the model's forward. Raises ValueError if
    its labels have another shape than the tokens, or other targets than the samples' columns.
    """
    labels = [beside_tokens(sample, reader.ignore_index)["labels"] for sample in samples]
    given = zip(samples, labels, strict=True)
    inputs = dict(collate_fn([{"tokens": s.tokens, "labels": beside, **s.others} for s, beside in given]))
    if "labels" not in inputs or inputs["labels"].shape != inputs["tokens"].shape:
        got = {key: tuple(value.shape) for key, value in inputs.items() if hasattr(value, "shape")}
        raise ValueError(f"collate_fn: labels must have the shape of tokens; it returned {got}")
    # The function pads labels beside their tokens: here they move to the position before.
    labels = inputs.pop("labels").roll(-1, dims=1)
    labels[:, -1] = reader.ignore_index
    targets = Targets(*_with_positions(labels, reader.ignore_index))
    if (num_rows := len(labels)) == len(samples):  # else targets have no sample
        # A row is a sample. If it begins with its tokens, what follows is padding, and its last token is known.
        owners = np.repeat(np.arange(num_rows)[:, None], labels.size(1), axis=1)
        lengths = np.array([len(sample.tokens) for sample in samples])
        rows = zip(inputs["tokens"].numpy(), samples, strict=True)
        if all(np.array_equal(row[: len(sample.tokens)], sample.tokens) for row, sample in rows):
            owners[np.arange(labels.size(1)) >= lengths[:, None]] = -1
            ends = np.arange(num_rows) * labels.size(1) + lengths - 1
            targets = targets._replace(ends=torch.from_numpy(ends))
        targets = targets._replace(owners=torch.from_numpy(owners))
    return _microbatch(samples, reader, inputs, targets, 0)


def share_of_row(row: Microbatch, share: Share, num_samples: int, row_multiple: int | None) -> Microbatch:
    """Returns a share of the microbatch of one packed row of ``num_samples``; share 0 counts the whole row.

    Shares are stripes, so that each has about as many targets: of a long prompt with a short answer, the last of a few
    blocks would have them all. The row is padded with one more document, so that each share has a multiple of
    ``row_multiple`` positions. Labels are those of the whole row's next positions.
    """
    first, num_ranks = share
    labels, documents = row.targets.labels, row.inputs["document_lengths"].lengths[0]
    num_missing = -labels.numel() % ((row_multiple or 1) * num_ranks)
    if num_missing:
        documents = [*documents, num_missing]

    def of_share(column: Tensor) -> Tensor:
        # The last position has no target, so copies of it are padding.
        padded = torch.cat([column, column[:, -1:].expand(-1, num_missing)], dim=1)
        return padded[:, first::num_ranks]

    inputs: dict[str, Any] = {key: of_share(x) for key, x in row.inputs.items() if key != "document_lengths"}
    inputs["document_lengths"] = Documents([documents], num_ranks)
    is_here = row.targets.positions % num_ranks == first
    owners = row.targets.owners
    assert owners is not None
    if num_missing:
        owners = torch.cat([owners, owners.new_full((1, num_missing), -1)], dim=1)
    targets = row.targets._replace(
        labels=of_share(labels),
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


# ---- What stands beside the positions --------------------------------------------------------------


def _microbatch(
    samples: Sequence[TextSample],
    reader: TextReader,
    inputs: dict[str, Any],
    targets: Targets,
    num_saved: int,
) -> Microbatch:
    """Makes a microbatch, with the columns [n, ...] of its samples at its targets, their values, and counts."""
    # Columns at targets: of the samples that have them, else their default.
    num_targets, columns, places = len(targets.positions), dict[str, Tensor](), None
    samples = [sample.with_columns(reader.columns) for sample in samples]
    shapes = {name: column.shape[1:] for sample in samples for name, column in sample.columns.items()}
    are_targets = [sample.labels != reader.ignore_index for sample in samples if shapes]
    for name, default in reader.columns.items():
        if name not in shapes:
            columns[name] = torch.full((num_targets,), default or 0.0, dtype=torch.float64)
            continue
        of_samples = []  # in the order of the targets
        for sample, is_target in zip(samples, are_targets, strict=True):
            column = sample.columns.get(name, np.full((len(is_target), *shapes[name]), default))
            of_samples.append(column[is_target])
        columns[name] = torch.from_numpy(joined(of_samples, name, samples))
        if len(columns[name]) != num_targets:
            text = f"it made {num_targets} targets of {len(columns[name])}, so {name} of samples have no place"
            raise ValueError(f"collate_fn: {text}; leave the key out")
    # Values of samples, and their places in the update step and in the dataset, once per sequence.
    values = {name: joined([s.values[name] for s in samples], name, samples) for name in samples[0].values}
    if targets.owners is not None:
        numbers = [len(sample.owners_and_ends()[1]) for sample in samples]
        each = np.array([[sample.at.position, sample.at.item] for sample in samples])
        places = torch.from_numpy(np.repeat(each, numbers, axis=0))
    targets = targets._replace(
        samples=None if places is None else places[:, 0],
        items=None if places is None else places[:, 1],
        values=columns,
        defaults=frozenset(reader.columns.keys() - shapes),
        of_samples={name: torch.from_numpy(value) for name, value in values.items()},
    )
    # Tokens count as often as samples have them, also where a row computes them once.
    num_shared = sum(sum(sample.num_shared) for sample in samples)
    images = {}
    if "images" in inputs:
        beside = [sample.images for sample in samples if sample.images is not None]
        num_tokens = sum(int((s.identities < 0).sum()) for s in beside)
        images = {"images": sum(len(each.sizes) for s in beside for each in s.pixels), "image_tokens": num_tokens}
    counts = {
        **images,
        "target_tokens": num_targets,
        "real_tokens": sum(sample.num_real for sample in samples) + num_shared,
        "positions": targets.labels.numel(),
        "shared_tokens": num_shared + num_saved,
        **{name: float(columns[name].sum()) for name in reader.totals if name in columns},
    }
    return Microbatch(inputs, targets, reader.count(counts, values), tuple(sample.name for sample in samples))


def _with_positions(labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Returns labels [b, s] of the next positions, and the positions [n] of targets."""
    return labels, torch.from_numpy(np.flatnonzero(labels.numpy() != ignore_index))


def _images_of(row: Shared) -> list[ImageInputs]:
    """Returns the inputs beside what is computed of each sample, if one of them is of data with images."""
    like = next((sample.images for sample in row.samples if sample.images is not None), None)
    if like is None:
        return []
    beside = []
    for sample, first in zip(row.samples, row.starts, strict=True):
        images = like.of_text(_positions_of(sample)) if sample.images is None else sample.images
        beside.append(images.at(np.arange(first, len(sample.tokens))))
    return beside


def _positions_of(sample: TextSample) -> np.ndarray:
    if sample.positions is not None:
        return sample.positions
    return np.concatenate([np.arange(length_of(document)) for document in sample.documents])
