"""The configs of real models fit the recipe, their model and each other; no weights are needed."""

import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
import torchtune
import yaml
from omegaconf import OmegaConf
from torchtune import config
from torchtune.config._utils import _get_component_from_path
from torchtune.modules import MultiHeadAttention
from torchtune.modules.low_precision import FrozenNF4Linear
from torchtune.modules.peft import get_adapter_params

from recipe_utils.loss import LinearCrossEntropyLoss
from recipe_utils.loss.attach_loss import HiddenAtTargets, attach_loss
from recipe_utils.loss.distillation import make_distillation_loss
from recipe_utils.loss.log_probs import LinearLogProbs
from recipe_utils.loss.preference import make_preference_loss
from recipe_utils.loss.self_distillation import ObjectiveSettings, SelfDistillationLoss
from recipe_utils.model.build.build import ModelSettings, build_on_meta
from recipe_utils.model.build.sizes import num_outputs, vocab_size_and_max_seq_len
from recipe_utils.model.vision.vision_transformer import with_heads
from recipe_utils.settings.settings import read_settings, settings_of
from recipe_utils.tune.registry import RECIPES, ROOT, config_path, recipe_path

STOCK_CONFIGS = Path(torchtune.__file__).parents[1] / "recipes" / "configs"
DEFAULTS = {
    "full_finetune_update_step": "llama3_2/5M_full_update_step",
    "lora_finetune_update_step": "llama3_2/5M_lora_update_step",
    "full_dpo_update_step": "llama3_2/5M_full_dpo_update_step",
    "knowledge_distillation_update_step": "llama3_2/5M_to_1M_KD_update_step",
    "dinov3_update_step": "vit/digits_dinov3_update_step",
}
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
ADAPTERS = {  # of all layers' q, v and output projections and MLPs
    "llama3_2/1B_lora_update_step": 42.5e6,
    "llama3_2/1B_qlora_update_step": 42.5e6,
    "llama3_2/3B_lora_update_step": 89.9e6,
    "llama3_2/3B_qlora_update_step": 89.9e6,
    "llama3_1/8B_lora_update_step": 19.7e6,
    "llama3_1/8B_qlora_update_step": 19.7e6,
    "qwen2_5/0.5B_lora_update_step": 16.8e6,
    "qwen2_5/7B_lora_update_step": 19.3e6,
}
PREFERENCES = (
    "llama3_2/1B_full_dpo_update_step",
    "llama3_2/3B_full_dpo_update_step",
    "llama3_1/8B_full_dpo_update_step",
    "qwen2_5/0.5B_full_dpo_update_step",
    "qwen2_5/7B_full_dpo_update_step",
    "llama3_1/8B_lora_dpo_update_step",
)
TEACHERS = {
    "llama3_2/8B_to_1B_KD_update_step": "llama3_1/8B_full_update_step",
    "qwen2_5/7B_to_0.5B_KD_update_step": "qwen2_5/7B_full_update_step",
    "qwen2_5/7B_to_1.5B_KD_update_step": "qwen2_5/7B_full_update_step",
}
"""Config -> the one that trains all weights of its teacher."""
CONFIGS = (*PARAMETERS, *ADAPTERS, *PREFERENCES, *TEACHERS)
BACKBONES = {  # as published, arXiv:2508.10104 and arXiv:2104.14294
    "vit/S16_dinov3_update_step": 21.6e6,
    "vit/B16_dinov3_update_step": 85.7e6,
    "vit/L16_dinov3_update_step": 303e6,
}
BETAS = [0.9, 0.95]
"""Stock's 0.999 averages squared gradients over 1000 update steps, which is all of most fine-tunings."""
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Per parameter: its code, an 8-bit scale of each 64, and a 32-bit scale of each 256 of those."""
COMPONENTS = (
    "model", "tokenizer", "checkpointer", "dataset", "optimizer", "loss", "metric_logger", "profiler",
)  # fmt: skip
OF_TEACHER = ("teacher_model", "teacher_tokenizer", "teacher_checkpointer", "kd_loss")
every_config = pytest.mark.parametrize("name", CONFIGS)
every_backbone_s_config = pytest.mark.parametrize("name", BACKBONES)
every_full_config = pytest.mark.parametrize("name", PARAMETERS)
every_adapter_config = pytest.mark.parametrize("name", ADAPTERS)
every_preference_config = pytest.mark.parametrize("name", PREFERENCES)
every_teacher_s_config = pytest.mark.parametrize("name", TEACHERS)


def load(name):
    return OmegaConf.load(config_path(name))


def build(name, key="model"):
    return build_on_meta(lambda: config.instantiate(load(name)[key]), ModelSettings(dtype="bf16"))


def of_full(name):
    """The name of the config that trains all weights of the same model."""
    name = re.sub(r"[\d.]+B_to_(.*)_KD_", r"\1_full_", name)
    return re.sub("_q?lora_", "_full_", name).replace("_dpo", "")


def recipe_of(name):
    (recipe,) = [recipe for recipe, configs in RECIPES.items() if name in configs]
    return recipe


def bytes_of_trained(name):
    """Per trained parameter: its weight, gradient and AdamW's two moments."""
    return 4 * {"fp32": 4, None: 2}[load(name).weights_dtype]


def num_quantised(model):
    return sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, FrozenNF4Linear) or getattr(module, "_quantize_base", False)
    )


def unresolved(name):
    return yaml.safe_load(config_path(name).read_text())


def test_every_config_file_is_registered_and_the_other_way_round():
    files = {str(path.relative_to(ROOT / "configs")) for path in ROOT.glob("configs/**/*.yaml")}
    registered = [f"{name}.yaml" for configs in RECIPES.values() for name in configs]
    assert sorted(registered) == sorted(files)
    assert all(recipe_path(recipe).is_file() for recipe in RECIPES)


def test_every_registered_training_config_is_tested_here():
    registered = [name for configs in RECIPES.values() for name in configs]
    training = {name for name in registered if "dataset" in unresolved(name)}
    assert training == {*DEFAULTS.values(), *CONFIGS, *BACKBONES}
    for recipe, default in DEFAULTS.items():
        assert RECIPES[recipe][0] == default


@pytest.mark.parametrize("name", [*DEFAULTS.values(), *CONFIGS, *BACKBONES])
def test_the_recipe_takes_every_key_and_its_value(name, tmp_path):
    here = {"output_dir": str(tmp_path), "device": "cpu", "dtype": "fp32"}
    read_settings(OmegaConf.merge(load(name), here), settings_of(recipe_of(name)))


@every_config
def test_the_configs_have_the_same_keys_in_the_same_order(name):
    first = next(each for each in CONFIGS if recipe_of(each) == recipe_of(name))
    assert list(unresolved(name)) == list(unresolved(first))
    default = DEFAULTS.get(recipe_of(name), DEFAULTS["full_dpo_update_step"])
    in_default = list(unresolved(default))
    shared = [key for key in unresolved(name) if key in in_default]
    assert shared == [key for key in in_default if key in shared]


@every_adapter_config
def test_beside_what_adapters_need_it_is_the_full_config_of_the_same_model(name):
    ours, full = unresolved(name), unresolved(of_full(name))
    own = {"save_adapter_weights_only", "export_dtype", "lr_scheduler"}
    assert ours.keys() == full.keys() | own
    may_differ = {
        "output_dir", "model", "dataset", "optimizer", "batch_size", "gradient_accumulation_steps",
        "max_tokens_per_microbatch", "weights_dtype",
    } | own  # fmt: skip
    for key in ours.keys() - may_differ:
        assert ours[key] == full[key], key
    kind = re.search("q?lora", name)[0]
    assert ours["output_dir"] == f"{full['output_dir']}_{kind}"


@every_preference_config
def test_beside_what_preferences_need_it_is_the_config_of_the_same_model(name):
    ours, other = unresolved(name), unresolved(name.replace("_dpo", ""))
    own = {
        "lr_scheduler", "prefix_sharing", "reference", "precompute_reference", "sft_loss_weight",
    }  # fmt: skip
    assert ours.keys() == other.keys() | own
    may_differ = {
        "output_dir", "tokenizer", "dataset", "optimizer", "loss", "batch_size", "gradient_accumulation_steps",
        "max_tokens_per_microbatch",
    } | own  # fmt: skip
    for key in ours.keys() - may_differ:
        assert ours[key] == other[key], key
    assert ours["output_dir"] == f"{other['output_dir']}_dpo"
    assert {**other["tokenizer"], "max_seq_len": 1024} == ours["tokenizer"]


@every_preference_config
def test_data_loss_and_schedule_are_those_of_the_stock_preference_configs(name):
    ours = OmegaConf.to_container(load(name), resolve=True)
    kind = "8B_lora_dpo" if "_lora_" in name else "8B_full_dpo"
    stock = yaml.safe_load((STOCK_CONFIGS / "llama3_1" / f"{kind}.yaml").read_text())
    stock["optimizer"] |= {"lr": float(stock["optimizer"]["lr"]), "betas": BETAS}
    for key in (
        "dataset", "optimizer", "loss", "lr_scheduler", "batch_size", "gradient_accumulation_steps",
    ):  # fmt: skip
        expected = stock[key]
        if key == "loss":
            expected = {"label_smoothing": 0, **expected}
        assert ours[key] == expected, key
    if "8B" in name:
        assert ours["model"] == stock["model"]


@every_preference_config
def test_the_header_says_the_memory_of_the_model_and_its_reference(name):
    text = config_path(name).read_text()
    size = PARAMETERS[of_full(name)]
    if "_lora_" in name:
        assert "# The reference is the model without them.\n" in text
        return
    found = re.search(
        r"^# ([\d.e]+) parameters x .* 2 reference\) bytes = ([\d.]+) GB.*\n# .* ([\d.]+) GB",
        text,
        re.M,
    )
    parameters, live, cached = map(float, found.groups())
    assert parameters == pytest.approx(size, rel=0.01)
    assert live == pytest.approx((bytes_of_trained(name) + 2) * size / 1e9, rel=0.02)
    assert cached == pytest.approx(bytes_of_trained(name) * size / 1e9, rel=0.02)


SAMPLES = 160
"""Of an update step on each rank, where stock's configs have 16 or 32. Alpaca's published rates are of 128: 2e-5 of all
weights (Stanford Alpaca), 3e-4 of adapters (alpaca-lora)."""
TOKENS = {"alpaca_dataset": 110, "alpaca_cleaned_dataset": 200}
"""Of a sample, prompt and all, at the least of what tokenizers make of it on average."""


def with_shorter_warm_up(stock):
    """As many samples as stock's longest, in fewer update steps."""
    warm_up = {**stock["lr_scheduler"], "num_warmup_steps": 100 * 32 // SAMPLES}
    assert stock["lr_scheduler"]["num_warmup_steps"] == 100
    return {**stock, "lr_scheduler": warm_up}


@pytest.mark.parametrize("name", [*PARAMETERS, *ADAPTERS, *TEACHERS])
def test_an_update_step_holds_sixteen_thousand_tokens_on_each_rank(name):
    cfg = load(name)
    assert cfg.batch_size * cfg.gradient_accumulation_steps == SAMPLES
    num_tokens = SAMPLES * TOKENS[cfg.dataset._component_.split(".")[-1]]
    assert num_tokens >= 16_384
    assert f"tokens each, are {num_tokens:,} tokens and more" in config_path(name).read_text()
    # Activations of 16,384 take too much beside the weights of some; see configs/README.md.
    of_16k = {"llama3_2/1B_full", "qwen2_5/0.5B_full", *(n for n in ADAPTERS if "3B" not in n)}
    expects_16k = name in of_16k or name.removesuffix("_update_step") in of_16k
    assert (cfg.max_tokens_per_microbatch == 16_384) == expects_16k


def of_teacher(cfg):
    """What a config says of its teacher, under the keys that a config of the teacher itself has."""
    keys = ("model", "tokenizer", "checkpointer")
    resolved = OmegaConf.to_container(OmegaConf.create(cfg), resolve=True)
    return {key: resolved[f"teacher_{key}"] for key in keys}


@every_teacher_s_config
def test_beside_what_a_teacher_needs_it_is_the_full_config_of_the_student(name):
    ours, full = unresolved(name), unresolved(of_full(name))
    own = {
        "teacher_dir", "teacher_model", "teacher_tokenizer", "teacher_checkpointer", "teacher_cache", "kd_loss",
        "kd_ratio", "lr_scheduler", "pipeline_parallel_dim",
    }  # fmt: skip
    assert ours.keys() == full.keys() | own
    batch = {"batch_size", "gradient_accumulation_steps", "max_tokens_per_microbatch"}
    for key in ours.keys() - own - batch - {"output_dir", "dataset", "optimizer"}:
        assert ours[key] == full[key], key
    assert ours["output_dir"].endswith(
        name.replace("/", "_").replace("_update_step", "").replace(".", "_")
    )


@every_teacher_s_config
def test_model_tokens_and_files_of_the_teacher_are_those_of_its_own_config(name):
    ours = of_teacher(unresolved(name))
    full = OmegaConf.to_container(load(TEACHERS[name]), resolve=True)
    del full["tokenizer"]["max_seq_len"], full["checkpointer"]["recipe_checkpoint"]
    ours["checkpointer"]["output_dir"] = full["checkpointer"]["output_dir"]
    assert ours == {key: full[key] for key in ours}
    assert unresolved(name)["teacher_dir"] == full["checkpoint_dir"]


@every_teacher_s_config
def test_data_rates_and_schedule_are_those_of_the_stock_distillation(name):
    ours = OmegaConf.to_container(load(name), resolve=True)
    path = STOCK_CONFIGS / "llama3_2" / "8B_to_1B_KD_lora_distributed.yaml"
    stock = yaml.safe_load(path.read_text())
    for key in ("dataset", "lr_scheduler", "kd_ratio"):
        assert ours[key] == with_shorter_warm_up(stock)[key], key


@every_teacher_s_config
def test_student_and_teacher_fit_each_other_and_the_loss(name):
    cfg = load(name)
    student, teacher = build(name), build(name, "teacher_model")
    assert vocab_size_and_max_seq_len(teacher)[1] >= cfg.tokenizer.max_seq_len
    # Qwen2.5's output layers have rows that stand for no token, and not all as many.
    rows = (151_936, 152_064) if "qwen" in name else (128_256, 128_256)
    assert (num_outputs(student), num_outputs(teacher)) == rows
    attach_loss(
        student,
        make_distillation_loss(
            config.instantiate(cfg.loss), config.instantiate(cfg.kd_loss), cfg.kd_ratio
        ),
    )
    attach_loss(teacher, HiddenAtTargets())
    teacher_parameters = sum(parameter.numel() for parameter in teacher.parameters())
    assert teacher_parameters == pytest.approx(PARAMETERS[TEACHERS[name]], rel=0.01)


@every_teacher_s_config
def test_the_header_says_the_memory_of_the_student_and_of_its_teacher(name):
    text = config_path(name).read_text()
    found = re.search(
        r"^# ([\d.e]+) parameters x .* = ([\d.]+) GB,\n# and ([\d.e]+) of the teacher x 2 bytes = ([\d.]+) GB"
        r".*\n# .*\n# stays after a pass before training, ([\d.]+) GB",
        text,
        re.M,
    )
    student, gigabytes, teacher, gigabytes_of_teacher, of_output = map(float, found.groups())
    assert student == pytest.approx(PARAMETERS[of_full(name)], rel=0.01)
    assert gigabytes == pytest.approx(bytes_of_trained(name) * student / 1e9, rel=0.02)
    assert teacher == pytest.approx(PARAMETERS[TEACHERS[name]], rel=0.01)
    assert gigabytes_of_teacher == pytest.approx(2 * teacher / 1e9, rel=0.02)
    width = build(name, "teacher_model").norm.scale.numel()
    num_tokens = num_outputs(build(name, "teacher_model"))
    assert of_output == pytest.approx(2 * num_tokens * width / 1e9, abs=0.05)
    (kilobytes,) = re.findall(r"kept on the disk, ([\d.]+) kB per target token\n", text)
    assert float(kilobytes) == pytest.approx(2 * width / 1e3, abs=0.05)


@every_config
def test_components_resolve_and_take_these_arguments(name):
    cfg = load(name)
    for key in (*COMPONENTS, *(OF_TEACHER if name in TEACHERS else ())):
        assert callable(_get_component_from_path(cfg[key]._component_)), key
    config.validate(cfg)
    assert OmegaConf.to_container(cfg, resolve=True)["checkpointer"]["output_dir"] == cfg.output_dir


@pytest.mark.parametrize("name", [*PARAMETERS, *ADAPTERS])
def test_files_model_data_and_optimizer_are_those_of_the_stock_config(name):
    ours = OmegaConf.to_container(load(name), resolve=True)
    stock_name = name.removesuffix("_update_step").replace("_qlora", "_qlora_single_device")
    stock = yaml.safe_load((STOCK_CONFIGS / f"{stock_name}.yaml").read_text())
    for cfg in (ours, stock):
        cfg["checkpointer"].pop("output_dir")
        cfg["checkpointer"]["checkpoint_dir"] = cfg["checkpointer"]["checkpoint_dir"].rstrip("/")
        cfg["tokenizer"].pop("max_seq_len", None)
        cfg["optimizer"]["lr"] = float(cfg["optimizer"]["lr"])  # PyYAML reads 2e-5 as a string
    stock["optimizer"]["betas"] = BETAS
    for key in ("model", "tokenizer", "checkpointer", "dataset", "optimizer"):
        assert ours[key] == stock[key], key
    if name in ADAPTERS:
        assert ours["lr_scheduler"] == with_shorter_warm_up(stock)["lr_scheduler"]


@every_full_config
def test_the_model_has_the_size_of_its_name(name):
    size = sum(parameter.numel() for parameter in build(name).parameters())
    assert size == pytest.approx(PARAMETERS[name], rel=0.01)
    in_name = float(re.search(r"/([\d.]+)B_", name)[1]) * 1e9
    assert size == pytest.approx(in_name, rel=0.35)  # Gemma 2 2B has 2.6e9


@every_config
def test_the_model_takes_the_loss(name):
    loss = config.instantiate(load(name).loss)
    if name in PREFERENCES:
        make_preference_loss(lambda: loss)
        loss = LinearLogProbs()
    else:
        assert isinstance(loss, LinearCrossEntropyLoss)
    attach_loss(build(name), loss)


@every_adapter_config
def test_the_model_is_that_of_its_name_with_adapters(name):
    sizes = [parameter.numel() for parameter in build(name).parameters()]
    adapters = sum(p.numel() for p in get_adapter_params(build(name)).values())
    assert adapters == pytest.approx(ADAPTERS[name], rel=0.01)
    assert sum(sizes) - adapters == pytest.approx(PARAMETERS[of_full(name)], rel=0.01)
    # Of a quantised model all but the embeddings, the output where it is not tied to them, and norms.
    quantised = num_quantised(build(name)) / (sum(sizes) - adapters)
    assert 0.75 < quantised < 0.9 if "_qlora_" in name else quantised == 0


@every_full_config
def test_the_header_says_the_memory_of_its_model(name):
    text = config_path(name).read_text()
    parameters, gigabytes = re.search(
        r"^# ([\d.e]+) parameters x .* = ([\d.]+) GB", text, re.M
    ).groups()
    assert float(parameters) == pytest.approx(PARAMETERS[name], rel=0.01)
    expected = bytes_of_trained(name) * PARAMETERS[name] / 1e9
    assert float(gigabytes) == pytest.approx(expected, rel=0.02)


@every_adapter_config
def test_the_header_says_the_memory_of_its_adapters_and_of_what_is_frozen(name):
    adapters, trained, quantised, frozen, frozen_gigabytes = re.search(
        r"^# ([\d.e]+) adapter parameters x \(4 .* 4 .* 8 .*\) bytes = ([\d.]+) GB\.\n"
        r"# (?:([\d.e]+) frozen parameters x 4\.13 bits in NF4 \+ )?([\d.e]+).* x 2 bytes in bf16 = ([\d.]+) GB\.$",
        config_path(name).read_text(),
        re.M,
    ).groups()
    assert float(adapters) == pytest.approx(ADAPTERS[name], rel=0.01)
    assert float(trained) == pytest.approx(bytes_of_trained(name) * ADAPTERS[name] / 1e9, abs=0.02)
    expected = num_quantised(build(name))
    assert pytest.approx(4.13, abs=0.005) == NF4_BITS
    assert float(quantised or 0) == pytest.approx(expected, rel=0.01)
    rest = PARAMETERS[of_full(name)] - expected
    assert float(frozen) == pytest.approx(rest, rel=0.03)
    gigabytes = (expected * NF4_BITS / 8 + rest * 2) / 1e9
    assert float(frozen_gigabytes) == pytest.approx(gigabytes, rel=0.02, abs=0.05)


@every_config
def test_the_header_says_how_to_get_and_train_it(name):
    text = config_path(name).read_text()
    assert f"{recipe_of(name)} --config {name}\n" in text
    for key in ("checkpoint_dir", "teacher_dir") if name in TEACHERS else ("checkpoint_dir",):
        assert f"--output-dir {load(name)[key]}" in text


@every_adapter_config
def test_the_header_names_dora_where_the_builder_knows_it_and_the_base_is_not_quantised(name):
    builder = _get_component_from_path(load(name).model._component_)
    knows_it = "use_dora" in inspect.signature(builder).parameters and "_qlora_" not in name
    assert knows_it == ("model.use_dora=True trains DoRA" in config_path(name).read_text())


@every_config
def test_a_microbatch_holds_the_longest_sample_and_fits_the_model(name):
    cfg = load(name)
    _, longest_sequence = vocab_size_and_max_seq_len(build(name))
    longest_sample = cfg.tokenizer.max_seq_len
    assert longest_sample <= longest_sequence
    sides = 2 if name in PREFERENCES else 1
    assert cfg.max_tokens_per_microbatch == sides * cfg.batch_size * longest_sample
    if cfg.microbatching == "packed":  # all of a microbatch is one sequence
        assert cfg.max_tokens_per_microbatch <= longest_sequence


@every_config
def test_samples_are_packed_where_the_attention_takes_a_block_mask(name):
    attentions = {type(layer.attn) for layer in build(name).layers}
    takes_block_mask = attentions == {MultiHeadAttention}
    assert load(name).microbatching == ("packed" if takes_block_mask else "least_padding")


@every_config
def test_weights_are_fp32_where_they_are_few_enough(name):
    """Adapters, and up to 3 billion: 51 GB. From seven billion on one GPU would not hold 16 bytes of each."""
    is_small = "lora_" in name or PARAMETERS[of_full(name)] < 4e9
    assert (load(name).dtype, load(name).weights_dtype) == ("bf16", "fp32" if is_small else None)
    assert load(name).optimizer.betas == BETAS


@every_config
def test_activations_are_checkpointed_from_seven_billion_parameters_on(name):
    assert load(name).enable_activation_checkpointing == (PARAMETERS[of_full(name)] > 7e9)


# ---- Self-supervised vision ----------------------------------------------------------------------


def build_with_heads(name):
    cfg = load(name)
    make = with_heads(lambda: config.instantiate(cfg.model), cfg.dino_head, cfg.ibot_head)
    return build_on_meta(make, ModelSettings(dtype="bf16"))


def num_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


@every_backbone_s_config
def test_backbone_and_heads_have_their_published_sizes(name):
    whole = build_with_heads(name)
    heads = num_parameters(whole.output)
    assert num_parameters(whole) - heads == pytest.approx(BACKBONES[name], rel=0.01)
    for head in (whole.output.dino, whole.output.ibot):
        widths = [layer.out_features for layer in head.mlp if hasattr(layer, "out_features")]
        assert (widths, head.prototypes.out_features) == ([2048, 2048, 256], 65_536)
    assert whole.tok_embeddings.num_registers == 4
    attach_loss(whole, SelfDistillationLoss(ObjectiveSettings()))


@every_backbone_s_config
def test_the_configs_of_backbones_differ_in_what_goes_with_size_alone(name):
    ours, first = unresolved(name), unresolved(next(iter(BACKBONES)))
    assert list(ours) == list(first)
    may_differ = {"output_dir", "model", "batch_size", "enable_activation_checkpointing"}
    assert {key for key in ours if ours[key] != first[key]} <= may_differ
    default = unresolved(DEFAULTS["dinov3_update_step"])
    shared = [key for key in ours if key in default]
    assert shared == [key for key in default if key in shared]


@every_backbone_s_config
def test_the_settings_of_self_distillation_are_the_published_ones(name):
    """Siméoni et al., arXiv:2508.10104, section 3.2 and appendix C."""
    cfg = load(name)
    transform = config.instantiate(cfg.transform)
    assert (transform.global_crop_size, transform.local_crop_size) == (256, 112)
    assert transform.num_local_crops == 8
    assert transform.problems_with(16, 3) == []
    assert (cfg.mask_probability, cfg.mask_ratio) == (0.5, [0.1, 0.5])
    assert cfg.global_batch_size == 4096
    assert (cfg.sinkhorn_iterations, cfg.sinkhorn_over) == (3, "update_step")
    # A mean over both global crops, where theirs is a sum.
    assert (cfg.koleo_group_size, cfg.koleo_loss_weight) == (16, 2 * 0.1)
    temperatures = (cfg.teacher_temperature_start, cfg.teacher_temperature, cfg.student_temperature)
    assert temperatures == (0.04, 0.07, 0.1)
    assert (cfg.optimizer.lr, cfg.optimizer.weight_decay) == (4e-4, 0.04)
    assert (cfg.layerwise_lr_decay, cfg.ema_momentum, cfg.rope_rescale) == (0.98, 0.999, 2.0)
    for every_rank in (1, 8, 32):
        assert cfg.global_batch_size % (cfg.batch_size * every_rank) == 0
    assert cfg.batch_size % cfg.koleo_group_size == 0


@every_backbone_s_config
def test_rates_are_constant_after_the_warm_up(name):
    cfg = load(name)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has not stepped
        schedule = config.instantiate(
            cfg.lr_scheduler, optimizer, num_training_steps=31_200, last_epoch=-1
        )
    rate = schedule.lr_lambdas[0]
    assert [rate(step) for step in (0, 1500, 3000, 10_000, 31_200)] == [0, 0.5, 1, 1, 1]


@every_backbone_s_config
def test_components_and_header_of_a_backbone_fit_it(name):
    cfg, text = load(name), config_path(name).read_text()
    for key in ("model", "dataset", "transform", "checkpointer", "optimizer", "profiler"):
        assert callable(_get_component_from_path(cfg[key]._component_)), key
    config.instantiate(cfg.checkpointer)
    assert f"dinov3_update_step --config {name} image_dir=" in text
    assert cfg.dataset.source == cfg.image_dir
    assert (cfg.dtype, cfg.weights_dtype) == ("bf16", "fp32")
    found = re.search(
        r"^# ([\d.e]+) parameters x .* = ([\d.]+) GB, ([\d.e]+) of them heads", text, re.M
    )
    parameters, gigabytes, of_heads = map(float, found.groups())
    whole = build_with_heads(name)
    assert parameters == pytest.approx(num_parameters(whole), rel=0.01)
    assert of_heads == pytest.approx(num_parameters(whole.output), rel=0.01)
    assert gigabytes == pytest.approx(20 * num_parameters(whole) / 1e9, abs=0.05)


@every_backbone_s_config
def test_the_memory_that_an_update_step_s_crops_take_is_said(name):
    cfg, whole = load(name), build_with_heads(name)
    num_tokens = sum(
        num_crops * (5 + (size // 16) ** 2)
        for num_crops, size in (
            (2, cfg.transform.global_crop_size),
            (cfg.transform.num_local_crops, cfg.transform.local_crop_size),
        )
    )
    columns = 1 + 3 * 16**2 + 2 + whole.num_draws
    (said,) = re.findall(r"crops are (\d+) GB", config_path(name).read_text())
    gigabytes = 4 * cfg.global_batch_size * num_tokens * columns / 1e9
    assert float(said) == pytest.approx(gigabytes, abs=0.6)
