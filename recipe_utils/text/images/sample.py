"""What a model takes beside the tokens of a sample with images.

Example: "What is it?" with one image of 3 placeholders, for a model whose positions have two axes in images (k = 4 rows:
those of the text, then time, height and width)::

    tokens      What is  it  <img> <img> <img>
    identities  What is  it   -9    -9    -9      equal placeholders are equal images only if their hash is
    types         0   0   0    1     1     1      a column that the model takes, under its own name
    positions     0   1   2    3     4     5      of the text, which restart in each document
                  0   1   2    3     3     3      time
                  0   1   2    3     3     3      height
                  0   1   2    3     4     5      width

Shapes: t tokens, k rows of positions.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch


class Join(NamedTuple):
    """How the tensors of several samples become one, as a model takes that."""

    axis: int = 0
    is_padded: bool = False
    """The other axes are padded to the largest."""


class Pixels(NamedTuple):
    """Images that a processor took together: those of a sample, which all are in a row, or none."""

    start: int
    """Position of the first placeholder."""
    sizes: Sequence[tuple[int, int]]
    """Width and height of each image as it was opened [pixels]."""
    tensors: Mapping[str, torch.Tensor]
    """By the model's argument."""


class ImageInputs(NamedTuple):
    """Inputs beside tokens for a model with images, also of samples without any."""

    positions: np.ndarray
    """[k, t] int64; the first row is that of the text."""
    identities: np.ndarray
    """[t] int64: below 0 for placeholders, a number that only the same images have; 0 for other tokens."""
    types: Mapping[str, np.ndarray]
    """Columns [t] by the model's argument."""
    pixels: Sequence[Pixels] = ()
    """In the order of their placeholders."""

    def keys_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns tokens [t], with numbers below 0 for placeholders, which are equal if the images are."""
        return np.where(self.identities < 0, self.identities, tokens)

    @property
    def num_to_last(self) -> int:
        """Returns the number of tokens up to the last placeholder; 0 without images."""
        return int(np.flatnonzero(self.identities).max(initial=-1)) + 1

    @property
    def num_values(self) -> int:
        """Returns the numbers of all images that a tower reads, padding of the processor included."""
        tensors = [tensor for each in self.pixels for tensor in each.tensors.values()]
        return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())

    def of_text(self, positions: np.ndarray) -> "ImageInputs":
        """Returns the inputs of a text of data without images, at ``positions`` [t], for the same model."""
        nothing = np.zeros(len(positions), dtype=np.int64)
        axes = np.broadcast_to(positions, (len(self.positions), len(positions)))
        return ImageInputs(axes, nothing, dict.fromkeys(self.types, nothing))

    def continued(self, num_tokens: int) -> "ImageInputs":
        """Returns the inputs of ``num_tokens``, those behind these are text: all axes of positions count on from the largest."""
        num_new = num_tokens - len(self.identities)
        new = self.positions.max(axis=1, keepdims=True) + np.arange(1, num_new + 1)
        new[1:] = self.positions[1:].max(initial=0) + np.arange(1, num_new + 1)
        return self._replace(
            positions=np.concatenate([self.positions, new], axis=1),
            identities=np.pad(self.identities, (0, num_new)),
            types={name: np.pad(column, (0, num_new)) for name, column in self.types.items()},
        )

    def at(self, places: np.ndarray) -> "ImageInputs":
        """Returns the inputs of the tokens at ``places`` [n], with the images of which the first placeholder is there."""
        found = np.full(len(self.identities), -1)
        found[places] = np.arange(len(places))
        moved = [each._replace(start=int(found[each.start])) for each in self.pixels if found[each.start] >= 0]
        return ImageInputs(
            self.positions[:, places],
            self.identities[places],
            {name: column[places] for name, column in self.types.items()},
            sorted(moved, key=lambda each: each.start),
        )


def joined_images(parts: Sequence[ImageInputs]) -> ImageInputs:
    """Returns the inputs of tokens one after the other."""
    starts = np.cumsum([0, *(len(part.identities) for part in parts)])
    return ImageInputs(
        np.concatenate([part.positions for part in parts], axis=1),
        np.concatenate([part.identities for part in parts]),
        {name: np.concatenate([part.types[name] for part in parts]) for name in parts[0].types},
        [
            each._replace(start=each.start + int(start))
            for part, start in zip(parts, starts[:-1], strict=True)
            for each in part.pixels
        ],
    )


def before_or_behind_images(keys: np.ndarray, num_common: int) -> int:
    """Returns how many first tokens a sample may share, of those that are ``num_common`` to another one.

    ``keys`` [t] are its tokens, below 0 where they are placeholders. Its images are all shared or none is: 5 common
    tokens of ``a b <img> <img> c <img> d`` are 2 then.
    """
    places = np.flatnonzero(keys < 0)
    is_between = len(places) > 0 and places[0] < num_common <= places[-1]
    return int(places[0]) if is_between else num_common


def join_pixels(parts: Sequence[Pixels], joins: Mapping[str, Join]) -> dict[str, torch.Tensor]:
    """Returns the tensors of the images of a row, each joined as the start-up check found to be exact."""
    if len(parts) == 1:
        return dict(parts[0].tensors)
    return {
        name: _join([part.tensors[name] for part in parts], joins[name]) for name in (parts[0].tensors if parts else ())
    }


def _join(tensors: Sequence[torch.Tensor], join: Join) -> torch.Tensor:
    """Returns one tensor of those of several samples; example: [2, 3, 8, 8] and [1, 3, 8, 8] along 0 are [3, 3, 8, 8]."""
    if join.is_padded:  # all other axes to the largest, with zeros behind
        sizes = [max(sizes) for sizes in zip(*(each.shape for each in tensors), strict=True)]
        sizes[join.axis] = -1
        padded = []
        for each in tensors:
            shape = [each.size(axis) if size < 0 else size for axis, size in enumerate(sizes)]
            target = each.new_zeros(shape)
            target[tuple(slice(0, size) for size in each.shape)] = each
            padded.append(target)
        tensors = padded
    return torch.cat([*tensors], dim=join.axis)
