"""Random draws for views: masks of patches, and the position factor.

Draws depend only on numbers such as seed, epoch and index: they are the same on any rank and after a resume.
"""

import hashlib
from functools import lru_cache

import numpy as np
import torch


def generator_of(purpose: str, *numbers: int) -> torch.Generator:
    """Returns a generator seeded by a purpose and numbers."""
    words = " ".join([purpose, *map(str, map(int, numbers))])
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@lru_cache(maxsize=4)  # the same for all samples of an update step
def mask_ratios(
    seed: int, epoch: int, step: int, num_crops: int, probability: float, mask_range: tuple[float, ...]
) -> np.ndarray:
    """Returns the share of masked patches in each global crop of an update step, float64 [num_crops].

    As in DINOv2 (Oquab et al. 2023, arXiv:2304.07193), the range is cut into one part per masked
    crop, and each crop draws its ratio from another part. ``num_crops`` are those of all ranks;
    ``probability`` is the share of crops with masked patches, whose number is rounded.
    """
    generator = generator_of("mask ratios", seed, epoch, step)
    low, high = mask_range
    num_masked = round(probability * num_crops)
    part = torch.randperm(num_crops, generator=generator).numpy()
    within = torch.rand(num_crops, generator=generator, dtype=torch.float64).numpy()
    ratios = low + (high - low) * (part + within) / max(num_masked, 1)
    return np.where(part < num_masked, ratios, 0.0)


def position_factor(seed: int, epoch: int, step: int, rescale: float | None) -> float:
    """Returns the factor of an update step's positions (DINOv3, Siméoni et al. 2025, arXiv:2508.10104)."""
    if rescale is None:
        return 1.0
    generator = generator_of("position factor", seed, epoch, step)
    exponent = 2 * torch.rand((), generator=generator, dtype=torch.float64).item() - 1
    return float(rescale**exponent)


def block_mask(side: int, num_masked: int, generator: torch.Generator) -> np.ndarray:
    """Masks exactly ``num_masked`` patches of a square in blocks, bool [side * side], row by row.

    As in BEiT (Bao et al. 2021, arXiv:2106.08254, algorithm 1) and iBOT (Zhou et al. 2021,
    arXiv:2111.07832), rectangles of random shape and of 4 patches or more, which may overlap, are
    added until ten in a row add no patch or too many. The rest is masked patch by patch.
    """
    mask = np.zeros((side, side), dtype=bool)
    low, high = np.log((0.3, 1 / 0.3))  # height over width
    missing = num_masked
    num_tries = 0
    while missing > 0 and num_tries < 10:
        num_tries += 1
        draws = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        least = min(4, missing)
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
