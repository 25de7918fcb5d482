"""The configs of real models fit the recipe, their model and each other; no weights are needed."""

import re
from pathlib import Path

import pytest
import torch
import torchtune
import yaml
from omegaconf import OmegaConf
from torchtune import config
from torchtune.config._utils import _get_component_from_path
from torchtune.modules import MultiHeadAttention

from recipe_utils.loss import LinearCrossEntropyLoss
from recipe_utils.loss.head import attach_head
from recipe_utils.model.build import build_on_meta
from recipe_utils.model.sizes import vocab_size_and_max_seq_len
from recipe_utils.settings import read_settings, settings_of
from recipe_utils.tune.registry import RECIPES, ROOT, config_path

STOCK_CONFIGS = Path(torchtune.__file__).parents[1] / "recipes" / "configs"
DEFAULT = "llama3_2/5M_full_update_step"
PARAMETERS = {  # as published
    "llama3_2/1B_full_update_step": 1.24e9,
    "llama3_2/3B_full_update_step": 3.21e9,
    "llama3_1/8B_full_update_step": 8.03e9,
    "qwen2_5/0.5B_full_update_step": 0.494e9,
    "qwen2_5/1.5B_full_update_step": 1.54e9,
    "qwen2_5/7B_full_update_step": 7.62e9,
    "gemma2/2B_full_update_step": 2.61e9,
    "mistral/7B_full_update_step": 7.24e9,
    "phi4/14B_full_update_step": 14.7e9,
}
COMPONENTS = (
    "model", "tokenizer", "checkpointer", "dataset", "optimizer", "loss", "metric_logger", "profiler",
)  # fmt: skip
every_config = pytest.mark.parametrize("name", PARAMETERS)


def load(name):
    return OmegaConf.load(config_path(name))


def build(name):
    return build_on_meta(lambda: config.instantiate(load(name).model), torch.bfloat16)


def unresolved(name):
    return yaml.safe_load(config_path(name).read_text())


def test_every_config_file_is_registered_and_the_other_way_round():
    files = {str(path.relative_to(ROOT / "configs")) for path in ROOT.glob("configs/**/*.yaml")}
    registered = [f"{name}.yaml" for configs in RECIPES.values() for name in configs]
    assert sorted(registered) == sorted(files)
    assert all((ROOT / "recipes" / f"{recipe}.py").is_file() for recipe in RECIPES)


def test_every_registered_training_config_is_tested_here():
    training = {n for n in RECIPES["full_finetune_update_step"] if "dataset" in unresolved(n)}
    assert training == {DEFAULT, *PARAMETERS}
    assert RECIPES["full_finetune_update_step"][0] == DEFAULT


@pytest.mark.parametrize("name", [DEFAULT, *PARAMETERS])
def test_the_recipe_takes_every_key_and_its_value(name, tmp_path):
    here = {"output_dir": str(tmp_path), "device": "cpu", "dtype": "fp32"}
    read_settings(OmegaConf.merge(load(name), here), settings_of("full_finetune_update_step"))


@every_config
def test_the_configs_have_the_same_keys_in_the_same_order(name):
    assert list(unresolved(name)) == list(unresolved(next(iter(PARAMETERS))))
    in_default = list(unresolved(DEFAULT))
    shared = [key for key in unresolved(name) if key in in_default]
    assert shared == [key for key in in_default if key in shared]


@every_config
def test_components_resolve_and_take_these_arguments(name):
    cfg = load(name)
    for key in COMPONENTS:
        assert callable(_get_component_from_path(cfg[key]._component_)), key
    config.validate(cfg)
    assert OmegaConf.to_container(cfg, resolve=True)["checkpointer"]["output_dir"] == cfg.output_dir


@every_config
def test_files_model_data_and_optimizer_are_those_of_the_stock_config(name):
    ours = OmegaConf.to_container(load(name), resolve=True)
    stock = yaml.safe_load(
        (STOCK_CONFIGS / f"{name.removesuffix('_update_step')}.yaml").read_text()
    )
    for cfg in (ours, stock):
        cfg["checkpointer"].pop("output_dir")
        cfg["checkpointer"]["checkpoint_dir"] = cfg["checkpointer"]["checkpoint_dir"].rstrip("/")
        cfg["tokenizer"].pop("max_seq_len", None)
        cfg["optimizer"]["lr"] = float(cfg["optimizer"]["lr"])  # PyYAML reads 2e-5 as a string
    for key in ("model", "tokenizer", "checkpointer", "dataset", "optimizer"):
        assert ours[key] == stock[key], key


@every_config
def test_the_model_has_the_size_of_its_name_and_takes_the_loss(name):
    model = build(name)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert size == pytest.approx(PARAMETERS[name], rel=0.01)
    in_name = float(re.search(r"/([\d.]+)B_", name)[1]) * 1e9
    assert size == pytest.approx(in_name, rel=0.35)  # Gemma 2 2B has 2.6e9

    loss = config.instantiate(load(name).loss)
    assert isinstance(loss, LinearCrossEntropyLoss)
    attach_head(model, loss)


@every_config
def test_the_header_says_the_memory_of_its_model(name):
    text = config_path(name).read_text()
    parameters, gigabytes = re.search(
        r"^# ([\d.e]+) parameters x .* = ([\d.]+) GB", text, re.M
    ).groups()
    assert float(parameters) == pytest.approx(PARAMETERS[name], rel=0.01)
    assert float(gigabytes) == pytest.approx(8 * PARAMETERS[name] / 1e9, rel=0.02)
    assert f"full_finetune_update_step --config {name}\n" in text
    assert f"--output-dir {load(name).checkpoint_dir}" in text


@every_config
def test_a_microbatch_holds_the_longest_sample_and_fits_the_model(name):
    cfg = load(name)
    _, longest_sequence = vocab_size_and_max_seq_len(build(name))
    longest_sample = cfg.tokenizer.max_seq_len
    assert longest_sample <= longest_sequence
    assert cfg.max_tokens_per_microbatch == cfg.batch_size * longest_sample
    if cfg.microbatching == "packed":  # all of a microbatch is one sequence
        assert cfg.max_tokens_per_microbatch <= longest_sequence


@every_config
def test_samples_are_packed_where_the_attention_takes_a_block_mask(name):
    attentions = {type(layer.attn) for layer in build(name).layers}
    takes_block_mask = attentions == {MultiHeadAttention}
    assert load(name).microbatching == ("packed" if takes_block_mask else "least_padding")


@every_config
def test_activations_are_checkpointed_from_seven_billion_parameters_on(name):
    assert load(name).enable_activation_checkpointing == (PARAMETERS[name] > 7e9)
