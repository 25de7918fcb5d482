"""Check that a decoder of transformers computes rows with images as it computes their samples one at a time.

Four samples with 1, 0, 2 and 1 images of three sizes, through the folder's own processor, are computed by the model's own
forward, one after the other; then padded, as one packed row, and as a tree whose two branches share an image. All
gradients are compared in float64, those of projector and tower included: a wrong row changes the loss by 0.04 to 4%, and
the tower's gradient beyond recognition.

How tensors of several samples become one is found by trying: Qwen's patches [n, d] are joined along axis 0, Idefics' tiles
[1, n, c, h, w] along axis 1, and LLaVA-NeXT's [1, n, c, h, w] are first padded to the most tiles.

The copy has few layers of text, a narrow tower of two layers, and a vocabulary of the tokens that occur.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import AutoTokenizer

from recipe_utils.models.transformers.decoder import Decoder, build, reached_by_text
from recipe_utils.models.transformers.double_precision import DoublePrecision
from recipe_utils.models.transformers.interface import PackingCheck
from recipe_utils.models.transformers.masks import NEEDS, Setting
from recipe_utils.models.transformers.packing_check import (
    BOUND,
    Gradients,
    cached,
    copies,
    cut,
    difference,
    error_on_device,
)
from recipe_utils.text.images.processor import ImageProcessor
from recipe_utils.text.images.sample import ImageInputs, Join
from recipe_utils.text.limits import Kernel, ModelLimits, RowBounds
from recipe_utils.text.reader import TextReader
from recipe_utils.text.row_tensors import packed, padded
from recipe_utils.text.samples import FIRST, TextSample
from recipe_utils.text.trees import apart, merge
from recipe_utils.torchtune_names import IGNORE_INDEX, set_default_dtype
from recipe_utils.update_steps.step import Microbatch

_SIZES = ((48, 32), (24, 40), (64, 24))
"""Width and height of images [pixels]; processors make them larger."""
_SAMPLES: tuple[tuple[int, ...], ...] = ((-1, 9), (13,), (4, -2, 3, -3, 6), (7, -2, 5), (7, -2, 5))
"""Numbers of text tokens, and images below 0. The last two begin alike, and end with tokens of their own."""
_NUM_TEXT_TOKENS = 40
_JOINS = (Join(0), Join(1), Join(0, True), Join(1, True), Join(-1))
_NUM_HEADS, _NARROW = 2, 8
"""Heads of the tower in a copy, and the width of each: Gemma 3's processor makes 4,096 patches of any image."""


def cached_image_check(
    config: Any, attention: str | None, check: PackingCheck, processor: ImageProcessor
) -> PackingCheck:
    """Returns :func:`check_images`, from the user's cache if it was made before. Raises ValueError as that."""
    made_from = [config, attention, processor.settings, asdict(check)]
    result = cached(made_from, lambda: asdict(check_images(config, attention, check, processor)))
    return TypeAdapter(PackingCheck).validate_python(result)


def error_beside_images(
    config: Any,
    attention: str | None,
    check: PackingCheck,
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    kernel: Kernel,
) -> str | None:
    """Returns the error of a kernel on a device as :func:`.error_on_device`: in rows of texts or, if it has none, of images."""
    processor = processor_of(path)

    def compute(with_kernel: Callable[[Any], Decoder]) -> tuple[Gradients, Gradients, Gradients]:
        in_fp32, in_dtype = (
            _comparison(config, attention, processor, precision) for precision in (torch.float32, dtype)
        )
        row = in_dtype.packed(in_dtype.samples[:4], _reader_of(check))
        return in_fp32.expected, in_dtype.expected, _gradients(with_kernel(in_dtype.make()), row)

    error_of = partial(error_on_device, config, attention, check, dtype, device, kernel)
    return error_of() or error_of(compute, processor.settings)


def processor_of(path: str) -> ImageProcessor:
    """Returns the processor of a folder, with its own sizes. Raises ValueError if it has none."""
    with torch.device("cpu"), set_default_dtype(torch.float32):  # models are built on the meta device
        return ImageProcessor(Path(path), AutoTokenizer.from_pretrained(path, local_files_only=True), {})


def check_images(config: Any, attention: str | None, check: PackingCheck, processor: ImageProcessor) -> PackingCheck:
    """Compares gradients of rows with images with those of their samples one at a time.

    ``check`` is that of texts. Returns it with ``joins``, and with a problem if packed rows are not exact. Raises ValueError
    if padded ones are not.
    """
    with torch.device("cpu"), set_default_dtype(torch.float64), torch.random.fork_rng(devices=[]), DoublePrecision():
        comparison = _comparison(config, attention, processor)
        check = replace(check, can_be_cut=False, spans_ranks=False, unreached=comparison.unreached)
        # Padded rows join images, too. Then the first way to attend that is exact.
        if (joins := comparison.joins(check)) is None:
            name = type(comparison.make()).__name__
            raise ValueError(f"model: {name}: rows of several samples with images have other gradients than each alone")
        check = replace(check, joins=joins)
        for splits in dict.fromkeys((check.splits_attention, False)):
            found, needs = replace(check, splits_attention=splits), set[str | tuple[int, int]]()
            with Setting(NEEDS, needs):
                error = comparison.error(found, comparison.packed)
            if error <= BOUND:
                return replace(
                    found,
                    error=max(check.error, error),
                    attention_needs=tuple(sorted({*check.attention_needs, *(n for n in needs if isinstance(n, str))})),
                    computes_trees=check.computes_trees and comparison.error_of_tree(found) <= BOUND,
                )
    return replace(check, problem=check.problem or "attention of images", computes_trees=False)


LayOut = Callable[[Sequence[TextSample], TextReader], Microbatch]


class ImageComparison(NamedTuple):
    """Layouts of the same samples, each compared with the gradients of the samples one at a time."""

    make: Callable[[], Any]
    """Makes equal models of transformers."""
    samples: Sequence[TextSample]
    expected: Mapping[str, Tensor]
    """Gradients of the first four."""
    expected_of_tree: Mapping[str, Tensor]
    """Gradients of the last two."""
    unreached: tuple[str, ...]
    """Parameters that neither text nor images reach, in all layers of the tower."""

    def joins(self, check: PackingCheck) -> dict[str, Join] | None:
        """Returns the first way to join the tensors of images that is exact in padded rows: if any, one for all of them."""
        names = list(next(p.tensors for s in self.samples if s.images for p in s.images.pixels))
        ways = [*((join,) * len(names) for join in _JOINS), *product(_JOINS, repeat=len(names))]
        for way in dict.fromkeys(ways):
            joins = dict(zip(names, way, strict=True))
            if self.error(replace(check, joins=joins), padded) <= BOUND:
                return joins
        return None

    def packed(self, samples: Sequence[TextSample], reader: TextReader) -> Microbatch:
        """Lays samples out as one row, padded to a multiple."""
        return packed(apart(samples), reader, row_multiple=8)

    def error(
        self, check: PackingCheck, lay_out: LayOut, change: Callable[[Mapping[str, Any]], None] = lambda _: None
    ) -> float:
        """Returns the largest relative difference of a gradient; infinity if the model cannot compute the layout.

        ``change`` changes its inputs, to see that this is noticed.
        """
        try:
            row = lay_out(self.samples[:4], _reader_of(check))
            change(row.inputs)
            return difference(_gradients(Decoder(self.make(), check), row), self.expected)
        except Exception:  # any: each module has its own
            return float("inf")

    def error_of_tree(self, check: PackingCheck) -> float:
        """Returns the same of two samples whose beginning, with its image, is computed once."""
        try:
            tree = merge(self.samples[3:], None, IGNORE_INDEX)
            return difference(
                _gradients(Decoder(self.make(), check), self.packed([tree], _reader_of(check))), self.expected_of_tree
            )
        except Exception:  # any: each module has its own
            return float("inf")


def _comparison(
    config: Any, attention: str | None, processor: ImageProcessor, dtype: torch.dtype = torch.float64
) -> ImageComparison:
    """Returns the comparison of the narrowest copy of a model that computes the samples, on the current device."""
    with torch.device("cpu"):
        drawn = [*_drawn(processor)]
    tokens = sorted({int(token) for ids, _ in drawn for token in ids})
    problem: Exception | None = None
    for narrows, num_layers in ((True, 2), (True, None), (False, 2), (False, None)):
        try:
            small, number = _small(config, tokens, narrows, num_layers)
            samples = [_sample([number[int(token)] for token in ids], beside, dtype) for ids, beside in drawn]
            make = copies(small, attention, dtype)
            expected, of_tree = (_gradients_one_by_one(make(), some) for some in (samples[:4], samples[3:]))
            whole = small if num_layers is None else _small(config, tokens, narrows, None)[0]
            return ImageComparison(make, samples, expected, of_tree, _unreached(build(whole, attention), samples[0]))
        except Exception as error:  # any: a model may need its real sizes
            problem = error
    text = f"model.images=True: {type(problem).__name__}: {problem}"
    raise ValueError(f"{text}; the model cannot compute images with this transformers") from problem


def _drawn(processor: ImageProcessor) -> Iterator[tuple[np.ndarray, ImageInputs]]:
    """Yields tokens [t] of each sample, and its inputs beside them."""
    draw = np.random.default_rng(0)
    special = {*processor.token_ids, *processor.tokenizer.all_special_ids, *processor.tokenizer.added_tokens_decoder}
    texts = [token for token in range(len(processor.tokenizer)) if token not in special][:_NUM_TEXT_TOKENS]
    images = [Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in _SIZES]
    for index, parts in enumerate(_SAMPLES):
        made = processor.processed([images[-part - 1] for part in parts if part < 0])
        replacements, ids = iter(made.texts), list[int]()
        text = np.random.default_rng(1 + min(index, 3))  # the last two have equal texts, up to the last ones
        for part in parts:
            drawn = text if part is not parts[-1] else draw
            ids += processor.token_ids_of(next(replacements)) if part < 0 else drawn.choice(texts, part).tolist()
        tokens = np.array(ids)
        yield tokens, processor.inputs(tokens, made)


def _unreached(model: Any, sample: TextSample) -> tuple[str, ...]:
    """Returns the names of parameters beside the text that have no gradient after a sample with an image."""
    waiting, found = [_logits_of(model, sample).sum().grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    reached = {id(node.variable) for node in found if hasattr(node, "variable")} | reached_by_text(model)
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) not in reached)


def _sample(ids: Sequence[int], beside: ImageInputs, dtype: torch.dtype) -> TextSample:
    """Returns a sample whose targets are the text tokens behind its last image, at least the last five."""
    tokens = np.array(ids)
    labels = np.append(tokens[1:], IGNORE_INDEX)
    first = len(tokens) - 6 if (beside.identities < 0).any() else 0
    labels[:first] = IGNORE_INDEX
    device = torch.get_default_device()
    pixels = [
        each._replace(
            tensors={n: t.to(device, dtype if t.is_floating_point() else None) for n, t in each.tensors.items()}
        )
        for each in beside.pixels
    ]
    return TextSample("check", FIRST, tokens, labels, [len(tokens)], images=beside._replace(pixels=pixels))


def _small(config: Any, tokens: Sequence[int], narrows: bool, num_layers: int | None) -> tuple[Any, Mapping[int, int]]:
    """Returns a config of few layers, a tower of narrow heads, and a vocabulary of ``tokens``; and each token's number in it."""
    small = cut(config, num_layers, cuts_tokens=False)
    parts = [small, *(part for name in small.sub_configs if (part := getattr(small, name, None)) is not None)]
    # Images are found by ids in the config; those that do not occur have numbers behind the others.
    number = {token: index for index, token in enumerate(tokens)}
    for part in parts:
        for name, value in list(vars(part).items()):
            if re.search("token_(id|index)$", name) and isinstance(value, int):
                setattr(part, name, number.setdefault(value, len(number)))
            elif re.search("token_(id|index)$", name) and isinstance(value, list):
                setattr(part, name, [number.setdefault(each, len(number)) for each in value])
    text = small.get_text_config()
    for part in (small, text):
        if "vocab_size" in vars(part):
            part.vocab_size = len(number)
    # Of Gemma 3's first six layers, one with a window and one without: attention is what images change.
    kinds = [*dict.fromkeys(getattr(text, "layer_types", None) or ())]
    if narrows and len(kinds) > 1 and not getattr(text, "num_kv_shared_layers", 0):
        text.layer_types, text.num_hidden_layers = kinds, len(kinds)
    tower = getattr(small, "vision_config", None)
    if narrows and tower is not None:
        heads = {value for name, value in vars(tower).items() if "heads" in name and isinstance(value, int)}
        with torch.device("meta"):
            width = _width_of_tower(build(small, "eager"))
        for name, value in list(vars(tower).items()):
            if len(heads) == 1 and value == width and value != text.hidden_size:
                setattr(tower, name, _NUM_HEADS * _NARROW)
            elif len(heads) == 1 and "heads" in name and isinstance(value, int):
                setattr(tower, name, _NUM_HEADS)
            elif name == "head_dim":
                tower.head_dim = _NARROW
            elif "intermediate_size" in name and isinstance(value, int):
                setattr(tower, name, min(value, 4 * _NUM_HEADS * _NARROW))
    return small, number


def _width_of_tower(model: Any) -> int:
    """Returns the width of a tower: that of the first layer, which maps patches."""
    reached = reached_by_text(model)
    layers = (module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d))
    return next(layer.weight.size(0) for layer in layers if id(layer.weight) not in reached)


def _reader_of(check: PackingCheck) -> TextReader:
    return TextReader(bounds=RowBounds(limits=ModelLimits(joins=check.joins)))


def _gradients(decoder: nn.Module, row: Microbatch) -> dict[str, Tensor]:
    """Returns each parameter's gradient of the cross-entropy summed over the targets of a microbatch."""
    row = tree_map_only(Tensor, lambda tensor: tensor.to(torch.get_default_device()), row)
    logits = decoder(**row.inputs).flatten(0, 1)
    _loss(logits, row.targets.labels.flatten()).backward()
    return {n.removeprefix("model."): p.grad for n, p in decoder.named_parameters() if p.grad is not None}


def _gradients_one_by_one(model: Any, samples: Sequence[TextSample]) -> dict[str, Tensor]:
    """Returns the same of samples, by the model's own forward, which computes positions itself."""
    for sample in samples:
        _loss(_logits_of(model, sample), torch.tensor(sample.labels)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _logits_of(model: Any, sample: TextSample) -> Tensor:
    """Returns logits [t, v] of a sample by the model's own forward."""
    assert sample.images is not None
    columns = {"input_ids": sample.tokens, **sample.images.types}
    inputs = {name: torch.tensor(column)[None] for name, column in columns.items()}
    for each in sample.images.pixels:
        inputs |= each.tensors
    logits: Tensor = model(**inputs, use_cache=False).logits[0]
    return logits


_loss = partial(nn.functional.cross_entropy, ignore_index=IGNORE_INDEX, reduction="sum")
