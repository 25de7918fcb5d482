"""From samples to the tensors of a microbatch.

Shapes: b samples, s slots (positions) per sample, n target tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchtune.modules.attention_utils import packed_block_causal_mask

from recipe_utils.samples import Sample


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
    """Keyword arguments of the model's forward: ``tokens`` [b, s] and whatever else the collate
    function returned besides labels."""
    targets: Targets
    num_target_tokens: int
    num_real_tokens: int
    """Positions that hold a sample's token."""
    num_slots: int
    """Positions computed: real tokens and padding."""
    seq_lens: Sequence[Tensor] | None = None
    """Packed data only: document lengths of each row; the attention mask is made from them when the
    microbatch reaches the device, so no mask waits in the queue."""

    def to(self, device: torch.device) -> "Microbatch":
        """Copies to ``device``, without waiting where the memory is pinned.

        Packed data gets its document mask here.
        """

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        inputs = dict(tree_map_only(Tensor, move, dict(self.inputs)))
        if self.seq_lens is not None:
            mask = packed_block_causal_mask(seq_lens=list(self.seq_lens))
            inputs["mask"] = mask.to(device)
        return replace(self, inputs=inputs, targets=tree_map_only(Tensor, move, self.targets))

    def pin_memory(self) -> "Microbatch":
        """Copies to page-locked memory, from which a device copy does not block the host."""

        def pin(tensor: Tensor) -> Tensor:
            return tensor.pin_memory()

        return replace(
            self,
            inputs=dict(tree_map_only(Tensor, pin, dict(self.inputs))),
            targets=tree_map_only(Tensor, pin, self.targets),
        )


def collate_microbatch(
    samples: Sequence[Sample],
    collate_fn: Callable[[Sequence[Sample]], dict[str, Any]],
    ignore_index: int,
) -> Microbatch:
    """Makes one microbatch; labels become targets, shifted by one position.

    Args:
        samples: at least one, of one kind: all packed or none.
        collate_fn: returns a dict with ``tokens`` and ``labels``, both [b, s], and further arguments
            of the model's forward. Not called for packed samples, which need no padding.
        ignore_index: the label of positions that are no targets.

    Raises:
        ValueError: ``collate_fn`` returned no labels, or labels of another shape than the tokens.
    """
    seq_lens = None
    if "seq_lens" in samples[0]:
        seq_lens = [torch.as_tensor(sample["seq_lens"]) for sample in samples]
        inputs: dict[str, Any] = {
            key: torch.stack([torch.as_tensor(sample[key]) for sample in samples])
            for key in ("tokens", "labels", "input_pos")
        }
    else:
        inputs = dict(collate_fn(samples))
    if "labels" not in inputs or inputs["labels"].shape != inputs["tokens"].shape:
        got = {key: tuple(value.shape) for key, value in inputs.items() if hasattr(value, "shape")}
        raise ValueError(f"collate_fn: it must return labels shaped as its tokens, returned {got}")

    labels = _labels_of_next_position(inputs.pop("labels"), seq_lens, ignore_index)
    positions = (labels.flatten() != ignore_index).nonzero().squeeze(1)
    return Microbatch(
        inputs=inputs,
        targets=Targets(labels, positions),
        num_target_tokens=len(positions),
        num_real_tokens=sum(num_real_tokens(sample, ignore_index) for sample in samples),
        num_slots=inputs["tokens"].numel(),
        seq_lens=seq_lens,
    )


def collate_empty_microbatch(
    sample: Sample,
    collate_fn: Callable[[Sequence[Sample]], dict[str, Any]],
    ignore_index: int,
) -> Microbatch:
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
    return replace(collate_microbatch([sample], collate_fn, ignore_index), num_real_tokens=0)


def num_real_tokens(sample: Sample, ignore_index: int) -> int:
    """Tokens of a sample that are no padding.

    Only packed samples hold padding: torchtune appends it to a row as one more "document" of a
    single repeated token without targets.
    """
    if "seq_lens" not in sample:
        return len(sample["tokens"])
    last = int(sample["seq_lens"][-1])
    tokens, labels = sample["tokens"][-last:], sample["labels"][-last:]
    is_padding = bool((tokens == tokens[-1]).all() and (labels == ignore_index).all())
    return len(sample["tokens"]) - (last if is_padding else 0)


def _labels_of_next_position(
    labels: Tensor, seq_lens: Sequence[Tensor] | None, ignore_index: int
) -> Tensor:
    """Shifts labels [b, s] left by one; the last position of a row or document has no target."""
    shifted = labels.roll(-1, dims=1)
    shifted[:, -1] = ignore_index
    if seq_lens is not None:
        for row, lengths in zip(shifted, seq_lens, strict=True):
            # Without this the last token of a document is trained to predict the first token of an
            # unrelated one, whenever that one's prompt is not masked.
            row[lengths[lengths > 0].cumsum(0) - 1] = ignore_index
    return shifted
