"""Several views of an image: crops at two scales, each changed in its colours.

DINO's (Caron et al. 2021, arXiv:2104.14294, appendix E) with the numbers of DINOv2 (Oquab et al. 2023,
arXiv:2304.07193): two global and some local crops. What is drawn comes from one generator, a fixed number of draws
for each crop in their order, so no outcome moves the draws after it. All arithmetic is NumPy's, elementwise
and in one thread: not a bit depends on the number of threads or on where a sample is made.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from recipe_utils.data.images.folders import grey_of
from recipe_utils.settings.components import component_at

Box = tuple[float, float, float, float]
"""Top, left, height, width in pixels of an image; need not be whole."""

_NUM_TRIES = 10
"""Of a box that fits into the image, as in torchvision's ``RandomResizedCrop``."""


class Crops(NamedTuple):
    """Views of one image."""

    of_global: np.ndarray
    """[2, c, global_crop_size, global_crop_size], normalised."""
    of_local: np.ndarray
    """[num_local_crops, c, local_crop_size, local_crop_size], normalised."""


class MultiCrop:
    """Makes two global and several local crops of an image.

    A crop is a box of random area and shape, whose borders need not lie between pixels, resized as Pillow
    does (:func:`resized_boxes`: antialiased where it gets smaller), flipped at random, changed in its colours and
    normalised. On images of one channel saturation, hue and greyscale do nothing.

    Args:
        global_crop_size: side of the global crops [pixels].
        local_crop_size: side of the local crops [pixels].
        num_local_crops: at least 1.
        global_crop_scale: smallest and largest area of global crops, as a share of the image's.
        local_crop_scale: likewise of local crops.
        aspect_ratio: narrowest and widest box, width over height; uniform in the logarithm.
        interpolation: of the resizing.
        flip_probability: of a crop's being flipped from left to right.
        jitter_probability: of changing brightness, contrast, saturation and hue, in random order.
        brightness: factor is uniform in 1 -+ this.
        contrast: likewise.
        saturation: likewise.
        hue: shift is uniform in -+ this [turns], at most 0.5.
        grey_probability: of a crop's losing its colours.
        blur_probability: of the first global crop, the second and the local ones.
        blur_sigma: smallest and largest standard deviation of the blur [pixels of the crop].
        solarize_probability: of inverting pixels from ``solarize_threshold`` on, likewise.
        solarize_threshold: in [0, 1].
        mean: of each channel, which is subtracted; ImageNet's, unless given.
        std: of each channel, by which is divided.
        image_transform: a component called with the whole image [c, h, w] (a tensor in [0, 1]) before it is
            cropped; returns such an image. A torchvision.transforms.v2 class, where torchvision is installed. It
            may draw from torch's global generator, which is seeded for each image; needs ``num_workers`` of at least 1.

    Raises:
        ValueError: an argument out of its bounds.
    """

    def __init__(  # these are a config's keys, never given by position
        self,
        *,
        global_crop_size: int = 224,
        local_crop_size: int = 96,
        num_local_crops: int = 8,
        global_crop_scale: Sequence[float] = (0.32, 1.0),
        local_crop_scale: Sequence[float] = (0.05, 0.32),
        aspect_ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Literal["bicubic", "bilinear"] = "bicubic",
        flip_probability: float = 0.5,
        jitter_probability: float = 0.8,
        brightness: float = 0.4,
        contrast: float = 0.4,
        saturation: float = 0.2,
        hue: float = 0.1,
        grey_probability: float = 0.2,
        blur_probability: Sequence[float] = (1.0, 0.1, 0.5),
        blur_sigma: Sequence[float] = (0.1, 2.0),
        solarize_probability: Sequence[float] = (0.0, 0.2, 0.0),
        solarize_threshold: float = 0.5,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        image_transform: dict[str, Any] | None = None,
    ) -> None:
        self.global_crop_size = _whole("global_crop_size", global_crop_size)
        self.local_crop_size = _whole("local_crop_size", local_crop_size)
        self.num_local_crops = _whole("num_local_crops", num_local_crops)
        self.global_crop_scale = _range("global_crop_scale", global_crop_scale, most=1.0)
        self.local_crop_scale = _range("local_crop_scale", local_crop_scale, most=1.0)
        self.aspect_ratio = _range("aspect_ratio", aspect_ratio)
        self.interpolation = interpolation
        self.flip_probability = _share("flip_probability", flip_probability)
        self.jitter_probability = _share("jitter_probability", jitter_probability)
        self.brightness = _share("brightness", brightness)
        self.contrast = _share("contrast", contrast)
        self.saturation = _share("saturation", saturation)
        self.hue = _share("hue", hue, most=0.5)
        self.grey_probability = _share("grey_probability", grey_probability)
        self.blur_probability = _of_three("blur_probability", blur_probability)
        self.blur_sigma = _range("blur_sigma", blur_sigma)
        self.solarize_probability = _of_three("solarize_probability", solarize_probability)
        self.solarize_threshold = _share("solarize_threshold", solarize_threshold)
        if interpolation not in _FILTERS:
            raise ValueError(f"interpolation={interpolation}: set it to {' or '.join(_FILTERS)}")
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise ValueError(
                f"mean={list(mean)}, std={list(std)}: give one value for each channel, std above 0"
            )
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        self.image_transform = None
        if image_transform is not None:
            arguments = {key: arg for key, arg in image_transform.items() if key != "_component_"}
            try:
                made = component_at(image_transform.get("_component_", ""))
            except ValueError as error:
                raise ValueError(f"image_transform={image_transform}: {error}") from error
            self.image_transform = made(**arguments)

    def problems_with(self, patch_size: int, num_channels: int) -> list[str]:
        """What does not fit to a model that takes patches of so many pixels a side, and so many channels."""
        problems = [
            f"transform.{name}={size}: no multiple of the model's patch_size={patch_size}; the nearest are "
            f"{max(size // patch_size, 1) * patch_size} and {(size // patch_size + 1) * patch_size}"
            for name, size in (
                ("global_crop_size", self.global_crop_size),
                ("local_crop_size", self.local_crop_size),
            )
            if size % patch_size
        ]
        if len(self.mean) != num_channels:
            problems.append(
                f"transform.mean={list(self.mean)}: {len(self.mean)} values for the model's "
                f"{num_channels} channels; give mean and std one for each"
            )
        return problems

    def __call__(self, image: np.ndarray, generator: torch.Generator) -> Crops:
        """The crops of an image.

        Args:
            image: [c, h, w], floats in [0, 1].
            generator: of all draws.
        """
        draws = torch.rand(
            3 + self.num_local_crops, _NUM_DRAWS, generator=generator, dtype=torch.float64
        ).numpy()
        if self.image_transform is not None:
            image = self._transformed(image, seed=int(draws[-1, 0] * 2**53))
        of_global = self._crops(image, draws[:2], is_local=False)
        return Crops(of_global, self._crops(image, draws[2:-1], is_local=True))

    def whole(self, image: np.ndarray) -> np.ndarray:
        """The largest square in the middle of an image, resized to a global crop's size and normalised.

        Args:
            image: [c, h, w], floats in [0, 1].

        Returns:
            [c, global_crop_size, global_crop_size].
        """
        height, width = image.shape[1:]
        side = min(height, width)
        box = ((height - side) / 2, (width - side) / 2, float(side), float(side))
        (crop,) = resized_boxes(image, [box], self.global_crop_size, self.interpolation)
        return self._normalised(_bounded(crop))

    def _transformed(self, image: np.ndarray, seed: int) -> np.ndarray:
        assert self.image_transform is not None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            transformed = self.image_transform(torch.from_numpy(image.copy()))
        array = np.asarray(transformed, dtype=image.dtype)
        if array.ndim != 3 or len(array) != len(image) or 0 in array.shape:
            raise ValueError(
                f"transform.image_transform made {list(array.shape)} of an image {list(image.shape)}; it must "
                "return an image [c, h, w]"
            )
        return _bounded(array)

    def _crops(self, image: np.ndarray, draws: np.ndarray, is_local: bool) -> np.ndarray:
        """Crops of one size; draws are [crops, _NUM_DRAWS]."""
        size = self.local_crop_size if is_local else self.global_crop_size
        scale = self.local_crop_scale if is_local else self.global_crop_scale
        drawn = [_Draws(of_crop) for of_crop in draws]
        boxes = [
            random_box(image.shape[1:], scale, self.aspect_ratio, each.boxes) for each in drawn
        ]
        crops = resized_boxes(image, boxes, size, self.interpolation)
        kinds = [2] * len(crops) if is_local else [0, 1]
        changed = map(self._changed, map(_bounded, crops), drawn, kinds)
        return np.stack([self._normalised(crop) for crop in changed])

    def _changed(self, crop: np.ndarray, drawn: "_Draws", kind: int) -> np.ndarray:
        """A crop with other colours, and perhaps flipped.

        Args:
            crop: [c, h, w], floats in [0, 1].
            drawn: for it.
            kind: its place in ``blur_probability`` and ``solarize_probability``.
        """
        if drawn.flip < self.flip_probability:
            crop = np.ascontiguousarray(crop[:, :, ::-1])
        if drawn.jitter < self.jitter_probability:
            crop = self._jittered(crop, drawn)
        if drawn.grey < self.grey_probability and len(crop) == 3:
            crop = np.repeat(grey_of(crop), 3, axis=0)
        if drawn.blur < self.blur_probability[kind]:
            low, high = self.blur_sigma
            crop = blurred(crop, low + (high - low) * drawn.sigma)
        if drawn.solarize < self.solarize_probability[kind]:
            crop = np.where(crop >= self.solarize_threshold, 1 - crop, crop)
        return crop

    def _jittered(self, crop: np.ndarray, drawn: "_Draws") -> np.ndarray:
        factors = 2 * drawn.factors - 1
        is_colour = len(crop) == 3
        for change in np.argsort(drawn.order, kind="stable"):
            if change == 0:
                crop = with_brightness(crop, 1 + self.brightness * factors[0])
            elif change == 1:
                crop = with_contrast(crop, 1 + self.contrast * factors[1])
            elif change == 2 and is_colour:
                crop = with_saturation(crop, 1 + self.saturation * factors[2])
            elif change == 3 and is_colour and self.hue:
                crop = with_hue(crop, self.hue * factors[3])
        return crop

    def _normalised(self, crop: np.ndarray) -> np.ndarray:
        mean, std = (np.array(of, crop.dtype)[:, None, None] for of in (self.mean, self.std))
        return (crop - mean) / std


_NUM_DRAWS = 4 * _NUM_TRIES + 14


class _Draws:
    """What is drawn for one crop, each in [0, 1)."""

    def __init__(self, draws: np.ndarray) -> None:
        self.boxes = draws[: 4 * _NUM_TRIES].reshape(_NUM_TRIES, 4)
        rest = draws[4 * _NUM_TRIES :]
        self.flip, self.jitter, self.grey, self.blur, self.sigma, self.solarize = rest[:6]
        self.factors, self.order = rest[6:10], rest[10:14]


# ---- Boxes ----------------------------------------------------------------------------------------


def random_box(
    shape: Sequence[int],
    scale: tuple[float, float],
    aspect_ratio: tuple[float, float],
    draws: np.ndarray,
) -> Box:
    """The first box of several that lies within an image; if none does, the largest one in the middle.

    Args:
        shape: height and width of the image [pixels].
        scale: smallest and largest area, as a share of the image's.
        aspect_ratio: narrowest and widest, width over height.
        draws: for each box that is tried area, shape, top and left, in [0, 1); shape [tries, 4].
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


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel (1981) with a = -0.5, as Pillow's."""
    a, x = -0.5, np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


_FILTERS = {"bicubic": (_cubic, 2.0), "bilinear": (_triangle, 1.0)}
"""Interpolation -> filter, and where it ends [pixels]."""


def resized_boxes(
    image: np.ndarray, boxes: Sequence[Box], size: int, interpolation: str
) -> list[np.ndarray]:
    """Boxes of an image, each resized to a square as Pillow's ``resize(size, box=box)`` does.

    Where a box is larger than the square, the filter is stretched by as much: it sees all pixels, so nothing
    aliases. Near the image's border the filter is cut off and normalised; it may see pixels beside the box.

    Args:
        image: [c, h, w] of floats.
        boxes: within the image.
        size: of the squares [pixels].
        interpolation: ``bicubic``, which may overshoot, or ``bilinear``.

    Returns:
        For each box [c, size, size].
    """
    tops, lefts, heights, widths = np.array(boxes, dtype=np.float64).T
    of_rows = _filter_taps(tops, heights, size, image.shape[1], interpolation)
    of_columns = _filter_taps(lefts, widths, size, image.shape[2], interpolation)
    resized = []
    for rows, columns in zip(of_rows, of_columns, strict=True):
        # Columns that no filter sees need no rows.
        first, last = columns[0].min(), columns[0].max()
        filtered = _filtered_rows(image[:, :, first : last + 1], *rows).transpose(0, 2, 1)
        filtered = _filtered_rows(filtered, columns[0] - first, columns[1]).transpose(0, 2, 1)
        resized.append(np.ascontiguousarray(filtered))
    return resized


def _filter_taps(
    starts: np.ndarray, lengths: np.ndarray, size: int, num_rows: int, interpolation: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each stretch of an image's rows: which rows each of ``size`` resized ones is made of, and their weights.

    Both [size, taps]; a tap outside of the image has weight 0.
    """
    kernel, support = _FILTERS[interpolation]
    # Of all stretches at once: on small images it is the number of calls that takes time.
    reach = support * np.maximum(lengths / size, 1)
    centres = (starts + (np.arange(size)[:, None] + 0.5) * (lengths / size)).T
    firsts = np.floor(centres - 0.5 - reach[:, None]).astype(np.int64) + 1
    num_taps = np.ceil(2 * reach).astype(np.int64)
    taps = firsts[:, :, None] + np.arange(num_taps.max())
    distances = (taps + 0.5 - centres[:, :, None]) / (reach[:, None, None] / support)
    weights = kernel(distances) * ((taps >= 0) & (taps < num_rows))
    weights /= weights.sum(axis=2, keepdims=True)
    taps = np.minimum(np.maximum(taps, 0), num_rows - 1)
    for index, number in enumerate(num_taps):
        yield taps[index, :, :number], weights[index, :, :number]


_MOST_AT_ONCE = 2**17
"""Pixels that are gathered for a sum, as many as stay in a cache: of a photograph all would be gigabytes."""


def _filtered_rows(image: np.ndarray, taps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Rows [c, s, w], each a weighted sum of rows of ``image`` [c, h, w]; taps and weights are [s, t]."""
    num_channels, _, width = image.shape
    weights = weights.astype(image.dtype)
    filtered = np.empty((num_channels, len(taps), width), image.dtype)
    num_rows = max(_MOST_AT_ONCE // (num_channels * taps.shape[1] * width), 1)
    for first in range(0, len(taps), num_rows):
        part = slice(first, first + num_rows)
        # Not a matrix product: the order in which a BLAS sums depends on its threads.
        np.einsum(
            "st,cstw->csw", weights[part], image.take(taps[part], axis=1), out=filtered[:, part]
        )
    return filtered


# ---- Colours, as torchvision's --------------------------------------------------------------------


def _bounded(pixels: np.ndarray) -> np.ndarray:
    bounded: np.ndarray = np.minimum(
        np.maximum(pixels, 0), 1
    )  # which np.clip does, ten times slower
    return bounded


def with_brightness(crop: np.ndarray, factor: float) -> np.ndarray:
    """``factor`` times the pixels, at most 1."""
    return _bounded(crop * crop.dtype.type(factor))


def with_contrast(crop: np.ndarray, factor: float) -> np.ndarray:
    """``factor`` times the pixels' distance from the mean luma."""
    grey = grey_of(crop) if len(crop) == 3 else crop
    return _blended(crop, crop.dtype.type(grey.mean(dtype=np.float64)), factor)


def with_saturation(crop: np.ndarray, factor: float) -> np.ndarray:
    """``factor`` times each pixel's distance from its luma; [3, h, w]."""
    return _blended(crop, grey_of(crop), factor)


def _blended(crop: np.ndarray, other: Any, factor: float) -> np.ndarray:
    factor = crop.dtype.type(factor)
    return _bounded(factor * crop + (1 - factor) * other)


def with_hue(crop: np.ndarray, shift: float) -> np.ndarray:
    """Hue, as in HSV, turned by ``shift`` [turns]; [3, h, w]."""
    red, green, blue = crop
    value = crop.max(axis=0)
    chroma = value - crop.min(axis=0)
    divisor = np.where(chroma == 0, 1, chroma)
    # Hue in sixths of a turn; that of grey pixels is of no account.
    hue = np.where(
        value == red,
        (green - blue) / divisor,
        np.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    hue = hue + crop.dtype.type(6 * shift)
    # A channel has the value for half a turn around its own colour, and lacks the chroma for the third opposite.
    channels = []
    for offset in (5, 3, 1):
        place = np.mod(hue + offset, 6)
        channels.append(value - chroma * _bounded(np.minimum(place, 4 - place)))
    return _bounded(np.stack(channels))


def blurred(crop: np.ndarray, sigma: float) -> np.ndarray:
    """A Gaussian blur, cut off at three standard deviations; beyond the border its pixels go on.

    Args:
        crop: [c, h, w].
        sigma: its standard deviation [pixels].
    """
    radius = int(np.ceil(3 * sigma))
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    weights /= weights.sum()
    for _ in range(2):
        size = crop.shape[1]
        taps = np.minimum(np.maximum(np.arange(size)[:, None] + offsets, 0), size - 1)
        crop = _filtered_rows(crop, taps, np.broadcast_to(weights, taps.shape)).transpose(0, 2, 1)
    return crop


# ---- Arguments ------------------------------------------------------------------------------------


def _whole(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value}: it must be a whole number of at least 1")
    return value


def _share(name: str, value: float, most: float = 1.0) -> float:
    if not 0 <= value <= most:
        raise ValueError(f"{name}={value}: it must be from 0 to {most:g}")
    return float(value)


def _range(name: str, values: Sequence[float], most: float = float("inf")) -> tuple[float, float]:
    if len(values) != 2 or not 0 < values[0] <= values[1] <= most:
        bound = "" if most == float("inf") else f" and at most {most:g}, the whole image"
        raise ValueError(
            f"{name}={list(values)}: give the smallest and the largest value, above 0{bound}"
        )
    return float(values[0]), float(values[1])


def _of_three(name: str, values: Sequence[float]) -> tuple[float, ...]:
    if len(values) != 3 or not all(0 <= value <= 1 for value in values):
        raise ValueError(
            f"{name}={list(values)}: give three probabilities, of the first global crop, the second and the "
            "local ones"
        )
    return tuple(map(float, values))


def check_fits(transform: Any, patch_size: int, num_channels: int) -> None:
    """Refuses what makes no crops, or crops that are no whole patches of a model.

    Raises:
        ValueError: says what is wrong.
    """
    if not isinstance(transform, MultiCrop):
        raise ValueError(
            f"transform: it is a {type(transform).__name__}; set it to recipe_utils.data.images.multi_crop.MultiCrop, "
            "which takes another transform as image_transform"
        )
    if problems := transform.problems_with(patch_size, num_channels):
        raise ValueError("; ".join(problems))
