"""A model whose builder gave it adapters trains only those; ``test_gradients.py`` has their gradients."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import tiny
import torch
import torch.distributed as dist
from arrays import TP_2
from checkpoint_runs import resuming_in
from distributed_runs import run_distributed
from recipe_runs import (
    STEP_OF_8,
    STOCK_LOSS,
    cosine,
    exported_model,
    keep_messages,
    losses,
    run_compiled_recipe,
    run_recipe,
    run_recipe_keeping_warnings,
    run_stock_recipe,
    set_up,
    slow,
    with_adapters,
)

from recipe_utils.files import CheckpointError
from recipe_utils.models.adapters import lora as adapters
from recipe_utils.settings.problems import ConfigError

TIED, DORA = tiny.adapted(tiny.MODEL), tiny.adapted(tiny.MODEL, use_dora=True)
KINDS = {
    "lora": tiny.adapted(tiny.WIDE_MODEL),
    "dora": tiny.adapted(tiny.WIDE_MODEL, use_dora=True),
    "qlora": tiny.adapted(tiny.WIDE_MODEL, quantize_base=True),
    "qdora": tiny.adapted(tiny.WIDE_MODEL, quantize_base=True, use_dora=True),
}


# ---- Loss curves --------------------------------------------------------------------------------


def curve_config(tiny_config, **changes):
    """Returns a config of 8 update steps of 8 samples, clipped, with weight decay."""
    return tiny_config(
        **{
            "dataset": {"_component_": "tiny.tiny_dataset", "num_samples": 64},
            **STEP_OF_8,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.003, "weight_decay": 0.1},
            "lr_scheduler": cosine(2),
            "clip_grad_norm": 0.05,
            **changes,
        }
    )


TOLERANCE = 5e-5
"""Of losses in fp32, in which torchtune's logits and NF4's products are: 5e-7 apart, and wrong adapters 1e-2, see below."""
ONE, PACKED_ON_2 = (1, {}), (2, {"microbatching": "packed"})
PP_2, HSDP_2 = (2, {"pipeline_parallel_dim": 2}), (4, {"data_parallel_replicate_dim": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("lora", (ONE, HSDP_2)),
        ("dora", (PACKED_ON_2, PP_2)),
        ("qlora", (ONE, PP_2)),
        ("qdora", (PACKED_ON_2, HSDP_2)),
    ],
)
def test_losses_are_those_of_the_stock_recipe(kind, layouts, tiny_config, tmp_path):
    config = with_adapters(curve_config(tiny_config, model=KINDS[kind]), tmp_path)
    of_stock = {**config, "gradient_accumulation_steps": 4, "loss": STOCK_LOSS}
    stock = run_distributed(run_stock_recipe, 1, of_stock, "lora_finetune")[0]
    assert len(losses(stock)) == 8
    norms = [metrics["grad_norm"].item() for metrics in stock]
    for world_size, changes in layouts:
        logged = run_distributed(run_recipe, world_size, {**config, **changes})[0]
        assert losses(logged) == pytest.approx(losses(stock), abs=TOLERANCE)
        assert [metrics["grad_norm"] for metrics in logged] == pytest.approx(norms, rel=1e-4)


@pytest.mark.slow
def test_compiled_layers_keep_doras_norms_alike(tiny_config):
    config = curve_config(tiny_config, model=DORA, microbatching="packed")
    plain = losses(run_distributed(run_recipe, 1, config)[0])
    compiled = losses(run_distributed(run_compiled_recipe, 1, config)[0])
    assert compiled == pytest.approx(plain, abs=TOLERANCE)


def norm_in_the_graph(layer, x):
    weight = layer.weight + layer.scaling * (layer.lora_b.weight @ layer.lora_a.weight)
    return torch.nn.functional.linear(x, weight) * (layer.magnitude / weight.norm(dim=1))


def adapters_of_each_rank(found, base, seed, dtype, draw=adapters.fresh_adapters):
    return draw(found, base, seed + dist.get_rank(), dtype)


ADAPTERS = "recipe_utils.models.adapters"
MUTANTS = {
    "dora's norm not detached": (f"{ADAPTERS}.adapted_linear._forward_dora", norm_in_the_graph),
    "dora's norm kept over steps": ("torch.optim.Optimizer.register_step_post_hook", lambda *_: None),
    "adapters drawn by each rank": (f"{ADAPTERS}.lora.fresh_adapters", adapters_of_each_rank),
    "base not frozen": ("recipe_utils.models.construct.freeze_base", lambda _: None),
}


def run_mutant(mutant, config):
    with patch(*MUTANTS[mutant]):
        return losses(run_recipe(config))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_adapter_has_another_curve(mutant, tiny_config):
    world_size = 2 if "each rank" in mutant else 1
    config = curve_config(tiny_config, model=KINDS["dora"], clip_grad_norm=None)
    config["optimizer"]["lr"] = 0.05
    right = losses(run_distributed(run_recipe, world_size, config)[0])
    wrong = run_distributed(run_mutant, world_size, mutant, config)[0]
    assert max(abs(a - b) for a, b in zip(right, wrong, strict=True)) > 1e-2


# ---- Initial values -----------------------------------------------------------------------------


def exported_adapters(config):
    return torch.load(f"{config['output_dir']}/epoch_0/adapter/adapter_model.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "qdora"])
def test_fresh_adapters_are_bitwise_alike_on_every_layout_and_change_nothing(kind, tiny_config):
    found = []
    for world_size, dims in (ONE, (2, {}), HSDP_2, PP_2):
        config = curve_config(
            tiny_config,
            model=KINDS[kind],
            save_adapter_weights_only=True,
            max_steps_per_epoch=1,
            optimizer={"_component_": "torch.optim.SGD", "lr": 0.0},
            **dims,
        )
        run_distributed(run_recipe, world_size, config)
        found.append(exported_adapters(config))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(tensor, found[0][name]) for name, tensor in other.items())
    drawn = found[0]["layers.0.attn.q_proj.lora_a.weight"]
    assert not torch.equal(drawn, found[0]["layers.1.attn.q_proj.lora_a.weight"])
    assert 0.9 / 16 < drawn.abs().max() <= 1 / 16  # torchtune's, at 256 columns
    assert not found[0]["layers.0.attn.q_proj.lora_b.weight"].any()
    # |W| of the weight that is multiplied: at the start a DoRA model is its base.
    config["model"] = {**KINDS[kind], "use_dora": False}
    plain = run_distributed(run_recipe, 2, config)[0]
    config["model"] = KINDS[kind]
    assert losses(run_distributed(run_recipe, 2, config)[0]) == pytest.approx(losses(plain), abs=1e-6)


@pytest.mark.slow
def test_loraplus_is_a_higher_rate_for_b_and_magnitudes(tiny_config, tmp_path):
    config = curve_config(
        tiny_config,
        model=DORA,
        optimizer={"_component_": "torch.optim.SGD", "lr": 0.01},
        lr_scheduler=...,
        clip_grad_norm=None,
        max_steps_per_epoch=1,
    )
    config = with_adapters(config, tmp_path)
    start = torch.load(config["checkpointer"]["adapter_checkpoint"], weights_only=True)
    change = {}
    for ratio in (None, 16.0):
        logged = run_distributed(run_recipe, 2, {**config, "loraplus_lr_ratio": ratio})[0]
        assert logged[0]["lr"] == 0.01
        change[ratio] = {n: w - start[n] for n, w in exported_adapters(config).items()}
    for name, plain in change[None].items():
        ratio = 1 if "lora_a" in name else 16
        assert plain.any()
        torch.testing.assert_close(change[16.0][name], ratio * plain, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_an_optimizer_in_the_backward_steps_adapters_alike(tiny_config):
    config = curve_config(
        tiny_config, model=DORA, clip_grad_norm=None, batch_size=8, gradient_accumulation_steps=1, global_batch_size=...
    )
    plain = run_distributed(run_recipe, 1, config)[0]
    in_backward = run_distributed(run_recipe, 1, {**config, "optimizer_in_bwd": True})[0]
    assert losses(in_backward) == pytest.approx(losses(plain), abs=TOLERANCE)


# ---- Resume -------------------------------------------------------------------------------------


def resumed(config, folder, **changes):
    """Returns the config of a training that resumes from a copy of another's step 4."""
    shutil.copytree(Path(config["output_dir"], "step_4"), folder / "step_4")
    return {**resuming_in(folder, config), **changes}


@pytest.fixture(scope="module", params=["dora", "qlora"])
def saved_after_4(request, module_config):
    """Returns a config that was run on one process, and its trained adapters."""
    config = curve_config(
        module_config,
        model=KINDS[request.param],
        save_every_n_steps=4,
        max_steps_per_epoch=4,
        save_adapter_weights_only=True,
    )
    run_distributed(run_recipe, 1, config)
    return config, exported_adapters(config)


def refusal(config):
    try:
        run_recipe(config)
    except ConfigError as error:
        return [*map(str, error.problems)]
    except CheckpointError as error:
        return [str(error)]
    return []


@pytest.mark.slow
def test_adapters_are_not_resumed_as_or_beside_others(saved_after_4, tmp_path, weights_folder):
    config, trained = saved_after_4
    # Checkpoints contain the adapters and their optimizer only.
    adapter_bytes = sum(tensor.nbytes for tensor in trained.values())
    files = Path(config["output_dir"], "step_4").iterdir()
    num_bytes = sum(path.stat().st_size for path in files)
    assert 3 * adapter_bytes < num_bytes < 1.05 * 3 * adapter_bytes + 64 * 1024
    weights = torch.load(weights_folder / "weights" / "wide.pt", weights_only=True)
    weights["layers.1.mlp.w2.weight"] = weights["layers.1.mlp.w2.weight"] * 1.01
    (tmp_path / "other").mkdir()
    torch.save(weights, tmp_path / "other" / "wide.pt")
    model = config["model"]
    is_nf4 = model.get("quantize_base", False)
    other = {**config["checkpointer"], "checkpoint_dir": str(tmp_path / "other")}
    cases = {
        r"lora_a.weight \(4, 256\) instead of \(8, 256\)": {"model": {**model, "lora_rank": 8}},
        "other frozen weights: layers.1.mlp.w2.weight=": {"checkpointer": other},
        "other frozen weights: .*NF4": {"model": {**model, "quantize_base": not is_nf4}},
    }
    for index, (words, changes) in enumerate(cases.items()):
        again = resumed({**config, **changes}, tmp_path / str(index))
        (problem,) = run_distributed(refusal, 1, again)[0]
        assert re.search(words, problem), problem


# ---- Refusals and warnings ----------------------------------------------------------------------

WIDE = KINDS["qlora"]
QUANTIZER = {"_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer", "groupsize": 16}


REFUSED = {  # by the number of ranks
    1: {"model.lora_alpha: it is missing": {"model": {**TIED, "lora_alpha": ...}}},
    2: {
        "data_parallel_shard_dim=1: FSDP2": {"model": WIDE, "data_parallel_replicate_dim": 2},
        "tensor_parallel_dim=2: .*LoRA": {"model": tiny.adapted(tiny.UNTIED_MODEL), **TP_2},
    },
    3: {"model.quantize_base=True: .* on 3 ranks": {"model": WIDE, "batch_size": 1}},
}


def refusals(configs):
    return [refusal(config) for config in configs]


@pytest.mark.parametrize("world_size", REFUSED)
def test_what_cannot_work_is_refused_by_name_before_training(world_size, tiny_config):
    cases = REFUSED[world_size]
    configs = []
    for changes in cases.values():
        config = tiny_config(**{"model": TIED, "gradient_accumulation_steps": 1, **changes})
        config["model"] = {k: v for k, v in config["model"].items() if v is not ...}
        configs.append(config)
    found = run_distributed(refusals, world_size, configs)[0]
    for words, problems in zip(cases, found, strict=True):
        assert len(problems) == 1, (words, problems)
        assert re.match(words, problems[0]), problems


def test_given_adapters_of_another_model_are_refused_by_name(tiny_config, tmp_path):
    given = with_adapters(tiny_config(model=TIED), tmp_path)["checkpointer"]
    text = tmp_path / "text.pt"
    text.write_text("no tensors")
    for words, model, changes in (
        ("its shapes differ: .*lora_a", {**TIED, "lora_rank": 2}, {}),
        ("it lacks layers.0.attn.k_proj.magnitude", DORA, {}),
        ("it has .*mlp.* the model does not have", {**TIED, "apply_lora_to_mlp": False}, {}),
        ("it has .* the model does not have", tiny.MODEL, {}),
        ("is no file", TIED, {"adapter_checkpoint": "missing.pt"}),
        ("holds no tensors", TIED, {"adapter_checkpoint": str(text)}),
    ):
        config = tiny_config(model=model, checkpointer={**given, **changes})
        (problem,) = run_distributed(refusal, 1, config)[0]
        assert re.match(f"checkpointer.adapter_checkpoint.*{words}", problem), problem


def start_from_exported_adapters(config):
    """Trains adapters, then starts from them with another alpha, on their merged model, and rightly."""
    run_recipe(config)
    out = Path(config["output_dir"])
    (merged,) = (out / "epoch_0").glob("*.bin")
    given = {**config["checkpointer"], "adapter_checkpoint": "epoch_0/adapter/adapter_model.pt"}
    of_merged = {"checkpoint_dir": str(merged.parent), "checkpoint_files": [merged.name]}
    alpha = json.loads((out / "epoch_0/adapter/trained_with.json").read_text())["lora_alpha"]
    return [
        refusal({**config, "checkpointer": given, **changes})
        for changes in (
            {"model": {**config["model"], "lora_alpha": 4 * alpha}},
            {"checkpointer": {**given, **of_merged}},
            {},
        )
    ]


def test_adapters_start_with_the_alpha_and_the_base_that_they_were_trained_with(tiny_config):
    config = tiny_config(model=TIED, max_steps_per_epoch=1)
    (alpha,), (base,), none = run_distributed(start_from_exported_adapters, 1, config)[0]
    assert re.search("trained with lora_alpha=6, the model has 24; set model.lora_alpha=6", alpha)
    assert re.search("trained on another base: 14 of .* weights differ", base)
    assert none == []


def test_a_stage_without_adapters_is_refused(tiny_config):
    model = {**tiny.MODEL, "_component_": "tiny.adapted_in_one_layer"}
    config = tiny_config(model=model, pipeline_parallel_dim=2)
    (problem,) = run_distributed(refusal, 2, config)[0]
    assert "stage 1 of 2 has nothing to train" in problem


def warnings_of(world_size, config):
    _, warnings = run_distributed(run_recipe_keeping_warnings, world_size, config)[0]
    return warnings


@pytest.mark.slow
def test_a_key_without_effect_is_warned_of_once(tiny_config):
    config = curve_config(tiny_config, max_steps_per_epoch=1)
    for words, changes in (
        ("model.attn_dropout=0.1", {"model": {**tiny.MODEL, "attn_dropout": 0.1}}),
        ("save_adapter_weights_only=True: the model has no", {"save_adapter_weights_only": True}),
    ):
        found = warnings_of(1, {**config, **changes})
        assert sum(words in text for text in found) == 1, found


def lines_of_stop_tokens(config):
    with keep_messages() as messages, set_up(config):
        return [text for text in messages if "Stop tokens" in text]


UNTIED = tiny.adapted(tiny.UNTIED_MODEL)
TRAINED_OUTPUT = tiny.adapted(tiny.UNTIED_MODEL, apply_lora_to_output=True)


@pytest.mark.parametrize(
    ("model", "world_size", "frozen"),
    [
        (tiny.MODEL, 1, []),
        (TIED, 1, ["tok_embeddings"]),
        (UNTIED, 1, ["tok_embeddings", "output"]),
        (TRAINED_OUTPUT, 1, ["tok_embeddings"]),
        slow(TIED, 2, ["tok_embeddings"]),
        (UNTIED, 2, ["tok_embeddings", "output"]),  # on another stage
    ],
)
def test_frozen_rows_of_stop_tokens_are_compared_with_all(model, world_size, frozen, tiny_config):
    (stop,) = tiny.tiny_tokenizer().stop_tokens
    whole, expected = tiny.tiny_model(tiny.base_of(model)), []
    for name in frozen:
        norms = getattr(whole, name).weight.norm(dim=1).tolist()
        kind = {"tok_embeddings": "embeddings", "output": "output rows"}[name]
        rows = f"{stop}: {norms[stop]:.3g}; median of all {sorted(norms)[33]:.3g}"
        expected.append(f"Stop tokens: norm of their frozen {kind} {rows}")
    config = tiny_config(model=model, pipeline_parallel_dim=world_size)
    assert run_distributed(lines_of_stop_tokens, world_size, config)[0] == expected


def exported_dtypes(config):
    return {weight.dtype for weight in torch.load(exported_model(config)).values()}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_export_warns_of_rounding_and_can_avoid_it(world_size, tiny_config):
    config = curve_config(tiny_config, model=KINDS["qlora"], dtype="bf16", max_steps_per_epoch=2)
    words = "rounding the merged weights"
    (text,) = [text for text in warnings_of(world_size, config) if words in text]
    assert re.search(r"weights loses [1-9]\d?% of the adapters' change", text)
    assert exported_dtypes(config) == {torch.bfloat16}
    config["export_dtype"] = "fp32"
    assert not any(words in text for text in warnings_of(world_size, config))
    assert exported_dtypes(config) == {torch.float32}


@pytest.mark.slow
def test_lora_is_trained_for_a_base_that_will_be_quantized(tiny_config):
    """The quantizer changes the loss; the adapters still learn."""
    config = curve_config(
        tiny_config,
        model=TIED,
        dataset={"_component_": "tiny.tiny_dataset", "num_samples": 8},
        epochs=8,
        optimizer={"_component_": "torch.optim.AdamW", "lr": 0.02},
        clip_grad_norm=None,
    )
    plain = losses(run_distributed(run_recipe, 1, config)[0])
    config["quantizer"] = QUANTIZER
    coarse = losses(run_distributed(run_recipe, 1, config)[0])
    on_two = losses(run_distributed(run_recipe, 2, config)[0])
    assert abs(coarse[0] - plain[0]) > 1e-4
    assert coarse[-1] < coarse[0] - 0.2
    assert on_two == pytest.approx(coarse, abs=1e-3)
