"""Images as rows of data have them, opened.

Example: with ``image_folder: /data/images`` the part ``{"type": "image", "path": "cats/1.jpg"}`` is the file
/data/images/cats/1.jpg, turned as its EXIF says, in RGB, as ``transformers.image_utils.load_image`` opens it.
``"../1.jpg"``, a link out of the folder and ``https://...`` are refused: a data file must not choose what is read.
"""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from recipe_utils.text.conversations.schema import PartError, shown
from recipe_utils.update_steps.samples import SampleError

Source = object
"""A path, a ``data:`` URL, ``{"bytes", "path"}`` of datasets' Image feature, or a Pillow image."""
_MARK = "<image>"
"""What stands for an image in texts of LLaVA's and ShareGPT's files."""
_KEYS = ("image", "path", "url", "image_url", "source", "bytes", "base64")
"""Keys of a part with its image, which differ between tools."""
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys of a part with the size that Qwen's tools make of its image."""


def is_image(part: object) -> bool:
    """Returns True for a part of a content that is an image: transformers', or OpenAI's ``image_url``."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "input_image")


def num_images_in(chat: Sequence[Mapping[str, object]]) -> int:
    """Returns the number of images of messages."""
    contents = [message.get("content") for message in chat]
    return sum(is_image(part) for content in contents if isinstance(content, list) for part in content)


def source_of(part: Mapping[str, object]) -> Source | None:
    """Returns the image of a part; None for the mark of one in a column of the row.

    Raises PartError for two images, and for a size of its own.
    """
    for key in _SIZES:
        if part.get(key) is not None:
            text = "a part of type image has a size of its own, which would be lost; set tokenizer.images for all"
            raise PartError(f"{key}={part[key]}: {text}")
    given = {key: part[key] for key in _KEYS if part.get(key) is not None}
    if len(given) > 1 and given.keys() != {"bytes", "path"}:
        raise PartError(f"a part of type image has {' and '.join(given)}; remove one of them")
    if "bytes" in given:
        return given
    value = next(iter(given.values()), None)
    if isinstance(value, Mapping) and value.keys() & {"url", "data"}:  # OpenAI's and Anthropic's
        return value["url"] if "url" in value else f"data:;base64,{value['data']}"
    return f"data:;base64,{value}" if "base64" in given else value


def images_of(chat: Sequence[Mapping[str, Any]], given: Sequence[Source]) -> tuple[list[dict[str, Any]], list[Source]]:
    """Returns messages whose images are parts ``{"type": "image"}``, and the images in their order.

    ``given`` are those of a column of the row. They belong to the parts without an image or, if there are none, to
    ``<image>`` in texts (LLaVA, ShareGPT). Without any place, they are in front of the first text of the user, as TRL's
    ``prepare_multimodal_messages`` puts them. Raises SampleError unless there is one for each.
    """
    if not num_images_in(chat):
        if not given:
            return [dict(message) for message in chat], []
        chat = _with_places(chat, len(given))
    waiting, found, made = [*given], list[Source](), list[dict[str, Any]]()
    num_marks = sum(
        is_image(part) and part["image"] is None
        for message in chat
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )
    if num_marks != len(given):
        text = f"its messages have {num_marks} places for the {len(given)} images of its column"
        raise SampleError(f"{text}; write a part of type image, or <image> in the text, for each")
    for message in chat:
        content = message.get("content")
        if isinstance(content, list):
            for part in filter(is_image, content):
                found.append(waiting.pop(0) if part["image"] is None else part["image"])
            content = [{"type": "image"} if is_image(part) else part for part in content]
        made.append({**message, "content": content} if "content" in message else dict(message))
    return made, found


def check_no_marks(chat: Sequence[Mapping[str, Any]]) -> None:
    """Raises SampleError for ``<image>`` in texts of the user of a row without images, whose column has another name."""
    if num_marks := _num_marks([message for message in chat if message["role"] == "user"]):
        text = f"its texts have {num_marks} of {_MARK} for 0 images; name their column images, or write a list of text parts"
        raise SampleError(text)


def _num_marks(chat: Sequence[Mapping[str, Any]]) -> int:
    contents = [message.get("content") for message in chat]
    return sum(content.count(_MARK) for content in contents if isinstance(content, str))


def _with_places(chat: Sequence[Mapping[str, Any]], num_images: int) -> list[Mapping[str, Any]]:
    """Returns messages with a part for each ``<image>``; without any, for each image in front of the first text of the user."""
    in_front, made = "" if _num_marks(chat) else _MARK * num_images, list[Mapping[str, Any]]()
    for message in chat:
        content = message.get("content")
        if isinstance(content, str):
            if message["role"] == "user":
                content, in_front = in_front + content, ""
            message = {**message, "content": _with_marks_as_parts(content)}
        made.append(message)
    return made


def _with_marks_as_parts(text: str) -> str | list[dict[str, Any]]:
    """Returns a text with ``<image>`` as parts; others as they are."""
    first, *others = text.split(_MARK)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for each in others:
        parts += [{"type": "image", "image": None}, {"type": "text", "text": each}]
    return [part for part in parts if part.get("text") != ""] if others else text


def open_image(source: Source, folder: Path | None) -> Image.Image:
    """Returns an image in RGB. Raises SampleError if it cannot be opened, or is no file below ``folder``."""
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, Image.Image):
        return _in_rgb(source)
    name, file = shown(source), io.BytesIO(source) if isinstance(source, bytes) else _file_of(source, folder)
    try:
        with Image.open(file) as image:
            return _in_rgb(image)
    except Exception as error:  # decoders raise various types
        raise SampleError(f"image {name}: it cannot be opened ({error}); write it again, or remove the row") from None


def _file_of(source: Source, folder: Path | None) -> io.BytesIO | Path:
    """Returns the content of a ``data:`` URL, or a path. Raises SampleError for others, and for one out of ``folder``."""
    if not isinstance(source, str) or not source:
        raise SampleError(f"image {shown(source)}: it is no path, data URL or bytes; write one of them")
    if source.startswith("data:"):
        head, _, data = source.partition(",")
        try:
            if not head.endswith(";base64"):
                raise ValueError("its data are not base64")
            return io.BytesIO(base64.b64decode(data, validate=True))
        except (ValueError, binascii.Error) as error:
            raise SampleError(f"image {shown(source)}: {error}; write data:image/png;base64,...") from None
    source = source.removeprefix("file://")
    if "://" in source:
        raise SampleError(
            f"image {shown(source)}: nothing is downloaded; copy it to dataset.image_folder, and write its path"
        )
    if folder is None:
        raise SampleError(f"image {shown(source)}: set dataset.image_folder to the folder that it is in")
    path = (folder / source).resolve()  # links, too
    if not path.is_relative_to(folder.resolve()):
        raise SampleError(f"image {shown(source)}: it is not below dataset.image_folder={folder}; copy it there")
    if not path.is_file():
        raise SampleError(f"image {shown(source)}: dataset.image_folder={folder} has no such file; correct its path")
    return path


def _in_rgb(image: Image.Image) -> Image.Image:
    """Returns an image turned as its EXIF says. Raises SampleError for 16 bits a pixel and numbers, which Pillow would cut off."""
    if image.mode in ("F", "I") or ";16" in image.mode:
        raise SampleError(f"its mode {image.mode} has more than 8 bits for each channel")
    return ImageOps.exif_transpose(image).convert("RGB")
