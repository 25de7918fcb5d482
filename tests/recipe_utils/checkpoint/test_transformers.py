"""Weights of folders are read as transformers reads them; it reads exports as they were trained."""

import json
import shutil

import pytest
import torch
from distributed_runs import run_distributed
from recipe_runs import refusal, run_recipe, set_up, slow
from safetensors.torch import load_file, save_file
from tiny_transformers import keys_of_folder, save_tiny
from transformers import AutoModelForCausalLM

from recipe_utils.files import CheckpointError

TOKENS = torch.arange(3, 43)[None]


def logits_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def read(config):
    """Returns all weights and buffers after a recipe's setup, and logits, on a rank of several."""
    with set_up(config) as made:
        made.model.eval()
        tensors = dict([*made.model.named_parameters(), *made.model.named_buffers()])
        full = {n: getattr(t, "full_tensor", lambda t=t: t)().detach() for n, t in tensors.items()}
        with torch.no_grad():
            return {n: t.numpy() for n, t in full.items()}, made.model(TOKENS).numpy()


@pytest.mark.parametrize("model_type", [slow("gemma3_text"), "qwen3_moe", slow("llama4_text")])
def test_ranks_read_what_transformers_reads(model_type, tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / "in", model_type))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in").eval()
    expected = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        logits = model(input_ids=TOKENS, use_cache=False).logits
    for tensors, found in run_distributed(read, 2, config):
        assert tensors.keys() == {f"model.{name}" for name in expected}
        for name, tensor in expected.items():
            assert torch.equal(torch.from_numpy(tensors[f"model.{name}"]), tensor), name
        torch.testing.assert_close(torch.from_numpy(found), logits)


@pytest.mark.parametrize("model_type", ["qwen3", *map(slow, ("qwen3_moe", "gpt_oss", "lfm2"))])
def test_an_export_is_a_folder_like_the_first(model_type, tiny_config, tmp_path):
    """It has the same names of weights, tied ones once, and the logits of the trained model."""
    tied = {"tie_word_embeddings": model_type == "qwen3"}
    keys = save_tiny(tmp_path / "in", model_type, **tied)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    config = tiny_config(**keys, max_steps_per_epoch=2)
    run_recipe(config)
    exported = tmp_path / "out" / "epoch_0"
    before, after = (load_file(each / "model.safetensors") for each in (tmp_path / "in", exported))
    assert before.keys() == after.keys()
    assert ("lm_head.weight" in after) != tied["tie_word_embeddings"]
    assert (exported / "tokenizer.json").read_text() == "{}"
    assert not torch.equal(logits_of(tmp_path / "in"), logits_of(exported))
    again = {**config, "output_dir": str(tmp_path / "again"), **keys_of_folder(exported)}
    with set_up(again) as made, torch.no_grad():
        made.model.eval()
        torch.testing.assert_close(made.model(TOKENS), logits_of(exported))


def test_an_export_of_quantized_weights_is_not_described_as_quantized(tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / "in", "gpt_oss"), max_steps_per_epoch=1)
    path = tmp_path / "in" / "config.json"
    described = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(described))
    run_recipe(config)
    assert "quantization_config" not in (tmp_path / "out" / "epoch_0" / "config.json").read_text()


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_config_json_that_changed_or_is_another_is_refused(tiny_config, tmp_path):
    """It changes between save and resume, and differs from that beside the loaded weights."""
    config = tiny_config(
        **save_tiny(tmp_path / "in", "qwen3"), save_every_n_steps=1, max_steps_per_epoch=2
    )
    run_recipe(config)
    change_config(tmp_path / "in", rms_norm_eps=0.5)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        run_recipe({**config, "resume_from_checkpoint": True, "epochs": 2})
    other = save_tiny(tmp_path / "other", "qwen3")["checkpointer"]
    text = refusal({**config, "checkpointer": other, "output_dir": str(tmp_path / "out_2")})
    assert "its config.json has rms_norm_eps=1e-06, and that of model.path" in text


def test_files_beside_the_weights_are_not_read(tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / "in", "qwen3"))
    weights = load_file(tmp_path / "in" / "model.safetensors")
    save_file({n: t + 1 for n, t in weights.items()}, tmp_path / "in" / "zz_average.safetensors")
    assert all((tensor < 0.9).any() for tensor in read(config)[0].values() if tensor.ndim > 1)


def test_adapters_beside_the_weights_are_refused(tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / "in", "qwen3"))
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


def test_weights_that_are_not_there_yet_are_described(tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / "in", "qwen3"))
    weights = tmp_path / "in" / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    assert f"it is a pointer of Git LFS; run `git lfs pull` in {tmp_path}/in" in refusal(config)
    weights.rename(tmp_path / "in" / "pytorch_model.bin")
    text = "no *.safetensors; convert pytorch_model.bin: from_pretrained(...).save_pretrained(...)"
    assert text in refusal(config)


def test_fresh_weights_come_from_a_config_and_a_seed(tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / "in", "qwen3"))
    described = json.loads((tmp_path / "in" / "config.json").read_text())
    config["model"] = {**config["model"], "config": described}
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
