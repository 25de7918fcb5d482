"""Every config of torchtune 0.6.1 for fine-tuning, adapters, preferences and distillation runs here."""

import json
import math
import os
import re
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import tiny
import torch
import torchtune
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import DPO, KD, SFT, losses, pretend_torchvision, run_recipes, slow, writing_to
from torchtune import config
from torchtune._recipe_registry import get_all_recipes
from torchtune.models.convert_weights import tune_to_meta

from recipe_utils.cli.registry import config_path
from recipe_utils.distillation.distillation_loss import make_distillation_loss
from recipe_utils.losses.attach import HiddenAtTargets, attach_loss
from recipe_utils.losses.log_probs import LinearLogProbs
from recipe_utils.models.construct import build_on_meta
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.sizes import num_outputs, vocab_size_and_max_seq_len
from recipe_utils.preference.pair_losses import make_preference_loss
from recipe_utils.settings.describe import settings_of
from recipe_utils.settings.problems import ConfigError
from recipe_utils.settings.read import read_settings

DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 130}
STOCK_CONFIGS = Path(torchtune.__file__).parents[1] / "recipes" / "configs"


def configs_of(*recipes):
    found = [recipe for recipe in get_all_recipes() if recipe.name in recipes]
    return sorted(each.file_path for recipe in found for each in recipe.configs)


FULL = configs_of("full_finetune_single_device", "full_finetune_distributed")
LORA = configs_of("lora_finetune_single_device", "lora_finetune_distributed")
QAT_LORA = configs_of("qat_lora_finetune_distributed")
QAT = configs_of("qat_distributed")
DEV = ["dev/8B_full_experimental.yaml"]  # torchtune's catalogue does not list it
STOCK = [*FULL, *LORA, *QAT_LORA, *QAT, *DEV]
PREFERENCES = configs_of("full_dpo_distributed", "lora_dpo_distributed", "lora_dpo_single_device")
DISTILLATION = configs_of("knowledge_distillation_single_device", "knowledge_distillation_distributed")
TRANSLATED = {"dev/11B_lora_multi_dataset.yaml": "llama3_2_vision/11B_lora_multi_dataset_update_step"}
"""Stock config -> this project's; its recipe is not registered in torchtune's command line."""
EVERY = [*STOCK, *PREFERENCES, *DISTILLATION]


def recipe_for(stock):
    """Returns this project's recipe for a stock config."""
    return {**dict.fromkeys(PREFERENCES, DPO), **dict.fromkeys(DISTILLATION, KD)}.get(stock, SFT)


def tiny_model_for(stock, cfg):
    """Returns a tiny model with the adapters of a config; in NF4 if the config has NF4."""
    if stock in QAT:  # wide enough for its groups
        return tiny.WIDE_UNTIED_MODEL
    if stock in FULL or stock in DEV or "_full_dpo" in stock:
        return tiny.UNTIED_MODEL
    asked = {key: cfg.model[key] for key in tiny.ADAPTER_KEYS & set(cfg.model)}
    asked = OmegaConf.to_container(OmegaConf.create(asked))
    if "encoder_trainable" in cfg.model:  # vision models name their targets elsewhere
        asked = {"lora_rank": cfg.model.lora_rank, "lora_alpha": cfg.model.lora_alpha}
    is_quantized = "qlora" in cfg.model._component_ or asked.pop("quantize_base", False)
    if is_quantized or stock in QAT_LORA:  # wide enough for their blocks and groups
        return tiny.adapted(tiny.WIDE_MODEL, quantize_base=is_quantized, **asked)
    return tiny.adapted(tiny.UNTIED_MODEL, **asked)


def on_this_machine(stock, tiny_config):
    """Replaces only what a machine without GPU, downloads and bitsandbytes must replace."""
    cfg = OmegaConf.load(STOCK_CONFIGS / stock)
    tiny_values = OmegaConf.create(tiny_config(model=tiny_model_for(stock, cfg), dataset=DATA))
    replaced = ["output_dir", "tokenizer", "model", "checkpointer", "metric_logger", "dataset"]
    if stock in DISTILLATION:
        replaced += ["teacher_model", "teacher_checkpointer"]
    for key in replaced:
        cfg[key] = tiny_values[key]
    if stock in PREFERENCES:
        cfg.dataset = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": 70}
    if "ref_checkpointer" in cfg:
        cfg.ref_checkpointer = tiny_values.checkpointer
    cfg.pop("collate_fn", None)  # of the vision configs; their samples have images
    cfg.device, cfg.dtype = "cpu", "fp32"
    cfg.enable_activation_offloading = False
    if "bitsandbytes" in cfg.optimizer._component_:
        cfg.optimizer._component_ = "torch.optim.AdamW"
    if "decoder.tok_embeddings" in (cfg.get("custom_sharded_layers") or []):
        cfg.custom_sharded_layers = ["tok_embeddings"]
    cfg.max_steps_per_epoch = 2 if stock in FULL else 1
    cfg.epochs = 1
    return OmegaConf.to_container(cfg, resolve=True)


def run_all(configs, recipe=SFT):
    os.environ["TORCH_COMPILE_BACKEND"] = "aot_eager"  # a config compiles; inductor takes a minute
    return run_recipes(configs, recipe)


def test_all_configs_that_train_are_here():
    kinds = (FULL, LORA, QAT_LORA, QAT, DEV, PREFERENCES, DISTILLATION, TRANSLATED)
    assert list(map(len, kinds)) == [44, 77, 4, 2, 1, 5, 4, 1]
    files = STOCK_CONFIGS.rglob("*.yaml")
    training = [file for file in files if "\noptimizer:" in file.read_text()]
    names = {str(file.relative_to(STOCK_CONFIGS)) for file in training}
    assert names - {*EVERY, *TRANSLATED} == {"mistral/7B_full_ppo_low_memory.yaml"}


@pytest.mark.parametrize("stock", TRANSLATED)
def test_a_translated_config_trains_the_same(stock, monkeypatch, tmp_path):
    """The recipe of that config had separate keys for a list of datasets."""
    pretend_torchvision(monkeypatch)
    theirs = OmegaConf.to_container(OmegaConf.load(STOCK_CONFIGS / stock))
    ours = OmegaConf.load(config_path(TRANSLATED[stock]))
    here = {"output_dir": str(tmp_path), "device": "cpu", "dtype": "fp32"}
    read_settings(OmegaConf.merge(ours, here), settings_of(SFT))
    ours = OmegaConf.to_container(ours)
    for key in ("model", "loss", "lr_scheduler", "optimizer", "tokenizer"):  # defaults left out
        given = {k: v for k, v in ours[key].items() if k != "path"}
        assert given.items() <= theirs[key].items(), key
    for key in ("batch_size", "clip_grad_norm", "compile", "enable_activation_checkpointing", "max_steps_per_epoch"):
        assert ours[key] == theirs[key], key
    assert ours["collate_fn"] == theirs["dataloader"]["collate_fn"]
    found = [(each["subset"], each["weight"]) for each in ours["dataset"]]
    assert found == [(each["subset"], each["weight"]) for each in theirs["datasets"]]


def train(stock_configs, world_size, tiny_config):
    """Trains configs. Those that accumulate have 2 microbatches; all of theirs take four times as long."""
    configs = [on_this_machine(stock, tiny_config) for stock in stock_configs]
    for cfg in configs:
        cfg["gradient_accumulation_steps"] = min(cfg["gradient_accumulation_steps"], 2)
    found = run_distributed(run_all, world_size, configs, timeout_seconds=400)[0]
    for stock, logged in zip(stock_configs, found, strict=True):
        assert len(logged) == (2 if stock in FULL else 1), stock
        assert losses(logged) == pytest.approx([4.7] * len(logged), abs=1.2), stock


REPRESENTATIVE = [
    "llama3_2/1B_full_single_device.yaml",
    "llama3_2/1B_full.yaml",
    "llama3_2/1B_lora_single_device.yaml",
    "llama3_2/1B_qlora_single_device.yaml",
    "llama3/8B_dora_single_device.yaml",
    "llama3/8B_qat_full.yaml",
    "dev/8B_full_experimental.yaml",
]


def test_representative_configs_train(tiny_config):
    names = [next(each for each in STOCK if each.endswith(name)) for name in REPRESENTATIVE]
    train(names, 1, tiny_config)


@pytest.mark.slow
def test_a_config_of_every_set_of_keys_trains(tiny_config):
    by_keys = {frozenset(OmegaConf.load(STOCK_CONFIGS / stock)): stock for stock in STOCK}
    train(list(by_keys.values()), 2, tiny_config)


@pytest.mark.parametrize("recipe", [DPO, KD])
@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_configs_of_preferences_and_distillation_train(world_size, recipe, tiny_kd_config):
    stock_configs = PREFERENCES if recipe == DPO else DISTILLATION
    stock_configs = stock_configs[:1] if world_size == 1 else stock_configs
    configs = [on_this_machine(stock, tiny_kd_config) for stock in stock_configs]
    found = run_distributed(run_all, world_size, configs, recipe)[0]
    for stock, (metrics,) in zip(stock_configs, found, strict=True):
        if recipe == DPO:
            assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6), stock
            assert metrics["num_pairs"] > 16, stock
        else:
            both = 0.5 * metrics["ce_loss"] + 0.5 * metrics["kd_loss"]  # their kd_ratio
            assert metrics["loss"] == pytest.approx(both), stock
            assert metrics["ce_loss"] == pytest.approx(4.7, abs=1.2), stock
            assert metrics["kd_loss"] > 0.5, stock  # two models that share no weights


def test_settings_of_every_config_are_accepted(tmp_path):
    """No keys, values or components' arguments are replaced; only CUDA and packages may be missing."""
    for stock in EVERY:
        cfg = OmegaConf.load(STOCK_CONFIGS / stock)
        cfg.output_dir = str(tmp_path)
        try:
            read_settings(cfg, settings_of(recipe_for(stock)))
        except ConfigError as error:
            for problem in error.problems:
                ours = "pip install bitsandbytes, or set it to recipe_utils.optim.AdamW8bit"
                missing = f"device=cuda|{ours}|No module named 'torchvision'"
                assert re.search(missing, str(problem)), (stock, str(problem))


@cache
def _built(component):
    cfg = OmegaConf.create(json.loads(component))
    return build_on_meta(lambda: config.instantiate(cfg), settings=ModelSettings(dtype="bf16"))


def model_on_meta(cfg):
    """Returns a model that is built once for all its configs; heads are attached to a copy."""
    return deepcopy(_built(json.dumps(OmegaConf.to_container(cfg))))


@pytest.mark.parametrize("part", [0, *map(slow, range(1, 8))])
def test_losses_vocabularies_and_units_are_found_in_every_model(part, monkeypatch):
    """Models are the real ones, on the meta device."""
    pretend_torchvision(monkeypatch)
    kinds = {}
    for stock in EVERY:
        cfg = OmegaConf.to_container(OmegaConf.load(STOCK_CONFIGS / stock))
        keys = ("model", "teacher_model", "loss", "kd_loss", "kd_ratio", "custom_sharded_layers")
        kind = {key: cfg[key] for key in keys if key in cfg}
        kinds.setdefault(json.dumps(kind, sort_keys=True), stock)
    # Models of one family share a part, and so the models that are built.
    of_model = sorted(kinds.items())
    for kind, stock in of_model[part * len(of_model) // 8 : (part + 1) * len(of_model) // 8]:
        cfg = OmegaConf.create(json.loads(kind))
        model = model_on_meta(cfg.model)
        vocab_size, max_seq_len = vocab_size_and_max_seq_len(model)
        assert vocab_size > 30_000
        assert max_seq_len >= 4096
        loss = config.instantiate(cfg.loss)
        if stock in PREFERENCES:
            make_preference_loss(lambda loss=loss: loss)
            loss = LinearLogProbs()
        elif stock in DISTILLATION:
            loss = make_distillation_loss(loss, config.instantiate(cfg.kd_loss), cfg.kd_ratio)
            teacher = model_on_meta(cfg.teacher_model)
            attach_loss(teacher, HiddenAtTargets())
            assert num_outputs(teacher) == num_outputs(model)
        attach_loss(model, loss)
        for name in cfg.get("custom_sharded_layers") or []:
            model.get_submodule(name)


@pytest.mark.slow
def test_a_meta_checkpoint_trains_as_a_torchtune_one(weights_folder, tiny_config, tmp_path):
    ours = tiny_config(model=tiny.UNTIED_MODEL)
    weights = torch.load(weights_folder / "weights" / "untied.pt", weights_only=True)
    given = tmp_path / "given"  # a run must not write below the folder that it reads
    given.mkdir()
    torch.save(tune_to_meta(weights), given / "consolidated.00.pth")
    checkpointer = {
        "_component_": "torchtune.training.FullModelMetaCheckpointer",
        "checkpoint_dir": str(given),
        "checkpoint_files": ["consolidated.00.pth"],
        "model_type": "LLAMA3",
    }
    meta = writing_to(tmp_path / "out_meta", {**ours, "checkpointer": checkpointer})
    ((of_ours, of_meta),) = run_distributed(run_all, 1, [ours, meta])
    assert losses(of_meta) == losses(of_ours)
    (saved,) = tmp_path.glob("out_meta/epoch_0/*.bin")
    (saved_ours,) = tmp_path.glob("out/epoch_0/*.bin")
    trained = torch.load(saved, weights_only=True)
    for name, weight in tune_to_meta(torch.load(saved_ours, weights_only=True)).items():
        assert torch.equal(trained[name], weight), name
