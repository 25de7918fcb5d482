"""Images of all types become pixels of the model's channels; broken ones are named."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from recipe_utils.dinov3.images.folders import checked_image, hf_image_dataset, image_folder_dataset, pixels_of
from recipe_utils.update_steps.samples import CheckedDataset, SampleError

GREY = (np.arange(20).reshape(4, 5) * 12).astype(np.uint8)
RGB = np.stack([GREY, GREY[::-1], 255 - GREY], axis=2)


def as_grey(rgb):
    return np.tensordot(rgb, [0.299, 0.587, 0.114], axes=([2], [0])) / 255


REPEATED = np.stack([GREY] * 3, axis=2) / 255
PICTURES = {
    "RGB": (Image.fromarray(RGB), RGB / 255),
    "RGBA": (Image.fromarray(RGB).convert("RGBA"), RGB / 255),
    "L": (Image.fromarray(GREY), REPEATED),
    "LA": (Image.fromarray(GREY).convert("LA"), REPEATED),
    "P": (Image.fromarray(GREY).convert("P"), REPEATED),
    "1": (Image.fromarray(GREY > 99), np.stack([GREY > 99] * 3, axis=2).astype(float)),
    "16 bits": (Image.fromarray(GREY.astype(np.uint16) * 257), REPEATED),
    "16 bits in 32": (Image.fromarray(GREY.astype(np.int32) * 257), REPEATED),
    "array [h, w]": (GREY, REPEATED),
    "array [h, w, c]": (np.tile(RGB, (2, 1, 1)), np.tile(RGB, (2, 1, 1)) / 255),
    "array [c, h, w]": (RGB.transpose(2, 0, 1) / 255, RGB / 255),
    "tensor": (torch.from_numpy(RGB).permute(2, 0, 1), RGB / 255),
    "tensor in bfloat16": (torch.zeros(3, 4, 5, dtype=torch.bfloat16), np.zeros((4, 5, 3))),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_an_image_of_any_type_becomes_rgb_or_grey(kind):
    image, expected = PICTURES[kind]
    pixels = pixels_of(image, 3)
    np.testing.assert_allclose(pixels, expected.transpose(2, 0, 1), atol=1e-6)
    assert pixels.dtype == (np.float64 if kind == "array [c, h, w]" else np.float32)
    np.testing.assert_allclose(pixels_of(image, 1)[0], as_grey(expected * 255), atol=1e-6)


BAD = {
    "empty": (np.zeros((3, 0, 4)), "no pixels: 0 x 4"),
    "not finite": (np.full((1, 2, 2), np.nan), "not all finite"),
    "not scaled": (np.full((1, 2, 2), 3.0), "from 3 to 3; give integers, or floats in"),
    "negative": (np.full((1, 2, 2), -0.5), "from -0.5"),
    "other numbers": (np.zeros((1, 2, 2), np.int64), "are int64"),
    "one axis": (np.zeros(3), r"\[h, w\] or \[c, h, w\]"),
    "no picture": ("cat.jpg", "it is a str"),
    "many channels": (np.zeros((5, 6, 7)), "5 channels, which cannot be converted to the model's 3"),
}


@pytest.mark.parametrize(("image", "message"), BAD.values(), ids=BAD)
def test_other_values_are_refused_by_name(image, message):
    with pytest.raises(SampleError, match=f"image a/b.png: .*{message}"):
        checked_image({"image": image, "name": "a/b.png"}, 3)


@pytest.mark.parametrize("label", [-1, "cat", 1.5, True, np.array([1, 2]), torch.tensor([1, 2]), [1]])
def test_a_label_that_is_no_class_is_refused(label):
    with pytest.raises(SampleError, match=r"its label is .*, not an integer of at least 0"):
        checked_image({"image": GREY, "label": label}, 3)


def test_a_pair_of_image_and_label_is_a_sample():
    assert checked_image((GREY, 3), 3)[1] == 3
    assert checked_image({"image": GREY}, 3)[1] is None
    with pytest.raises(SampleError, match="it has no 'image', only"):
        checked_image({"tokens": [1]}, 3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for label, size in (("cat", (5, 4)), ("dog", (8, 6))):
        of_label = tmp_path / "images" / "train" / label
        of_label.mkdir(parents=True)
        Image.new("RGB", size, "red").save(of_label / "0.png")
    png = io.BytesIO()
    Image.fromarray(RGB).save(png, "png")
    (tmp_path / "images/train/dog/1.png").write_bytes(png.getvalue()[:-40])
    (tmp_path / "images/train/dog/2.png").write_bytes(b"")
    Image.fromarray(GREY.astype(np.uint16) * 257).save(tmp_path / "images/train/dog/3.png")
    return tmp_path / "images"


def prepare(sample, name, at):
    return {"image": checked_image(sample, 3)}


def test_subfolders_are_labels_and_broken_files_are_named(folder):
    labels, problems = [], []
    dataset = image_folder_dataset(str(folder))
    checked = CheckedDataset(dataset, "dataset", prepare)
    for index in range(len(checked)):
        try:
            pixels, label = checked[index]["image"]
            labels.append((label, pixels.shape))
        except SampleError as error:
            problems.append(str(error))
    assert labels == [(0, (3, 4, 5)), (1, (3, 6, 8)), (1, (3, 4, 5))]
    broken, empty = sorted(problems)
    assert f"image {folder}/train/dog/1.png: it cannot be decoded" in broken
    assert f"image {folder}/train/dog/2.png: its file is empty" in empty


def test_what_a_folder_holds_and_what_is_passed_over_is_logged(folder, caplog):
    (folder / "train" / "cat" / "1.heic").write_bytes(b"")
    image_folder_dataset(str(folder))
    assert f"{folder}/train, split=train: 5 images, 2 labels" in caplog.text
    assert "datasets read 5 of 6 files, whose suffixes are .heic, .png" in caplog.text
    (folder / "train" / "metadata.csv").write_text("file_name,text\ncat/0.png,a cat\n")
    image_folder_dataset(str(folder))
    assert "metadata.csv determines which images are read" in caplog.text


def test_a_missing_column_is_named(folder):
    with pytest.raises(ValueError, match="image_column=picture: there are only image, label"):
        hf_image_dataset("imagefolder", data_dir=str(folder), image_column="picture")
