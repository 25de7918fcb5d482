"""Text microbatches: padded or packed rows.

Shapes: b samples, s positions per sample, n target tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from recipe_utils.data.loader.microbatch import Microbatch, Targets
from recipe_utils.data.loader.samples import Sample
from recipe_utils.data.plan.plan import WHOLE, Part
from recipe_utils.data.text.documents import DocumentLengths, Documents

CollateFn = Callable[[Sequence[Sample]], dict[str, Any]]
"""torchtune's ``collate_fn``: samples -> tensors of a batch."""

Collate = Callable[..., Microbatch]
"""Samples, and for packed rows the part -> microbatch."""


def collate_microbatch(
    samples: Sequence[Sample],
    collate_fn: CollateFn,
    ignore_index: int,
    merge_packed_rows: bool = False,
) -> Microbatch:
    """Makes a padded microbatch; labels become targets, shifted by one position.

    Args:
        samples: at least one, all from a packed dataset or none.
        collate_fn: returns ``tokens`` and ``labels``, both [b, s], and further arguments of the
            model's forward. Not called for samples of a packed dataset, which need no padding.
        ignore_index: label of positions that are not targets.
        merge_packed_rows: merges samples of a packed dataset by :func:`collate_packed_microbatch`.

    Raises:
        ValueError: ``collate_fn`` returned no labels, or labels of another shape than the tokens.
    """
    document_lengths = None
    if "seq_lens" in samples[0] and merge_packed_rows:
        return collate_packed_microbatch(samples, ignore_index)
    if "seq_lens" in samples[0]:
        document_lengths = [document_lengths_of(sample) for sample in samples]
        inputs: dict[str, Any] = {
            key: torch.stack([torch.as_tensor(sample[key]) for sample in samples])
            for key in ("tokens", "labels", "input_pos")
        }
        inputs["document_lengths"] = Documents(document_lengths)
    else:
        inputs = dict(collate_fn(samples))
    if "labels" not in inputs or inputs["labels"].shape != inputs["tokens"].shape:
        got = {key: tuple(value.shape) for key, value in inputs.items() if hasattr(value, "shape")}
        raise ValueError(f"collate_fn: labels must have the shape of tokens; it returned {got}")
    labels = inputs.pop("labels")
    num_real = sum(num_real_tokens(sample, ignore_index) for sample in samples)
    datasets = _datasets_of(samples, [labels.size(1)] * len(labels))
    return _microbatch(inputs, labels, document_lengths, num_real, ignore_index, datasets)


def collate_packed_microbatch(
    samples: Sequence[Sample],
    ignore_index: int,
    padding_idx: int = 0,
    row_multiple: int | None = None,
    part: Part = WHOLE,
) -> Microbatch:
    """Makes a microbatch of one row of concatenated samples, or of a part of it.

    Each attends only to itself, its positions start from 0 and its last token predicts nothing.
    Samples of a packed dataset are split into documents without padding. Each part is padded to a
    multiple of ``row_multiple`` tokens, the row with one more document.

    Raises:
        ValueError: a sample contains images. Other keys than those of text are ignored.
    """
    parts: list[Tensor] = []
    lengths: list[int] = []
    for sample in samples:
        if "encoder_input" in sample:
            raise ValueError(
                "microbatching=packed: rows contain only text, and a sample has encoder_input; set "
                "microbatching=least_padding, and collate_fn for images"
            )
        num_real = num_real_tokens(sample, ignore_index)
        padded = num_real < len(sample["tokens"])
        lengths += document_lengths_of(sample)[: -1 if padded else None]
        # The second part of a document that the dataset cut in two has later positions.
        positions = sample.get("input_pos", torch.arange(num_real))
        columns = (sample["tokens"], sample["labels"], positions)
        parts.append(torch.stack([torch.as_tensor(each)[:num_real] for each in columns]))
    datasets = _datasets_of(samples, [part.size(1) for part in parts])
    num_real = sum(lengths)
    multiple = (row_multiple or 1) * part.num_ranks
    if num_real % multiple:
        lengths.append(-num_real % multiple)
        padding = torch.tensor([[padding_idx], [ignore_index], [0]])
        parts.append(padding.expand(3, lengths[-1]))
    tokens, labels, input_pos = torch.cat(parts, dim=1).unsqueeze(1)
    inputs = {"tokens": tokens, "input_pos": input_pos, "document_lengths": Documents([lengths])}
    row = _microbatch(inputs, labels, [lengths], num_real, ignore_index, datasets)
    return cut_part(row, part, len(samples))


def cut_part(row: Microbatch, part: Part, num_samples: int) -> Microbatch:
    """Returns a part of the microbatch of one packed row; part 0 counts the whole row.

    Parts are stripes, so that each has about as many targets: of a long prompt with a short answer,
    the last of a few blocks would have them all. Labels are those of the whole row's next positions.
    """
    if part.num_ranks == 1:
        return row
    own = slice(part.first, None, part.num_ranks)
    inputs: dict[str, Any] = {key: row.inputs[key][:, own] for key in ("tokens", "input_pos")}
    documents = row.inputs["document_lengths"]
    inputs["document_lengths"] = Documents(documents.lengths, part.num_ranks)
    is_own = row.targets.positions % part.num_ranks == part.first
    targets = row.targets._replace(
        labels=row.targets.labels[:, own],
        positions=row.targets.positions[is_own] // part.num_ranks,
    )
    if targets.dataset_indices is not None:
        targets = targets._replace(dataset_indices=targets.dataset_indices[is_own])
    if targets.pairs is not None:
        of_row = targets.pairs.segment_lengths
        segments = torch.arange(len(of_row)).repeat_interleave(of_row)[is_own]
        own_lengths = segments.bincount(minlength=len(of_row))
        pairs = targets.pairs._replace(
            segment_lengths=own_lengths, of_row=of_row, num_ranks=part.num_ranks
        )
        targets = targets._replace(pairs=pairs)
    counts = {**row.counts, "spanning_samples": num_samples}
    if part.first > 0:
        counts = dict.fromkeys(counts, 0)
    return Microbatch(inputs, targets, counts)


def collate_dummy(sample: Sample, collate: Collate, ignore_index: int) -> Microbatch:
    """Makes a dummy microbatch: a sample whose targets are all ignored.

    Its loss is zero, with a graph through every parameter. Plain text is cut to one token; other
    samples (images, packed rows) keep their shape.
    """
    if set(sample) <= {"tokens", "labels", "mask", "dataset_index"}:
        sample = {**sample, "tokens": list(sample["tokens"][:1]), "labels": [ignore_index]}
    else:
        ignored = torch.full_like(torch.as_tensor(sample["labels"]), ignore_index)
        sample = {**sample, "labels": ignored if "seq_lens" in sample else ignored.tolist()}
    return replace(collate([sample]), counts={})


def document_lengths_of(sample: Sample) -> list[int]:
    """Returns the tokens of each document, one unless the sample is packed; padding is the last."""
    if "seq_lens" not in sample:
        return [len(sample["tokens"])]
    return [length for length in torch.as_tensor(sample["seq_lens"]).tolist() if length]


def num_targets_of(sample: Sample, ignore_index: int) -> int:
    """Returns the number of target tokens: those with a label that are not the first of their document."""
    is_target = torch.as_tensor(sample["labels"]) != ignore_index
    lengths = document_lengths_of(sample)
    is_target[list(accumulate(lengths[:-1], initial=0))] = False
    return int(is_target.sum())


def num_real_tokens(sample: Sample, ignore_index: int) -> int:
    """Returns the number of tokens that are not padding.

    Only samples of a packed dataset contain padding: torchtune appends it as one more "document" of
    a repeated token without targets.
    """
    if "seq_lens" not in sample:
        return len(sample["tokens"])
    last = document_lengths_of(sample)[-1]
    tokens, labels = sample["tokens"][-last:], sample["labels"][-last:]
    is_padding = bool((tokens == tokens[-1]).all() and (labels == ignore_index).all())
    return len(sample["tokens"]) - (last if is_padding else 0)


def _datasets_of(samples: Sequence[Sample], lengths: Sequence[int]) -> Tensor | None:
    """Returns the dataset index of each position, for samples of given lengths; None without any."""
    if "dataset_index" not in samples[0]:
        return None
    indices = torch.tensor([sample["dataset_index"] for sample in samples])
    return indices.repeat_interleave(torch.tensor(lengths))


def _microbatch(
    inputs: dict[str, Any],
    labels: Tensor,
    document_lengths: DocumentLengths | None,
    num_real: int,
    ignore_index: int,
    datasets: Tensor | None,
) -> Microbatch:
    """Shifts labels [b, s] left by one; the last position of a row or document has no target."""
    shifted = labels.roll(-1, dims=1)
    shifted[:, -1] = ignore_index
    for row, lengths in zip(shifted, document_lengths or (), strict=document_lengths is not None):
        # Otherwise the last token of a document predicts the first one of the next, if that is not masked.
        row[torch.tensor(lengths).cumsum(0) - 1] = ignore_index
    positions = (shifted.flatten() != ignore_index).nonzero().squeeze(1)
    counts = {
        "target_tokens": len(positions),
        "real_tokens": num_real,
        "positions": inputs["tokens"].numel(),
    }
    indices = None if datasets is None else datasets[positions]
    return Microbatch(inputs, Targets(shifted, positions, dataset_indices=indices), counts)
