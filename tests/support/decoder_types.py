"""Tiny models of all decoder types of transformers, and how they compute packed rows.

    python tests/support/decoder_types.py            # all types, a table
    python tests/support/decoder_types.py qwen3      # some types

Every type runs in a process of its own for at most 100 seconds.
"""

import multiprocessing
import os
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from recipe_utils.models.transformers.causal_lm import config_of
from recipe_utils.models.transformers.packing_check import check_packing

_SECONDS = 100
_processes = multiprocessing.get_context("fork")  # they share the imports
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 4, "vocab_size": 200, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "is_decoder": True, "n_head": 4, "n_layer": 4,
    # windows, chunks and selections
    "sliding_window": 8, "attention_chunk_size": 8, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 16,
    "vocab_size_per_layer_input": 200, "hidden_size_per_layer_input": 16,
    # experts
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "intermediate_size_mlp": 96,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    # state spaces and linear attention
    "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2,
    "mamba_chunk_size": 8, "state_size": 16, "time_step_rank": 4, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
"""Arguments of all configs that have them."""
TOWER: dict[str, Any] = {
    "hidden_size": 32, "d_model": 32, "embed_dim": 32, "intermediate_size": 48, "num_hidden_layers": 6, "depth": 6, "num_layers": 6,
    "num_attention_heads": 2, "num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 64,
    "use_clipped_linears": False, "projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64,
    "base_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 64, "num_res_blocks": 1, "latent_channels": 32,
}  # fmt: skip
"""Arguments of parts for other data than text. They have more layers than the part for text."""
MROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
"""RoPE of three positions per token: 16 channels of a head are 8 frequencies."""
WINDOWS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
OF_TYPE: dict[str, dict[str, Any]] = {
    "cohere2": WINDOWS,
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [3, 3, 2]}, "moe_intermediate_size": [32, 32],
    },
    "gemma2": {**WINDOWS, "query_pre_attn_scalar": 16},
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 16},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), WINDOWS),
    "gemma3n_text": {**WINDOWS, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    **dict.fromkeys(("glm4v_text", "glm_ocr_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"), MROPE),
    "glm4v_moe_text": {"rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [1, 1, 2]}},  # of half a head
    "gpt_oss": WINDOWS,
    "hunyuan_vl_text": {"rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [2, 2, 2, 2]}},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "llama4_text": {
        "no_rope_layers": [1, 1, 1, 0], "moe_layers": [1, 3],
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    },
    "mamba": {"intermediate_size": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_block_size": 4, "index_topk_blocks": 2,
        "index_n_heads": 2,
    },
    "olmo3": WINDOWS,
    "paddleocr_vl_text": MROPE,
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "qwen3_next": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4},
}  # fmt: skip
"""Arguments of one type, so that it has every kind of layer."""


def tiny_config_of(model_type: str, **changes: Any) -> Any:
    """Returns a config of the arguments in :data:`SIZES` and :data:`OF_TYPE` that a type has, and ``changes``.

    Other arguments that are lists of one value per layer keep the first of each value. Of a type of several kinds of
    data, these are the arguments of the part for text; the others have those in :data:`TOWER`.
    """
    make = CONFIG_MAPPING[model_type]
    default = make()
    if "text_config" in make.sub_configs:
        text = tiny_config_of(default.text_config.model_type, **changes)
        towers = {name: tower_of(getattr(default, name) or made()) for name, made in make.sub_configs.items()}
        return make(**towers | {"text_config": text})
    known = {*make.__dataclass_fields__, *make.attribute_map}
    num_layers = getattr(default, "num_hidden_layers", None)
    given: dict[str, Any] = {}
    for name, value in vars(default).items():
        if name in known and isinstance(value, list) and len(value) == num_layers:
            kinds = list(dict.fromkeys(value))[:4]
            given[name] = [*kinds, *value[:4]][:4]
    given |= {**SIZES, **OF_TYPE.get(model_type, {}), **changes}
    if "kv_lora_rank" in known:
        given["num_key_value_heads"] = given["num_attention_heads"]
    return make(**{key: value for key, value in given.items() if key in known})


def read_config_of(model_type: str, **changes: Any) -> Any:
    """Returns the config that a model is built from, given a folder with :func:`tiny_config_of`."""
    with TemporaryDirectory() as folder:
        tiny_config_of(model_type, **changes).save_pretrained(folder)
        return config_of(folder)


def tower_of(default: Any) -> Any:
    known = {*type(default).__dataclass_fields__, *type(default).attribute_map}
    return type(default)(**{key: value for key, value in TOWER.items() if key in known})


def result_of(model_type: str) -> dict[str, Any]:
    """Returns the fields of a type's packing check, or its ``error`` as text."""
    pipe, theirs = _processes.Pipe()
    process = _processes.Process(target=_prove, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        if pipe.poll(_SECONDS):
            return dict(pipe.recv())
        return {"way": "not proved", "error": f"more than {_SECONDS} s"}
    except EOFError:
        return {"way": "not proved", "error": "its process died"}
    finally:
        process.kill()
        process.join()


def _prove(model_type: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    try:
        check = check_packing(read_config_of(model_type))
        way = "padded" if check.problem else "by_document" if check.modules else "masks"
        pipe.send({"way": way, **asdict(check)})
    except Exception as error:  # any: each type has its own
        refused = isinstance(error, ValueError) and str(error).startswith(("model: ", "model.path="))
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        pipe.send({"way": "refused" if refused else "not built", "error": text})


def main(model_types: list[str]) -> None:
    """Prints a table of ways, their number of types and the types."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = dict(zip(model_types, pool.map(result_of, model_types), strict=True))
    of_way: defaultdict[str, list[str]] = defaultdict(list)
    for model_type, result in results.items():
        why = result.get("problem") or ", ".join(result.get("modules", ()))
        of_way[result["way"]].append(f"{model_type} ({why})" if why else model_type)
        if "error" in result and isinstance(result["error"], str):
            print(f"{model_type}: {result['error']}", file=sys.stderr)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}\n")
    print("| way | number of types | types |\n| --- | --- | --- |")
    for way, found in sorted(of_way.items(), key=lambda item: -len(item[1])):
        print(f"| {way} | {len(found)} | {', '.join(found)} |")


if __name__ == "__main__":
    main(sys.argv[1:] or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES])
