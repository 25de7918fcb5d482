"""Collators of views (crops, masks and random draws of images), and of labeled images for k-NN.

Shapes are those of :mod:`recipe_utils.dinov3.images.crop_rows`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import partial
from itertools import groupby
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch.utils.data import Dataset

from recipe_utils.dinov3.images.crop_rows import CropsOfOneSize, TokenLayout, ViewTargets, row_of, without_targets
from recipe_utils.dinov3.images.folders import checked_image, digest_of
from recipe_utils.dinov3.images.multi_crop import MultiCrop, check_fits
from recipe_utils.dinov3.images.view_draws import block_mask, generator_of, mask_ratios, position_factor
from recipe_utils.plans.padded import plan_in_order
from recipe_utils.plans.rounds import WHOLE, Microbatches, Share
from recipe_utils.settings.components import Component
from recipe_utils.settings.keys import STRICT
from recipe_utils.settings.problems import Problem
from recipe_utils.text.mixture import Mixture
from recipe_utils.update_steps.objective import Collator, Layout
from recipe_utils.update_steps.order import StepIndex
from recipe_utils.update_steps.samples import Facts, Sample, SampleError, facts_of
from recipe_utils.update_steps.settings import DataSettings
from recipe_utils.update_steps.step import Microbatch

_OF_ROWS = ["microbatching", "max_tokens_per_microbatch", "max_ranks_per_row", "balance_over_ranks", "packed_attention"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ViewSettings:
    """Crops and masks of an image."""

    transform: Component
    """``recipe_utils.dinov3.MultiCrop``: sizes and augmentation of crops."""
    mask_probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of an update step's global crops that have masked patches."""
    mask_ratio: list[float] | None = None
    """Range of the share of masked patches in such a crop, uniform; null is ``[0.1, 0.5]``."""
    koleo_group_size: Annotated[int, Field(ge=2)] | None = 16
    """Consecutive images, in one microbatch, that KoLeo searches for neighbors; null: the update step."""
    rope_rescale: Annotated[float, Field(ge=1)] | None = None
    """Largest factor x of the positions of an update step's patches, drawn log-uniformly from [1/x, x]; null for none."""

    unused: ClassVar = {
        **dict.fromkeys(_OF_ROWS, "all images have the same number of tokens, so rows are in order"),
        "collate_fn": "views do not use it",
        "sample_losses": "losses of views are not by image",
        "sample_prompts": "a vision transformer generates no text",
        "tensor_parallel_dim": "not with images",
        "optimizer_in_bwd": "not with a moving average",
    }

    def problems(self) -> Iterator[Problem]:
        """Yields invalid values."""
        ratio = self.mask_ratio
        if ratio is not None and not (len(ratio) == 2 and 0 <= ratio[0] <= ratio[1] <= 1):
            text = "it must be the smallest and the largest share, from 0 to 1, such as [0.1, 0.5]"
            yield Problem("mask_ratio", text, ratio)

    def problems_of_views(self, data: DataSettings) -> Iterator[Problem]:
        """Yields values of the data keys that views do not support."""
        size = self.koleo_group_size
        if size is not None and data.batch_size % size:
            larger = (data.batch_size // size + 1) * size
            text = (
                f"a group is in one microbatch, and batch_size={data.batch_size} is not a multiple of it; "
                f"set batch_size to {larger}, or koleo_group_size to a divisor of it or to null"
            )
            yield Problem("koleo_group_size", text, size)
        if self.transform.get("image_transform") is not None and data.num_workers == 0:
            text = (
                "transform.image_transform draws from torch's global generator, as training does at the "
                "same time; set num_workers to 1 or more"
            )
            yield Problem("num_workers", text, 0)


@plain_dataclass
class Views(Dataset[dict[str, Any]]):
    """Crops of each image of a dataset, with masks and random draws.

    Draws depend only on (seed, epoch, dataset index); mask ratios and the position factor on (seed,
    epoch, update step). Raises ValueError if the crops do not match the model.
    """

    dataset: Any
    transform: MultiCrop
    settings: ViewSettings
    layout: TokenLayout
    seed: int

    def __post_init__(self) -> None:
        check_fits(self.transform, self.layout.patch_size, self.layout.num_channels)
        sources = facts_of(self.dataset).sources
        self._is_drawn = isinstance(sources, Mixture) and sources.weights is not None

    def __len__(self) -> int:
        return len(self.dataset)

    def facts(self) -> Facts:
        """Returns those of the images, which are asked for with their place."""
        return facts_of(self.dataset)._replace(takes_place=True)

    def __getitem__(self, index: int | StepIndex) -> dict[str, Any]:
        """Returns the views of an image as arrays, because tensors need a file handle each in workers.

        ``global_crops`` [2, c, h, h], ``local_crops`` [L, c, w, w]; ``masks`` bool [2, P]; ``draws``
        [2 + L, num_draws] in [0, 1). Raises SampleError if the image cannot be used.
        """
        index = index if isinstance(index, StepIndex) else StepIndex(index)
        # One generator for each purpose: a change of one leaves the draws of the others.
        settings, layout = self.settings, self.layout
        pixels, _ = checked_image(self.dataset[index.item], layout.num_channels, with_label=False)
        place: tuple[int, ...] = (self.seed, index.epoch, index.item)
        if self._is_drawn:  # a mixture may take an image more than once per epoch
            place += (index.step, index.position)
        global_crops, local_crops = self.transform(pixels, generator_of("crops", *place))
        num_crops = 2 + self.transform.num_local_crops
        draws = torch.rand(num_crops, layout.num_draws, generator=generator_of("drops", *place))
        # What all images of an update step share is drawn by its number alone.
        step = (self.seed, index.epoch, index.step)
        side = self.transform.global_crop_size // layout.patch_size
        generator = generator_of("masks", *place)
        ratios = self._mask_ratios(*step, index.step_size)
        masks = [block_mask(side, round(ratios[2 * index.position + crop] * side**2), generator) for crop in range(2)]
        return {
            "global_crops": global_crops,
            "local_crops": local_crops,
            "masks": np.stack(masks),
            "draws": draws.numpy(),
            "position": index.position,
            "step_size": index.step_size,
            "position_factor": position_factor(*step, settings.rope_rescale),
            "digest": digest_of(pixels),
        }

    def _mask_ratios(self, seed: int, epoch: int, step: int, num_images: int) -> np.ndarray:
        """Returns the share of masked patches of each global crop of an update step."""
        mask_range = tuple(self.settings.mask_ratio or (0.1, 0.5))
        probability = self.settings.mask_probability
        return mask_ratios(seed, epoch, step, 2 * num_images, probability, mask_range)

    def check_masks(self, num_images: int) -> None:
        """Raises ValueError if an update step of ``num_images`` masks no patch."""
        num_patches = (self.transform.global_crop_size // self.layout.patch_size) ** 2
        ratios = self._mask_ratios(self.seed, 0, 0, num_images)
        if not any(round(ratio * num_patches) for ratio in ratios):
            settings, size = self.settings, self.transform.global_crop_size
            raise ValueError(
                f"mask_ratio={settings.mask_ratio}: with mask_probability={settings.mask_probability} and crops "
                f"of {size} pixels, an update step of {num_images} images masks no patch, so iBOT has no loss; set "
                "them higher, or ibot_loss_weight=0"
            )


class ViewCollator(Collator):
    """Collator of views; totals count images."""

    counts = ("images", "koleo_images", "masked_patches", "crop_tokens")
    """Images; images with a neighbor in their group; masked patches of global crops; tokens of the student."""

    def __init__(self, data: DataSettings, views: ViewSettings, layout: TokenLayout) -> None:
        self._block = views.koleo_group_size or 1  # consecutive images that stay in one microbatch
        self.layout = Layout(self.plan, block=self._block)
        self._group_size = views.koleo_group_size
        self._batch_size = data.batch_size
        self._layout = layout

    @staticmethod
    def prepare(sample: Sample, name: str, at: StepIndex) -> Sample:
        """Returns the sample unchanged."""
        return sample

    @staticmethod
    def content(sample: Sample) -> tuple[Sequence[np.ndarray], Mapping[str, Any]]:
        """Returns the digest of the image; what else it has is computed from it and the config."""
        return (np.asarray(sample["digest"]),), {}

    def length(self, sample: Sample) -> int:
        """Returns the position in the update step, by which groups are formed; lengths are equal."""
        position: int = sample["position"]
        return position

    def plan(self, positions: Sequence[int], num_ranks: int = 1) -> list[Microbatches]:
        """Cuts images in order into microbatches of whole groups, at most ``batch_size`` images each.

        A skipped image changes only its own group. ``positions`` are those in the update step.
        """
        microbatches: Microbatches = []
        for _, block in groupby(range(len(positions)), lambda i: positions[i] // self._block):
            images = list(block)
            if not microbatches or len(microbatches[-1]) + len(images) > self._batch_size:
                microbatches.append([])
            microbatches[-1] += images
        return [microbatches[rank::num_ranks] for rank in range(num_ranks)]

    def collate(self, samples: Sequence[Sample], share: Share = WHOLE) -> list[Microbatch]:
        """Returns one row (:func:`row_of`): the global crops of all images, then the local ones."""
        keys = ("masks", "global_crops", "local_crops")
        masks, global_crops, local_crops = (np.concatenate([sample[key] for sample in samples]) for key in keys)
        global_draws = np.concatenate([sample["draws"][:2] for sample in samples])
        local_draws = np.concatenate([sample["draws"][2:] for sample in samples])
        parts = [CropsOfOneSize(global_crops, global_draws, masks), CropsOfOneSize(local_crops, local_draws)]
        inputs, ((global_cls, patches), (local_cls, _)) = row_of(parts, self._layout, samples[0]["position_factor"])
        # The masked patches of a crop have a total weight of 1, however many there are.
        num_masked = masks.sum(axis=1)
        # KoLeo's groups, from 0, and the number of images that are not alone in theirs.
        if (size := self._group_size) is None:  # the group is the update step, with images in other microbatches
            groups = torch.zeros(len(samples), dtype=torch.int64)
            num_neighbors = len(samples) * (samples[0]["step_size"] > 1)
        else:
            numbers = torch.tensor([sample["position"] // size for sample in samples])
            _, groups, num_images = numbers.unique_consecutive(return_inverse=True, return_counts=True)
            num_neighbors = int(num_images[num_images > 1].sum())
        targets: Any = ViewTargets(
            cls_positions=torch.cat([global_cls, local_cls]),
            num_images=len(samples),
            patch_positions=patches.flatten(),
            num_local_crops=len(samples[0]["local_crops"]),
            masked_positions=torch.from_numpy(patches.numpy()[masks]),
            masked_weights=torch.from_numpy(np.repeat(1 / np.maximum(num_masked, 1), num_masked)),
            koleo_groups=groups,
        )
        counts = {
            "images": len(samples),
            "koleo_images": num_neighbors,
            "masked_patches": int(num_masked.sum()),
            "crop_tokens": inputs["tokens"].size(1),
        }
        return [Microbatch(inputs, targets, counts)]

    def dummy(self, sample: Sample) -> Microbatch:
        """Returns a microbatch with zero loss, which keeps collectives matched."""
        return without_targets(*self.collate([sample]))


@plain_dataclass
class WholeImages(Dataset[dict[str, Any]]):
    """Central crops of a dataset's images, without random draws."""

    dataset: Any
    transform: MultiCrop
    layout: TokenLayout

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the image as ``crop`` [c, h, h]; raises SampleError if it cannot be used or has no label."""
        pixels, label = checked_image(self.dataset[index], self.layout.num_channels)
        if label is None:
            raise SampleError("it has no label for neighbors to vote for")
        crop = self.transform.whole(pixels)
        return {"label": label, "crop": crop, "digest": digest_of(pixels)}


class ImageCollator(Collator):
    """Collator of labeled images; totals count images."""

    counts = ("images", "crop_tokens")
    """Images; tokens of the model."""
    prepare = staticmethod(ViewCollator.prepare)
    content = staticmethod(ViewCollator.content)

    def __init__(self, data: DataSettings, layout: TokenLayout) -> None:
        self._layout = layout._replace(num_draws=0)
        self.layout = Layout(partial(plan_in_order, batch_size=data.batch_size))

    def length(self, sample: Sample) -> int:
        """Returns 1: all images have the same number of tokens."""
        return 1

    def collate(self, samples: Sequence[Sample], share: Share = WHOLE) -> list[Microbatch]:
        """Returns one row with a global crop of each image, without masks and draws."""
        crops = np.stack([sample["crop"] for sample in samples])
        inputs, ((cls, patches),) = row_of([CropsOfOneSize(crops)], self._layout, 1.0)
        targets: Any = ViewTargets(
            cls_positions=cls,
            num_images=len(samples),
            patch_positions=patches.flatten(),
            labels=torch.tensor([sample["label"] for sample in samples]),
        )
        counts = {"images": len(samples), "crop_tokens": inputs["tokens"].size(1)}
        return [Microbatch(inputs, targets, counts)]

    def dummy(self, sample: Sample) -> Microbatch:
        """Returns a microbatch with zero loss, which keeps collectives matched."""
        return without_targets(*self.collate([sample]))
