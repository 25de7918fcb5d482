"""Text microbatches: padded or packed rows.

Shapes: b samples, s slots (positions) per sample, n target tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from recipe_utils.data.loader.microbatch import Microbatch, Targets
from recipe_utils.data.loader.samples import Sample
from recipe_utils.data.text.documents import DocumentLengths, Documents

CollateFn = Callable[[Sequence[Sample]], dict[str, Any]]
"""As torchtune's ``collate_fn``: samples -> tensors of a batch."""

Collate = Callable[[Sequence[Sample]], Microbatch]
"""Samples -> what one forward and backward consumes: one of the two functions below."""


def collate_microbatch(
    samples: Sequence[Sample],
    collate_fn: CollateFn,
    ignore_index: int,
    merge_packed_rows: bool = False,
) -> Microbatch:
    """Makes one microbatch; labels become targets, shifted by one position.

    Args:
        samples: at least one, of one kind: all packed or none.
        collate_fn: returns a dict with ``tokens`` and ``labels``, both [b, s], and further arguments
            of the model's forward. Not called for packed samples, which need no padding.
        ignore_index: the label of positions that are no targets.
        merge_packed_rows: packed samples become one row without their padding, see
            :func:`collate_packed_microbatch`.

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
        raise ValueError(f"collate_fn: it must return labels shaped as its tokens, returned {got}")

    labels = _labels_of_next_position(inputs.pop("labels"), document_lengths, ignore_index)
    num_real = sum(num_real_tokens(sample, ignore_index) for sample in samples)
    return _microbatch(inputs, labels, num_real, ignore_index)


def collate_packed_microbatch(
    samples: Sequence[Sample],
    ignore_index: int,
    padding_idx: int = 0,
    row_multiple: int | None = None,
) -> Microbatch:
    """Makes one microbatch of one row, in which sample follows sample.

    Each attends only to itself, its positions start from 0 and its last token predicts nothing. Samples of a
    packed dataset are taken apart into their documents, and their padding is dropped.

    Args:
        samples: at least one, of text.
        ignore_index: the label of positions that are no targets.
        padding_idx: the token to pad with.
        row_multiple: pads the row to a multiple of so many tokens, as one more document. None for no
            padding.

    Raises:
        ValueError: a sample holds images; what else there is besides text is ignored.
    """
    tokens, labels, positions = [], [], []
    lengths: list[int] = []
    for sample in samples:
        if "encoder_input" in sample:
            raise ValueError(
                "microbatching=packed: rows hold text only, a sample has encoder_input, too; set "
                "microbatching=least_padding, and collate_fn for images"
            )
        num_real = num_real_tokens(sample, ignore_index)
        padded = num_real < len(sample["tokens"])
        lengths += document_lengths_of(sample)[: -1 if padded else None]
        tokens.append(torch.as_tensor(sample["tokens"])[:num_real])
        labels.append(torch.as_tensor(sample["labels"])[:num_real])
        # A document that the dataset cut in two goes on counting positions in its second part.
        own_positions = sample.get("input_pos", torch.arange(num_real))
        positions.append(torch.as_tensor(own_positions)[:num_real])
    num_real = sum(lengths)
    if row_multiple is not None and num_real % row_multiple:
        lengths.append(-num_real % row_multiple)
        tokens.append(torch.full((lengths[-1],), padding_idx))
        labels.append(torch.full((lengths[-1],), ignore_index))
        positions.append(torch.zeros(lengths[-1], dtype=torch.long))
    inputs = {
        "tokens": torch.cat(tokens).unsqueeze(0),
        "input_pos": torch.cat(positions).unsqueeze(0),
        "document_lengths": Documents([lengths]),
    }
    shifted = _labels_of_next_position(torch.cat(labels).unsqueeze(0), [lengths], ignore_index)
    return _microbatch(inputs, shifted, num_real, ignore_index)


def collate_empty_microbatch(sample: Sample, collate: Collate, ignore_index: int) -> Microbatch:
    """A microbatch without real tokens, for a rank that has fewer microbatches than the others.

    Every rank must run the same forwards and backwards, or FSDP's collectives hang. So the rank runs
    a sample whose targets are all ignored: a zero loss with a graph through every parameter. Plain
    text is cut to one token, anything else (images, packed rows) keeps its shape.
    """
    if set(sample) <= {"tokens", "labels", "mask"}:
        sample = {"tokens": list(sample["tokens"][:1]), "labels": [ignore_index]}
    else:
        ignored = torch.full_like(torch.as_tensor(sample["labels"]), ignore_index)
        sample = {**sample, "labels": ignored if "seq_lens" in sample else ignored.tolist()}
    return replace(collate([sample]), counts={})


def document_lengths_of(sample: Sample) -> list[int]:
    """Tokens of each document of a sample, one unless it is packed; padding is the last of them."""
    if "seq_lens" not in sample:
        return [len(sample["tokens"])]
    return [length for length in torch.as_tensor(sample["seq_lens"]).tolist() if length]


def num_targets_of(sample: Sample, ignore_index: int) -> int:
    """Tokens of a sample that are predicted: with a label, and not the first of their document."""
    is_target = torch.as_tensor(sample["labels"]) != ignore_index
    lengths = document_lengths_of(sample)
    is_target[list(accumulate(lengths[:-1], initial=0))] = False
    return int(is_target.sum())


def num_real_tokens(sample: Sample, ignore_index: int) -> int:
    """Tokens of a sample that are no padding.

    Only packed samples hold padding: torchtune appends it to a row as one more "document" of a
    single repeated token without targets.
    """
    if "seq_lens" not in sample:
        return len(sample["tokens"])
    last = document_lengths_of(sample)[-1]
    tokens, labels = sample["tokens"][-last:], sample["labels"][-last:]
    is_padding = bool((tokens == tokens[-1]).all() and (labels == ignore_index).all())
    return len(sample["tokens"]) - (last if is_padding else 0)


def _microbatch(
    inputs: dict[str, Any], labels: Tensor, num_real: int, ignore_index: int
) -> Microbatch:
    positions = (labels.flatten() != ignore_index).nonzero().squeeze(1)
    counts = {
        "target_tokens": len(positions),
        "real_tokens": num_real,
        "positions": inputs["tokens"].numel(),
    }
    return Microbatch(inputs, Targets(labels, positions), counts)


def _labels_of_next_position(
    labels: Tensor, document_lengths: DocumentLengths | None, ignore_index: int
) -> Tensor:
    """Shifts labels [b, s] left by one; the last position of a row or document has no target."""
    shifted = labels.roll(-1, dims=1)
    shifted[:, -1] = ignore_index
    for row, lengths in zip(shifted, document_lengths or (), strict=document_lengths is not None):
        # Without this the last token of a document is trained to predict the first token of an
        # unrelated one, whenever that one's prompt is not masked.
        row[torch.tensor(lengths).cumsum(0) - 1] = ignore_index
    return shifted
