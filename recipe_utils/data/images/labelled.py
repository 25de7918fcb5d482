"""Images as they are, with labels, as a kind of sample: for nearest neighbours."""

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
    """Each image of a dataset as one crop, of which nothing is drawn; for nearest neighbours.

    Args:
        dataset: see :class:`recipe_utils.data.images.collator.Views`.
        transform: resizes and normalises.
        layout: of the model's tokens.

    Raises:
        ValueError: the transform's crops do not fit to the model.
    """

    def __init__(self, dataset: Any, transform: MultiCrop, layout: TokenLayout) -> None:
        check_fits(transform, layout.patch_size, layout.num_channels)
        self._dataset = dataset
        self._transform = transform
        self._layout = layout

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The image as an array ``crop`` [c, h, h], its ``label``, ``path`` and ``digest``.

        Raises:
            SampleError: the image cannot be used, or has no label.
        """
        pixels, sample = checked_image(self._dataset[int(index)], self._layout.num_channels)
        if sample["label"] is None:
            raise SampleError("it has no label, without which neighbours say nothing")
        return {**sample, "crop": self._transform.whole(pixels), "digest": digest_of(pixels)}


class ImageCollator:
    """Images as they are, with labels, for nearest neighbours; an update step counts images.

    Args:
        data: settings of the data.
        layout: of the model's tokens.
    """

    counts = ("images", "crop_tokens")
    """What a microbatch counts: images, and slots that are computed."""
    fingerprint_keys = ("digest",)

    def __init__(self, data: DataSettings, layout: TokenLayout) -> None:
        self._layout = layout._replace(num_draws=0)
        self.plan = partial(plan_in_order, batch_size=data.batch_size)

    def warnings(self) -> Iterator[str]:
        """None."""
        yield from ()

    def prepare(self, sample: Sample, name: str) -> Sample:
        """The sample as :class:`WholeImages` made it, with a name.

        Raises:
            SampleError: the dataset is no :class:`WholeImages`.
        """
        check_keys(sample, ("crop", "label"), name)
        return with_image_name(sample, name)

    def length(self, sample: Sample) -> int:
        """1: all are as long."""
        return 1

    def collate(self, samples: Sequence[Sample]) -> Microbatch:
        """One row of one global crop for each image, without masks and draws; see :meth:`recipe_utils.data.images.collator.ViewCollator.collate`."""
        crops = np.stack([sample["crop"] for sample in samples])
        draws = np.zeros((len(crops), 0))
        inputs, (slots,) = row_of(
            [CropsOfOneSize(crops, draws, np.zeros((len(crops), 1), dtype=bool))], self._layout, 1.0
        )
        none = torch.zeros(0, dtype=torch.int64)
        targets = ViewTargets(
            cls_positions=slots.classes,
            num_images=len(samples),
            num_local_crops=0,
            masked_positions=none,
            masked_weights=none.double(),
            patch_positions=slots.patches.flatten(),
            koleo_groups=none,
            labels=labels_of(samples),
            names=tuple(sample["name"] for sample in samples),
        )
        counts = {"images": len(samples), "crop_tokens": inputs["tokens"].size(1)}
        return microbatch_of(inputs, targets, counts)

    def dummy(self, sample: Sample) -> Microbatch:
        """A microbatch of a crop to run, of which nothing is asked."""
        return without_targets(self.collate([sample]))
