"""Tiny folders of transformers with a processor of images: tokenizer, chat template, processor and ``config.json``."""

import json
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_CLIP = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
_QWEN = {
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
_WITH_TILES = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)] + [
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
]
FOLDERS = {
    "qwen2_vl": (
        "Qwen2VL", "<|vision_start|><|image_pad|><|vision_end|>", ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
        _QWEN, {},
        lambda ids: {"text_config": {**_TEXT, **_MROPE}, "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
            "vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}},
    ),
    "llava": (
        "Llava", "<image>\n", ["<image>"], {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}},
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        lambda ids: {"text_config": {"model_type": "llama", **_TEXT}, "vision_config": {"model_type": "clip_vision_model", "image_size": 8, **_CLIP},
            "image_token_index": ids["<image>"]},
    ),
    "gemma3": (
        "Gemma3", "<start_of_image>", ["<start_of_image>", "<end_of_image>", "<image_soft_token>"], {"size": {"height": 8, "width": 8}},
        {"image_seq_length": 4},
        lambda ids: {"text_config": {**_TEXT, "head_dim": 16, "sliding_window": 16}, "mm_tokens_per_image": 4, "image_token_index": ids["<image_soft_token>"],
            "boi_token_index": ids["<start_of_image>"], "eoi_token_index": ids["<end_of_image>"],
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 8, **_CLIP, "patch_size": 2}},
    ),
    "idefics3": (
        "Idefics3", "<image>", ["<image>", *_WITH_TILES], {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}, {"image_seq_len": 4},
        lambda ids: {"text_config": {"model_type": "llama", **_TEXT}, "image_token_id": ids["<image>"], "scale_factor": 2,
            "vision_config": {**_CLIP, "image_size": 16}},
    ),
}  # fmt: skip
"""Model type -> classes' prefix, what the template prints for an image, special tokens, arguments of the image processor and of the
processor, and ``config.json`` by the ids of special tokens."""


def write_image_folder(path: Path, kind: str) -> Path:
    """Writes a folder of a tiny model with images, without weights; returns it."""
    prefix, printed, names, of_images, of_both, config_of = FOLDERS[kind]
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *names]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(names)
    further = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    own = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        **({"extra_special_tokens": further} if kind == "gemma3" else {}),
    )  # fmt: skip
    own.chat_template = TEMPLATE.replace("IMAGE", printed)
    own.save_pretrained(path)
    getattr(transformers, f"{prefix}ImageProcessorPil", transformers.CLIPImageProcessorPil)(
        **of_images
    ).save_pretrained(path)
    (path / "processor_config.json").write_text(json.dumps({"processor_class": f"{prefix}Processor", **of_both}))
    ids = {name: own.convert_tokens_to_ids(name) for name in names}
    given = config_of(ids)
    given["text_config"] = {
        **given["text_config"],
        "vocab_size": len(own),
        "eos_token_id": ids["<|im_end|>"],
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    CONFIG_MAPPING[kind](**given).save_pretrained(path)
    return path
