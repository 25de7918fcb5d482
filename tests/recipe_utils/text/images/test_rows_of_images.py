"""Images in trees and packed rows: each placeholder has its image, whatever samples share.

A position whose next token two samples train is not shared: of ``ab___cX`` and ``ab___cY`` ``c`` stands twice.
"""

import numpy as np
import pytest
import torch

from recipe_utils.text.documents import chains
from recipe_utils.text.images.sample import ImageInputs, Join, Pixels, join_pixels
from recipe_utils.text.limits import ModelLimits, RowBounds
from recipe_utils.text.reader import TextReader
from recipe_utils.text.row_tensors import packed, padded
from recipe_utils.text.samples import FIRST, TextSample
from recipe_utils.text.trees import merge, share_beginnings, split_trees

IGNORED = -100
PLACEHOLDER = 7


def sample_of(text, target, numbers=()):
    """Returns a sample of a text of letters, in which ``_`` is a placeholder; its images are ``numbers``, 3 tensors each."""
    tokens = np.array([PLACEHOLDER if letter == "_" else 100 + ord(letter) for letter in text])
    labels = np.where(np.arange(len(text)) >= text.index(target), tokens, IGNORED)
    labels = np.append(labels[1:], IGNORED)
    identities = np.where(tokens == PLACEHOLDER, -1 - hash(numbers) % 10**9, 0)
    positions = np.stack([np.arange(len(text)), np.arange(len(text)) * 10])
    tensors = {"pixel_values": torch.tensor([[float(number)] for number in numbers for _ in range(3)])}
    pixels = [Pixels(text.index("_"), [(1, 1)] * len(numbers), tensors)] if numbers else []
    images = ImageInputs(positions, identities, {"types": (tokens == PLACEHOLDER) * 1}, pixels)
    return TextSample("sample", FIRST, tokens, labels, [len(tokens)], images=images)


def images_at(row_tokens, pixels, path):
    """Returns the numbers of the images at a sequence's placeholders, as a model fills them: in the order of the row."""
    filled = np.full(len(row_tokens), np.nan)
    filled[row_tokens == PLACEHOLDER] = pixels["pixel_values"][:, 0]
    return filled[path][row_tokens[path] == PLACEHOLDER].tolist()


@pytest.mark.parametrize(
    ("texts", "num_positions"),
    [
        ([("ab___cX", (1,)), ("ab___cY", (1,))], 9),  # one image of two answers
        ([("ab___cX", (1,)), ("ab___cY", (2,))], 12),  # equal placeholders of two images
        ([("ab___c___dX", (1, 2)), ("ab___c___dY", (1, 2))], 13),
        ([("ab___c___dX", (1, 2)), ("ab___e___dY", (1, 2))], 20),  # their images are shared together, or not
        ([("ab___cX", (1,)), ("ab___cXe___fY", (1, 2))], 18),  # of a conversation
        ([("abX", ()), ("ab___cY", (1,)), ("ab___cZ", (1,))], 10),
        ([("___aX", (3,)), ("___aY", (3,)), ("___aX", (4,))], 12),
    ],
)
def test_placeholders_of_a_tree_have_the_images_of_their_sequence(texts, num_positions):
    sequences = [sample_of(text, text[-1], numbers) for text, numbers in texts]
    tree = merge(sequences, None, IGNORED)
    assert len(tree.tokens) == num_positions
    pixels = join_pixels(tree.images.pixels, {"pixel_values": Join()})
    (_, ends), paths = (
        tree.owners_and_ends(),
        [np.concatenate([np.arange(*r) for r in c.ranges]) for c in chains(tree.documents)],
    )
    for (text, numbers), sequence, end in zip(texts, sequences, ends, strict=True):
        path = next(path for path in paths if end in path)
        path = path[: path.searchsorted(end) + 1]
        np.testing.assert_array_equal(tree.tokens[path], sequence.tokens)
        np.testing.assert_array_equal(tree.images.positions[:, path], sequence.images.positions)
        np.testing.assert_array_equal(tree.images.types["types"][path], sequence.images.types["types"])
        if numbers:
            assert images_at(tree.tokens, pixels, path) == [number for number in numbers for _ in range(3)], text
    (alone,) = split_trees(tree)
    assert [each.start for each in alone.images.pixels] == [each.start for each in tree.images.pixels]


def test_samples_of_a_row_share_an_image_only_if_it_is_the_same():
    text = "abcdefghijklmn___opX"
    samples = [sample_of(text, "X", (number,)) for number in (1, 2, 1)]
    row = share_beginnings(samples, IGNORED)
    reader = TextReader(bounds=RowBounds(limits=ModelLimits(joins={"pixel_values": Join()})))
    made = packed(row, reader)
    assert row.num_saved == 18
    assert made.inputs["images"]["pixel_values"][:, 0].tolist() in ([1] * 3 + [2] * 3, [2] * 3 + [1] * 3)
    assert made.inputs["input_pos"].shape == (2, 1, 60 - 18)
    assert made.inputs["images"]["types"].sum() == 6


@pytest.mark.parametrize(
    "lay_out", [padded, lambda samples, reader: packed(share_beginnings(samples, IGNORED), reader, row_multiple=16)]
)
def test_positions_and_types_stand_beside_their_tokens(lay_out):
    samples = [sample_of("ab___cX", "X", (1,)), sample_of("deY", "Y"), sample_of("___X", "X", (2,))]
    reader = TextReader(bounds=RowBounds(limits=ModelLimits(joins={"pixel_values": Join()})))
    inputs = lay_out(samples, reader).inputs
    tokens = inputs["tokens"]
    assert torch.equal(inputs["images"]["types"], (tokens == PLACEHOLDER).long())
    assert torch.equal(inputs["input_pos"][1], inputs["input_pos"][0] * 10)
    assert inputs["images"]["pixel_values"][:, 0].tolist() == [1, 1, 1, 2, 2, 2]
    texts_alone = lay_out(samples[1:2], reader).inputs
    assert texts_alone["images"].keys() == {"types"}


@pytest.mark.parametrize(
    ("join", "shape"),
    [(Join(0), (3, 2, 4)), (Join(0, is_padded=True), (3, 2, 4)), (Join(1, is_padded=True), (2, 4, 4)), (Join(2), None)],
)
def test_tensors_are_joined_along_an_axis_or_padded_to_the_largest(join, shape):
    parts = [
        Pixels(0, [(4, 2)], {"pixels": torch.ones(1, 2, 4)}),
        Pixels(9, [(4, 2)], {"pixels": torch.full((2, 2, 4), 2.0)}),
    ]
    if shape is None:
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            join_pixels(parts, {"pixels": join})
        return
    made = join_pixels(parts, {"pixels": join})["pixels"]
    assert made.shape == shape
    assert made.sum() == 8 + 32


def test_texts_of_other_data_stand_beside_samples_with_images():
    """Such as those of a mixture: they have no image inputs of their own."""
    text = sample_of("abcX", "X")
    samples = [text._replace(images=None), sample_of("___cX", "X", (1,)), text._replace(images=None)]
    reader = TextReader(bounds=RowBounds(limits=ModelLimits(joins={"pixel_values": Join()})))
    inputs = packed(share_beginnings(samples, IGNORED), reader).inputs
    assert torch.equal(inputs["images"]["types"], (inputs["tokens"] == PLACEHOLDER).long())
    assert inputs["input_pos"][0].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert inputs["input_pos"][1].tolist() == [[0, 1, 2, 3, 0, 10, 20, 30, 40, 0, 1, 2, 3]]
    assert "images" not in packed(share_beginnings(samples[:1], IGNORED), reader).inputs
