"""LoRA and DoRA in decoders of transformers have PEFT's gradients on any layout, and files that PEFT reads."""

import json
import re
import shutil
from functools import cache
from pathlib import Path

import big_batch
import peft
import pytest
import tiny
import torch
import torch.nn.functional as F
from checkpoint_runs import resuming_in
from distributed_runs import run_distributed
from recipe_runs import (
    STEP_OF_8,
    keep_messages,
    losses,
    refusal,
    run_recipe,
    run_recipe_recording_gradients,
    set_up,
    slow,
    tiny_config,
)
from safetensors.torch import load_file
from tiny_transformers import float64_throughout, load, save_tiny, tiny_config_of
from torch import nn
from torchtune.modules.peft import LoRALinear
from transformers import AutoModelForCausalLM

from recipe_utils.models import lora_causal_lm
from recipe_utils.models.adapters.lora import adapters_in_words, find_adapters
from recipe_utils.torchtune_names import log_once

LORA = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
DORA = {**LORA, "use_dora": True}
SOME = {**LORA, "use_rslora": True, "target_modules": ["q_proj", "2.mlp.down_proj", "lm_head"]}
PACKED = {"microbatching": "packed"}
RECOMPUTED = {**PACKED, "enable_activation_checkpointing": True}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Makes a type's folder with weights."""

    @cache
    def make(model_type):
        folder = tmp_path_factory.mktemp(model_type)
        with torch.random.fork_rng():
            save_tiny(folder, model_type)
        return folder

    return make


@pytest.fixture
def config_of(folder_of, tmp_path):
    """Makes a config that starts from adapters that PEFT has saved."""

    def make(model_type, lora, **changes):
        folder, given = str(folder_of(model_type)), tmp_path / "given"
        adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(**lora))
        generator = torch.Generator().manual_seed(0)
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data = 0.2 * drawn + ("magnitude" in name)
        adapted.save_pretrained(given, save_embedding_layers=False)
        checkpointer = {
            "_component_": "recipe_utils.checkpoint.FolderCheckpointer",
            "checkpoint_dir": folder,
            "output_dir": str(tmp_path / "out"),
            "adapter_checkpoint": str(given / "adapter_model.safetensors"),
        }
        builder = "recipe_utils.models.lora_causal_lm"
        model = {"_component_": builder, "path": folder, **lora}
        return tiny_config(tmp_path, model=model, checkpointer=checkpointer, **changes)

    return make


# ---- Gradients ----------------------------------------------------------------------------------


def gradients_of_peft(config):
    """Returns gradients of the mean over all target tokens, one sample after the other."""
    checkpointer = config["checkpointer"]
    with float64_throughout():
        base = AutoModelForCausalLM.from_pretrained(checkpointer["checkpoint_dir"], dtype=torch.float64)
        path = Path(checkpointer["adapter_checkpoint"]).parent
        model = peft.PeftModel.from_pretrained(base, path, is_trainable=True).double()
        sums, num_targets = [], 0
        for sample in tiny.make_samples(8):
            logits = model(input_ids=torch.tensor([sample["tokens"]])).logits[0, :-1]
            labels = torch.tensor(sample["labels"])[1:]
            num_targets += (labels != tiny.IGNORE).sum()
            sums.append(F.cross_entropy(logits, labels, reduction="sum", ignore_index=tiny.IGNORE))
        (sum(sums) / num_targets).backward()
    return {ours(n): p.grad for n, p in model.named_parameters() if p.requires_grad}


def ours(name):
    """Returns a parameter's name in ``Decoder``, from PEFT's in a model or a file."""
    name = name.removeprefix("base_model.").replace(".default", "")
    name = name.replace("lora_A", "lora_a").replace("lora_B", "lora_b")
    return re.sub("lora_magnitude_vector.*", "magnitude", name)


def recorded(config):
    with float64_throughout():
        (gradients,) = run_recipe_recording_gradients(config)
    return gradients


@pytest.mark.parametrize(
    ("model_type", "lora", "world_size", "changes"),
    [
        ("qwen2", DORA, 1, {"microbatching": "in_order"}),  # with biases
        slow("lfm2", LORA, 2, RECOMPUTED),  # adapters within what runs by document
        slow("qwen2", DORA, 2, RECOMPUTED),
        slow("lfm2", DORA, 1, PACKED),
        slow("qwen3", SOME, 2, PACKED),
        slow("gemma2", LORA, 1, PACKED),  # the output layer is not the whole tail
        slow("bloom", {**LORA, "target_modules": ["query_key_value"]}, 2, PACKED),  # masks
        slow("falcon_h1", {**LORA, "target_modules": ["in_proj", "q_proj"]}, 1, PACKED),
    ],
)
def test_gradients_are_those_of_peft_on_one_sample_at_a_time(model_type, lora, world_size, changes, config_of):
    data = {"_component_": "tiny.tiny_dataset", "num_samples": 8}
    config = config_of(model_type, lora, dataset=data, **STEP_OF_8, **changes)
    expected = gradients_of_peft(config)
    for gradients in run_distributed(recorded, world_size, config):
        assert gradients.keys() == expected.keys()
        assert big_batch.error(gradients, expected) < 1e-10


# ---- Files --------------------------------------------------------------------------------------

ATTENTION = {**LORA, "target_modules": ["q_proj", "o_proj"]}


@torch.no_grad()
@pytest.mark.parametrize(
    ("model_type", "lora"),
    [("qwen2", DORA), *map(slow, ("lfm2", "qwen3", "gpt_oss", "qwen3_moe"), (LORA, SOME, DORA, ATTENTION))],
)  # fmt: skip
def test_an_export_computes_the_trained_model_s_logits_merged_and_with_peft(model_type, lora, config_of):
    config = config_of(model_type, lora, max_steps_per_epoch=4)
    with torch.enable_grad(), set_up(config) as made:
        made.train()
    tokens = torch.randint(tiny.VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(1))
    own = made.model.module(tokens)
    folder = Path(config["output_dir"], "epoch_0")
    assert not list(folder.glob("adapter_*"))  # transformers would apply them to the merged model
    base = load(config["checkpointer"]["checkpoint_dir"], dtype=torch.float32)
    assert (own - base(tokens).logits).abs().max() > 0.1
    for model in (load(folder, dtype=torch.float32), peft.PeftModel.from_pretrained(base, folder / "adapter")):
        assert (model(tokens).logits - own).abs().max() < 1e-5 * own.abs().max()


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        ("gemma3", "all-linear"),
        slow("gemma3", ["q_proj"]),  # both parts have it
        *(slow(name, "all-linear") for name in ("gemma4", "llama4", "moss_transcribe_diarize", "llava", "qwen2_5_vl")),
    ],
)
def test_layers_that_text_does_not_train_have_no_adapters(model_type, targets, tiny_config, tmp_path):
    keys = save_tiny(tmp_path / "in", model_type, tie_word_embeddings=False)
    lora = {**LORA, "_component_": "recipe_utils.models.lora_causal_lm", "target_modules": targets}
    config = tiny_config(**keys | {"model": keys["model"] | lora}, max_steps_per_epoch=2)
    log_once.cache_clear()
    with keep_messages() as messages, set_up(config) as made:
        made.train()
    base = load(tmp_path / "in").eval()
    tokens = torch.randint(3, tiny.VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(1))
    base(input_ids=tokens, use_cache=False).logits.sum().backward()
    linear = {name: m for name, m in base.named_modules() if type(m).forward is nn.Linear.forward}  # no routers
    expected = {name for name, module in linear.items() if module.weight.grad is not None}
    if targets == "all-linear":
        expected -= {name for name, module in linear.items() if module is base.get_output_embeddings()}
    else:
        expected = {name for name in expected if name.rpartition(".")[2] in targets}
    folder = tmp_path / "out" / "epoch_0" / "adapter"
    assert set(json.loads((folder / "adapter_config.json").read_text())["target_modules"]) == expected
    others = [text for text in messages if "linear layers for other data than text" in text]
    assert len(others) == (model_type != "llama4")  # whose tower is not built
    adapted = peft.PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        found = made.model.module.eval()(tokens)
        torch.testing.assert_close(found, adapted(input_ids=tokens, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_adapters_start_as_they_were_trained(config_of, tmp_path):
    config = config_of("qwen3", DORA, max_steps_per_epoch=1)
    run_recipe(config)
    model, given = config["model"], config["checkpointer"]
    name = "epoch_0/adapter/adapter_model.safetensors"
    exported = {**given, "adapter_checkpoint": name}
    with set_up({**config, "checkpointer": exported}) as made:
        found = made.model.module.state_dict()
    for key, tensor in load_file(tmp_path / "out" / name).items():
        assert torch.equal(found[ours(key)], tensor)

    path = tmp_path / "given" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "alpha_pattern": {"q_proj": 1}}))
    merged = {
        **exported,
        "checkpoint_dir": str(tmp_path / "out" / "epoch_0"),
        "adapter_checkpoint": str(tmp_path / "out" / name),
        "output_dir": str(tmp_path / "again"),
    }
    for words, changes in (
        ("lora_alpha=6, the model has 12", {"model": {**model, "lora_alpha": 12}}),
        (r"shapes differ: .*\(4, 64\) instead of \(8, 64\)", {"model": {**model, "r": 8}}),
        ("it has .*magnitude", {"model": {**model, "use_dora": False}}),
        ("it has .*down_proj", {"model": {**model, "target_modules": ["q_proj"]}}),
        ("another base", {"checkpointer": merged}),
        ("alpha_pattern={'q_proj': 1}", {"checkpointer": given}),
        ("No such file", {"checkpointer": {**given, "adapter_checkpoint": "none"}}),
    ):
        problem = refusal({**config, "checkpointer": exported, **changes})
        assert re.search(f"checkpointer.adapter_checkpoint.*{words}", problem), problem


@pytest.mark.parametrize(("model_type", "lora", "world_size"), [slow("lfm2", DORA, 2), ("qwen3", LORA, 1)])
def test_a_stopped_training_resumes(model_type, lora, world_size, config_of, tmp_path):
    steps = {"max_steps_per_epoch": 4, "save_every_n_steps": 2}
    config = config_of(model_type, lora, **STEP_OF_8, **steps, **RECOMPUTED, dtype="fp64")
    del config["checkpointer"]["adapter_checkpoint"]  # fresh ones, with DoRA's norms of the base
    uninterrupted = losses(run_distributed(run_recipe, 1, config)[0])
    shutil.copytree(tmp_path / "out" / "step_2", tmp_path / "again" / "step_2")
    resumed = losses(run_distributed(run_recipe, world_size, resuming_in(tmp_path / "again", config))[0])
    assert resumed == pytest.approx(uninterrupted[2:], abs=3e-6 if world_size > 1 else 0)


# ---- Refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "lora", "words"),
    [
        ("qwen3", {"target_modules": ["attn"]}, r"attn fits no layer; set it to some of \[down_proj, .*v_proj\]"),
        ("qwen3", {"target_modules": []}, "it is empty"),
        ("qwen3", {"target_modules": ["self_attn"]}, "self_attn is a Qwen3Attention, not an nn.Linear"),
        ("gemma2", {"target_modules": ["lm_head"]}, "lm_head shares its weight"),
        ("gpt2", {}, "all-linear fits no layer; no nn.Linear can have them"),
        ("gpt2", {"target_modules": ["c_attn"]}, "c_attn is a Conv1D"),
        ("qwen3_moe", {"target_modules": ["gate", "experts"]}, "gate is a .*Router.*; experts is a .*Experts"),
        ("mamba2", {}, r"Mamba2Mixer reads out_proj.weight itself.*some of \[in_proj, lm_head\]"),
        ("gemma3", {"target_modules": ["q_proj", "fc1"]}, r"fc1 fits no layer; set it to some of \[down_proj, .*v_proj\]"),
        ("qwen3", {"r": 0}, "model.r=0: .*at least 1"),
        ("qwen3", {"lora_alpha": 0}, "model.lora_alpha=0: .*above 0"),
        ("qwen3", {"lora_dropout": 1.0}, "model.lora_dropout=1.0: .*below 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_adapted_is_refused_by_name(model_type, lora, words, tmp_path):
    tiny_config_of(model_type).save_pretrained(tmp_path)
    with torch.device("meta"), pytest.raises(ValueError, match=words) as error:
        lora_causal_lm(str(tmp_path), **lora)
    assert str(error.value).startswith("model.")


def test_the_experts_that_have_adapters_are_counted(tmp_path):
    config = tiny_config_of("qwen3_moe")
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        fused = lora_causal_lm(str(tmp_path), r=2, target_modules=["q_proj", "v_proj"])
    experts = [nn.ModuleDict({"w1": layer}) for layer in (LoRALinear(4, 4, 2, 1.0), nn.Linear(4, 4))]
    single = nn.ModuleDict({"experts": nn.ModuleList(experts)})
    texts = [adapters_in_words(model, find_adapters(model)) for model in (fused, single)]
    num_layers = config.num_hidden_layers
    expected = f"modules: q_proj, v_proj; of 0 of {num_layers * config.num_experts} experts"
    assert texts == [f"{2 * num_layers} {expected}", "1 modules: w1; of 1 of 2 experts"]


@pytest.mark.slow
def test_adapters_that_peft_takes_for_those_of_experts_are_warned_of(folder_of):
    folder = folder_of("deepseek_v3")
    log_once.cache_clear()
    with torch.device("meta"), keep_messages() as messages:
        lora_causal_lm(str(folder), **LORA)
    assert sum("PEFT takes adapters of down_proj, gate_proj, up_proj" in m for m in messages) == 1
