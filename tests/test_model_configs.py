"""The registered configs are short, and fit their recipe, their model and each other; no weights are needed."""

import json
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtune
import yaml
from decoder_types import tiny_config_of
from image_folders import write_image_folder
from omegaconf import OmegaConf
from recipe_runs import pretend_torchvision
from torchtune import config
from torchtune.modules import MultiHeadAttention
from torchtune.modules.low_precision import FrozenNF4Linear
from torchtune.modules.peft import get_adapter_params
from torchtune.training.checkpointing._utils import FormattedCheckpointFiles
from transformers import AutoConfig

from recipe_utils.cli.registry import RECIPES, ROOT, config_path, recipe_path
from recipe_utils.dinov3.backbone import with_heads
from recipe_utils.dinov3.images.multi_crop import check_fits
from recipe_utils.models.construct import build_on_meta
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.sizes import num_outputs, vocab_size_and_max_seq_len
from recipe_utils.models.transformers import decoder
from recipe_utils.settings.describe import settings_of
from recipe_utils.settings.keys import keys_of
from recipe_utils.settings.read import read_settings

STOCK_CONFIGS = Path(torchtune.__file__).parents[1] / "recipes" / "configs"
TRAINING = [
    name for configs in RECIPES.values() for name in configs if "benchmark" not in name and "generation" not in name
]
OF_TRANSFORMERS: dict[str, tuple[float, dict[str, Any]]] = {  # published size, config.json
    "qwen3/0.6B_full_update_step": (0.596e9, {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": True,
    }),
    "qwen3/8B_full_update_step": (8.19e9, {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
    }),
    "gemma3/1B_full_update_step": (1.00e9, {
        "model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912, "sliding_window": 512,
        "vocab_size": 262144,
    }),
    "smollm3/3B_full_update_step": (3.08e9, {
        "model_type": "smollm3", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 11008, "tie_word_embeddings": True, "vocab_size": 128256,
    }),
    "lfm2/1.2B_full_update_step": (1.17e9, {
        "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 12288, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "vocab_size": 65536,
    }),
    "gpt_oss/20B_lora_update_step": (20.9e9, {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32,
    }),
    "qwen3_vl/2B_full_update_step": (2.13e9, {
        "model_type": "qwen3_vl", "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 6144,
        },
        "vision_config": {
            "hidden_size": 1024, "depth": 24, "intermediate_size": 4096, "out_hidden_size": 2048, "num_heads": 16,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    }),
    "qwen2_5_vl/3B_lora_update_step": (3.75e9, {
        "model_type": "qwen2_5_vl", "tie_word_embeddings": True,
        "text_config": {
            "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
            "intermediate_size": 11008,
        },
        "vision_config": {"hidden_size": 1280, "depth": 32, "intermediate_size": 3420, "out_hidden_size": 2048, "num_heads": 16},
    }),
}  # fmt: skip
VISION = ["llama3_2_vision/11B_lora_multi_dataset_update_step"]  # recipes/test_drop_in.py has it
TEXT = [name for name in TRAINING if "B_" in name and name not in {*OF_TRANSFORMERS, *VISION}]
PREFERENCES = [name for name in TEXT if "B_full_dpo_" in name]
PARAMETERS = {  # as published
    "llama3_2/1B_full_update_step": 1.24e9,
    "llama3_2/3B_full_update_step": 3.21e9,
    "llama3_1/8B_full_update_step": 8.03e9,
    "qwen2_5/0.5B_full_update_step": 0.494e9,
    "qwen2_5/1.5B_full_update_step": 1.54e9,
    "qwen2_5/7B_full_update_step": 7.62e9,
    "gemma2/2B_full_update_step": 2.61e9,
    "mistral/7B_full_update_step": 7.24e9,
    "phi4/14B_full_update_step": 14.66e9,
}
ADAPTERS = {name for name in TEXT if "lora_" in name}
TEACHERS = {  # config: the one that trains all weights of its teacher
    "llama3_2/8B_to_1B_KD_update_step": "llama3_1/8B_full_update_step",
    "qwen2_5/7B_to_0.5B_KD_update_step": "qwen2_5/7B_full_update_step",
    "qwen2_5/7B_to_1.5B_KD_update_step": "qwen2_5/7B_full_update_step",
}
BACKBONES = {  # as published: arXiv:2508.10104, arXiv:2104.14294
    "vit/S16_dinov3_update_step": 21.6e6,
    "vit/B16_dinov3_update_step": 85.7e6,
    "vit/L16_dinov3_update_step": 303e6,
}
BETAS = [0.9, 0.95]
"""Betas of AdamW: stock's beta2 of 0.999 averages over 1000 update steps, longer than most fine-tuning."""
SAMPLES = 160
"""Samples per update step and rank; stock's configs have 16 or 32."""
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Bits per parameter: its code, an 8-bit scale per 64 and a 32-bit scale per 256 of those."""


def load(name):
    return OmegaConf.load(config_path(name))


def plain(name, resolve=True):
    return OmegaConf.to_container(load(name), resolve=resolve)


def recipe_of(name):
    (recipe,) = [recipe for recipe, configs in RECIPES.items() if name in configs]
    return recipe


def full_name(name):
    """Returns the config that trains all weights of the same model."""
    name = re.sub(r"[\d.]+B_to_(.*)_KD_", r"\1_full_", name)
    return re.sub("_q?lora_", "_full_", name).replace("_dpo", "")


@cache
def build_once(component):
    make = partial(config.instantiate, OmegaConf.create(json.loads(component)))
    return build_on_meta(make, ModelSettings(dtype="bf16"))


def build(name, key="model"):
    """Builds a model on the meta device, once for all configs that have it."""
    return build_once(json.dumps(plain(name)[key]))


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


def memory_in_header(name):
    """Returns GB by purpose, as in the header's lines."""
    text = config_path(name).read_text().replace("\n#", "")
    return [float(number) for number in re.findall(r"([\d.]+) GB", text)]


def bytes_per_trained(cfg):
    """Returns bytes of a weight, its gradient and AdamW's two moments, which have scales in 8 bits."""
    return 4 + 4 + (2 * (1 + 4 / 256) if "8bit" in cfg.optimizer._component_ else 8)


def files_of(checkpointer):
    """Returns the checkpointer with its files by name."""
    files = checkpointer["checkpoint_files"]
    if isinstance(files, dict):
        files = FormattedCheckpointFiles.from_dict(files).build_checkpoint_filenames()
    names = ("_component_", "model_type", "safe_serialization")
    folder = checkpointer["checkpoint_dir"].rstrip("/")
    return [folder, files, *(checkpointer.get(name) for name in names)]


def test_configs_are_registered_and_tested_here():
    files = {str(path.relative_to(ROOT / "configs")) for path in ROOT.glob("configs/**/*.yaml")}
    registered = [name for configs in RECIPES.values() for name in configs]
    assert sorted(f"{name}.yaml" for name in registered) == sorted(files)
    assert all(recipe_path(recipe).is_file() for recipe in RECIPES)
    assert {*PARAMETERS, *ADAPTERS, *PREFERENCES, *TEACHERS} == {*TEXT}
    embedded = {*TRAINING} - {*TEXT, *BACKBONES, *OF_TRANSFORMERS, *VISION}
    assert all(re.search("/(5M|digits)_", name) for name in embedded)


@pytest.mark.parametrize("name", TRAINING)
def test_a_config_is_short_accepted_and_names_its_commands(name, tmp_path, monkeypatch):
    if name in VISION:
        pretend_torchvision(monkeypatch)
    recipe, text = recipe_of(name), config_path(name).read_text()
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 100
    assert f"# All keys: python -m recipe_utils.settings {recipe}\n" in text
    assert f"{recipe} --config {name}\n" in text
    here = {"output_dir": str(tmp_path), "device": "cpu", "dtype": "fp32"}
    if "lora_causal_lm" in text or name in OF_TRANSFORMERS:  # the model chooses the plan
        if "images: " in text:
            write_image_folder(tmp_path / "in", "qwen2_vl")
        else:
            tiny_config_of("qwen3").save_pretrained(tmp_path / "in")
        here["checkpoint_dir"] = str(tmp_path / "in")
    read_settings(OmegaConf.merge(load(name), here), settings_of(recipe))
    for key in ("checkpoint_dir", "teacher_dir"):
        assert name not in TEXT or key not in load(name) or f"--output-dir {load(name)[key]}" in text
    keys = keys_of(settings_of(recipe))
    defaults = {key: spec.default for key, spec in keys.items() if not spec.is_required()}
    given = plain(name, resolve=False)
    assert not [key for key in given if key in defaults and given[key] == defaults[key]]


@pytest.mark.parametrize("name", [*PARAMETERS, *sorted(name for name in ADAPTERS if "_dpo_" not in name)])
def test_model_data_and_optimizer_are_those_of_the_stock_config(name):
    ours = plain(name)
    stock_name = name.removesuffix("_update_step").replace("_qlora", "_qlora_single_device")
    stock = yaml.safe_load((STOCK_CONFIGS / f"{stock_name}.yaml").read_text())
    for cfg in (ours, stock):
        cfg["checkpointer"] = files_of(cfg["checkpointer"])
        cfg["tokenizer"].pop("max_seq_len", None)
        cfg["optimizer"]["lr"] = float(cfg["optimizer"]["lr"])
    # From 7B on of 8 bits, see test_batches_rows_and_dtypes_fit_the_model.
    stock["optimizer"] |= {"betas": BETAS, "_component_": ours["optimizer"]["_component_"]}
    for key in ("tokenizer", "checkpointer", "optimizer"):
        assert ours[key] == stock[key], key
    for key in ("model", "dataset"):  # without arguments that equal their default
        assert ours[key].items() <= stock[key].items(), key
    if name in ADAPTERS:
        warm_up = stock["lr_scheduler"]["num_warmup_steps"] * 32 // SAMPLES
        assert ours["lr_scheduler"] == {**stock["lr_scheduler"], "num_warmup_steps": warm_up}


@pytest.mark.parametrize("name", sorted(name for name in TEXT if name not in PARAMETERS))
def test_a_config_has_the_model_and_the_settings_of_the_full_one(name):
    ours, full = plain(name, resolve=False), plain(full_name(name), resolve=False)
    for key in (
        *("checkpoint_dir", "checkpointer", "microbatching", "clip_grad_norm", "dtype", "seed"),
        *("num_workers", "enable_activation_checkpointing", "save_every_n_minutes"),
    ):
        assert ours.get(key) == full.get(key), key
    own = name.removesuffix("_update_step").replace("/", "_").replace(".", "_")
    assert ours["output_dir"].endswith(own.replace("_full", ""))


@pytest.mark.parametrize("name", sorted(name for name in TEXT if "_dpo_" in name))
def test_preferences_have_data_loss_and_schedule_of_the_stock_configs(name):
    ours = plain(name)
    kind = "8B_lora_dpo" if "_lora_" in name else "8B_full_dpo"
    stock = yaml.safe_load((STOCK_CONFIGS / "llama3_1" / f"{kind}.yaml").read_text())
    stock["optimizer"] |= {"lr": float(stock["optimizer"]["lr"]), "betas": BETAS}
    stock["optimizer"]["_component_"] = ours["optimizer"]["_component_"]
    keys = ["dataset", "optimizer", "lr_scheduler", "batch_size", "gradient_accumulation_steps"]
    assert {key: ours[key] for key in keys} == {key: stock[key] for key in keys}
    assert ours["loss"] == {key: stock["loss"][key] for key in ("_component_", "beta")}
    assert (ours["tokenizer"]["max_seq_len"], ours["prefix_sharing"]) == (1024, True)


@pytest.mark.parametrize("name", TEACHERS)
def test_distillation_has_the_stock_data_and_fitting_models(name):
    ours, teacher = plain(name), plain(TEACHERS[name])
    stock_path = STOCK_CONFIGS / "llama3_2" / "8B_to_1B_KD_lora_distributed.yaml"
    stock = yaml.safe_load(stock_path.read_text())
    assert ours["dataset"].items() <= stock["dataset"].items()
    assert stock["kd_ratio"] == keys_of(settings_of(recipe_of(name)))["kd_ratio"].default
    assert ours["lr_scheduler"] == {**stock["lr_scheduler"], "num_warmup_steps": 20}
    assert (ours["teacher_dir"], ours["teacher_model"]) == (teacher["checkpoint_dir"], teacher["model"])
    found, expected = ours["teacher_checkpointer"], teacher["checkpointer"]
    assert files_of(found) == files_of(expected)
    student, of_teacher = build(name), build(name, "teacher_model")
    assert vocab_size_and_max_seq_len(of_teacher)[1] >= ours["tokenizer"]["max_seq_len"]
    # Qwen2.5's output layers have rows without a token, and not all equally many.
    rows = (151_936, 152_064) if "qwen" in name else (128_256, 128_256)
    assert (num_outputs(student), num_outputs(of_teacher)) == rows


@pytest.mark.parametrize("name", TEXT)
def test_batches_rows_and_dtypes_fit_the_model(name):
    cfg, parameters = load(name), PARAMETERS[full_name(name)]
    _, longest_sequence = vocab_size_and_max_seq_len(build(name))
    longest_sample = cfg.tokenizer.max_seq_len
    assert longest_sample <= longest_sequence
    sides = 2 if "_dpo_" in name else 1
    assert cfg.max_tokens_per_microbatch == sides * cfg.batch_size * longest_sample
    takes_block_mask = {type(layer.attn) for layer in build(name).layers} == {MultiHeadAttention}
    assert cfg.microbatching == ("packed" if takes_block_mask else "least_padding")
    if takes_block_mask:  # all of a microbatch is one sequence
        assert cfg.max_tokens_per_microbatch <= longest_sequence
    if "_dpo_" not in name:
        assert cfg.batch_size * cfg.gradient_accumulation_steps == SAMPLES
    is_small = "lora_" in name or parameters < 4e9  # 51 GB at 3B; 7B would need 112
    expected = "torch.optim.AdamW" if is_small else "recipe_utils.optim.AdamW8bit"
    assert cfg.optimizer._component_ == expected
    assert (cfg.dtype, cfg.weights_dtype) == ("bf16", "fp32")
    assert cfg.optimizer.betas == BETAS
    assert cfg.get("enable_activation_checkpointing", False) == (parameters > 7e9)


@pytest.mark.parametrize("name", TEXT)
def test_a_model_has_its_published_size_and_the_memory_in_its_header(name):
    whole, parameters = build(name), PARAMETERS[full_name(name)]
    adapters = 0
    if name in ADAPTERS:
        adapters = sum(parameter.numel() for parameter in get_adapter_params(whole).values())
    base = size(whole) - adapters
    assert base == pytest.approx(parameters, rel=0.01)
    quantized = sum(
        module.weight.numel()
        for module in whole.modules()
        if isinstance(module, FrozenNF4Linear) or getattr(module, "_quantize_base", False)
    )
    assert 0.75 < quantized / base < 0.9 if "_qlora_" in name else quantized == 0
    trained = (adapters or base) * bytes_per_trained(load(name))
    expected = [trained]
    if name in ADAPTERS:
        expected.append(quantized * NF4_BITS / 8 + (base - quantized) * 2)
    elif name in PREFERENCES:  # with a reference, and without one on the GPU
        expected.insert(0, trained + 2 * base)
    elif name in TEACHERS:
        expected.append(2 * PARAMETERS[TEACHERS[name]])
    gigabytes = [pytest.approx(number / 1e9, rel=0.02, abs=0.05) for number in expected]
    assert memory_in_header(name) == gigabytes


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_a_model_of_transformers_has_its_published_size_and_the_memory_in_its_header(name):
    parameters, described = OF_TRANSFORMERS[name]
    with torch.device("meta"):
        model = decoder.build(AutoConfig.for_model(**described), "eager")
    assert size(model) == pytest.approx(parameters, rel=0.01)
    cfg = load(name)
    assert cfg.max_tokens_per_microbatch == cfg.batch_size * cfg.tokenizer.max_seq_len
    assert cfg.batch_size * cfg.gradient_accumulation_steps == SAMPLES
    # Of a model of images, the text and the projector are trained.
    tower = [(n, p.numel()) for n, p in model.named_parameters() if ".visual." in n]
    frozen = sum(number for parameter_name, number in tower if "merger" not in parameter_name)
    trained = size(model) - frozen
    if "_lora_" in name:
        names = tuple(f"self_attn.{target}" for target in cfg.model.target_modules)
        linears = [m for n, m in model.named_modules() if n.endswith(names)]
        trained, frozen = 8 * sum(m.in_features + m.out_features for m in linears), size(model)
    expected = [trained * bytes_per_trained(cfg), *([2 * frozen] if frozen else [])]
    found = memory_in_header(name)
    assert found == [pytest.approx(number / 1e9, rel=0.02, abs=0.05) for number in expected]


@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_have_published_sizes_crops_and_the_memory_in_their_header(name):
    """Siméoni et al., arXiv:2508.10104, section 3.2 and appendix C."""
    cfg = load(name)
    make = partial(with_heads, lambda: config.instantiate(cfg.model), {}, {})
    whole = build_on_meta(make, ModelSettings(dtype="bf16"))
    assert size(whole) - size(whole.output) == pytest.approx(BACKBONES[name], rel=0.01)
    for head in (whole.output.dino, whole.output.ibot):
        widths = [layer.out_features for layer in head.mlp if hasattr(layer, "out_features")]
        assert (widths, head.prototypes.out_features) == ([2048, 2048, 256], 65_536)
    transform = config.instantiate(cfg.transform)
    crops = (transform.global_crop_size, transform.local_crop_size, transform.num_local_crops)
    assert crops == (256, 112, 8)
    check_fits(transform, 16, 3)
    assert cfg.global_batch_size % (cfg.batch_size * 32) == 0
    memory, of_crops = memory_in_header(name)
    assert memory == pytest.approx(20 * size(whole) / 1e9, abs=0.05)
    tokens = sum(n * (5 + (s // 16) ** 2) for n, s in ((2, crops[0]), (crops[2], crops[1])))
    columns = 1 + 3 * 16**2 + 2 + whole.num_draws
    assert of_crops == pytest.approx(4 * cfg.global_batch_size * tokens * columns / 1e9, abs=0.6)
    ours, first = plain(name, resolve=False), plain(next(iter(BACKBONES)), resolve=False)
    may_differ = {"output_dir", "model", "batch_size", "enable_activation_checkpointing"}
    assert all(ours.get(key) == first.get(key) for key in (ours.keys() | first.keys()) - may_differ)
