"""Views of images as a kind of sample: crops, their masks and draws, and the rows that a microbatch makes of them.

Shapes: g images, each with 2 global and L local crops of c channels; patches are p x p pixels. A global crop has
G tokens, 1 for the class, R registers and P patches row by row; a local one l tokens likewise.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset
from torchtune import config

from recipe_utils.components import Component
from recipe_utils.data.images import checked_image
from recipe_utils.data.loader import DataSettings
from recipe_utils.data.microbatch import Microbatch
from recipe_utils.data.multi_crop import MultiCrop
from recipe_utils.data.plan import Microbatches, plan_in_order
from recipe_utils.data.sampler import StepIndex
from recipe_utils.data.samples import Sample, SampleError, check_keys
from recipe_utils.settings import ROOM

PATCH, MASKED_PATCH, CLASS, FIRST_REGISTER = 0, 1, 2, 3
"""Kinds of tokens, as column 0 of ``tokens`` says them; register r is ``FIRST_REGISTER + r``."""


class ViewTargets(NamedTuple):
    """Where in a microbatch's row its losses look. n crops, m masked patches."""

    cls_positions: Tensor
    """[n] int64: slots of the class tokens, in the row's order."""
    num_images: int
    """g."""
    num_local_crops: int
    """L, of each image."""
    masked_positions: Tensor
    """[m] int64: slots of masked patches, ascending; all are of global crops."""
    masked_weights: Tensor
    """[m] float64: 1 over the number of masked patches of the crop."""
    patch_positions: Tensor
    """[2 * g * P] int64: slots of the patches of global crops."""
    koleo_groups: Tensor
    """[g] int64: the images' groups, counted from 0 in the microbatch, ascending."""
    labels: Tensor | None
    """[g] int64, of the images; None if not all have one."""
    names: tuple[str, ...]
    """Of the images, for errors."""
    teacher: Any = None
    """What a teacher says: tensors in any nesting."""


class TokenLayout(NamedTuple):
    """What rows depend on in a model."""

    patch_size: int
    """Side of a patch [pixels]."""
    num_channels: int = 3
    """Of an image."""
    num_registers: int = 0
    """Register tokens of a crop."""
    num_draws: int = 0
    """Draws for drop path of a crop, one for each residual branch; 0 where nothing is dropped."""


@dataclass(frozen=True, config=ROOM)
class ViewSettings:
    """What is made of an image."""

    transform: Component
    """``recipe_utils.data.multi_crop.MultiCrop``: crops, their sizes and what changes their colours."""
    mask_probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of an update step's global crops that have masked patches."""
    mask_ratio: list[float] | None = None
    """Smallest and largest share of masked patches in such a crop, all between alike; null is ``[0.1, 0.5]``."""
    koleo_group_size: Annotated[int, Field(ge=2)] | None = 16
    """Images among which KoLeo looks for neighbours: so many that follow each other in the update step, in one
    microbatch; null is all of the update step."""
    rope_rescale: Annotated[float, Field(ge=1)] | None = None
    """Positions of an update step are multiplied by a factor in [1/x, x], uniform in its logarithm; null for none."""

    @property
    def mask_range(self) -> tuple[float, float]:
        """Smallest and largest share of masked patches in a crop that has some."""
        low, high = self.mask_ratio or (0.1, 0.5)
        return low, high

    def problems(self) -> Iterator[str]:
        """What is wrong by itself that a type does not say."""
        ratio = self.mask_ratio
        if ratio is not None and not (len(ratio) == 2 and 0 <= ratio[0] <= ratio[1] <= 1):
            yield (
                f"mask_ratio={ratio}: it must be the smallest and the largest share, both from 0 to 1; such as "
                "[0.1, 0.5]"
            )

    def problems_with(self, data: DataSettings) -> Iterator[str]:
        """What of the data's keys views cannot have."""
        size = self.koleo_group_size
        if size is not None and data.batch_size % size:
            yield (
                f"koleo_group_size={size}: a group is whole in a microbatch, and batch_size={data.batch_size} is no "
                f"multiple of it; set batch_size to {(data.batch_size // size + 1) * size}, or koleo_group_size to "
                "a divisor of it or to null"
            )
        if data.microbatching != "in_order":
            yield (
                f"microbatching={data.microbatching}: all images have as many tokens; set microbatching=in_order"
            )
        if data.collate_fn != DataSettings.collate_fn:
            yield f"collate_fn={data.collate_fn}: views are collated in one way only; leave the key out"
        if self.transform.get("image_transform") is not None and data.num_workers == 0:
            yield (
                "num_workers=0: transform.image_transform draws from torch's global generator, from which the "
                "training draws at the same time; set num_workers to 1 or more"
            )


def load_images(cfg: DictConfig | ListConfig | None, with_labels: bool = False) -> Any:
    """A dataset of its component, or of a list of components one after the other; None of none.

    Args:
        cfg: the component.
        with_labels: whether nearest neighbours are to vote for them.

    Raises:
        ValueError: by its first sample it is of something else, or without labels. A broken image is named when it
            is needed.
    """
    if isinstance(cfg, ListConfig):
        made: Any = ConcatDataset([config.instantiate(part) for part in cfg])
    else:
        made = config.instantiate(cfg)
    if made is None or len(made) == 0:
        return made
    try:
        sample = made[0]
    except Exception:
        return made
    if isinstance(sample, tuple) and len(sample) == 2:
        sample = {"image": sample[0], "label": sample[1]}
    if not isinstance(sample, Mapping) or "image" not in sample:
        found = sorted(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise ValueError(
            f"its samples have {found} and no image; set it to one of images, such as "
            "recipe_utils.data.images.image_folder_dataset"
        )
    if with_labels and sample.get("label") is None:
        raise ValueError(
            "its images have no labels for neighbours to vote for; set dataset_knn and dataset_val to images with "
            "labels, or run_val_every_n_steps=null"
        )
    return made


# ---- What is drawn --------------------------------------------------------------------------------


_GLOBAL, _LOCAL = slice(0, 2), slice(2, None)
"""Of an image's crops."""


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


class Views(Dataset[dict[str, Any]]):
    """Of each image of a dataset its crops, with masks and all else that is drawn for them.

    What is drawn depends on (seed, epoch, dataset index) alone, the masks' ratios and the factor of the positions
    on (seed, epoch, update step).

    Args:
        dataset: map-style, of samples as :func:`recipe_utils.data.images.checked_image` takes them.
        transform: makes the crops.
        settings: of the masks and positions.
        layout: of the model's tokens.
        seed: of all draws.

    Raises:
        ValueError: the transform's crops do not fit to the model.
    """

    def __init__(
        self,
        dataset: Any,
        transform: MultiCrop,
        settings: ViewSettings,
        layout: TokenLayout,
        seed: int,
    ) -> None:
        _check_transform(transform, layout)
        self._dataset = dataset
        self._transform = transform
        self._settings = settings
        self._layout = layout
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The views of one image, as arrays: a worker sends them without a file handle for each.

        Returns:
            ``global_crops`` [2, c, h, h] and ``local_crops`` [L, c, w, w], normalised; ``masks`` bool [2, P];
            ``draws`` [2 + L, num_draws] in [0, 1); ``position`` and ``step_size`` of its index;
            ``position_factor``; ``label`` or None; ``path`` or an empty text; ``digest`` int64 [2] of the
            image before it is changed.

        Raises:
            SampleError: the image cannot be used.
        """
        index = StepIndex.of(index)
        settings, layout = self._settings, self._layout
        pixels, sample = checked_image(self._dataset[int(index)], layout.num_channels)
        place = (self._seed, index.epoch, int(index))
        crops = self._transform(pixels, generator_of("crops", *place))
        num_crops = 2 + self._transform.num_local_crops
        draws = torch.rand(num_crops, layout.num_draws, generator=generator_of("drops", *place))
        of_step = (self._seed, index.epoch, index.step)
        ratios = mask_ratios(
            *of_step, 2 * index.step_size, settings.mask_probability, settings.mask_range
        )
        side = self._transform.global_crop_size // layout.patch_size
        generator = generator_of("masks", *place)
        masks = [
            block_mask(side, round(ratios[2 * index.position + crop] * side**2), generator)
            for crop in range(2)
        ]
        return {
            **sample,
            "global_crops": crops.of_global,
            "local_crops": crops.of_local,
            "masks": np.stack(masks),
            "draws": draws.numpy(),
            "position": index.position,
            "step_size": index.step_size,
            "position_factor": position_factor(*of_step, settings.rope_rescale),
            "digest": _digest_of(pixels),
        }


class WholeImages(Dataset[dict[str, Any]]):
    """Each image of a dataset as one crop, of which nothing is drawn; for nearest neighbours.

    Args:
        dataset: see :class:`Views`.
        transform: resizes and normalises.
        layout: of the model's tokens.

    Raises:
        ValueError: the transform's crops do not fit to the model.
    """

    def __init__(self, dataset: Any, transform: MultiCrop, layout: TokenLayout) -> None:
        _check_transform(transform, layout)
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
        return {**sample, "crop": self._transform.whole(pixels), "digest": _digest_of(pixels)}


def _check_transform(transform: Any, layout: TokenLayout) -> None:
    if not isinstance(transform, MultiCrop):
        raise ValueError(
            f"transform: it is a {type(transform).__name__}; set it to recipe_utils.data.multi_crop.MultiCrop, "
            "which takes another transform as image_transform"
        )
    if problems := transform.problems_with(layout.patch_size, layout.num_channels):
        raise ValueError("; ".join(problems))


def _digest_of(pixels: np.ndarray) -> np.ndarray:
    """By which a resumed training knows its data again, int64 [2]."""
    digest = hashlib.blake2b(str(pixels.shape).encode(), digest_size=16)
    digest.update(pixels.tobytes())
    return np.frombuffer(digest.digest(), dtype=np.int64).copy()  # that may be written to


# ---- Microbatches ---------------------------------------------------------------------------------


class ViewSamples:
    """Images with several views, of which an update step counts images.

    Args:
        data: settings of the data.
        settings: of the views.
        layout: of the model's tokens.
    """

    counts = ("images", "koleo_images", "masked_patches", "crop_tokens")
    """What a microbatch counts: images; those that have a neighbour in their group; masked patches of global
    crops; slots that a student computes."""
    fingerprint_keys = ("digest",)

    def __init__(self, data: DataSettings, settings: ViewSettings, layout: TokenLayout) -> None:
        self.block = settings.koleo_group_size or 1
        """So many consecutive images of an update step stay on one rank, and in one microbatch."""
        self._group_size = settings.koleo_group_size
        self._batch_size = data.batch_size
        self._layout = layout

    def warnings(self) -> Iterator[str]:
        """None."""
        yield from ()

    def prepare(self, sample: Sample, name: str) -> Sample:
        """The sample as :class:`Views` made it, with a name.

        Raises:
            SampleError: the dataset is no :class:`Views`.
        """
        check_keys(sample, ("global_crops", "local_crops", "masks", "draws"), name)
        return _named(sample, name)

    def length(self, sample: Sample) -> int:
        """Position in the update step: all images have as many tokens, and groups are made of neighbours."""
        position: int = sample["position"]
        return position

    def plan(self, positions: Sequence[int], num_ranks: int = 1) -> list[Microbatches]:
        """Images as they come, whole groups in each microbatch and up to ``batch_size`` images.

        Where an image is left out its group is smaller; the others stay what they are.

        Args:
            positions: in the update step, ascending.
            num_ranks: the microbatches are dealt to them in turn.
        """
        microbatches: Microbatches = []
        held: list[int] = []
        for _, of_block in groupby(range(len(positions)), lambda i: positions[i] // self.block):
            block = list(of_block)
            if held and len(held) + len(block) > self._batch_size:
                microbatches.append(held)
                held = []
            held += block
            while len(held) > self._batch_size:  # of a dataset that is not read in update steps
                microbatches.append(held[: self._batch_size])
                held = held[self._batch_size :]
        if held:
            microbatches.append(held)
        return [microbatches[rank::num_ranks] for rank in range(num_ranks)]

    def collate(self, samples: Sequence[Sample]) -> Microbatch:
        """One row of all crops: the global ones, image after image, then the local ones likewise.

        Returns:
            ``inputs`` are ``tokens`` [1, s, 1 + c * p * p], kind of token and pixels of a patch [c, p, p]; ``input_pos``
            [1, s, 2 + num_draws], row and column of a patch's centre in its crop, both in (-1, 1) times the
            update step's factor, and the crop's draws; ``crop_groups``, ((2 * g, G), (L * g, l)).
        """
        masks = np.concatenate([sample["masks"] for sample in samples])
        crops = [
            np.concatenate([s[key] for s in samples]) for key in ("global_crops", "local_crops")
        ]
        draws = [np.concatenate([s["draws"][part] for s in samples]) for part in (_GLOBAL, _LOCAL)]
        no_masks = np.zeros((len(crops[1]), 1), dtype=bool)
        inputs, (of_global, of_local) = _row_of(
            [_Part(crops[0], draws[0], masks), _Part(crops[1], draws[1], no_masks)],
            self._layout,
            samples[0]["position_factor"],
        )
        is_masked = torch.from_numpy(masks)
        num_masked = is_masked.sum(dim=1)
        groups, num_neighbours = self._groups_of(samples)
        targets = ViewTargets(
            cls_positions=torch.cat([of_global.classes, of_local.classes]),
            num_images=len(samples),
            num_local_crops=len(samples[0]["local_crops"]),
            masked_positions=of_global.patches[is_masked],
            masked_weights=(1 / num_masked.double()).repeat_interleave(num_masked),
            patch_positions=of_global.patches.flatten(),
            koleo_groups=groups,
            labels=_labels_of(samples),
            names=tuple(sample["name"] for sample in samples),
        )
        counts = {
            "images": len(samples),
            "koleo_images": num_neighbours,
            "masked_patches": int(num_masked.sum()),
            "crop_tokens": inputs["tokens"].size(1),
        }
        return _microbatch(inputs, targets, counts)

    def _groups_of(self, samples: Sequence[Sample]) -> tuple[Tensor, int]:
        """Each image's group, counted from 0, and how many images have another one in their group."""
        size = self._group_size
        if size is None:  # all of the update step, most of which may be in other microbatches
            has_neighbours = samples[0]["step_size"] > 1
            return torch.zeros(len(samples), dtype=torch.int64), len(samples) * has_neighbours
        numbers = torch.tensor([sample["position"] // size for sample in samples])
        _, groups, num_images = numbers.unique_consecutive(return_inverse=True, return_counts=True)
        return groups, int(num_images[num_images > 1].sum())

    def stand_in(self, sample: Sample) -> Microbatch:
        """A microbatch of crops to run, of which no loss looks at anything."""
        return _without_targets(self.collate([sample]))


class ImageSamples:
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
        return _named(sample, name)

    def length(self, sample: Sample) -> int:
        """1: all are as long."""
        return 1

    def collate(self, samples: Sequence[Sample]) -> Microbatch:
        """One row of one global crop for each image, without masks and draws; see :meth:`ViewSamples.collate`."""
        crops = np.stack([sample["crop"] for sample in samples])
        draws = np.zeros((len(crops), 0))
        inputs, (slots,) = _row_of(
            [_Part(crops, draws, np.zeros((len(crops), 1), dtype=bool))], self._layout, 1.0
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
            labels=_labels_of(samples),
            names=tuple(sample["name"] for sample in samples),
        )
        counts = {"images": len(samples), "crop_tokens": inputs["tokens"].size(1)}
        return _microbatch(inputs, targets, counts)

    def stand_in(self, sample: Sample) -> Microbatch:
        """A microbatch of a crop to run, of which nothing is asked."""
        return _without_targets(self.collate([sample]))


def of_teacher(microbatch: Microbatch) -> Microbatch:
    """What a teacher sees of a microbatch: its global crops without masks, and no draws; see :func:`of_global_crops`."""
    seen = of_global_crops(microbatch)
    kind, pixels = seen.inputs["tokens"].tensor_split([1], dim=2)
    unmasked = {
        **seen.inputs,
        "tokens": torch.cat([kind.masked_fill(kind == MASKED_PATCH, PATCH), pixels], dim=2),
        "input_pos": seen.inputs["input_pos"][:, :, :2],
    }
    return replace(seen, inputs=unmasked)


def of_global_crops(microbatch: Microbatch) -> Microbatch:
    """What a student sees of a microbatch, without local crops; their class tokens are none of the targets."""
    inputs, targets = microbatch.inputs, cast(Any, microbatch.targets)
    first, *_ = inputs["crop_groups"]
    num_slots = first[0] * first[1]
    seen = {
        "tokens": inputs["tokens"][:, :num_slots],
        "input_pos": inputs["input_pos"][:, :num_slots],
        "crop_groups": (first,),
    }
    # Of whole images, each of one crop, all are global.
    crops_per_image = 2 if targets.num_local_crops else 1
    kept = targets.cls_positions[: crops_per_image * targets.num_images]
    return replace(microbatch, inputs=seen, targets=targets._replace(cls_positions=kept))


def layout_of(whole: Any) -> TokenLayout:
    """What rows depend on in a vision transformer, which may be on the meta device."""
    patches = whole.tok_embeddings
    return TokenLayout(
        patches.patch_size, patches.num_channels, patches.num_registers, whole.num_draws
    )


class _Part(NamedTuple):
    """n crops of one size."""

    crops: np.ndarray
    """[n, c, h, h]."""
    draws: np.ndarray
    """[n, num_draws]."""
    masks: np.ndarray
    """bool [n, P], or [n, 1] for all patches."""


class _Slots(NamedTuple):
    """Of a part's tokens."""

    classes: Tensor
    """[n]."""
    patches: Tensor
    """[n, P]."""


def _row_of(
    parts: Sequence[_Part], layout: TokenLayout, position_factor: float
) -> tuple[dict[str, Any], list[_Slots]]:
    """A microbatch's inputs, see :meth:`ViewSamples.collate`, and where in its row the parts' tokens are."""
    patch, first_patch = layout.patch_size, 1 + layout.num_registers
    sides = [part.crops.shape[-1] // patch for part in parts]
    groups = tuple(
        (len(part.crops), first_patch + side**2) for part, side in zip(parts, sides, strict=True)
    )
    num_slots = sum(num_crops * length for num_crops, length in groups)
    dtype = parts[0].crops.dtype
    tokens = np.zeros((num_slots, 1 + layout.num_channels * patch**2), dtype)
    positions = np.zeros((num_slots, 2 + layout.num_draws), dtype)
    slots = []
    start = 0
    for part, side, (num_crops, length) in zip(parts, sides, groups, strict=True):
        end = start + num_crops * length
        of_part = tokens[start:end].reshape(num_crops, length, -1)  # a view, which is filled
        of_part[:, 0, 0] = CLASS
        of_part[:, 1:first_patch, 0] = FIRST_REGISTER + np.arange(layout.num_registers)
        of_part[:, first_patch:, 0] = np.where(part.masks, MASKED_PATCH, PATCH)
        of_part[:, first_patch:, 1:] = _patches_of(part.crops, patch)

        centres = ((2 * np.arange(side) + 1) / side - 1) * position_factor
        of_part = positions[start:end].reshape(num_crops, length, -1)
        of_part[:, first_patch:, 0] = centres.repeat(side)
        of_part[:, first_patch:, 1] = np.tile(centres, side)
        of_part[:, :, 2:] = part.draws[:, None]

        all_slots = torch.arange(start, end).view(num_crops, length)
        slots.append(_Slots(all_slots[:, 0].contiguous(), all_slots[:, first_patch:]))
        start = end
    inputs = {
        "tokens": torch.from_numpy(tokens)[None],
        "input_pos": torch.from_numpy(positions)[None],
        "crop_groups": groups,
    }
    return inputs, slots


def _patches_of(crops: np.ndarray, patch: int) -> np.ndarray:
    """Crops [n, c, h, w] as patches, row by row, [n, P, c * patch * patch]."""
    num_crops, num_channels, height, width = crops.shape
    cut = crops.reshape(num_crops, num_channels, height // patch, patch, width // patch, patch)
    return cut.transpose(0, 2, 4, 1, 3, 5).reshape(num_crops, -1, num_channels * patch**2)


def _named(sample: Sample, name: str) -> Sample:
    path = sample["path"]
    shown = name.replace("sample", "image", 1)
    return {**sample, "name": f"{shown} ({path})" if path else shown}


def _labels_of(samples: Sequence[Mapping[str, Any]]) -> Tensor | None:
    labels = [sample["label"] for sample in samples]
    return None if None in labels else torch.tensor(labels)


def _microbatch(
    inputs: Mapping[str, Any], targets: ViewTargets, counts: Mapping[str, int]
) -> Microbatch:
    return Microbatch(inputs, targets, counts)  # type: ignore[arg-type] # text's targets, but to text


def _without_targets(microbatch: Microbatch) -> Microbatch:
    none = torch.zeros(0, dtype=torch.int64)
    targets: Any = microbatch.targets
    targets = targets._replace(
        cls_positions=none,
        num_images=0,
        masked_positions=none,
        masked_weights=none.double(),
        patch_positions=none,
        koleo_groups=none,
        labels=None if targets.labels is None else none,
        names=(),
    )
    return replace(microbatch, targets=targets, counts={})
