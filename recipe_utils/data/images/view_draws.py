"""What is drawn for views of images: which patches are masked, and what positions are multiplied by.

A draw depends on numbers that a training knows at every place, such as seed, epoch and index, and on nothing else.
"""

import hashlib
from functools import lru_cache

import numpy as np
import torch


def generator_of(purpose: str, *numbers: int) -> torch.Generator:
    """A generator for one purpose, which depends on these numbers and on nothing else."""
    words = " ".join([purpose, *map(str, map(int, numbers))])
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@lru_cache(maxsize=4)  # all samples of an update step ask for the same
def mask_ratios(
    seed: int,
    epoch: int,
    step: int,
    num_crops: int,
    probability: float,
    mask_range: tuple[float, float],
) -> np.ndarray:
    """The share of masked patches in each global crop of an update step, over all ranks; 0 for none.

    As DINOv2 (Oquab et al. 2023, arXiv:2304.07193; its range is cut into as many parts as there are crops with
    masks, and each gets a ratio of another part), but over the update step and not over what a rank holds. So the
    spread is the same however it is split.

    Args:
        seed: of the training.
        epoch: of the update step.
        step: of the epoch.
        num_crops: of the update step.
        probability: share of the crops that have masked patches, rounded to a whole number of crops.
        mask_range: smallest and largest ratio.

    Returns:
        float64 [num_crops].
    """
    generator = generator_of("mask ratios", seed, epoch, step)
    low, high = mask_range
    num_masked = round(probability * num_crops)
    part = torch.randperm(num_crops, generator=generator).numpy()
    within = torch.rand(num_crops, generator=generator, dtype=torch.float64).numpy()
    ratios = low + (high - low) * (part + within) / max(num_masked, 1)
    return np.where(part < num_masked, ratios, 0.0)


def position_factor(seed: int, epoch: int, step: int, rescale: float | None) -> float:
    """What an update step's positions are multiplied by (DINOv3, Siméoni et al. 2025, arXiv:2508.10104)."""
    if rescale is None:
        return 1.0
    generator = generator_of("position factor", seed, epoch, step)
    exponent = 2 * torch.rand((), generator=generator, dtype=torch.float64).item() - 1
    return float(rescale**exponent)


_LEAST_BLOCK = 4
"""Patches of a block, while so many are left to be masked."""
_BLOCK_SHAPES = (0.3, 1 / 0.3)
"""Narrowest and widest block, height over width."""
_NUM_BLOCK_TRIES = 10


def block_mask(side: int, num_masked: int, generator: torch.Generator) -> np.ndarray:
    """Masks exactly so many patches of a square, in blocks.

    BEiT's (Bao et al. 2021, arXiv:2106.08254, algorithm 1), as iBOT's (Zhou et al. 2021, arXiv:2111.07832):
    rectangles of random area and shape, which may overlap, as long as one is found that adds some patches and
    not too many. What is missing then is masked patch by patch.

    Args:
        side: of the square [patches].
        num_masked: of its patches.
        generator: of all draws.

    Returns:
        bool [side * side], row by row.
    """
    mask = np.zeros((side, side), dtype=bool)
    low, high = np.log(_BLOCK_SHAPES)
    missing = num_masked
    num_tries = 0
    while missing > 0 and num_tries < _NUM_BLOCK_TRIES:
        num_tries += 1
        draws = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        least = min(_LEAST_BLOCK, missing)
        area = least + (missing - least) * draws[0]
        shape = np.exp(low + (high - low) * draws[1])
        height = min(max(round(float(np.sqrt(area * shape))), 1), side)
        width = min(max(round(float(np.sqrt(area / shape))), 1), side)
        top, left = int(draws[2] * (side - height + 1)), int(draws[3] * (side - width + 1))
        block = mask[top : top + height, left : left + width]
        added = block.size - int(block.sum())
        if 0 < added <= missing:
            block[:] = True
            missing -= added
            num_tries = 0
    order = torch.randperm(side * side, generator=generator).numpy()
    free = order[~mask.reshape(-1)[order]]
    mask.reshape(-1)[free[:missing]] = True
    return mask.reshape(-1)
