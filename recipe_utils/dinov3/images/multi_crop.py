"""Multi-crop augmentation of DINO (Caron et al. 2021, arXiv:2104.14294, appendix E).

Defaults are those of DINOv2 (Oquab et al. 2023, arXiv:2304.07193). Each crop takes a fixed number
of draws from one generator, so no outcome shifts later draws. Pillow resizes and NumPy computes
elementwise, both in one thread: crops are bitwise the same for any number of threads and workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from recipe_utils.dinov3.images.folders import grey_of
from recipe_utils.settings.components import component_at
from recipe_utils.settings.keys import Count, Positive

Box = tuple[float, float, float, float]
"""Top, left, height and width [pixels], possibly fractional."""


def _ascending(values: Sequence[float]) -> Sequence[float]:
    if len(values) != 2 or values[0] > values[1]:
        raise ValueError("give the smallest and the largest value")
    return values


Share = Annotated[float, Field(ge=0, le=1)]
Areas = Annotated[Sequence[Annotated[float, Field(gt=0, le=1)]], AfterValidator(_ascending)]
Range = Annotated[Sequence[Positive], AfterValidator(_ascending)]
SharesOfKinds = Annotated[Sequence[Share], Field(min_length=3, max_length=3)]
"""Probabilities of the first global crop, the second and the local ones."""

_NUM_TRIES = 10
"""Maximum boxes drawn until one fits, as in torchvision's ``RandomResizedCrop``."""


@dataclass(kw_only=True)
class MultiCrop:
    """Transform that makes two global and several local crops of an image.

    A crop is a box of random area and shape, resized (:func:`resized_boxes`), flipped at random,
    changed in its colors and normalized. Images of one channel skip saturation, hue and greyscale.

    Args:
        global_crop_size, local_crop_size: sides [pixels].
        num_local_crops: at least 1.
        global_crop_scale, local_crop_scale: smallest and largest area, as a share of the image's.
        aspect_ratio: smallest and largest width over height; uniform in the logarithm.
        interpolation: filter of the resizing.
        flip_probability: probability of a horizontal flip.
        jitter_probability: for brightness, contrast, saturation and hue, in random order.
        brightness, contrast, saturation: factors are uniform in 1 -+ this.
        hue: shift is uniform in -+ this [turns], at most 0.5.
        grey_probability: probability of conversion to greyscale.
        blur_probability: for the first global crop, the second and the local ones.
        blur_sigma: smallest and largest standard deviation [pixels of the crop].
        solarize_probability: for the first global crop, the second and the local ones.
        solarize_threshold: smallest value that is inverted, in [0, 1].
        mean, std: subtracted from each channel, and its divisor; default: ImageNet's.
        image_transform: component called with the image [c, h, w], a tensor in [0, 1], before
            cropping; returns such an image. For instance a torchvision.transforms.v2 class. It may
            draw from torch's global generator, which is seeded for each image; needs
            ``num_workers`` above 0.

    Raises:
        ValueError: an argument is out of bounds, or Pillow is not installed.
    """

    global_crop_size: Count = 224
    local_crop_size: Count = 96
    num_local_crops: Count = 8
    global_crop_scale: Areas = (0.32, 1.0)
    local_crop_scale: Areas = (0.05, 0.32)
    aspect_ratio: Range = (3 / 4, 4 / 3)
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    flip_probability: Share = 0.5
    jitter_probability: Share = 0.8
    brightness: Share = 0.4
    contrast: Share = 0.4
    saturation: Share = 0.2
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    grey_probability: Share = 0.2
    blur_probability: SharesOfKinds = (1.0, 0.1, 0.5)
    blur_sigma: Range = (0.1, 2.0)
    solarize_probability: SharesOfKinds = (0.0, 0.2, 0.0)
    solarize_threshold: Share = 0.5
    mean: Sequence[float] = (0.485, 0.456, 0.406)
    std: Sequence[float] = (0.229, 0.224, 0.225)
    image_transform: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, bounds in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            try:
                TypeAdapter(bounds).validate_python(value)
            except ValidationError as error:
                raise ValueError(f"{name}={value}: {error.errors()[0]['msg']}") from None
        if len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise ValueError(f"mean={self.mean}, std={self.std}: give one value for each channel, std above 0")
        self._transform: Any = None
        if self.image_transform is not None:
            arguments = dict(self.image_transform)
            try:
                self._transform = component_at(arguments.pop("_component_", ""))(**arguments)
            except ValueError as error:
                raise ValueError(f"image_transform={self.image_transform}: {error}") from error

    def __call__(self, image: np.ndarray, generator: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns global and local crops [n, c, h, h], normalized, of an image [c, h, w] of floats in [0, 1]."""
        draws = torch.rand(3 + self.num_local_crops, _NUM_DRAWS, generator=generator, dtype=torch.float64).numpy()
        if self._transform is not None:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(int(draws[-1, 0] * 2**53))
                transformed = self._transform(torch.from_numpy(image.copy()))
            array = np.asarray(transformed, dtype=image.dtype)
            if array.ndim != 3 or len(array) != len(image) or 0 in array.shape:
                raise ValueError(
                    f"transform.image_transform made {list(array.shape)} of an image {list(image.shape)}; it must "
                    "return an image [c, h, w]"
                )
            image = _bounded(array)
        global_crops = self._crops(image, draws[:2], is_local=False)
        return global_crops, self._crops(image, draws[2:-1], is_local=True)

    def whole(self, image: np.ndarray) -> np.ndarray:
        """Returns the central square, normalized, [c, global_crop_size, global_crop_size]."""
        height, width = image.shape[1:]
        side = min(height, width)
        box = ((height - side) / 2, (width - side) / 2, float(side), float(side))
        (crop,) = resized_boxes(image, [box], self.global_crop_size, self.interpolation)
        return self._normalized(_bounded(crop))

    def _crops(self, image: np.ndarray, draws: np.ndarray, is_local: bool) -> np.ndarray:
        """Returns the crops of one size; draws are [crops, _NUM_DRAWS]."""
        size = self.local_crop_size if is_local else self.global_crop_size
        scale = self.local_crop_scale if is_local else self.global_crop_scale
        drawn = [_Draws(crop_draws) for crop_draws in draws]
        boxes = [random_box(image.shape[1:], scale, self.aspect_ratio, crop.boxes) for crop in drawn]
        crops = resized_boxes(image, boxes, size, self.interpolation)
        kinds = [2] * len(crops) if is_local else [0, 1]
        changed = map(self._changed, map(_bounded, crops), drawn, kinds)
        return np.stack([self._normalized(crop) for crop in changed])

    def _changed(self, crop: np.ndarray, drawn: "_Draws", kind: int) -> np.ndarray:
        """Flips a crop and changes its colors; ``kind`` is its index in ``blur_probability``."""
        if drawn.flip < self.flip_probability:
            crop = np.ascontiguousarray(crop[:, :, ::-1])
        # In a drawn order, as torchvision's ColorJitter; a grey crop has no saturation and no hue.
        if drawn.jitter < self.jitter_probability:
            factors, is_color = 2 * drawn.factors - 1, len(crop) == 3
            for change in np.argsort(drawn.order, kind="stable"):
                if change == 0:
                    crop = with_brightness(crop, 1 + self.brightness * factors[0])
                elif change == 1:
                    crop = with_contrast(crop, 1 + self.contrast * factors[1])
                elif change == 2 and is_color:
                    crop = with_saturation(crop, 1 + self.saturation * factors[2])
                elif change == 3 and is_color and self.hue:
                    crop = with_hue(crop, self.hue * factors[3])
        if drawn.grey < self.grey_probability and len(crop) == 3:
            crop = np.repeat(grey_of(crop), 3, axis=0)
        # With probabilities of their own for each global crop, and for local ones.
        if drawn.blur < self.blur_probability[kind]:
            low, high = self.blur_sigma
            crop = blurred(crop, low + (high - low) * drawn.sigma)
        if drawn.solarize < self.solarize_probability[kind]:
            crop = np.where(crop >= self.solarize_threshold, 1 - crop, crop)
        return crop

    def _normalized(self, crop: np.ndarray) -> np.ndarray:
        mean, std = (np.array(values, crop.dtype)[:, None, None] for values in (self.mean, self.std))
        return (crop - mean) / std


_NUM_DRAWS = 4 * _NUM_TRIES + 14


class _Draws:
    """Random numbers in [0, 1) for one crop."""

    def __init__(self, draws: np.ndarray) -> None:
        self.boxes = draws[: 4 * _NUM_TRIES].reshape(_NUM_TRIES, 4)
        rest = draws[4 * _NUM_TRIES :]
        self.flip, self.jitter, self.grey, self.blur, self.sigma, self.solarize = rest[:6]
        self.factors, self.order = rest[6:10], rest[10:14]


# ---- Boxes ----------------------------------------------------------------------------------------


def random_box(shape: Sequence[int], scale: Sequence[float], aspect_ratio: Sequence[float], draws: np.ndarray) -> Box:
    """Returns the first drawn box within an image; if there is none, the largest central one.

    ``shape`` is height and width of the image [pixels]; ``draws`` [tries, 4] in [0, 1) are area,
    shape, top and left of each box. For ``scale`` and ``aspect_ratio`` see :class:`MultiCrop`.
    """
    height, width = map(float, shape)
    low, high = aspect_ratio
    for area, ratio, top, left in draws.tolist():
        share = scale[0] + (scale[1] - scale[0]) * area
        shape_of_box = low * (high / low) ** ratio
        box_width = float(np.sqrt(share * height * width * shape_of_box))
        box_height = float(np.sqrt(share * height * width / shape_of_box))
        if box_width <= width and box_height <= height:
            return (top * (height - box_height), left * (width - box_width), box_height, box_width)
    box_width, box_height = min(width, height * high), min(height, width / low)
    return ((height - box_height) / 2, (width - box_width) / 2, box_height, box_width)


def resized_boxes(image: np.ndarray, boxes: Sequence[Box], size: int, interpolation: str) -> list[np.ndarray]:
    """Resizes boxes within an image [c, h, w] to squares [c, size, size] with Pillow.

    Channels are images of mode "F" (float32), in any number and without loss for 16 bits.
    Downscaling stretches the filter (antialiasing), which may read pixels beside the box.
    ``interpolation`` is ``bicubic``, which may overshoot, or ``bilinear``.
    """
    from PIL import Image

    kernel = Image.Resampling[interpolation.upper()]
    height, width = image.shape[1:]
    channels = [Image.fromarray(channel.astype(np.float32)) for channel in image]
    resized = []
    for top, left, box_height, box_width in boxes:
        # Rounding could move an edge out of the image.
        box = (left, top, min(left + box_width, width), min(top + box_height, height))
        crop = [np.asarray(channel.resize((size, size), kernel, box=box)) for channel in channels]
        resized.append(np.stack(crop).astype(image.dtype))
    return resized


# ---- Colors, as torchvision's --------------------------------------------------------------------


def _bounded(pixels: np.ndarray) -> np.ndarray:
    bounded: np.ndarray = np.minimum(np.maximum(pixels, 0), 1)  # np.clip takes ten times longer
    return bounded


def with_brightness(crop: np.ndarray, factor: float) -> np.ndarray:
    """Multiplies the pixels by ``factor``, at most to 1."""
    return _bounded(crop * crop.dtype.type(factor))


def with_contrast(crop: np.ndarray, factor: float) -> np.ndarray:
    """Multiplies the pixels' distance from the mean luma by ``factor``."""
    grey = grey_of(crop) if len(crop) == 3 else crop
    return _blended(crop, crop.dtype.type(grey.mean(dtype=np.float64)), factor)


def with_saturation(crop: np.ndarray, factor: float) -> np.ndarray:
    """Multiplies each pixel's distance from its luma by ``factor``; [3, h, w]."""
    return _blended(crop, grey_of(crop), factor)


def _blended(crop: np.ndarray, other: Any, factor: float) -> np.ndarray:
    factor = crop.dtype.type(factor)
    return _bounded(factor * crop + (1 - factor) * other)


def with_hue(crop: np.ndarray, shift: float) -> np.ndarray:
    """Rotates the hue of HSV by ``shift`` [turns]; [3, h, w]."""
    red, green, blue = crop
    value = crop.max(axis=0)
    chroma = value - crop.min(axis=0)
    divisor = np.where(chroma == 0, 1, chroma)
    # Hue in sixths of a turn; that of grey pixels has no effect.
    hue = np.where(
        value == red,
        (green - blue) / divisor,
        np.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    hue = hue + crop.dtype.type(6 * shift)
    # A channel is the value near its hue, and the value minus the chroma opposite to it.
    channels = []
    for offset in (5, 3, 1):
        place = np.mod(hue + offset, 6)
        channels.append(value - chroma * _bounded(np.minimum(place, 4 - place)))
    return _bounded(np.stack(channels))


def blurred(crop: np.ndarray, sigma: float) -> np.ndarray:
    """Blurs [c, h, w] with a Gaussian cut off at three ``sigma`` [pixels]; border pixels are repeated."""
    radius = int(np.ceil(3 * sigma))
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    weights = (weights / weights.sum()).astype(crop.dtype)
    for _ in range(2):
        size = crop.shape[1]
        padded = np.pad(crop, ((0, 0), (radius, radius), (0, 0)), mode="edge")
        rows = (weight * padded[:, i : i + size] for i, weight in enumerate(weights))
        crop = sum(rows, start=np.zeros_like(crop)).transpose(0, 2, 1)
    return crop


def check_fits(transform: Any, patch_size: int, num_channels: int) -> None:
    """Raises a ValueError unless a transform is a MultiCrop that matches the model."""
    if not isinstance(transform, MultiCrop):
        remedy = "set it to recipe_utils.dinov3.MultiCrop, which takes another transform as image_transform"
        raise ValueError(f"transform: it is a {type(transform).__name__}; {remedy}")
    # All problems at once, each with the nearest values that fit.
    problems = []
    for name in ("global_crop_size", "local_crop_size"):
        size = getattr(transform, name)
        if size % patch_size:
            below = size // patch_size * patch_size
            problems.append(
                f"transform.{name}={size}: not a multiple of the model's patch_size={patch_size}; the nearest are "
                f"{max(below, patch_size)} and {below + patch_size}"
            )
    if len(transform.mean) != num_channels:
        problems.append(
            f"transform.mean={transform.mean}: {len(transform.mean)} values for the model's {num_channels} channels; "
            "give mean and std one for each"
        )
    if problems:
        raise ValueError("; ".join(problems))
