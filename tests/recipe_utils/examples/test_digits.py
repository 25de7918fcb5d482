"""The digits: two splits that never change."""

import hashlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from recipe_utils.examples.digits.samples import digits_dataset


def test_the_splits_hold_every_digit_once_and_never_change():
    names = [[sample["name"] for sample in digits_dataset(split)] for split in ("train", "test")]
    assert [len(of_split) for of_split in names] == [1400, 397]
    assert {*names[0], *names[1]} == {f"digits/{number}" for number in range(1797)}
    digest = hashlib.sha256(" ".join(names[1]).encode()).hexdigest()[:16]
    assert digest == "42ac2db71b4f708e"
    with pytest.raises(ValueError, match="split=validation: set it to train or test"):
        digits_dataset("validation")


def test_an_image_is_the_digit_in_twice_its_size():
    digits = load_digits()
    dataset = digits_dataset("test")
    for sample in (dataset[0], dataset[396]):
        number = int(sample["name"].removeprefix("digits/"))
        assert sample["label"] == digits.target[number]
        small = torch.from_numpy(digits.images[number])[None, None] / 16
        image = F.interpolate(small, scale_factor=2, mode="bilinear")[0].float()
        np.testing.assert_array_equal(sample["image"], image.numpy())
    assert {sample["label"] for sample in dataset} == set(range(10))
