"""Tiny folders of transformers with a processor of images: tokenizer, chat template, processor and ``config.json``."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

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
_LINEAR = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_QWEN_NAMES = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_WITH_TILES = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)] + [
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
]


def _qwen_ids(ids):
    """Returns the ids in a config of Qwen's."""
    keys = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {key: ids[name] for key, name in zip(keys, _QWEN_NAMES, strict=True)}


FOLDERS = {
    "qwen2_vl": (
        "Qwen2VL", "<|vision_start|><|image_pad|><|vision_end|>", _QWEN_NAMES, _QWEN, {},
        lambda ids: {**_qwen_ids(ids), "text_config": {**_TEXT, **_MROPE},
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
    "qwen3_5": (
        "Qwen3VL", "<|vision_start|><|image_pad|><|vision_end|>", _QWEN_NAMES, _QWEN, {},
        lambda ids: {**_qwen_ids(ids), "text_config": {**_TEXT, **_LINEAR, "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}},
            "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
                "num_position_embeddings": 64}},
    ),
    "gemma4": (
        "Gemma4", "<|image|>", ["<|image>", "<image|>", "<|image|>", "<|audio>", "<audio|>", "<|audio|>", "<|video|>"],
        {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2}, {},
        lambda ids: {"text_config": {**_TEXT, "head_dim": 16, "global_head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
                "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 300, "num_kv_shared_layers": 0},
            "image_token_id": ids["<|image|>"], "boi_token_id": ids["<|image>"], "eoi_token_id": ids["<image|>"], "audio_token_id": ids["<|audio|>"],
            "video_token_id": ids["<|video|>"], "audio_config": None,
            "vision_config": {**_CLIP, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64, "pooling_kernel_size": 2}},
    ),
}  # fmt: skip
"""Model type -> classes' prefix, what the template prints for an image, special tokens, arguments of the image processor and of the
processor, and ``config.json`` by the ids of special tokens."""

_NAMED = {
    "gemma3": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    "gemma4": {
        **{"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
        **{"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
    },
}
"""Special tokens that a processor reads from its tokenizer by name."""


def write_image_folder(path: Path, kind: str) -> Path:
    """Writes a folder of a tiny model with images, without weights; returns it."""
    prefix, printed, names, of_images, of_both, config_of = FOLDERS[kind]
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *names]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(names)
    further = {"extra_special_tokens": _NAMED[kind]} if kind in _NAMED else {}
    own = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", **further
    )
    own.chat_template = TEMPLATE.replace("IMAGE", printed)
    own.save_pretrained(path)
    others = {"Llava": "CLIP", "Qwen3VL": "Qwen2VL"}
    getattr(transformers, f"{others.get(prefix, prefix)}ImageProcessorPil")(**of_images).save_pretrained(path)
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


# ---- Chats with images ---------------------------------------------------------------------------


SIZES = {"cat": (24, 40), "dog": (24, 16), "fox": (32, 24), "cow": (24, 40)}
"""Width and height of images [pixels]."""


def turn(*parts):
    content = [
        {"type": "image", "path": f"{part}.png"} if part in SIZES else {"type": "text", "text": part} for part in parts
    ]
    return {"role": "user", "content": content}


def answer(text):
    return {"role": "assistant", "content": text}


CHATS = [
    [turn("cat", "What?"), answer("A cat."), turn("And ", "dog", "?"), answer("A dog, I think.")],
    [turn("Hello"), answer("Yes?")],
    [turn("fox"), answer("Fox")],
    [turn("A text of more than sixteen tokens before ", "dog", "?"), answer("Dog")],
    # One of these has an image, so one rank has none.
    [turn("Hi"), answer("Yes, hello to you.")],
    [turn("fox", "dog", "?"), answer("Two")],
    [turn("Ho"), answer("No.")],
    [turn("A text of more than sixteen tokens before nothing"), answer("?")],
]


def write_chats(path):
    """Writes chats and their images; returns their folder."""
    for seed, (name, (width, height)) in enumerate(SIZES.items()):
        pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path / f"{name}.png")
    (path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    return path


def model_folder(folder, kind):
    """Returns the folder of a model with weights of order 1, which the first call writes."""
    path = folder / kind
    if not (path / "model.safetensors").exists():
        write_image_folder(path, kind)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path))
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() < 2 else parameter[0].numel() ** -0.5)
        chat_template = (path / "chat_template.jinja").read_text()
        model.save_pretrained(path)
        (path / "chat_template.jinja").write_text(chat_template)
    return str(path)


def image_keys(folder, kind, trains):
    """Returns the keys of a config that trains parts of a model on the chats of a folder."""
    path = model_folder(folder, kind)
    return {
        "model": {"_component_": "recipe_utils.models.causal_lm", "path": path, "images": True, "trains": trains},
        "tokenizer": {"_component_": "recipe_utils.text.folder_tokenizer", "path": path},
        "checkpointer": {"_component_": "recipe_utils.checkpoint.FolderCheckpointer", "checkpoint_dir": path},
        "dataset": {
            "_component_": "recipe_utils.text.conversation_dataset",
            "path": str(folder / "chats.jsonl"),
            "image_folder": str(folder),
        },
    }
