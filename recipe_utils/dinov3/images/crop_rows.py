"""Rows of crops: input tokens of a vision transformer, and the positions that losses use.

Example: with 4 registers and patches of 16 pixels, a global crop of 224 pixels has 1 + 4 + 14 * 14 = 201 tokens, a local
one of 96 pixels 41. Three images with 8 local crops each are a row of 6 * 201 + 24 * 41 = 2,190 tokens, whose groups of
crops are ((6, 201), (24, 41)). Class tokens are at 0, 201, ..., 1005, and then at 1206, 1247, ...

Shapes: g images, each with 2 global and L local crops of c channels; patches are p x p pixels. A
global crop has G tokens: 1 class token, R registers and P patches, row by row; a local one l.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from recipe_utils.update_steps.step import Microbatch

PATCH, MASKED_PATCH, CLASS, FIRST_REGISTER = 0, 1, 2, 3
"""Types of tokens in column 0 of ``tokens``; register r is ``FIRST_REGISTER + r``."""
_NONE = torch.zeros(0, dtype=torch.int64)


class ViewTargets(NamedTuple):
    """Positions in a row that losses use. n crops, m masked patches."""

    cls_positions: Tensor
    """[n] int64: positions of the class tokens, ascending."""
    num_images: int
    """g."""
    patch_positions: Tensor
    """[2 * g * P] int64: positions of the patches of global crops."""
    labels: Tensor = _NONE
    """[g] int64: classes of labeled images."""
    num_local_crops: int = 0
    """L, of each image."""
    masked_positions: Tensor = _NONE
    """[m] int64: positions of masked patches, ascending; all in global crops."""
    masked_weights: Tensor = _NONE.double()
    """[m] float64: 1 over the number of masked patches of the crop."""
    koleo_groups: Tensor = _NONE
    """[g] int64: groups of the images, from 0 in the microbatch, ascending."""
    outputs: Mapping[str, Any] = {}
    """Teacher outputs: nested tensors."""


class TokenLayout(NamedTuple):
    """Properties of a model that rows depend on."""

    patch_size: int
    """Side of a patch [pixels]."""
    num_channels: int = 3
    """Channels of an image."""
    num_registers: int = 0
    """Register tokens of a crop."""
    num_draws: int = 0
    """Drop-path draws of a crop, one for each residual branch; 0 without drop path."""


def layout_of(model: Any) -> TokenLayout:
    """Returns the layout of a vision transformer, on any device."""
    patches = model.tok_embeddings
    return TokenLayout(patches.patch_size, patches.num_channels, patches.num_registers, model.num_draws)


class CropsOfOneSize(NamedTuple):
    """n crops of one size."""

    crops: np.ndarray
    """[n, c, h, h]."""
    draws: np.ndarray | None = None
    """[n, num_draws]; None is 0."""
    masks: np.ndarray | None = None
    """bool [n, P]; None masks no patch."""


def row_of(
    parts: Sequence[CropsOfOneSize], layout: TokenLayout, position_factor: float
) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """Returns the inputs of a microbatch, and each part's positions of class tokens [n] and patches [n, P].

    Inputs are those of :meth:`recipe_utils.dinov3.backbone.VisionTransformer.forward`,
    with ``input_pos`` multiplied by ``position_factor``.
    """
    patch, first_patch = layout.patch_size, 1 + layout.num_registers
    sides = [part.crops.shape[-1] // patch for part in parts]
    groups = tuple((len(part.crops), first_patch + side**2) for part, side in zip(parts, sides, strict=True))
    num_tokens = sum(num_crops * length for num_crops, length in groups)
    dtype = parts[0].crops.dtype
    tokens = np.zeros((num_tokens, 1 + layout.num_channels * patch**2), dtype)
    positions = np.zeros((num_tokens, 2 + layout.num_draws), dtype)
    places = []
    start = 0
    for part, side, (num_crops, length) in zip(parts, sides, groups, strict=True):
        end = start + num_crops * length
        # Class token, registers, then patches with their pixels.
        part_tokens = tokens[start:end].reshape(num_crops, length, -1)  # a view
        part_tokens[:, 0, 0] = CLASS
        part_tokens[:, 1:first_patch, 0] = FIRST_REGISTER + np.arange(layout.num_registers)
        part_tokens[:, first_patch:, 0] = PATCH
        if part.masks is not None:
            part_tokens[:, first_patch:, 0][part.masks] = MASKED_PATCH
        part_tokens[:, first_patch:, 1:] = _patches_of(part.crops, patch)

        centers = ((2 * np.arange(side) + 1) / side - 1) * position_factor
        part_positions = positions[start:end].reshape(num_crops, length, -1)
        part_positions[:, first_patch:, 0] = centers.repeat(side)
        part_positions[:, first_patch:, 1] = np.tile(centers, side)
        if part.draws is not None:
            part_positions[:, :, 2:] = part.draws[:, None]

        # Losses use class tokens and patches, by their places in the row.
        in_row = torch.arange(start, end).view(num_crops, length)
        places.append((in_row[:, 0].contiguous(), in_row[:, first_patch:]))
        start = end
    inputs = {
        "tokens": torch.from_numpy(tokens)[None],
        "input_pos": torch.from_numpy(positions)[None],
        "crop_groups": groups,
    }
    return inputs, places


def _patches_of(crops: np.ndarray, patch: int) -> np.ndarray:
    """Cuts crops [n, c, h, w] into patches [n, P, c * patch * patch]."""
    num_crops, num_channels, height, width = crops.shape
    cut = crops.reshape(num_crops, num_channels, height // patch, patch, width // patch, patch)
    return cut.transpose(0, 2, 4, 1, 3, 5).reshape(num_crops, -1, num_channels * patch**2)


def without_targets(microbatch: Microbatch) -> Microbatch:
    """Returns the microbatch with zero loss: without targets and counts."""
    given = cast(Any, microbatch.targets)
    targets: Any = ViewTargets(_NONE, 0, _NONE, num_local_crops=given.num_local_crops)
    return replace(microbatch, targets=targets, counts={})


def global_crops(microbatch: Microbatch) -> Microbatch:
    """Returns a microbatch of the global crops alone, as views of its tensors."""
    inputs, targets = microbatch.inputs, cast(Any, microbatch.targets)
    first, *_ = inputs["crop_groups"]
    num_tokens = first[0] * first[1]
    seen = {
        "tokens": inputs["tokens"][:, :num_tokens],
        "input_pos": inputs["input_pos"][:, :num_tokens],
        "crop_groups": (first,),
    }
    # Labeled images have one crop, a global one.
    crops_per_image = 2 if targets.num_local_crops else 1
    kept = targets.cls_positions[: crops_per_image * targets.num_images]
    return replace(microbatch, inputs=seen, targets=targets._replace(cls_positions=kept))
