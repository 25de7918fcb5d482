"""Start-up check of a decoder: it computes packed rows in the first way that is exact, or in none."""

import errno
import logging
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from decoder_types import read_config_of, tiny_config_of
from recipe_runs import keep_messages, slow
from tiny_transformers import save_tiny

from recipe_utils.models.sizes import limits_of
from recipe_utils.models.transformers import decoder, packing_check
from recipe_utils.models.transformers.causal_lm import causal_lm, config_of
from recipe_utils.settings.problems import ConfigError

ALL = {"trees", "stages", "ranks"}
PROVED = {
    **dict.fromkeys((
        "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "granite", "olmo3", "cohere2", "smollm3",
        "deepseek_v3", "qwen3_moe", "starcoder2", "glm4", "seed_oss",
    ), ((), ALL)),
    "gpt2": ((), ALL - {"stages"}),  # every stage would add its positions
    **dict.fromkeys(("gpt_oss", "llama4_text"), ((), ALL - {"ranks"})),  # sinks; chunks
    # Biases depend on places in a row, which are not the positions of a branch.
    **dict.fromkeys(("bloom", "mpt"), ((), set())),
    "lfm2": (("Lfm2ShortConv",), ALL - {"ranks"}),
    "mamba": (("MambaMixer",), ALL - {"ranks"}),
    "mamba2": (("Mamba2Mixer",), ALL - {"ranks"}),
    "qwen3_next": (("Qwen3NextGatedDeltaNet",), ALL - {"ranks"}),
    "falcon_h1": (("FalconH1Mixer",), {"trees"}),  # every stage would multiply
    # Folders of images or audio and text
    **dict.fromkeys(("gemma3", "moss_transcribe_diarize"), ((), ALL)),
    **dict.fromkeys(("gemma4_unified", "got_ocr2", "llama4"), ((), ALL - {"ranks"})),
    **dict.fromkeys((
        "aria", "aya_vision", "cohere2_vision", "deepseek_vl", "ernie4_5_vl_moe", "exaone4_5", "fuyu", "glm46v", "glm4v",
        "glm4v_moe", "glm_ocr", "hunyuan_vl", "idefics2", "idefics3", "internvl", "janus", "kimi_k25", "lighton_ocr",
        "llava", "llava_next", "llava_onevision", "mistral3", "mllama", "muse_glimmer", "ovis2", "paddleocr_vl",
        "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "video_llama_3", "vipllava",
    ), ((), ALL)),
    "lfm2_vl": (("Lfm2ShortConv",), ALL - {"ranks"}),
    "lfm3_vl": (("Lfm3ShortConv",), ALL - {"ranks"}),
    "minicpmv4_6": (("Qwen3_5GatedDeltaNet",), ALL - {"ranks"}),
    **{name: ((f"{layer}GatedDeltaNet",), ALL - {"ranks"}) for name, layer in (
        ("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe"),
    )},
}  # fmt: skip
"""Classes that run by document, and layouts of packed rows that are exact."""
FAST = ("qwen3", "gpt_oss", "llama4_text", "lfm2", "bloom", "gemma3", "llava", "mllama", "qwen3_vl")


@pytest.mark.parametrize("model_type", [t if t in FAST else slow(t) for t in PROVED])
def test_packed_rows_have_the_gradients_of_their_documents(model_type):
    check = packing_check.check_packing(read_config_of(model_type))
    parts = {"trees": check.computes_trees, "stages": check.can_be_cut, "ranks": check.spans_ranks}
    assert (tuple(check.modules), {n for n in parts if parts[n]}) == PROVED[model_type]
    assert check.problem is None
    assert check.error < 1e-10


@pytest.mark.parametrize(
    ("model_type", "num_layers"),
    [("gemma3", 2), ("git", 2), ("moss_transcribe_diarize", 2), ("gemma4", 2), ("gemma4_text", 2), ("qwen3_5", 4)],
)
def test_a_copy_has_few_layers_for_text_and_one_in_each_tower(model_type, num_layers):
    """Of 8 layers, every second one has no window. Gemma 4 marks the last of each kind, which makes no other kind."""
    layer_types = ["sliding_attention", "full_attention"] * 4
    if model_type == "qwen3_5":
        layer_types = (["linear_attention"] * 3 + ["full_attention"]) * 2
    copied = packing_check.cut(read_config_of(model_type, num_hidden_layers=8, layer_types=layer_types))
    assert copied.get_text_config().num_hidden_layers == num_layers
    towers = [getattr(copied, name) for name in set(copied.sub_configs) - {"text_config"}]
    assert [tower.num_hidden_layers for tower in towers] == [1] * len(towers)
    assert bool(towers) == (model_type not in ("gemma4_text", "qwen3_5"))


@pytest.mark.parametrize("model_type", ["mllama", *map(slow, ("gemma4", "llava", "qwen3_vl", "janus"))])
def test_what_texts_do_not_reach_is_frozen(model_type, tmp_path):
    """Such as mllama's layers that attend to images."""
    tiny_config_of(model_type).save_pretrained(tmp_path)
    decoder = causal_lm(str(tmp_path))
    decoder(torch.arange(3, 43)[None]).sum().backward()
    trained = {name for name, parameter in decoder.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in decoder.named_parameters() if parameter.grad is not None}


def test_a_decoder_that_multiplies_embeddings_is_not_cut():
    assert not packing_check.check_packing(tiny_config_of("granite", embedding_multiplier=12.0)).can_be_cut


@pytest.mark.parametrize(
    ("model_type", "max_modules", "module"),
    [
        ("lfm2", 0, r"model.layers.0.conv \(Lfm2ShortConv\)"),
        slow("deepseek_v4", 3, r"model.layers.1.self_attn.*DeepseekV4Indexer.*"),
        slow("bart", 3, r"model.decoder \(BartDecoder\)"),
        slow("roberta", 3, r"roberta.embeddings \(RobertaEmbeddings\)"),
    ],
)
def test_the_module_that_mixes_documents_is_named(model_type, max_modules, module, monkeypatch):
    monkeypatch.setattr(packing_check, "_MAX_MODULES", max_modules)
    assert re.fullmatch(module, packing_check.check_packing(tiny_config_of(model_type)).problem)


UNUSABLE = {
    "os.mkdir": errno.EROFS, "os.open": errno.EACCES, "fcntl.flock": errno.ENOSYS, "os.fsync": errno.ENOSPC,
}  # fmt: skip


@pytest.mark.parametrize("call", UNUSABLE)
def test_a_proof_is_made_in_memory_where_the_cache_cannot_be_used(call, monkeypatch, tmp_path):
    code, config = UNUSABLE[call], tiny_config_of("qwen3")
    expected = packing_check.check_packing(config)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with keep_messages(logging.WARNING) as warnings, monkeypatch.context() as patches:
        patches.setattr(call, Mock(side_effect=OSError(code, os.strerror(code))))
        found = [packing_check.cached_packing_check(config) for _ in range(2)]
    assert found == [expected] * 2
    (warning,) = warnings
    assert warning.startswith(f"{tmp_path}/torchtune_update_step: it cannot keep")
    assert f"({os.strerror(code)})" in warning
    assert not list(tmp_path.rglob("*.json"))


def test_gradients_that_are_not_numbers_prove_nothing():
    ones = {name: torch.ones(2, dtype=torch.float64) for name in "abc"}
    for name in ones:
        assert packing_check.difference({**ones, name: torch.tensor([1.0, torch.nan])}, ones) == torch.inf


def test_ties_of_sparse_attention_are_found():
    with pytest.raises(ValueError, match=r"DeepseekV32ForCausalLM: padding changes .*ties of a sparse"):
        packing_check.check_packing(tiny_config_of("deepseek_v32", index_n_heads=1))


def test_a_tail_without_the_soft_cap_is_not_proved(monkeypatch):
    assert packing_check.check_packing(tiny_config_of("gemma2")).head_is_tail is False
    monkeypatch.setattr(decoder, "Tail", lambda model: model.get_output_embeddings())
    with pytest.raises(ValueError, match="logits are not made of its decoder's hidden states"):
        packing_check.check_packing(tiny_config_of("gemma2"))


@pytest.mark.parametrize(
    ("model_type", "changes", "text"),
    [
        slow("xlnet", {"d_head": 16}, "XLNetLMHeadModel: padding changes gradients"),
        ("qwen3_moe", {"output_router_logits": True}, "output_router_logits=True"),
        ("vit", {}, "no causal language model for model_type=vit"),
        ("blip-2", {}, "model_type=blip-2 needs pixel_values in each forward, also for texts; set it to another model"),
        ("gemma3n", {}, "model: .* timm .*pip install timm"),  # no requirement of ours
        ("kosmos-2", {}, "Kosmos2.* cannot compute texts without images .*; set model.path to another model"),
        ("paligemma", {}, "model_type=paligemma attends both ways in its inputs, and only decoders are trained"),
        slow("udop", {}, "model_type=udop attends both ways in its inputs, and only decoders are trained"),
    ],
)
def test_what_cannot_be_trained_exactly_is_refused(model_type, changes, text, tmp_path):
    tiny_config_of(model_type, **changes).save_pretrained(tmp_path / model_type)
    with pytest.raises(ValueError, match=text):
        causal_lm(str(tmp_path / model_type))
    with pytest.raises(ValueError, match=r"no config.json"):
        causal_lm(str(tmp_path))


@pytest.mark.parametrize(("model_type", "rope_type"), [("phi3", "longrope"), ("llama", "dynamic")])
def test_rope_that_depends_on_other_samples_limits_them(model_type, rope_type, tmp_path):
    """Beyond the original length, frequencies are those of the longest sample of a microbatch."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    rope |= {"original_max_position_embeddings": 32}
    config = tiny_config_of(model_type, rope_parameters=rope, max_position_embeddings=128)
    config.original_max_position_embeddings = 32
    config.save_pretrained(tmp_path)
    assert config_of(str(tmp_path)).max_position_embeddings == 128
    assert causal_lm(str(tmp_path)).max_seq_len == 32


@pytest.mark.parametrize(
    ("model_type", "problem"),
    [("qwen3", None), ("lfm2", "max_ranks_per_row=2: Lfm2ForCausalLM has windows, or mixes tokens")],
)
def test_rows_over_ranks_are_refused_where_they_are_not_proved(model_type, problem, tmp_path):
    save_tiny(tmp_path, model_type)
    with torch.device("meta"):
        limits = limits_of(causal_lm(str(tmp_path)), torch.device("cpu"))
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        limits.multiple_of_packed_rows(64, ("prefix_sharing=True", "set prefix_sharing=False"), 2)


@pytest.mark.slow
def test_a_proof_is_kept_as_long_as_no_code_of_a_forward_changes():
    """It depends on all modules of these packages that the check imports."""
    code = (
        "import sys, recipe_utils.models.transformers.packing_check\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('recipe_utils.')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {
        path for path in ran.stdout.split() if re.search(r"recipe_utils/(models|text|parallel|model_kinds)\b", path)
    }
    assert len(imported) > 20
    assert imported <= set(map(str, packing_check.paths_of_code()))
