"""Pixels of images, and datasets of image files."""

import hashlib
import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from recipe_utils.torchtune_names import log_rank_zero
from recipe_utils.update_steps.samples import SampleError, check_has

_LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a gray image (ITU-R BT.601, as in Pillow)."""


@dataclass
class ImageDataset(Dataset[dict[str, Any]]):
    """Images of a ``datasets.Dataset`` with ``decode=False``, decoded on access.

    ``label_column`` has integer classes for a k-NN classifier, training ignores it; None for images without labels.
    """

    rows: Any
    image_column: str
    label_column: str | None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the Pillow ``image``, its path as ``name``, and ``label`` if there is one.

        Raises SampleError with the path if the file cannot be decoded.
        """
        from PIL import Image

        row = self.rows[int(index)]
        file = row[self.image_column]
        if file is None:
            raise SampleError("it has no image")
        path, content = file["path"] or "", file["bytes"]
        try:
            if content is None:
                content = Path(path).read_bytes()
            image = Image.open(io.BytesIO(content))
            image.load()
        except Exception as error:  # decoders raise various types
            problem = "its file is empty" if content == b"" else f"it cannot be decoded ({error})"
            raise SampleError(f"image {path or 'without a path'}: {problem}") from None
        sample: dict[str, Any] = {"image": image, "name": path}
        if self.label_column is not None and row[self.label_column] is not None:
            sample["label"] = row[self.label_column]
        return sample


def image_folder_dataset(source: str, split: str = "train") -> ImageDataset:
    """Returns images in a folder, labeled by subfolder: ``source/cat/1.jpg``, ``source/dog/2.png``.

    Labels are the indices of the sorted names; without subfolders there are none. ``split`` selects
    ``train``, ``validation`` or ``test`` of ``source/train/cat/1.jpg``, ... Logs the number of images
    and labels, and warns of files that ``datasets`` passes over.
    """
    dataset = hf_image_dataset("imagefolder", split=split, data_dir=source)
    name, is_slice, _ = split.partition("[")
    folder = Path(source, name) if Path(source, name).is_dir() else Path(source)
    num_labels = 0
    if dataset.label_column is not None:
        num_labels = getattr(dataset.rows.features[dataset.label_column], "num_classes", 0)
    log_rank_zero(f"{folder}, split={split}: {len(dataset)} images, {num_labels} labels")
    # datasets skips other files in silence, and reads a metadata file instead of the names of subfolders.
    files = [path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."]
    if described := [path for path in files if path.stem == "metadata"]:
        text = f"{described[0]} determines which images are read and what their labels are"
        log_rank_zero(text, logging.WARNING)
    elif len(files) > len(dataset) and not is_slice:
        suffixes = ", ".join(sorted({path.suffix for path in files}))
        text = f"{folder}: datasets read {len(dataset)} of {len(files)} files, whose suffixes are {suffixes}"
        log_rank_zero(text, logging.WARNING)
    return dataset


def hf_image_dataset(
    source: str,
    split: str = "train",
    image_column: str = "image",
    label_column: str = "label",
    **load_dataset_kwargs: Any,
) -> ImageDataset:
    """Returns the images of a dataset of ``datasets.load_dataset``.

    Args:
        source: name or path of the dataset.
        split: name, or a slice such as ``train[:1000]``.
        image_column: column of images.
        label_column: column of integer classes, which only a k-NN classifier reads; there need not be one.
        load_dataset_kwargs: further arguments, such as ``name`` or ``data_files``.

    Raises ValueError if there is no ``image_column``.
    """
    import datasets  # takes a second

    rows = datasets.load_dataset(source, split=split, **load_dataset_kwargs)
    columns = rows.column_names
    if image_column not in columns:
        raise ValueError(f"image_column={image_column}: there are only {', '.join(columns) or 'no columns'}")
    rows = rows.cast_column(image_column, datasets.Image(decode=False))
    return ImageDataset(rows, image_column, label_column if label_column in columns else None)


def check_is_image(sample: Any, with_labels: bool = False) -> None:
    """Raises ValueError if a sample has no image, or no class as label and ``with_labels`` is True."""
    sample = _as_mapping(sample)
    if not isinstance(sample, Mapping) or "image" not in sample:
        keys = sorted(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        remedy = "set it to a dataset of images, such as recipe_utils.dinov3.image_folder_dataset"
        raise ValueError(f"its samples have {keys} and no image; {remedy}")
    label = sample.get("label")
    if with_labels and not _is_class(label):
        found = "no labels" if label is None else f"labels such as {label!r:.40}, not integers of at least 0,"
        raise ValueError(
            f"its images have {found} for neighbors to vote for; set dataset_knn and dataset_val to images with "
            "labels, or run_val_every_n_steps=null"
        )


def _is_class(label: Any) -> bool:
    is_integer = hasattr(label, "__index__") and not isinstance(label, bool) and np.ndim(label) == 0
    return is_integer and int(label) >= 0


def _as_mapping(sample: Any) -> Any:
    """Converts a pair (image, label), as torchvision's datasets return it."""
    if isinstance(sample, tuple) and len(sample) == 2:
        return {"image": sample[0], "label": sample[1]}
    return sample


def checked_image(sample: Any, num_channels: int, with_label: bool = True) -> tuple[np.ndarray, int | None]:
    """Returns the pixels of a sample's image (:func:`pixels_of`), and its label ``with_label``, if it has one.

    ``sample`` is a mapping with ``image`` and optionally ``label`` and ``name`` (the path), or a
    pair (image, label). Raises SampleError if the image, or a label that is returned, is not valid.
    """
    sample = _as_mapping(sample)
    check_has(sample, ("image",), "sample")
    path = str(sample.get("name") or "")
    try:
        pixels = pixels_of(sample["image"], num_channels)
    except ValueError as error:
        raise SampleError(f"image {path}: {error}" if path else f"its image: {error}") from None
    label = sample.get("label") if with_label else None
    if label is not None and not _is_class(label):
        raise SampleError(f"its label is {label!r}, not an integer of at least 0")
    return pixels, None if label is None else int(label)


def pixels_of(image: Any, num_channels: int) -> np.ndarray:
    """Returns pixels in [0, 1], [num_channels, h, w]: float64 if the image is, else float32.

    As in torchvision's ``ImageFolder``, images become RGB, or gray if ``num_channels`` is 1: gray
    images are repeated, palettes looked up, alpha channels dropped. Integers are divided by the
    largest value of their type, so 16-bit images are not clipped at 255.

    ``image`` is a Pillow image; or an array or tensor [h, w], [c, h, w] or, if the first axis
    cannot be channels, [h, w, c], of integers or of floats in [0, 1]. Raises ValueError for no
    pixels, other types or values, and channels that cannot be converted.
    """
    if hasattr(image, "convert"):  # Pillow, which may not be installed
        image = _array_of_pillow(image)
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu()
        image = (image.float() if image.dtype == torch.bfloat16 else image).numpy()
    array = np.asarray(image)
    if array.ndim not in (2, 3) or array.dtype.kind not in "fiub":
        raise ValueError(
            f"it must be a picture, or an array [h, w] or [c, h, w]; it is a {type(image).__name__} "
            f"{list(array.shape)} of {array.dtype}"
        )
    if array.ndim == 2:
        array = array[None]
    elif array.shape[0] not in range(1, 5) and array.shape[-1] in range(1, 5):
        array = array.transpose(2, 0, 1)
    if 0 in array.shape:
        raise ValueError(f"it has no pixels: {array.shape[1]} x {array.shape[2]}")
    return np.ascontiguousarray(_with_channels(_scaled(array), num_channels))


def _array_of_pillow(image: Any) -> np.ndarray:
    """Returns [h, w] or [c, h, w]."""
    if image.mode.startswith("I") or image.mode == "F":
        array = np.asarray(image)
        # Pillow reads some 16-bit gray files as 32 bits.
        is_16_bit = array.dtype.kind in "iu" and array.size and 0 <= array.min() <= array.max() < 2**16
        return array.astype(np.uint16) if is_16_bit else array
    if image.mode not in ("L", "RGB"):
        image = image.convert("L" if image.mode in ("1", "LA", "La") else "RGB")
    array = np.asarray(image)
    return array if array.ndim == 2 else array.transpose(2, 0, 1)


def _scaled(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "f":
        array = array if array.dtype == np.float64 else array.astype(np.float32)
        low, high = array.min(), array.max()
        if not np.isfinite(low + high):
            raise ValueError("its pixels are not all finite")
        if low < 0 or high > 1:
            raise ValueError(f"its pixels are from {low:.3g} to {high:.3g}; give integers, or floats in [0, 1]")
        return array
    if array.dtype not in (np.uint8, np.uint16, np.bool_):
        raise ValueError(f"its pixels are {array.dtype}; give uint8, uint16, or floats in [0, 1]")
    most = 1 if array.dtype == np.bool_ else np.iinfo(array.dtype).max
    return array.astype(np.float32) / np.float32(most)


def _with_channels(array: np.ndarray, num_channels: int) -> np.ndarray:
    num_given = len(array)
    if num_channels in (1, 3) and num_given in (2, 4):
        array = array[:-1]  # alpha
    if num_channels == 3 and len(array) == 1:
        return np.repeat(array, 3, axis=0)
    if num_channels == 1 and len(array) == 3:
        return grey_of(array)
    if len(array) != num_channels:
        raise ValueError(f"it has {num_given} channels, which cannot be converted to the model's {num_channels}")
    return array


def grey_of(pixels: np.ndarray) -> np.ndarray:
    """Returns the luma [1, h, w] of RGB pixels [3, h, w]."""
    red, green, blue = (pixels[i] * pixels.dtype.type(_LUMA[i]) for i in range(3))
    return np.asarray(red + green + blue)[None]


def digest_of(pixels: np.ndarray) -> np.ndarray:
    """Returns a hash of the pixels, int64 [2]."""
    digest = hashlib.blake2b(str(pixels.shape).encode(), digest_size=16)
    digest.update(pixels.tobytes())
    return np.frombuffer(digest.digest(), dtype=np.int64).copy()  # writable
