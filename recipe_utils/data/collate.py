"""From samples to the tensors of a microbatch.

Shapes: b samples, s slots (positions) per sample, n target tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only

from recipe_utils.data.samples import Sample
from recipe_utils.model.document_mask import DocumentLengths

CollateFn = Callable[[Sequence[Sample]], dict[str, Any]]
"""As torchtune's ``collate_fn``: samples -> tensors of a batch."""


class Targets(NamedTuple):
    """What a microbatch is asked to predict."""

    labels: Tensor
    """[b, s]: the label of the *next* position, ``ignore_index`` where there is no target."""
    positions: Tensor
    """[n]: indices of the target tokens in the flattened [b * s] slots, ascending. Found on the CPU,
    so that no device has to be waited for to learn n."""


@dataclass(frozen=True)
class Microbatch:
    """What one forward and backward consumes on one rank."""

    inputs: Mapping[str, Any]
    """Keyword arguments of the model's forward: ``tokens`` [b, s], whatever else the collate function
    returned besides labels and, for packed rows, ``input_pos`` [b, s] and ``document_lengths``, of
    which :mod:`recipe_utils.model.document_mask` makes the mask: no mask waits in the queue."""
    targets: Targets
    num_target_tokens: int
    num_real_tokens: int
    """Positions that hold a sample's token."""
    num_slots: int
    """Positions computed: real tokens and padding."""

    def pin_memory(self) -> "Microbatch":
        """Copies to page-locked memory, from which a device copy does not block the host."""
        pinned: Microbatch = tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), self)
        return pinned


# As a tree of its tensors it can be copied along with whatever stands beside it.
register_dataclass(Microbatch)


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
        inputs["document_lengths"] = document_lengths
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
        ValueError: a sample holds something else than text.
    """
    tokens, labels, positions = [], [], []
    lengths: list[int] = []
    for sample in samples:
        other = sorted(sample.keys() - {"tokens", "labels", "mask", "input_pos", "seq_lens"})
        if other:
            raise ValueError(
                f"microbatching=packed: rows hold text only, a sample has {', '.join(other)}, too; set "
                "microbatching=least_padding"
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
        "document_lengths": [lengths],
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
    return replace(collate([sample]), num_real_tokens=0)


def document_lengths_of(sample: Sample) -> list[int]:
    """Tokens of each document of a sample, one unless it is packed; padding is the last of them."""
    if "seq_lens" not in sample:
        return [len(sample["tokens"])]
    return [length for length in torch.as_tensor(sample["seq_lens"]).tolist() if length]


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
    return Microbatch(
        inputs=inputs,
        targets=Targets(labels, positions),
        num_target_tokens=len(positions),
        num_real_tokens=num_real,
        num_slots=inputs["tokens"].numel(),
    )


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
