"""Processor of a transformers folder: what a model takes for images, and the tokens that stand for them.

Example: of a chat template that prints ``<|image_pad|>`` for an image, Qwen2-VL's processor makes ``pixel_values``
[64 patches, 1176], ``image_grid_thw`` [1, 3], and the text of 16 placeholders for it. Texts are tokenized as those
without images are, so that targets are found in the same way; the end of each token is moved back to where it is in
what the template printed:

    printed   a < | i m a g e _ p a d | > b          ends of tokens  1, 14, 15
    replaced  a < | i m a g e _ p a d | > ... b      ends of tokens  1, 14 (of the first placeholder), 27, ..., 209
    moved back                                                        1, 14, 14, ..., 15
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from recipe_utils.text.images.sample import ImageInputs, Pixels
from recipe_utils.update_steps.samples import SampleError

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
"""Files of a folder that may name the class of its processor."""
_OF_TEXT = {"input_ids", "attention_mask", "text_replacement_offsets"}
"""What a processor returns of the text."""
_OPTIONS = {"return_text_replacement_offsets": True, "return_tensors": "pt", "add_special_tokens": False}
"""How a processor is called."""
_SHOWN = [Image.linear_gradient("L").resize(size).convert("RGB") for size in ((64, 48), (40, 96), (32, 32))]
"""Images by which parts of a processor are compared with it."""


class ProcessedImages(NamedTuple):
    """Images of a sample as a model takes them."""

    texts: Sequence[str] = ()
    """What stands for each image in place of its placeholder."""
    tensors: Mapping[str, torch.Tensor] = {}
    """Those of all images together, by the model's argument."""
    sizes: Sequence[tuple[int, int]] = ()
    """Width and height of each image as it was opened [pixels]."""
    identity: int = 0
    """A number below 0 that only these images have, in these sizes."""


class ImageProcessor:
    """Processor of a folder, for images beside text.

    Args:
        path: the folder.
        tokenizer: the tokenizer of its class, which has the names of special tokens.
        options: further arguments of its image processor, such as ``max_pixels`` or ``size``.

    Raises:
        ValueError: the folder has no processor that says which tokens stand for an image, or it lacks a package.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, object]) -> None:
        self._processor, self.tokenizer = _processor_of(path, tokenizer, options), tokenizer
        self.placeholder: str = self._processor.image_token
        """What a chat template prints for an image."""
        self.token_ids: list[int] = self._processor.image_token_ids
        """Tokens that images take the place of."""
        # An image shows what the processor makes, and whether it makes it at all.
        try:
            made = self._call([Image.new("RGB", (64, 48))])
        except Exception as error:  # any: a processor is a program
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            text = f"does not say which tokens stand for an image ({cause}); train it with texts alone"
            raise ValueError(f"tokenizer.path={path}: its {type(self._processor).__name__} {text}") from None
        tokens = made["input_ids"][0].numpy()
        self._columns = [name for name in made if name not in _OF_TEXT and made[name].shape == made["input_ids"].shape]
        for name in self._columns:
            if not np.array_equal(self._types(tokens), made[name][0]):
                raise ValueError(
                    f"tokenizer.path={path}: its {name} are not those of tokens; train it with texts alone"
                )
        self._rope_index = _rope_index_of(path)
        self._takes = signature(self._rope_index).parameters if self._rope_index else ()
        arguments = {name: value for name, value in vars(self._processor).items() if isinstance(value, int | str)}
        self.settings = f"{self._processor.image_processor.to_json_string()} {json.dumps(arguments)}"
        """What tokens and pixels depend on beside the images, as JSON texts."""
        self._images_kwargs, self._last = self._arguments_of_parts(), ProcessedImages()

    def processed(self, images: Sequence[Image.Image]) -> ProcessedImages:
        """Returns the images of a sample as the model takes them, all together.

        Those of the call before are not made again: answers to one prompt have the same.
        """
        if not images:
            return ProcessedImages()
        digest = blake2b(self.settings.encode(), digest_size=7)
        for image in images:
            digest.update(repr(image.size).encode() + image.tobytes())
        identity = -1 - int.from_bytes(digest.digest(), "little")
        made = self._last  # read once: validation and prefetching are threads of one process
        if made.identity != identity:
            texts, tensors = self._made(images, self._images_kwargs)
            self._last = made = ProcessedImages(texts, tensors, [image.size for image in images], identity)
        return made

    def inputs(self, tokens: np.ndarray, images: ProcessedImages) -> ImageInputs:
        """Returns the inputs beside the tokens [t] of a sample."""
        types = self._types(tokens)
        positions = np.arange(len(tokens))[None]
        if self._rope_index is not None:
            beside = dict.fromkeys(self._columns, torch.from_numpy(types)[None])
            given = {name: tensor for name, tensor in {**beside, **images.tensors}.items() if name in self._takes}
            axes, _ = self._rope_index(torch.from_numpy(tokens)[None], **given)
            # Three axes are those of images, behind the text's; the four of HunYuan begin with the text's.
            positions = np.concatenate([positions[: len(axes) == 3], axes[:, 0].numpy()])
        identities = images.identity * types
        pixels = [Pixels(int(np.argmax(types)), images.sizes, images.tensors)] if images.texts else []
        return ImageInputs(positions, identities, dict.fromkeys(self._columns, types), pixels)

    def inputs_beside(self, tokens: np.ndarray, images: Sequence[Image.Image]) -> ImageInputs:
        """Returns the inputs beside token ids [t] that have the placeholders of their images; raises SampleError for others."""
        made = self.processed(images)
        places, start, are_equal = np.flatnonzero(self._types(tokens)), 0, True
        numbers = list[int]()
        for text in made.texts:
            # Tokens from the first placeholder to the last one, with the names of tiles between them.
            ids = np.array(self.token_ids_of(text))
            inside = np.flatnonzero(self._types(ids))
            numbers.append(len(inside))
            if (part := places[start : start + len(inside)]).size:
                are_equal &= np.array_equal(tokens[part[0] : part[-1] + 1], ids[inside[0] : inside[-1] + 1])
            start += len(inside)
        if not are_equal or len(places) != start:
            text = f"its token ids have {len(places)} placeholders, and its {len(numbers)} images have {numbers}, in this order"
            remedy = (
                "write ids with expanded images, or set tokenizer.images to the arguments of the engine's processor"
            )
            raise SampleError(f"{text}; {remedy}")
        return self.inputs(tokens, made)

    def _arguments_of_parts(self) -> Mapping[str, object] | None:
        """Returns merged arguments for images if the parts of the processor make the same of three images as its whole call.

        Its parts halve the time of a small image. Returns None if they do not, or are other ones.
        """
        if type(self._processor).__call__ is ProcessorMixin.__call__:
            with suppress(Exception):  # any: these are parts of transformers
                merged = self._processor._merge_kwargs(tokenizer_init_kwargs=self.tokenizer.init_kwargs, **_OPTIONS)
                arguments: Mapping[str, object] = merged["images_kwargs"]
                (texts, tensors), (found, made) = self._made(_SHOWN), self._made(_SHOWN, arguments)
                if found == texts and all(torch.equal(made[name], tensors[name]) for name in {**made, **tensors}):
                    return arguments
        return None

    def _call(self, images: Sequence[Image.Image]) -> Mapping[str, Any]:
        text = [self.placeholder * len(images)]
        made: Mapping[str, Any] = self._processor(images=[*images], text=text, **_OPTIONS)
        return made

    def _made(
        self, images: Sequence[Image.Image], images_kwargs: Mapping[str, object] | None = None
    ) -> tuple[Sequence[str], Mapping[str, torch.Tensor]]:
        """Returns what stands for each image, and the tensors of all, by the model's argument.

        With ``images_kwargs``, merged arguments of a processor that has transformers' own call, only its parts for images
        are called, which do not merge the arguments again or tokenize a text.
        """
        if images_kwargs is None:
            made = self._call(images)
            texts = [each["replacement"] for each in made["text_replacement_offsets"][0]]
        else:
            laid_out, *_ = self._processor.prepare_inputs_layout([*images], [self.placeholder * len(images)])
            made, texts = self._processor._process_images(laid_out, **images_kwargs)
        unused = {*_OF_TEXT, *self._columns, *self._processor.unused_input_names}
        return texts, {name: made[name] for name in made if name not in unused}

    def token_ids_of(self, text: str) -> list[int]:
        """Returns the tokens of what stands for an image."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _types(self, tokens: np.ndarray) -> np.ndarray:
        """Returns for each token whether an image takes its place: 1, else 0."""
        return (tokens[:, None] == self.token_ids).any(axis=1).astype(np.int64)


def replaced(text: str, placeholder: str, texts: Sequence[str]) -> tuple[str, np.ndarray]:
    """Returns a text with ``texts`` in place of its placeholders, and where each place [characters + 1] of it was before.

    Places within a replacement were at the placeholder's end. Raises SampleError for more placeholders than texts.
    """
    parts = text.split(placeholder)
    if len(parts) - 1 > len(texts):
        raise SampleError(f"it has {len(parts) - 1} of {placeholder} for {len(texts)} images; remove it from its texts")
    pieces, places, start = [parts[0]], [np.arange(len(parts[0]) + 1)], len(parts[0])
    for new, part in zip(texts, parts[1:], strict=False):
        start += len(placeholder)
        places += [np.full(len(new), start), np.arange(start + 1, start + 1 + len(part))]
        pieces += [new, part]
        start += len(part)
    return "".join(pieces), np.concatenate(places)


def _processor_of(path: Path, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, object]) -> Any:
    """Returns the processor of a folder without those of video and audio, which need further packages."""
    contents = [json.loads((path / name).read_text("utf-8")) for name in _FILES if (path / name).is_file()]
    name = next((name for each in contents if (name := each.get("processor_class"))), None)
    kind = getattr(transformers, name or "", None)
    if kind is None:
        text = "no processor of images" if name is None else f"transformers {transformers.__version__} has no {name}"
        raise ValueError(
            f"tokenizer.path={path}: {text}; copy preprocessor_config.json and processor_config.json there, or drop the "
            "images of the data by dataset.ignored_keys=[image, images]"
        )
    try:
        # Pillow's where there is one: torchvision resizes otherwise, and would have to be installed.
        images = AutoImageProcessor.from_pretrained(path, backend="pil", local_files_only=True, **options)
        own: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
        others = dict.fromkeys({*kind.get_attributes()} - {"image_processor", "tokenizer"})
        arguments, _ = kind.get_processor_dict(path, local_files_only=True)
        return own.from_args_and_dict([], arguments, image_processor=images, tokenizer=tokenizer, **others)
    except Exception as error:  # any: a processor is a program
        cause = " ".join(str(error).split())
        remedy = "; pip install torchvision" if "torchvision" in cause.lower() else ""
        raise ValueError(f"tokenizer.path={path}: its {name} cannot be made: {cause[:200]}{remedy}") from None


def _rope_index_of(path: Path) -> Any:
    """Returns the function that computes positions of several axes, of a model without weights; None if it has one axis."""
    if not (path / "config.json").is_file():
        text = "no config.json, which says how positions in images count; a training with model.config writes it"
        raise ValueError(f"tokenizer.path={path}: {text}")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path, local_files_only=True))
    return getattr(getattr(model, "model", model), "get_rope_index", None)
