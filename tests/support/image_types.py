"""Tiny models of the image-text types of transformers, and samples with the tensors that their processors would make.

Example: four samples with 1, 0, 2 and 1 images. An image of Qwen2-VL of 2 x 3 merged patches is ``pixel_values``
[24, 1176], ``image_grid_thw`` [[1, 4, 6]] and 6 placeholders. Where types differ stands in :data:`TYPES`.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from decoder_types import MROPE, tiny_config_of, tower_of
from torch import Tensor
from transformers import CONFIG_MAPPING

from recipe_utils.text.images.sample import ImageInputs, Join, Pixels, join_pixels
from recipe_utils.text.samples import FIRST, TextSample
from recipe_utils.torchtune_names import IGNORE_INDEX

PLACEHOLDER, FIRST_SPECIAL = 190, 191
"""Tokens that stand for images; other special tokens follow. Vocabularies have 200 tokens."""
SAMPLES: tuple[tuple[Any, ...], ...] = (((2, 3), 9), (13,), (4, (2, 2), 3, (1, 2), 6), (7, (3, 1), 5), (7, (3, 1), 6))
"""Numbers of text tokens, and heights and widths of images [merged patches]. The last two begin alike."""
Tensors = dict[str, Tensor]


def grid(config: Any, height: int, width: int, **names: Any) -> Tensors:
    """Patches of images of any size, as Qwen's processors make them; ``names`` are arguments of one number each."""
    tower = config.vision_config
    merge = next((v for n in ("spatial_merge_size", "merge_size") if (v := getattr(tower, n, None))), 2)
    times = getattr(tower, "temporal_patch_size", getattr(tower, "patch_temporal", 1))
    rows, columns = height * merge, width * merge
    values = torch.randn(rows * columns, 3 * times * tower.patch_size**2)
    return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, rows, columns]])}


def grid_of_channels(config: Any, height: int, width: int) -> Tensors:
    """Patches [n, 3, p, p] instead."""
    made, size = grid(config, height, width), config.vision_config.patch_size
    return made | {"pixel_values": torch.randn(len(made["pixel_values"]), 3, size, size)}


def merged_grid(config: Any, height: int, width: int) -> Tensors:
    return grid(config, height, width) | {"image_merge_sizes": torch.tensor([2])}


def squares(config: Any, *_: int) -> Tensors:
    """Images of one size [1, 3, h, w]."""
    size = config.vision_config.image_size
    return {"pixel_values": torch.randn(1, 3, *(size if isinstance(size, list) else [size, size]))}


def masked_squares(config: Any, height: int, width: int) -> Tensors:
    """Images of one size, of which some pixels are padding."""
    made, size = squares(config), config.vision_config.patch_size
    mask = torch.zeros(made["pixel_values"].shape[-2:], dtype=torch.bool)
    mask[: height * size, : width * size] = True
    return made | {"pixel_mask": mask[None]}


def rows_of_tiles(config: Any, height: int, width: int) -> Tensors:
    """Tiles [1, n, 3, h, w] of a sample, as Idefics' processors make them."""
    made = masked_squares(config, height, width)
    return {"pixel_values": made["pixel_values"][None], "pixel_attention_mask": made["pixel_mask"][None]}


def tiles(config: Any, height: int, width: int) -> Tensors:
    """Tiles [1, n, 3, h, w] of an image, after a small copy of it."""
    size = config.vision_config.image_size
    height, width = min(height, 2), min(width, 2)
    values = torch.randn(1, 1 + height * width, 3, size, size)
    return {"pixel_values": values, "image_sizes": torch.tensor([[height * size, width * size]])}


def any_size(config: Any, height: int, width: int) -> Tensors:
    """Images of any size [1, 3, h, w], as Pixtral's processor makes them."""
    size = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    sizes = height * size, width * size
    return {"pixel_values": torch.randn(1, 3, *sizes), "image_sizes": torch.tensor([sizes])}


def padded_patches(config: Any, height: int, width: int) -> Tensors:
    """Patches padded to the most that an image may have, as SigLIP 2's processor makes them."""
    size, shape = config.vision_config.patch_size, (2 * height, 2 * width)
    values, mask = torch.zeros(1, 24, 3 * size**2), torch.zeros(1, 24, dtype=torch.long)
    number = shape[0] * shape[1]
    values[:, :number], mask[:, :number] = torch.randn(number, 3 * size**2), 1
    return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([shape])}


def strip(config: Any, height: int, width: int) -> Tensors:
    """Patches [1, 3, p, n p] of all images, one after the other."""
    size, shape = config.vision_config.patch_size, (4 * height, 4 * width)
    values = torch.randn(1, 3, size, shape[0] * shape[1] * size)
    return {"pixel_values": values, "target_sizes": torch.tensor([shape], dtype=torch.int32)}


def placed_patches(config: Any, height: int, width: int) -> Tensors:
    """Patches with their places, padded to the most that an image may have, as Gemma 4's processor makes them."""
    tower = config.vision_config
    merge, size = tower.pooling_kernel_size, tower.patch_size
    if hasattr(tower, "model_patch_size"):
        merge, size = 1, tower.model_patch_size
    places = torch.cartesian_prod(torch.arange(width * merge), torch.arange(height * merge))
    values, at = torch.zeros(1, 6 * merge**2, 3 * size**2), torch.full((1, 6 * merge**2, 2), -1)
    values[:, : len(places)], at[:, : len(places)] = torch.rand(len(places), 3 * size**2), places
    return {"pixel_values": values, "image_position_ids": at}


class ImageType(NamedTuple):
    """A type: what its processor makes of an image, and arguments of its config."""

    pixels: Callable[[Any, int, int], Tensors]
    types: tuple[str, ...] = ()
    """Columns of ones at placeholders that the model takes."""
    joins: dict[str, Join] = {}  # noqa: RUF012
    """Those that differ from ``Join(0)``."""
    text: dict[str, Any] = {}  # noqa: RUF012
    tower: dict[str, Any] = {}  # noqa: RUF012
    whole: dict[str, Any] = {}  # noqa: RUF012
    model_type: str = ""
    """If it is not the name of the row."""
    tower_type: str = ""
    """If it is not the default."""
    perceiver: dict[str, Any] = {}  # noqa: RUF012


PATCH_4 = {"patch_size": 4, "depth": 2, "num_hidden_layers": 2}
QWEN = ImageType(grid, ("mm_token_type_ids",), tower=PATCH_4)
DEEP = QWEN._replace(tower={**PATCH_4, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64})
QWEN_3_5 = QWEN._replace(
    tower={**PATCH_4, "num_position_embeddings": 64},
    text={"rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 1.0}},
)
PLAIN_GRID = ImageType(grid, tower=PATCH_4)
SQUARES = ImageType(squares, tower={"num_hidden_layers": 3})
IN_ROWS = dict.fromkeys(("pixel_values", "pixel_attention_mask"), Join(1))
IDEFICS = ImageType(rows_of_tiles, joins=IN_ROWS, tower={"patch_size": 7, "num_hidden_layers": 2})
PIXTRAL = ImageType(any_size, joins={"pixel_values": Join(0, True)}, tower={"patch_size": 4, "image_size": 28})
TILES = ImageType(
    tiles, joins={"pixel_values": Join(0, True)}, tower={"num_hidden_layers": 3},
    whole={"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
)  # fmt: skip
GEMMA_4 = ImageType(
    placed_patches, ("mm_token_type_ids",), text={"use_bidirectional_attention": "vision"},
    tower={**PATCH_4, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 32},
)  # fmt: skip
TYPES: dict[str, ImageType] = {
    "qwen2_vl": QWEN._replace(tower={**PATCH_4, "hidden_size": 64}),
    **dict.fromkeys(("qwen2_5_vl", "glm4v", "glm4v_moe", "glm46v", "glm_ocr"), QWEN),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), DEEP),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), QWEN_3_5),
    "ernie4_5_vl_moe": QWEN._replace(types=("mm_token_type_ids", "moe_mm_token_type_ids")),
    "paddleocr_vl": QWEN._replace(pixels=grid_of_channels, tower={**PATCH_4, "image_size": 28}),
    "hunyuan_vl": QWEN._replace(tower={**PATCH_4, "max_image_size": 64}),
    "exaone4_5": PLAIN_GRID._replace(tower={**PATCH_4, "num_key_value_heads": 2}),
    "kimi_k25": PLAIN_GRID._replace(pixels=grid_of_channels, whole={"projection_hidden_size": 32}),
    "lfm3_vl": PLAIN_GRID,
    "muse_glimmer": PLAIN_GRID._replace(whole={"out_hidden_size": 128, "projector_hidden_size": 64}),
    "video_llama_3": PLAIN_GRID._replace(pixels=merged_grid),
    **dict.fromkeys(("smolvlm", "idefics3"), IDEFICS),
    "idefics2": IDEFICS._replace(perceiver={"resampler_n_latents": 3, "resampler_n_heads": 4, "resampler_head_dim": 16}),
    **dict.fromkeys(("llava", "aya_vision", "cohere2_vision", "deepseek_vl"), SQUARES),
    "got_ocr2": SQUARES._replace(tower={"num_hidden_layers": 2, "mlp_dim": 48, "output_channels": 32}),
    "aria": SQUARES._replace(pixels=masked_squares, whole={"projector_patch_to_query_dict": {4: 3}}),
    "internvl": SQUARES._replace(tower={"num_hidden_layers": 2, "image_size": [28, 28], "patch_size": [7, 7]}),
    "janus": SQUARES._replace(tower={"num_hidden_layers": 3, "projection_dim": 64}),
    "ovis2": SQUARES._replace(
        tower={"num_hidden_layers": 2, "vocab_size": 32}, whole={"hidden_size": 64, "vocab_size": 200}
    ),
    "vipllava": SQUARES._replace(whole={"vision_feature_layers": [-2, -3, 1]}),
    "llava_pixtral": PIXTRAL._replace(
        model_type="llava", tower_type="pixtral", whole={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    ),
    **dict.fromkeys(("mistral3", "lighton_ocr"), PIXTRAL),
    **dict.fromkeys(("llava_next", "llava_onevision"), TILES),
    "gemma3": SQUARES._replace(
        types=("token_type_ids",), tower={"patch_size": 7, "num_hidden_layers": 2}, whole={"mm_tokens_per_image": 4}
    ),
    "gemma4": GEMMA_4,
    "gemma4_causal": GEMMA_4._replace(model_type="gemma4", text={}),
    "gemma4_unified": GEMMA_4._replace(tower={"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32}),
    "lfm2_vl": ImageType(padded_patches, tower=PATCH_4),
    "minicpmv4_6": ImageType(strip, joins={"pixel_values": Join(-1)}, tower={**PATCH_4, "insert_layer_id": 0}),
}  # fmt: skip


def tiny_image_config_of(name: str) -> Any:
    """Returns the config of a type; all special tokens are in the vocabulary."""
    kind = TYPES[name]
    config = tiny_config_of(kind.model_type or name, **kind.text)
    if kind.tower_type:
        config.vision_config = tower_of(CONFIG_MAPPING[kind.tower_type]())
    parts = (
        (config.vision_config, kind.tower),
        (config, kind.whole),
        (getattr(config, "perceiver_config", None), kind.perceiver),
    )
    for part, changes in parts:
        for key, value in changes.items():
            if hasattr(part, key):
                setattr(part, key, value)
    for key, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and key.endswith("token_ids"):
            setattr(config, key, list(range(5, 5 + len(value))))
    ids = iter(range(FIRST_SPECIAL, 200))
    for key, value in list(vars(config).items()):
        if (
            re.search("token_(id|index)$", key)
            and isinstance(value, int | None)
            and key[:3] not in ("bos", "eos", "pad")
        ):
            setattr(config, key, PLACEHOLDER if key.startswith("image_token") else next(ids))
    return config


def samples_of(name: str, model: Any) -> list[TextSample]:
    """Returns the samples of :data:`SAMPLES` for a model of a type; targets are the tokens of the text behind an image."""
    kind, draw = TYPES[name], np.random.default_rng(0)
    torch.manual_seed(0)
    images = {
        part: kind.pixels(model.config, *part) for parts in SAMPLES for part in parts if not isinstance(part, int)
    }
    common = draw.integers(3, PLACEHOLDER, 40)
    samples = []
    for index, parts in enumerate(SAMPLES):
        tokens, labels, of_sample = list[int](), list[int](), list[Tensors]()
        for part in parts:
            if isinstance(part, int):
                text = draw.integers(3, PLACEHOLDER, part)
                if index > 2:  # of the last two, texts differ in the last tokens alone
                    text[: min(part, 4)] = common[len(tokens) :][: min(part, 4)]
                tokens += text.tolist()
                labels += text.tolist() if part is parts[-1] else [IGNORE_INDEX] * part
            else:
                of_sample.append(images[part])
                num_placeholders = num_tokens_of(model, images[part])
                tokens += [PLACEHOLDER] * num_placeholders
                labels += [IGNORE_INDEX] * num_placeholders
        samples.append(_sample(kind, model, np.array(tokens), np.array([*labels[1:], IGNORE_INDEX]), of_sample))
    return samples


def num_tokens_of(model: Any, tensors: Tensors) -> int:
    """Returns the number of placeholders of an image: that of its features."""
    with torch.no_grad():
        features = model.model.get_image_features(**tensors).pooler_output
    width = model.config.get_text_config().hidden_size
    return sum(each.numel() for each in features) // width


def _sample(kind: ImageType, model: Any, tokens: Any, labels: Any, images: list[Tensors]) -> TextSample:
    is_image = (tokens == PLACEHOLDER).astype(np.int64)
    parts = [Pixels(0, [], each) for each in images]
    pixels = join_pixels(parts, {name: kind.joins.get(name, Join()) for each in images for name in each})
    positions = np.arange(len(tokens))[None]
    if hasattr(model.model, "get_rope_index"):
        given = {"mm_token_type_ids": torch.from_numpy(is_image)[None]}
        given |= {name: tensor for name, tensor in pixels.items() if name == "image_grid_thw"}
        axes, _ = model.model.get_rope_index(torch.from_numpy(tokens)[None], **given)
        positions = np.concatenate([positions[: len(axes) == 3], axes[:, 0].numpy()])
    identity = -1 - sum(each["pixel_values"].sum().abs().mul(1e6).long().item() for each in images)
    beside = ImageInputs(
        positions,
        np.where(is_image, identity, 0),
        dict.fromkeys(kind.types, is_image),
        [Pixels(int(is_image.argmax()), [(1, 1)] * len(images), pixels)] if images else [],
    )
    return TextSample("sample", FIRST, tokens, labels, [len(tokens)], images=beside)


def gradients_one_by_one(model: Any, samples: list[TextSample]) -> dict[str, Tensor]:
    """Returns gradients of samples one after the other, by the model's own forward, without positions."""
    for sample in samples:
        assert sample.images is not None
        inputs = {name: torch.from_numpy(column)[None] for name, column in sample.images.types.items()}
        for each in sample.images.pixels:
            inputs |= each.tensors
        logits = model(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False, **inputs).logits[0]
        _sum_of_losses(logits, torch.from_numpy(sample.labels)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients_of_row(decoder: Any, row: Any) -> dict[str, Tensor]:
    """Returns gradients of a decoder's microbatch, by the names of its model."""
    _sum_of_losses(decoder(**row.inputs).flatten(0, 1), row.targets.labels.flatten()).backward()
    return {name: p.grad for name, p in decoder.model.named_parameters() if p.grad is not None}


def _sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
