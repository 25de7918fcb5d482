"""Collator of labelled images, for the k-nearest-neighbors classifier."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from recipe_utils.data.images.crop_rows import (
    CropsOfOneSize,
    TokenLayout,
    ViewTargets,
    labels_of,
    microbatch_of,
    row_of,
    without_targets,
)
from recipe_utils.data.images.folders import checked_image, digest_of, with_image_name
from recipe_utils.data.images.multi_crop import MultiCrop, check_fits
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.plan import plan_in_order
from recipe_utils.data.loader.samples import Sample, SampleError, check_keys
from recipe_utils.data.loader.settings import DataSettings


class WholeImages(Dataset[dict[str, Any]]):
    """Central crops of a dataset's images, without random draws.

    Raises:
        ValueError: the transform's crops do not match the model.
    """

    def __init__(self, dataset: Any, transform: MultiCrop, layout: TokenLayout) -> None:
        check_fits(transform, layout.patch_size, layout.num_channels)
        self._dataset = dataset
        self._transform = transform
        self._layout = layout

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the image as an array ``crop`` [c, h, h], its ``label``, ``path`` and ``digest``.

        Raises:
            SampleError: the image cannot be used, or has no label.
        """
        pixels, sample = checked_image(self._dataset[int(index)], self._layout.num_channels)
        if sample["label"] is None:
            raise SampleError("it has no label for neighbors to vote for")
        return {**sample, "crop": self._transform.whole(pixels), "digest": digest_of(pixels)}


class ImageCollator:
    """Collator of labelled images; totals count images."""

    counts = ("images", "crop_tokens")
    """Images; tokens of the model."""
    fingerprint_keys = ("digest",)

    def __init__(self, data: DataSettings, layout: TokenLayout) -> None:
        self._layout = layout._replace(num_draws=0)
        self.plan = partial(plan_in_order, batch_size=data.batch_size)

    def warnings(self) -> Iterator[str]:
        """Yields nothing."""
        yield from ()

    def prepare(self, sample: Sample, name: str) -> Sample:
        """Adds the sample's name; raises SampleError if it is not from :class:`WholeImages`."""
        check_keys(sample, ("crop", "label"), name)
        return with_image_name(sample, name)

    def length(self, sample: Sample) -> int:
        """Returns 1: all images have the same number of tokens."""
        return 1

    def collate(self, samples: Sequence[Sample]) -> Microbatch:
        """Returns one row with a global crop of each image, without masks and draws."""
        crops = np.stack([sample["crop"] for sample in samples])
        draws = np.zeros((len(crops), 0))
        inputs, (positions,) = row_of(
            [CropsOfOneSize(crops, draws, np.zeros((len(crops), 1), dtype=bool))], self._layout, 1.0
        )
        none = torch.zeros(0, dtype=torch.int64)
        targets = ViewTargets(
            cls_positions=positions.classes,
            num_images=len(samples),
            num_local_crops=0,
            masked_positions=none,
            masked_weights=none.double(),
            patch_positions=positions.patches.flatten(),
            koleo_groups=none,
            labels=labels_of(samples),
            names=tuple(sample["name"] for sample in samples),
        )
        counts = {"images": len(samples), "crop_tokens": inputs["tokens"].size(1)}
        return microbatch_of(inputs, targets, counts)

    def dummy(self, sample: Sample) -> Microbatch:
        """Returns a microbatch with zero loss, which keeps collectives matched."""
        return without_targets(self.collate([sample]))
