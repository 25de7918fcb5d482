"""Start-up proof of a decoder: it computes packed rows in the first way that is exact, or in none."""

import copy
import errno
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from decoder_types import tiny_config_of
from recipe_runs import keep_messages, slow
from tiny_transformers import save_tiny

from recipe_utils.data.text.documents import Documents
from recipe_utils.model.construct.sizes import limits_of
from recipe_utils.model.transformers import probe
from recipe_utils.model.transformers.build import causal_lm, config_of
from recipe_utils.model.transformers.decoder import Decoder, build
from recipe_utils.settings.problems import ConfigError

MASKS = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "llama4_text", "mistral", "phi3", "granite", "olmo3",
    "cohere2", "smollm3", "deepseek_v3", "qwen3_moe", "gpt2", "starcoder2", "glm4", "seed_oss",
    "gpt_oss", "bloom",
)  # fmt: skip
BY_DOCUMENT = {
    "lfm2": "Lfm2ShortConv", "mamba": "MambaMixer", "mamba2": "Mamba2Mixer", "falcon_h1": "FalconH1Mixer",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
}  # fmt: skip
FAST = ("qwen3", "gpt_oss", "lfm2")
WAYS = {
    **dict.fromkeys(MASKS, ("masks", ())),
    **{model_type: ("by_document", (module,)) for model_type, module in BY_DOCUMENT.items()},
}


@pytest.mark.parametrize("model_type", [t if t in FAST else slow(t) for t in WAYS])
def test_packed_rows_have_the_gradients_of_their_documents(model_type):
    proof = probe.prove(tiny_config_of(model_type))
    assert (proof.way, proof.modules) == WAYS[model_type]
    assert proof.error < 1e-10


@pytest.mark.parametrize(
    ("model_type", "ways", "module"),
    [
        ("lfm2", ("masks",), r"model.layers.0.conv \(Lfm2ShortConv\)"),
        slow("deepseek_v4", probe.WAYS, r"model.layers.1.self_attn.*DeepseekV4Indexer.*"),
        slow("roberta", probe.WAYS, r"roberta.embeddings \(RobertaEmbeddings\)"),
    ],
)
def test_the_module_that_mixes_documents_is_named(model_type, ways, module):
    proof = probe.prove(tiny_config_of(model_type), ways=ways)
    assert proof.way == "padded"
    assert re.fullmatch(module, proof.problem)


UNUSABLE = {
    "os.mkdir": errno.EROFS, "os.open": errno.EACCES, "fcntl.flock": errno.ENOSYS, "os.fsync": errno.ENOSPC,
}  # fmt: skip


@pytest.mark.parametrize("call", UNUSABLE)
def test_a_proof_is_made_in_memory_where_the_cache_cannot_be_used(call, monkeypatch, tmp_path):
    code, config = UNUSABLE[call], tiny_config_of("qwen3")
    expected = replace(probe.proof_of(config), seconds=0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with keep_messages(logging.WARNING) as warnings, monkeypatch.context() as patches:
        patches.setattr(call, Mock(side_effect=OSError(code, os.strerror(code))))
        found = [probe.proof_of(config) for _ in range(2)]
    assert [replace(each, seconds=0) for each in found] == [expected] * 2
    (warning,) = warnings
    assert warning.startswith(f"{tmp_path}/torchtune_update_step: it cannot keep")
    assert f"({os.strerror(code)})" in warning
    assert not list(tmp_path.rglob("*.json"))


def test_gradients_that_are_not_numbers_prove_nothing():
    ones = {name: torch.ones(2, dtype=torch.float64) for name in "abc"}
    for name in ones:
        assert probe.difference({**ones, name: torch.tensor([1.0, torch.nan])}, ones) == torch.inf


def test_ties_of_sparse_attention_are_found():
    with pytest.raises(
        ValueError, match=r"DeepseekV32ForCausalLM: padding changes .*ties of a sparse"
    ):
        probe.prove(tiny_config_of("deepseek_v32", index_n_heads=1))


def test_a_changed_soft_cap_is_found():
    config = tiny_config_of("gemma2")
    model = build(config, "eager")
    other = copy.deepcopy(model)
    other.config.final_logit_softcapping *= 2
    tokens = torch.arange(3, 20)
    assert probe.check_tail(model.eval(), copy.deepcopy(model), tokens) is False
    with pytest.raises(ValueError, match="logits are not made of its decoder's hidden states"):
        probe.check_tail(model, other, tokens)


@pytest.mark.parametrize(
    ("model_type", "changes", "text"),
    [
        slow("xlnet", {"d_head": 16}, "XLNetLMHeadModel: padding changes gradients"),
        slow("bart", {}, "BartForCausalLM: its logits are not made of"),
        ("qwen3_moe", {"output_router_logits": True}, "output_router_logits=True"),
        ("vit", {}, "no causal language model for model_type=vit"),
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


def test_rows_as_long_as_the_model_is_wide_are_cut_along_their_positions():
    """So are documents of equal lengths, of one token, or as long as the model is wide."""
    config = tiny_config_of("lfm2")
    proof = probe.prove(config, "sdpa")
    torch.manual_seed(0)
    model = build(config, "sdpa").eval()
    decoder = Decoder(copy.deepcopy(model), proof)
    for lengths in ([40, 24], [1, 1], [64, 64], [32, 32], [16] * 4):
        documents = [torch.randint(3, 200, (n,)) for n in lengths]
        expected = [model(input_ids=d[None], use_cache=False).logits[0] for d in documents]
        found = decoder(
            torch.cat(documents)[None],
            input_pos=torch.cat([torch.arange(n) for n in lengths])[None],
            document_lengths=Documents([lengths]),
        )
        torch.testing.assert_close(found[0], torch.cat(expected))


@pytest.mark.parametrize(
    ("model_type", "problem"),
    [
        ("qwen3", None),
        ("lfm2", "Lfm2ForCausalLM has windows, or mixes tokens"),
        slow("llama4_text", "Llama4ForCausalLM has windows, or mixes tokens"),  # chunks
        slow("gpt_oss", "GptOssForCausalLM has windows, or mixes tokens"),  # sinks
        slow("gemma3_text", None),  # windows
        slow("deepseek_v3", None),  # keys are wider than values
        slow("smollm3", None),
    ],
)
def test_parts_of_rows_are_proved(model_type, problem, tmp_path):
    save_tiny(tmp_path, model_type)
    with torch.device("meta"):
        limits = limits_of(causal_lm(str(tmp_path)), torch.device("cpu"), False)
    of_pairs = ("prefix_sharing=True", "set prefix_sharing=False")
    if problem is None:
        limits.multiple_of_packed_rows(64, of_pairs, 2)
        return
    with pytest.raises(ConfigError, match=f"max_ranks_per_row=2: {problem}"):
        limits.multiple_of_packed_rows(64, of_pairs, 2)


def test_a_proof_is_kept_as_long_as_no_code_of_a_forward_changes():
    """It depends on all modules of these packages that the probe imports."""
    code = (
        "import sys, recipe_utils.model.transformers.probe\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('recipe_utils.')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {
        path
        for path in ran.stdout.split()
        if re.search(r"recipe_utils/(model|data/text|parallel)/", path)
    }
    assert len(imported) > 20
    assert imported <= set(map(str, probe.paths_of_code()))
