"""Handwritten digits of scikit-learn, without a download."""

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def digits_dataset(split: str = "train") -> list[dict[str, Any]]:
    """Returns a fixed split of scikit-learn's 1,797 digits, upsampled to 16 x 16 pixels.

    Samples have ``image`` [1, 16, 16], float32 in [0, 1], ``label`` from 0 to 9, and ``name``.

    Args:
        split: ``train`` (1,400 images) or ``test`` (397).

    Raises:
        ValueError: an unknown split, or scikit-learn is not installed.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split={split}: set it to train or test")
    images, labels, order = _load()
    return [
        {"image": images[number], "label": int(labels[number]), "name": f"digits/{number}"}
        for number in (order[:1400] if split == "train" else order[1400:])
    ]


@cache
def _load() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns images, labels, and the order of images that is cut into the splits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(f"the digits need scikit-learn ({error}); pip install -e '.[vision]'") from error
    digits = load_digits()
    small = torch.from_numpy(digits.images).unsqueeze(1) / 16
    images = F.interpolate(small, size=(16, 16), mode="bilinear", align_corners=False)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).numpy()
    return images.float().numpy(), digits.target, order
