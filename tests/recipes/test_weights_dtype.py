"""``weights_dtype``: weights, summed gradients and optimizer state are wider than what the model computes in."""

from pathlib import Path

import pytest
import recipe_runs
import tiny
import torch
from arrays import TP_PLAN
from big_batch import STEP_OF_16
from distributed_runs import run_distributed
from recipe_runs import (
    DPO,
    KD,
    RECORDING_SGD,
    SFT,
    ListLogger,
    losses,
    run_compiled_recipe,
    run_recipe,
    set_up,
    slow,
    train_recording_gradients,
    writing_to,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.func import functional_call

from recipe_utils.losses import LinearCrossEntropyLoss
from recipe_utils.losses.attach import attach_loss
from recipe_utils.models.kernels import fuse_norms_and_rope
from recipe_utils.models.settings import ModelSettings
from recipe_utils.settings.problems import ConfigError

FSDP2_KEEPS_WIDER_GRADIENTS = hasattr(FSDPParam, "unsharded_grad_dtype")
"""Since 2.15, FSDP2 sums fp32 gradients of kernels (norm scales) without a cast to the bf16 weight's dtype."""

MIXED = {"dtype": "bf16", "weights_dtype": "fp32"}
RECORDED = {**STEP_OF_16, **MIXED, "batch_size": 2, "optimizer": RECORDING_SGD}


def gradients_and_steps(config):
    """Returns the full gradients of each update step by name, and the update steps."""
    with set_up(config) as made:
        with made.loader.epoch(0) as steps:
            steps = list(steps)
        return train_recording_gradients(made), steps


def of_all(configs):
    return [gradients_and_steps(config) for config in configs]


def bf16_gradients(model, microbatch, scale):
    """Returns fp32 gradients of one microbatch for fp32 weights that are cast by hand."""
    leaves = {name: p.detach().bfloat16().requires_grad_() for name, p in model.named_parameters()}
    if FSDP2_KEEPS_WIDER_GRADIENTS:
        for leaf in leaves.values():
            leaf.grad_dtype = None
    inputs = {**microbatch.inputs, "targets": microbatch.targets}
    (functional_call(model, leaves, kwargs=inputs) * scale).sum().backward()
    return {name: leaf.grad.float() for name, leaf in leaves.items()}


def reference(sizes, steps_of_ranks, sums_each_microbatch=False, accumulate=torch.float32):
    """Returns the gradients of each update step, from plain tensors and a plain model."""
    model = tiny.tiny_model(sizes)
    fuse_norms_and_rope(model)  # bf16 would make more of a norm's last digit
    attach_loss(model, LinearCrossEntropyLoss())
    found = []
    for steps in zip(*steps_of_ranks, strict=True):  # one update step on each rank
        scale = steps[0].scale("target_tokens")
        of_ranks = [[bf16_gradients(model, microbatch, scale) for microbatch in step.microbatches] for step in steps]
        total = {}
        for name in of_ranks[0][0]:
            parts = [[g[name].to(accumulate) for g in of_rank] for of_rank in of_ranks]
            if sums_each_microbatch:  # over the ranks, then over the microbatches
                total[name] = sum(sum(each) / len(steps) for each in zip(*parts, strict=True))
            else:
                total[name] = sum(sum(of_rank[1:], of_rank[0]) for of_rank in parts) / len(steps)
        found.append(total)
    return found


def equal(gradients, expected):
    """Returns True if the gradients are bitwise equal; a stage has some of them."""
    assert gradients.keys() <= expected.keys()
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    return all(torch.equal(gradients[name], expected[name]) for name in gradients)


def error(gradients, expected):
    scale = max(g.abs().max().item() for g in expected.values())
    return max((g - expected[name]).abs().max().item() for name, g in gradients.items()) / scale


@pytest.mark.parametrize(
    "changes",
    [
        {"model": tiny.MODEL},
        {"model": tiny.UNTIED_MODEL, "gradient_sync": "last_microbatch"},
        {"model": tiny.UNTIED_MODEL, "enable_activation_checkpointing": True},
        {"model": tiny.MODEL, "ac_mode": "selective", "ac_option": 2},
    ],
    ids=["tied", "one_sync", "recomputed", "every_second_layer"],
)
def test_on_one_process_gradients_are_those_of_weights_cast_by_hand(changes, tiny_config):
    gradients, steps = gradients_and_steps(tiny_config(**RECORDED, **changes))
    expected = reference(changes["model"], [steps])
    assert len(gradients) == len(expected) == 2
    assert all(map(equal, gradients, expected))


def test_a_sum_in_bf16_misses_them(tiny_config, monkeypatch):
    config = tiny_config(model=tiny.MODEL, **RECORDED, gradient_sync="last_microbatch")
    gradients, steps = gradients_and_steps(config)
    in_bf16 = reference(tiny.MODEL, [steps], accumulate=torch.bfloat16)
    assert error(gradients[0], in_bf16[0]) > 1e-3

    expected = reference(tiny.MODEL, [steps])
    monkeypatch.setattr(ModelSettings, "torch_weights_dtype", ModelSettings.torch_dtype)
    gradients, _ = gradients_and_steps(config)
    assert error(gradients[0], expected[0]) > 1e-3


PP_2 = {"pipeline_parallel_dim": 2}
TWO_RANKS = {
    "fsdp": {},
    "fsdp_one_sync": {"gradient_sync": "last_microbatch"},
    "hsdp": {"data_parallel_replicate_dim": 2},
    "pp": PP_2,
    "pp_1f1b": {**PP_2, "pipeline_parallel_schedule": "1F1B"},
    "tp": {"tensor_parallel_dim": 2, **TP_PLAN},
}


@pytest.fixture(scope="module")
def on_two_ranks(weights_folder):
    """Returns by layout the gradients and update steps of each of two ranks."""
    configs = [
        recipe_runs.tiny_config(weights_folder, model=tiny.UNTIED_MODEL, **RECORDED, **changes)
        for changes in TWO_RANKS.values()
    ]
    return dict(zip(TWO_RANKS, zip(*run_distributed(of_all, 2, configs), strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", TWO_RANKS)
def test_on_two_ranks_gradients_are_those_of_weights_cast_by_hand(layout, on_two_ranks):
    of_ranks = on_two_ranks[layout]
    holds_other_data = layout in ("fsdp", "fsdp_one_sync", "hsdp")
    steps = [steps for _, steps in of_ranks][: 2 if holds_other_data else 1]
    expected = reference(tiny.UNTIED_MODEL, steps, sums_each_microbatch=layout == "fsdp")
    for gradients, _ in of_ranks:
        if layout == "tp":
            # Partial sums are rounded to bf16, by up to 2^-9, at 4 all-reduces of 2 ranks, forward and backward.
            errors = [error(g, e) for g, e in zip(gradients, expected, strict=True)]
            assert max(errors) < 16 * 2**-9
        else:
            assert all(map(equal, gradients, expected))
    if layout.startswith("pp"):
        names = [set(gradients[0]) for gradients, _ in of_ranks]
        assert names[0] | names[1] == set(expected[0])
        assert not names[0] & names[1]


# ---- All else that has a precision --------------------------------------------------------------


def losses_and_dtypes(config, recipe):
    """Returns losses, and dtypes of trained weights, their optimizer state, frozen weights and frozen models."""
    with set_up(config, recipe) as made:
        made.train()
    optimizer = made.stepper.optimizer
    parts = optimizer.optim_map.values() if hasattr(optimizer, "optim_map") else [optimizer]
    states = [state for part in parts for state in part.state.values()]
    source = made.teacher._model if hasattr(made, "teacher") else getattr(made.attached, "__self__", None)
    frozen = (source or made).model.module
    of = {
        "trained": [p for p in made.model.module.parameters() if p.requires_grad],
        "frozen": [p for p in made.model.module.parameters() if not p.requires_grad],
        "state": [v for state in states for k, v in state.items() if k != "step"],
        "others": list(frozen.parameters()) if frozen is not made.model.module else [],
    }
    dtypes = {name: {str(t.dtype) for t in tensors} for name, tensors in of.items()}
    return losses(ListLogger.logged), dtypes


def of_each(configs, recipe):
    return [losses_and_dtypes(config, recipe) for config in configs]


WIDE_ADAPTED = tiny.adapted(tiny.WIDE_MODEL)
QDORA = {**WIDE_ADAPTED, "quantize_base": True, "use_dora": True}
SPLIT_BACKWARD = {"pipeline_parallel_schedule": "InterleavedZeroBubble"}
KINDS = {  # processes, recipe and config
    "full": (1, SFT, {}),
    "qdora": (1, SFT, {"model": QDORA}),
    "dpo_of_adapters": (1, DPO, {"model": WIDE_ADAPTED}),
    "optimizer_in_bwd": (2, SFT, {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1}),
    "lora_recomputed": (2, SFT, {"model": WIDE_ADAPTED, "enable_activation_checkpointing": True}),
    "dpo": (2, DPO, {}),
    "distillation": (2, KD, {}),
    "pp_tied": (2, SFT, {"model": tiny.DEEP_MODEL, **PP_2, **SPLIT_BACKWARD, "gradient_accumulation_steps": 4}),
    "pp_of_lora": (2, SFT, {"model": WIDE_ADAPTED, **PP_2}),
    "fsdp_and_tp": (4, SFT, {"model": tiny.UNTIED_MODEL, **TWO_RANKS["tp"]}),
}
FAST = ("full", "dpo_of_adapters")
MAKE = {SFT: "tiny_config", DPO: "tiny_dpo_config", KD: "tiny_kd_config"}


@pytest.mark.parametrize("kind", [kind if kind in FAST else slow(kind) for kind in KINDS])
def test_all_kinds_train_wider_weights(kind, weights_folder, tmp_path):
    world_size, recipe, changes = KINDS[kind]
    configs = []
    for precision in (MIXED, {"dtype": "bf16"}):
        config = getattr(recipe_runs, MAKE[recipe])(
            weights_folder, **{"max_steps_per_epoch": 3, **changes, **precision}
        )
        configs.append(writing_to(tmp_path, config))
    found = run_distributed(of_each, world_size, configs, recipe)
    fp32, bf16 = {"torch.float32"}, {"torch.bfloat16"}
    has_frozen = any(word in kind for word in ("lora", "dora", "adapters"))
    for (_, dtypes), _ in found:
        assert dtypes["trained"] == dtypes["state"] == fp32
        assert dtypes["frozen"] == (bf16 if has_frozen else set())
        assert dtypes["others"] == (bf16 if kind in ("dpo", "distillation") else set())

    # At the first step both have bf16's weights. A bf16 weight below 2 is rounded by up to 2^-9 * 2, 0.4 of AdamW's
    # update at lr 0.01: to first order the losses differ by less than 0.4 of what training changes.
    (in_fp32, _), (in_bf16, _) = found[0]
    assert in_fp32[0] == pytest.approx(in_bf16[0], rel=1e-3)
    assert in_fp32 == pytest.approx(in_bf16, abs=0.4 * (max(in_bf16) - min(in_bf16)))
    assert in_fp32 != in_bf16


@pytest.mark.slow
def test_compiled_layers_compute_in_dtype(tiny_config):
    config = tiny_config(**MIXED, max_steps_per_epoch=2)
    eager = losses(run_recipe(config))
    (compiled,) = run_distributed(run_compiled_recipe, 1, config)
    assert losses(compiled) == pytest.approx(eager, rel=0.01)


def loss_and_norm(config):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in run_recipe(config)]


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_where_it_is_dtype_it_changes_nothing(dtype, tiny_config):
    config = tiny_config(dtype=dtype, max_steps_per_epoch=3)
    assert loss_and_norm({**config, "weights_dtype": dtype}) == loss_and_norm(config)


@pytest.mark.parametrize("dtype", ["fp32", None])
def test_weights_narrower_than_what_is_computed_are_refused(dtype, tiny_config):
    with pytest.raises(ConfigError, match="weights_dtype=bf16: dtype=fp32 would compute"):
        run_recipe(tiny_config(dtype=dtype, weights_dtype="bf16"))


@pytest.mark.slow
def test_a_checkpoint_of_wider_weights_is_not_resumed_with_others(tiny_config):
    config = tiny_config(**MIXED, max_steps_per_epoch=2, save_every_n_steps=2)
    run_recipe(config)
    for changes in ({"weights_dtype": None}, {"dtype": "fp64", "weights_dtype": None}):
        other = {**config, "resume_from_checkpoint": True, "epochs": 2, **changes}
        (error,) = run_distributed(run_recipe, 1, other, expect_failures=True)
        assert "set model, dtype and weights_dtype as then" in error


@pytest.mark.parametrize(("asked", "expected"), [(None, torch.bfloat16), ("fp32", torch.float32)])
def test_an_export_is_in_dtype_unless_asked_otherwise(asked, expected, tiny_config):
    """Adapters are exported in the dtype of training."""
    precision = {**MIXED, "export_dtype": asked}
    run_recipe(tiny_config(model=WIDE_ADAPTED, **precision, max_steps_per_epoch=1))
    folder = Path(tiny_config()["output_dir"], "epoch_0")
    (model,) = folder.glob("*.bin")
    adapters = folder / "adapter" / "adapter_model.pt"
    for path, dtype in ((model, expected), (adapters, torch.float32)):
        exported = torch.load(path, weights_only=True)
        assert {weight.dtype for weight in exported.values()} == {dtype}
