"""Weights of folders are read as transformers reads them; it reads exports as they were trained."""

import json
import re
import shutil

import pytest
import torch
from distributed_runs import run_distributed
from recipe_runs import refusal, run_recipe, run_recipe_keeping_warnings, set_up, slow, writing_to
from safetensors.torch import load_file, save_file
from tiny_transformers import FILES, OLD_WEIGHTS, keys_of_folder, load, save_published, save_tiny, tensors_of
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from recipe_utils.files import CheckpointError

TOKENS = torch.arange(3, 43)[None]


def logits_of(folder):
    model = load(folder).eval()
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def read(config):
    """Returns all weights and buffers after a recipe's setup, and logits, on a rank of several."""
    with set_up(config) as made:
        made.model.module.eval()
        tensors = dict([*made.model.module.named_parameters(), *made.model.module.named_buffers()])
        full = {n: getattr(t, "full_tensor", lambda t=t: t)().detach() for n, t in tensors.items()}
        with torch.no_grad():
            return {n: t.numpy() for n, t in full.items()}, made.model.module(TOKENS).numpy()


@pytest.mark.parametrize("model_type", [*map(slow, ("gemma3_text", "llama4_text", "llama4")), "gemma3", "qwen3_moe"])
def test_ranks_read_what_transformers_reads(model_type, tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / "in", model_type))
    model = load(tmp_path / "in").eval()
    expected = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        logits = model(input_ids=TOKENS, use_cache=False).logits
    for tensors, found in run_distributed(read, 2, config):
        assert tensors.keys() == {f"model.{name}" for name in expected}
        for name, tensor in expected.items():
            assert torch.equal(torch.from_numpy(tensors[f"model.{name}"]), tensor), name
        torch.testing.assert_close(torch.from_numpy(found), logits)


@pytest.mark.parametrize(
    ("model_type", "extra"),
    [
        ("deepseek_v3", ["model.layers.61.eh_proj.weight"]),
        (
            "deepseek_v3",
            [f"model.layers.{i}.{each}.weight" for i in (4, 5) for each in ("eh_proj", "self_attn.o_proj")],
        ),
        slow("glm4_moe", ["model.layers.92.shared_head.norm.weight"]),
        slow("glm4_moe", ["model.layers.4.shared_head.norm.weight", "model.layers.4.mlp.experts.0.up_proj.weight"]),
        ("llama4", []),
        ("qwen2_5_vl", []),
        *(slow(name, []) for name in ("gemma3", "qwen3_5", "moss_transcribe_diarize", "llava", "mllama")),
        slow("qwen3_next", ["mtp.fc.weight"]),
        slow("gpt2", ["transformer.h.0.attn.bias"]),
        slow("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
        *(slow(name, []) for name in ("qwen3_moe", "gpt_oss", "lfm2")),
    ],
)
def test_an_export_is_the_folder_that_came_in_with_other_weights(model_type, extra, tiny_config, tmp_path):
    folder, exported = tmp_path / "in", tmp_path / "out" / "epoch_0"
    config = tiny_config(**save_published(folder, model_type, extra), dtype="bf16", max_steps_per_epoch=1)
    run_recipe(config)
    files = {str(each.relative_to(exported)) for each in exported.rglob("*") if each.is_file()}
    weight_files = {"model-0.safetensors", "model-1.safetensors", "model.safetensors.index.json"}
    assert files == {"config.json", *FILES, *weight_files}
    for name in ("config.json", *FILES):
        assert (exported / name).read_bytes() == (folder / name).read_bytes(), name
    before, after = tensors_of(folder), tensors_of(exported)
    assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in before.items()}
    kept = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    not_for_text = "e_score_correction_bias|vision|visual|audio|multi_modal"
    if model_type == "mllama":
        not_for_text += r"|layers\.3\."  # it attends to images
    others = {n for n in before if re.search(not_for_text, n)} | {*extra}
    assert others <= kept <= others | {n for n in before if "expert" in n}
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(exported / file)[name], after[name])
    _, loading = load(exported, output_loading_info=True)
    assert not loading["missing_keys"]
    assert bool(loading["unexpected_keys"]) == (model_type == "llama4" or "layers.4" in "".join(extra))
    again = {**config, "output_dir": str(tmp_path / "again"), **keys_of_folder(exported)}
    with set_up(again) as made, torch.no_grad():
        torch.testing.assert_close(made.model.module.eval()(TOKENS), logits_of(exported))


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("scaling", [None, YARN])
def test_transformers_4_reads_the_logits_of_the_trained_model(scaling, tiny_config, tmp_path):
    """Transformers 4 takes RoPE from ``rope_theta`` and ``rope_scaling``, and 10,000 without them."""
    keys = save_published(tmp_path / "in", "qwen3", rope_scaling=scaling)
    with set_up(tiny_config(**keys, max_steps_per_epoch=1)) as made:
        made.train()
        expected = made.model.module.eval()(TOKENS).detach()
    exported = tmp_path / "out" / "epoch_0"
    base, described = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "in", exported))
    assert described == base | {"torch_dtype": "float32"}
    old = described.get("rope_scaling") or {"type": "default"}
    rope = {"rope_type": old.get("type"), **old, "rope_theta": described.pop("rope_theta", 1e4)}
    config = CONFIG_MAPPING["qwen3"](**described | {"rope_scaling": None, "rope_parameters": rope})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(tensors_of(exported))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=TOKENS).logits, expected)


def test_what_adapters_do_not_change_keeps_its_bits(tiny_config, tmp_path):
    """In all exports of a run, which has another precision than the folder."""
    keys = save_published(tmp_path / "in", "deepseek_v3")
    adapted = {"_component_": "recipe_utils.models.lora_causal_lm"}
    keys["model"] |= {**adapted, "target_modules": ["o_proj"]}
    run_recipe(tiny_config(**keys, max_steps_per_epoch=2, export_every_n_steps=1))
    before = tensors_of(tmp_path / "in")
    for name in ("export_step_1", "epoch_0"):
        after = tensors_of(tmp_path / "out" / name)
        merged = {n for n in after if n not in before or not torch.equal(after[n], before[n])}
        assert merged == {n for n in before if "o_proj" in n}
        assert {after[n].dtype for n in merged} == {torch.float32}
        assert all(after[n].dtype == before[n].dtype for n in before.keys() - merged)
        for file, content in FILES.items():
            assert (tmp_path / "out" / name / file).read_text() == content
        assert not (tmp_path / "out" / name / OLD_WEIGHTS[0]).exists()


def test_names_and_ties_of_the_files_stay(tiny_config, tmp_path):
    """Files of a model without its output layer lack a prefix, and may contain a tied weight twice."""
    for name, change in {
        "prefix": lambda n, t: {n.removeprefix("transformer."): t},
        "twice": lambda n, t: {n: t, **({"lm_head.weight": t.clone()} if ".wte." in n else {})},
    }.items():
        config = tiny_config(**save_tiny(tmp_path / name, "gpt2"), max_steps_per_epoch=1)
        weights = load_file(tmp_path / name / "model.safetensors")
        changed = {n: t for old, w in weights.items() for n, t in change(old, w).items()}
        save_file(changed, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        run_recipe(writing_to(tmp_path / f"{name}_out", config))
        after = load_file(tmp_path / f"{name}_out" / "epoch_0" / "model.safetensors")
        assert after.keys() == changed.keys()
        assert not any(torch.equal(after[n], changed[n]) for n in changed)
        if name == "twice":
            assert torch.equal(after["lm_head.weight"], after["transformer.wte.weight"])


def test_an_export_of_quantized_weights_is_not_described_as_quantized(tiny_config, tmp_path):
    """Weights of 448 times a scale of 1/448, in blocks of float8, are ones."""
    config = tiny_config(**save_tiny(tmp_path / "in", "qwen3"), max_steps_per_epoch=1)
    weights = load_file(tmp_path / "in" / "model.safetensors")
    for name in [n for n in weights if "proj" in n]:
        weights[name] = torch.full_like(weights[name], 448).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = torch.full((1, 1), 1 / 448)
    save_file(weights, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    change_config(tmp_path / "in", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    read_weights = read(config)[0]
    assert all((w == 1).all() for n, w in read_weights.items() if "proj" in n)
    _, warnings = run_recipe_keeping_warnings(config)
    exported = tmp_path / "out" / "epoch_0"
    assert "quantization_config" not in (exported / "config.json").read_text()
    assert tensors_of(exported).keys() == {n for n in weights if "scale" not in n}
    assert not any("exports lack" in text for text in warnings)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, "quantized (bitsandbytes)"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized (gptq)"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "quantized (awq)"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "model_type=own needs code"),
    ],
)  # fmt: skip
def test_folders_that_cannot_be_trained_exactly_are_refused(changes, text, tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / "in", "qwen3"))
    whole = save_tiny(tmp_path / "whole", "qwen3")
    change_config(tmp_path / "in", **changes)
    assert f"model.path={tmp_path}/in: " in (found := refusal(config))
    assert text in found
    found = refusal({**config, "model": whole["model"]})
    assert f"checkpointer.checkpoint_dir={tmp_path}/in: " in found
    assert text in found


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_config_json_that_changed_or_is_another_is_refused(tiny_config, tmp_path):
    """It changes between save and resume, and differs from that beside the loaded weights."""
    config = tiny_config(**save_tiny(tmp_path / "in", "qwen3"), save_every_n_steps=1, max_steps_per_epoch=2)
    run_recipe(config)
    change_config(tmp_path / "in", rms_norm_eps=0.5)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        run_recipe({**config, "resume_from_checkpoint": True, "epochs": 2})
    other = save_tiny(tmp_path / "other", "qwen3")["checkpointer"]
    text = refusal({**config, "checkpointer": other, "output_dir": str(tmp_path / "out_2")})
    assert "its config.json has rms_norm_eps=1e-06, and that of model.path" in text


def test_other_weights_beside_them_are_not_read_and_adapters_refused(tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / "in", "qwen3"))
    weights = load_file(tmp_path / "in" / "model.safetensors")
    save_file({n: t + 1 for n, t in weights.items()}, tmp_path / "in" / "zz_average.safetensors")
    assert all((tensor < 0.9).any() for tensor in read(config)[0].values() if tensor.ndim > 1)
    (tmp_path / "in" / "adapter_config.json").write_text("{}")
    assert "transformers would apply its adapter_config.json" in refusal(config)


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w: w.pop("model.norm.weight"), "missing keys: model.norm.weight"),
        (lambda w: w.update({"model.extra": torch.ones(1)}), "unexpected keys: model.extra"),
        (lambda w: w.update({"model.norm.weight": torch.ones(3)}), "model.norm.weight (3,) instead of (64,)"),
        (lambda w: w.update({"lm_head.weight": w["lm_head.weight"] + 1}), "lm_head.weight and model.embed_tokens.weight differ"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named(change, text, tiny_config, tmp_path, capfd):
    config = tiny_config(**save_tiny(tmp_path / "in", "qwen3"))
    if "lm_head" in text:
        change_config(tmp_path / "in", tie_word_embeddings=True)
    change_weights(tmp_path / "in", change)
    capfd.readouterr()
    assert text in refusal(config)
    assert "can be ignored" not in capfd.readouterr().err  # of transformers, about missing keys


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("deepseek_v3", "model.layers.4.self_attn.o_proj.weight"),
        ("deepseek_v3", "model.layers.3.eh_proj.weight"),
        slow("llama", "model.layers.4.eh_proj.weight"),
        slow("llama4", "language_model.model.layers.4.mlp.weight"),
    ],
)
def test_a_layer_that_predicts_no_further_tokens_is_not_ignored(model_type, name, tiny_config, tmp_path):
    """It is a decoder layer too many, or has a name that no layer of its kind has."""
    config = tiny_config(**save_tiny(tmp_path / "in", model_type))
    change_weights(tmp_path / "in", lambda weights: weights.update({name: torch.ones(3)}))
    assert f"{tmp_path}/in does not fit its config.json: unexpected keys: {name}" in refusal(config)


def test_weights_that_are_not_there_yet_are_described(tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / "in", "qwen3"))
    weights = tmp_path / "in" / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    assert f"it is a pointer of Git LFS; run `git lfs pull` in {tmp_path}/in" in refusal(config)
    weights.rename(tmp_path / "in" / "pytorch_model.bin")
    assert "no *.safetensors; convert pytorch_model.bin: from_pretrained(...).save_pretrained(...)" in refusal(config)


def test_fresh_weights_come_from_a_config_and_a_seed(tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / "in", "qwen3"))
    config["model"] = {**config["model"], "config": json.loads((tmp_path / "in" / "config.json").read_text())}
    assert "has weights and a config.json; remove this key" in refusal(config)
    shutil.rmtree(tmp_path / "in")
    assert "it has no *.safetensors; set another folder, or checkpointer.seed" in refusal(config)
    config["checkpointer"]["seed"] = 3
    text = "in has weights (model.safetensors); remove this key"
    again = {**config, **save_tiny(tmp_path / "in", "qwen3")}
    again["checkpointer"]["seed"] = 3
    assert text in refusal(again)
    shutil.rmtree(tmp_path / "in")
    config["model"]["config"]["hidden_sizes"] = 1
    assert "Qwen3Config has no argument" in refusal(config).replace("such argument", "argument")
    del config["model"]["config"]["hidden_sizes"]
    first, second = (read(config)[0] for _ in range(2))
    assert all((first[name] == second[name]).all() for name in first)
    config["checkpointer"]["seed"] = 4
    other = read(config)[0]
    assert any((first[name] != other[name]).any() for name in first)
