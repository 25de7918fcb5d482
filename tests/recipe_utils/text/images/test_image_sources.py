"""Images as rows have them: opened as transformers opens them, or refused by what they are."""

import base64
import io

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from recipe_utils.text.images.sources import open_image, source_of
from recipe_utils.update_steps.samples import SampleError

PIXELS = np.random.default_rng(0).integers(0, 255, (6, 4, 3), dtype=np.uint8)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder of images: one turned by its EXIF, one with a palette, and a link out of it."""
    path = tmp_path_factory.mktemp("images")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(PIXELS).save(path / "turned.jpg", exif=turned)
    Image.fromarray(PIXELS).quantize(8).save(path / "palette.png")
    (path / "inner").mkdir()
    Image.fromarray(PIXELS).save(path / "inner" / "plain.png")
    (path.parent / "secret.png").write_bytes(encoded(Image.fromarray(PIXELS)))
    (path / "link.png").symlink_to(path.parent / "secret.png")
    (path / "text.png").write_text("no image")
    plain = encoded(Image.fromarray(PIXELS))
    (path / "broken.png").write_bytes(plain[:33] + b"\0\0\0\5" + plain[37:])  # a second chunk begins within the first
    return path


@pytest.mark.parametrize("name", ["turned.jpg", "palette.png", "inner/plain.png"])
def test_a_file_is_opened_as_by_transformers(folder, name):
    expected = load_image(str(folder / name))
    for source in (name, str(folder / name), {"bytes": None, "path": name}, {"bytes": (folder / name).read_bytes()}):
        made = open_image(source, folder)
        assert made.mode == "RGB"
        np.testing.assert_array_equal(made, expected)


def test_data_of_a_part_is_opened_without_a_folder():
    content = base64.b64encode(encoded(Image.fromarray(PIXELS))).decode()
    url = f"data:image/png;base64,{content}"
    for part in ({"image_url": {"url": url}}, {"url": url}, {"base64": content}, {"image": Image.fromarray(PIXELS)}):
        np.testing.assert_array_equal(open_image(source_of({"type": "image", **part}), None), PIXELS)
    assert source_of({"type": "image"}) is None


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("../secret.png", "not below dataset.image_folder"),
        ("link.png", "not below dataset.image_folder"),
        ("/etc/hostname", "not below dataset.image_folder"),
        ("missing.png", "has no such file"),
        ("text.png", "cannot be opened"),
        ("broken.png", r"broken.png': it cannot be opened \(broken PNG file"),
        ("https://host/1.png", "nothing is downloaded"),
        ("file:///etc/hostname", "not below dataset.image_folder"),
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64,?", "write data:image/png;base64"),
        ("data:image/png;base64,aGk=", "cannot be opened"),
        (7, "no path, data URL or bytes"),
        ({"bytes": None, "path": None}, "no path, data URL or bytes"),
    ],
)
def test_what_is_no_image_of_the_folder_is_refused(folder, source, cause):
    with pytest.raises(SampleError, match=cause):
        open_image(source, folder)


def test_a_path_needs_a_folder():
    with pytest.raises(SampleError, match=r"set dataset.image_folder"):
        open_image("1.png", None)


def test_an_image_that_is_too_large_to_open_is_named(folder, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    with pytest.raises(SampleError, match=r"inner/plain.png.*cannot be opened"):
        open_image("inner/plain.png", folder)


def test_two_images_of_a_part_are_refused():
    with pytest.raises(SampleError, match="image and url; remove one"):
        source_of({"type": "image", "image": "1.png", "url": "2.png"})
