"""Crops of Pillow, colors of torchvision's formulas, and draws that do not shift each other."""

import colorsys
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from recipe_utils.dinov3.images.multi_crop import (
    MultiCrop,
    blurred,
    check_fits,
    random_box,
    resized_boxes,
    with_brightness,
    with_contrast,
    with_hue,
    with_saturation,
)

PLAIN = {
    "flip_probability": 0.0,
    "jitter_probability": 0.0,
    "grey_probability": 0.0,
    "blur_probability": (0.0, 0.0, 0.0),
    "solarize_probability": (0.0, 0.0, 0.0),
    "mean": (0.0, 0.0, 0.0),
    "std": (1.0, 1.0, 1.0),
}
SMALL = {"global_crop_size": 32, "local_crop_size": 16, "num_local_crops": 3}


def picture(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).random(shape).astype(dtype)


def made_by(transform, image, seed=0):
    return transform(image, torch.Generator().manual_seed(seed))


# ---- Resizing -------------------------------------------------------------------------------------

BOXES = {
    "smaller": (3.3, 10.7, 60.2, 41.9),
    "larger": (20.5, 1.25, 9.1, 12.6),
    "smaller and larger": (0.0, 30.0, 70.0, 5.5),
}


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_an_image_is_resized_as_torch_does(interpolation):
    image = picture(3, 50, 41)
    (ours,) = resized_boxes(image, [(0, 0, 50, 41)], 16, interpolation)
    resize = {"size": (16, 16), "mode": interpolation, "align_corners": False}
    theirs = F.interpolate(torch.from_numpy(image)[None], **resize, antialias=True)[0]
    np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-6)
    aliased = F.interpolate(torch.from_numpy(image)[None], **resize)[0]
    assert np.abs(ours - aliased.numpy()).max() > 0.05


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("box", BOXES)
def test_a_box_is_resized_at_its_place(box, interpolation):
    top, left, height, width = BOXES[box]
    ramp = np.broadcast_to(np.arange(58, dtype=np.float32), (73, 58))
    image = np.stack([ramp, np.full_like(ramp, 0.25)])
    (crop,) = resized_boxes(image, [(top, left, height, width)], 8, interpolation)
    assert crop.dtype == image.dtype
    np.testing.assert_allclose(crop[1], 0.25, atol=1e-6)
    assert crop[0, :, 3:5].mean() == pytest.approx(left + width / 2 - 0.5, abs=0.02 * width)


@given(shape=st.tuples(st.integers(1, 300), st.integers(1, 300)), low=st.floats(0.01, 1), seed=st.integers(0, 99))
def test_boxes_lie_in_the_image_and_have_an_area_and_a_shape_within_bounds(shape, low, seed):
    draws = np.random.default_rng(seed).random((10, 4))
    top, left, height, width = random_box(shape, (low, 1.0), (3 / 4, 4 / 3), draws)
    assert 0 <= top <= top + height <= shape[0] * (1 + 1e-12)
    assert 0 <= left <= left + width <= shape[1] * (1 + 1e-12)
    assert 3 / 4 - 1e-9 <= width / height <= 4 / 3 + 1e-9
    share = width * height / (shape[0] * shape[1])
    is_fallback = width == pytest.approx(shape[1]) or height == pytest.approx(shape[0])
    assert is_fallback or low * (1 - 1e-9) <= share <= 1


def test_a_box_that_never_fits_is_the_largest_in_the_middle():
    assert random_box((10, 100), (1.0, 1.0), (0.5, 2.0), np.zeros((10, 4))) == (0, 40, 10, 20)
    assert random_box((100, 10), (1.0, 1.0), (0.5, 2.0), np.zeros((10, 4))) == (40, 0, 20, 10)


# ---- Colors --------------------------------------------------------------------------------------

ENHANCED = {
    "brightness": (with_brightness, ImageEnhance.Brightness),
    "contrast": (with_contrast, ImageEnhance.Contrast),
    "saturation": (with_saturation, ImageEnhance.Color),
}


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.4])
@pytest.mark.parametrize("change", ENHANCED)
def test_colors_change_as_in_pillow(change, factor):
    ours, theirs = ENHANCED[change]
    pixels = (picture(3, 9, 7) * 255).astype(np.uint8)
    enhanced = theirs(Image.fromarray(pixels.transpose(1, 2, 0))).enhance(factor)
    changed = ours(pixels.astype(np.float32) / 255, factor)
    # Pillow rounds pixels, and the mean of all greys.
    np.testing.assert_allclose(
        changed * 255, np.asarray(enhanced).transpose(2, 0, 1), atol=1.5 if factor != 1 else 1e-4
    )


@pytest.mark.parametrize("shift", [-0.1, 0.0, 0.03, 0.5])
def test_hue_turns_as_in_colorsys(shift):
    pixels = picture(3, 6, 5, dtype=np.float64)
    pixels[:, 0, 0] = 0.4  # a grey one
    pixels[:, 0, 1] = 0.0
    turned = with_hue(pixels, shift)
    for row, column in np.ndindex(6, 5):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixels[:, row, column])
        expected = colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)
        np.testing.assert_allclose(turned[:, row, column], expected, atol=1e-12)


@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
def test_a_blur_is_a_convolution_with_a_gaussian(sigma):
    pixels = picture(2, 11, 8, dtype=np.float64)
    radius = int(np.ceil(3 * sigma))
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float64)
    kernel = torch.exp(-(offsets[:, None] ** 2 + offsets**2) / (2 * sigma**2))
    kernel /= kernel.sum()
    padded = F.pad(torch.from_numpy(pixels)[None], [radius] * 4, mode="replicate")
    expected = F.conv2d(padded, kernel.expand(2, 1, -1, -1), groups=2)[0]
    np.testing.assert_allclose(blurred(pixels, sigma), expected.numpy(), atol=1e-14)


# ---- Draws ---------------------------------------------------------------------------------------


def test_crops_without_changes_are_the_normalized_image():
    image, wide = picture(3, 32, 32), picture(3, 32, 64)
    whole = {"global_crop_scale": (1.0, 1.0), "aspect_ratio": (1.0, 1.0)}
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    transform = MultiCrop(**{**PLAIN, **SMALL, **whole, "mean": mean, "std": std})

    def normalized(pixels):
        return (pixels - np.float32(mean)[:, None, None]) / np.float32(std)[:, None, None]

    crops = made_by(transform, image)
    assert crops[0].shape == (2, 3, 32, 32)
    assert crops[1].shape == (3, 3, 16, 16)
    for crop in (*crops[0], transform.whole(image)):
        np.testing.assert_allclose(crop, normalized(image), atol=1e-6)
    np.testing.assert_array_equal(transform.whole(wide), normalized(wide[:, :, 16:48]))


CHANGES = {
    "flip_probability": 1.0,
    "jitter_probability": 1.0,
    "grey_probability": 1.0,
    "blur_probability": (1.0, 1.0, 1.0),
    "solarize_probability": (1.0, 1.0, 1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_outcome_moves_the_draws_after_it(change):
    image = picture(3, 40, 48)
    without = made_by(MultiCrop(**{**PLAIN, **SMALL}), image)
    changed = made_by(MultiCrop(**{**PLAIN, **SMALL, change: CHANGES[change]}), image)
    for plain, crops in zip(without, changed, strict=True):
        assert not np.array_equal(plain, crops)
        if change == "flip_probability":
            np.testing.assert_array_equal(crops, plain[..., ::-1])
        elif change == "solarize_probability":
            np.testing.assert_array_equal(crops, np.where(plain >= 0.5, 1 - plain, plain))
        elif change == "grey_probability":
            luma = np.tensordot(plain, np.float32([0.299, 0.587, 0.114]), axes=([1], [0]))
            np.testing.assert_allclose(crops, np.stack([luma] * 3, axis=1), atol=1e-6)


def test_blur_and_solarization_have_a_probability_for_each_kind_of_crop():
    image = picture(3, 40, 48)
    without = made_by(MultiCrop(**{**PLAIN, **SMALL}), image)
    for change in ("blur_probability", "solarize_probability"):
        for kind in range(3):
            probabilities = [float(i == kind) for i in range(3)]
            crops = made_by(MultiCrop(**{**PLAIN, **SMALL, change: probabilities}), image)
            differ = [not np.array_equal(crops[0][i], without[0][i]) for i in (0, 1)]
            differ.append(not np.array_equal(crops[1], without[1]))
            assert differ == [i == kind for i in range(3)]


DROPOUT = {"_component_": "torch.nn.Dropout", "p": 0.5}
"""Stands for a transform of torchvision: it draws from torch's global generator."""


@pytest.mark.parametrize("image_transform", [None, DROPOUT])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_crops_depend_only_on_the_generator_and_keep_the_dtype(dtype, image_transform):
    transform = MultiCrop(**SMALL, image_transform=image_transform)
    image = picture(3, 30, 20, dtype=dtype)
    kept = image.copy()
    first = made_by(transform, image, seed=1)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    again, other = made_by(transform, image, seed=1), made_by(transform, image, seed=2)
    for a, b, c in zip(first, again, other, strict=True):
        assert a.dtype == dtype
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(image, kept)


def test_images_of_one_channel_have_no_colors_to_change():
    transform = MultiCrop(**SMALL, mean=[0.5], std=[0.5])
    assert made_by(transform, picture(1, 8, 8))[1].shape == (3, 1, 16, 16)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_local_crops", 0, "greater than or equal to 1"),
        ("global_crop_scale", [0.3, 1.2], "less than or equal to 1"),
        ("local_crop_scale", [0.3, 0.1], "smallest and the largest value"),
        ("blur_sigma", [0.0, 1.0], "greater than 0"),
        ("aspect_ratio", [0.3], "smallest and the largest value"),
        ("hue", 0.6, "less than or equal to 0.5"),
        ("contrast", float("nan"), "less than or equal to 1"),
        ("interpolation", "lanczos", "'bicubic' or 'bilinear'"),
        ("blur_probability", [0.5], "at least 3 items"),
        ("solarize_probability", [0, 2, 0], "less than or equal to 1"),
        ("mean", [0.5], ".*one value for each channel"),
        ("std", [1.0, 0.0, 1.0], ".* std above 0"),
        ("image_transform", {"_component_": "no.such.thing"}, "Error"),
    ],
)
def test_arguments_out_of_bounds_are_refused(name, value, message):
    with pytest.raises(ValueError, match=rf"{name}={re.escape(str(value))}.*: .*{message}"):
        MultiCrop(**{name: value})


def test_all_mismatches_with_a_model_are_refused_with_their_numbers():
    transform = MultiCrop(global_crop_size=224, local_crop_size=90)
    check_fits(transform, 2, 3)
    message = r"local_crop_size=90: .*patch_size=16; .* 80 and 96; .*3 values for the model's 1 channels"
    with pytest.raises(ValueError, match=message):
        check_fits(transform, 16, 1)
    with pytest.raises(ValueError, match="transform: it is a Identity; set it to recipe_utils"):
        check_fits(torch.nn.Identity(), 16, 3)
