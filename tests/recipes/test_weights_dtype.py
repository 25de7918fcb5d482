"""``weights_dtype``: weights, summed gradients and optimizer state are wider than what the model computes in."""

from dataclasses import replace
from pathlib import Path

import pytest
import recipe_runs
import tiny
import torch
from big_batch import STEP_OF_16, TP_PLAN
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import (
    DPO,
    KD,
    RECORDING_SGD,
    SFT,
    ListLogger,
    recipe_class,
    run_compiled_recipe,
    run_recipe,
    save_weights,
)
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call

from recipe_utils.loss import LinearCrossEntropyLoss
from recipe_utils.loss.attach_loss import attach_loss
from recipe_utils.model.adapters.adapters import find_adapters
from recipe_utils.model.build.kernels import speed_up_layers
from recipe_utils.settings.problems import ConfigError

MIXED = {"dtype": "bf16", "weights_dtype": "fp32"}
RECORDED = {**STEP_OF_16, **MIXED, "batch_size": 2, "optimizer": RECORDING_SGD}


def reduce_in_bf16(model):
    """As ``MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)``."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
            group.mp_policy = replace(group.mp_policy, reduce_dtype=torch.bfloat16)


def gradients_and_steps(config, change=None, mutation=()):
    """The full gradients of each update step by name, and the update steps that they are of."""
    tiny.RecordingSGD.recorded.clear()
    cfg = OmegaConf.create(config)
    made = recipe_class(*mutation)(cfg)
    with made.run:
        made.setup(cfg)
        if change is not None:
            change(made.model)
        with made.loader.epoch(0) as steps:
            steps = list(steps)
        parts = made.model.values() if made.pipeline is not None else [made.model]
        names = [
            name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
            for part in parts
            for name, p in part.named_parameters()
            if p.requires_grad
        ]
        made.train()
    recorded = tiny.RecordingSGD.recorded
    return [dict(zip(names, step, strict=True)) for step in recorded], steps


def of_all(configs):
    return [gradients_and_steps(config) for config in configs]


def bf16_gradients(model, microbatch, scale):
    """Of one microbatch, with fp32 weights that are cast by hand; in fp32."""
    leaves = {name: p.detach().bfloat16().requires_grad_() for name, p in model.named_parameters()}
    sums = functional_call(
        model, leaves, kwargs={**microbatch.inputs, "targets": microbatch.targets}
    )
    (sums * scale).sum().backward()
    assert {leaf.grad.dtype for leaf in leaves.values()} == {torch.bfloat16}
    return {name: leaf.grad.float() for name, leaf in leaves.items()}


def reference(sizes, steps_of_ranks, sums_each_microbatch, accumulate=torch.float32):
    """The gradients of each update step, from plain tensors and a plain model."""
    model = tiny.tiny_model(sizes)
    speed_up_layers(model)  # bf16 would make more of a norm's last digit
    attach_loss(model, LinearCrossEntropyLoss())
    found = []
    for steps in zip(*steps_of_ranks, strict=True):  # one update step on each rank
        scale = steps[0].scale("target_tokens")
        of_ranks = [
            [bf16_gradients(model, microbatch, scale) for microbatch in step.microbatches]
            for step in steps
        ]
        total = {}
        for name in of_ranks[0][0]:
            parts = [[g[name].to(accumulate) for g in of_rank] for of_rank in of_ranks]
            if sums_each_microbatch:
                total[name] = sum(
                    sum(of_ranks) / len(steps) for of_ranks in zip(*parts, strict=True)
                )
            else:
                total[name] = sum(sum(of_rank[1:], of_rank[0]) for of_rank in parts) / len(steps)
        found.append(total)
    return found


def equal(gradients, expected):
    """Whether the gradients are equal bit for bit; a stage has some of them."""
    assert gradients.keys() <= expected.keys()
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    return all(torch.equal(gradients[name], expected[name]) for name in gradients)


def error(gradients, expected):
    scale = max(g.abs().max().item() for g in expected.values())
    return max((g - expected[name]).abs().max().item() for name, g in gradients.items()) / scale


ONE_PROCESS = {
    "as it is": {},
    "one sync": {"gradient_sync": "last_microbatch"},
    "recomputed": {"enable_activation_checkpointing": True},
    "every second layer recomputed": {"ac_mode": "selective", "ac_option": 2},
}


@pytest.mark.parametrize("sizes", [tiny.MODEL, tiny.UNTIED_MODEL], ids=["tied", "untied"])
def test_on_one_process_gradients_are_those_of_weights_cast_by_hand(sizes, tiny_config):
    for changes in ONE_PROCESS.values():
        gradients, steps = gradients_and_steps(tiny_config(model=sizes, **{**RECORDED, **changes}))
        expected = reference(sizes, [steps], sums_each_microbatch=False)
        assert len(gradients) == len(expected) == 2
        assert all(map(equal, gradients, expected))


def test_a_sum_in_bf16_misses_them(tiny_config):
    config = tiny_config(model=tiny.MODEL, **RECORDED, gradient_sync="last_microbatch")
    gradients, steps = gradients_and_steps(config)
    in_bf16 = reference(tiny.MODEL, [steps], False, accumulate=torch.bfloat16)
    assert error(gradients[0], in_bf16[0]) > 1e-3

    expected = reference(tiny.MODEL, [steps], False)
    gradients, _ = gradients_and_steps(config, change=reduce_in_bf16)
    assert not equal(gradients[0], expected[0])
    assert error(gradients[0], expected[0]) > 1e-3

    forgets_it = (
        "build_model(make_model, prepare, modules,",
        "build_model(make_model, prepare, modules.without_gradients(),",
    )
    gradients, _ = gradients_and_steps(config, mutation=forgets_it)
    assert error(gradients[0], expected[0]) > 1e-3


TWO_RANKS = {
    "fsdp": {},
    "fsdp, one sync": {"gradient_sync": "last_microbatch"},
    "hsdp": {"data_parallel_replicate_dim": 2},
    "stages": {"pipeline_parallel_dim": 2},
    "stages, one forward one backward": {
        "pipeline_parallel_dim": 2,
        "pipeline_parallel_schedule": "1F1B",
    },
    "tp": {"tensor_parallel_dim": 2, **TP_PLAN},
}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """By layout, what each of two ranks has found."""
    folder = tmp_path_factory.mktemp("two_ranks")
    save_weights(folder)
    configs = [
        recipe_runs.tiny_config(folder, model=tiny.UNTIED_MODEL, **{**RECORDED, **changes})
        for changes in TWO_RANKS.values()
    ]
    return dict(zip(TWO_RANKS, zip(*run_distributed(of_all, 2, configs), strict=True), strict=True))


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_on_two_ranks_too(layout, on_two_ranks):
    of_ranks = on_two_ranks[layout]
    holds_other_data = layout in ("fsdp", "fsdp, one sync", "hsdp")
    steps = [steps for _, steps in of_ranks][: 2 if holds_other_data else 1]
    expected = reference(tiny.UNTIED_MODEL, steps, sums_each_microbatch=layout == "fsdp")
    for gradients, _ in of_ranks:
        if layout == "tp":  # its ranks add parts of activations and of their gradients, in bf16
            assert all(error(g, e) < 0.02 for g, e in zip(gradients, expected, strict=True))
        else:
            assert all(map(equal, gradients, expected))
    if "stages" in layout:
        names = [set(gradients[0]) for gradients, _ in of_ranks]
        assert names[0] | names[1] == set(expected[0])
        assert not names[0] & names[1]


# ---- Everything else that has a precision -----------------------------------------------------------


def trained(config, recipe=SFT):
    """Losses, and the precisions of trained weights, their optimizer state, frozen weights and other models."""
    cfg = OmegaConf.create(config)
    ListLogger.logged.clear()
    made = recipe_class(recipe=recipe)(cfg)
    with made.run:
        made.setup(cfg)
        made.train()
    optimizer = made.optimizer
    parts = optimizer.optim_map.values() if hasattr(optimizer, "optim_map") else [optimizer]
    states = [state for part in parts for state in part.state.values()]
    reference = getattr(getattr(made, "reference", None), "_model", None)
    teacher = getattr(getattr(made, "teacher", None), "_live", None)
    others = [m for m in (reference, getattr(teacher, "_model", None)) if m is not None]
    of = {
        "trained": [p for p in made.model.parameters() if p.requires_grad],
        "frozen": [p for p in made.model.parameters() if not p.requires_grad],
        "state": [v for state in states for k, v in state.items() if k != "step"],
        "others": [p for model in others for p in model.parameters()],
    }
    dtypes = {name: {str(t.dtype) for t in tensors} for name, tensors in of.items()}
    return [line["loss"] for line in ListLogger.logged], dtypes


def trained_all(cases):
    return [trained(config, recipe) for config, recipe in cases]


WIDE_ADAPTED = tiny.adapted(tiny.WIDE_MODEL)
IN_BACKWARD = {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1}
KINDS = {
    "full": (SFT, {}),
    "optimizer in the backward": (SFT, IN_BACKWARD),
    "lora": (SFT, {"model": WIDE_ADAPTED}),
    "dora": (SFT, {"model": {**WIDE_ADAPTED, "use_dora": True}}),
    "qlora": (SFT, {"model": {**WIDE_ADAPTED, "quantize_base": True}}),
    "dpo": (DPO, {}),
    "dpo of adapters": (DPO, {"model": WIDE_ADAPTED}),
    "distillation": (KD, {}),
}
ON_TWO = {
    **{kind: KINDS[kind] for kind in ("optimizer in the backward", "qlora", "dpo", "distillation")},
    "lora, recomputed": (SFT, {"model": WIDE_ADAPTED, "enable_activation_checkpointing": True}),
    "stages of tied embeddings": (SFT, {"pipeline_parallel_dim": 2}),
    "stages whose backward is split": (
        SFT,
        {
            "model": tiny.DEEP_MODEL,
            "pipeline_parallel_dim": 2,
            "pipeline_parallel_schedule": "InterleavedZeroBubble",
            "gradient_accumulation_steps": 4,
        },
    ),
    "stages of a lora": (SFT, {"model": WIDE_ADAPTED, "pipeline_parallel_dim": 2}),
}


def configs_of(folder, kinds, **changes):
    """For each kind one in bf16 with fp32 weights, and one in bf16 alone."""
    make = {
        SFT: recipe_runs.tiny_config,
        DPO: recipe_runs.tiny_dpo_config,
        KD: recipe_runs.tiny_kd_config,
    }
    short = {"max_steps_per_epoch": 3, **changes}
    return [
        (make[recipe](folder, **{**short, **own, **precision}), recipe)
        for recipe, own in kinds.values()
        for precision in (MIXED, {"dtype": "bf16"})
    ]


def check(kind, mixed, in_bf16, is_first=True):
    losses, dtypes = mixed
    fp32, bf16 = {"torch.float32"}, {"torch.bfloat16"}
    assert dtypes["trained"] == dtypes["state"] == fp32
    has_frozen = any(word in kind for word in ("lora", "dora", "adapters"))
    assert dtypes["frozen"] == (bf16 if has_frozen else set())
    assert dtypes["others"] == (bf16 if kind in ("dpo", "distillation") else set())
    if is_first:  # one computes in bf16 either way; the weights are bf16's at the first step
        assert losses == pytest.approx(in_bf16[0], rel=0.02)
        assert losses[0] == pytest.approx(in_bf16[0][0], rel=1e-3)
        assert losses != in_bf16[0]


@pytest.mark.parametrize("kind", KINDS)
def test_on_one_process_all_kinds_train_wider_weights(kind, tmp_path):
    save_weights(tmp_path)
    check(kind, *trained_all(configs_of(tmp_path, {kind: KINDS[kind]})))


@pytest.fixture(scope="module")
def kinds_on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    save_weights(folder)
    return run_distributed(trained_all, 2, configs_of(folder, ON_TWO))


@pytest.mark.parametrize("kind", ON_TWO)
def test_on_two_ranks_they_do(kind, kinds_on_two_ranks):
    for rank, found in enumerate(kinds_on_two_ranks):
        index = 2 * list(ON_TWO).index(kind)
        check(kind, found[index], found[index + 1], is_first=rank == 0)


def test_shards_of_split_layers_too(tmp_path):
    """FSDP2 over two, tensor parallel over two."""
    save_weights(tmp_path)
    own = {"model": tiny.UNTIED_MODEL, "tensor_parallel_dim": 2, **TP_PLAN}
    configs = configs_of(tmp_path, {"tp": (SFT, own)})
    found = run_distributed(trained_all, 4, configs)
    for rank, (mixed, in_bf16) in enumerate(found):
        check("tp", mixed, in_bf16, is_first=rank == 0)


def test_compiled_layers_compute_in_dtype(tiny_config):
    config = tiny_config(**MIXED, max_steps_per_epoch=2)
    eager = [line["loss"] for line in run_recipe(config)]
    (compiled,) = run_distributed(run_compiled_recipe, 1, config)
    assert [line["loss"] for line in compiled] == pytest.approx(eager, rel=0.01)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_where_it_is_dtype_it_changes_nothing(dtype, tiny_config):
    config = tiny_config(dtype=dtype, max_steps_per_epoch=3)

    def digits(config):
        kept = ("loss", "grad_norm")
        return [[line[name] for name in kept] for line in run_recipe(config)]

    assert digits({**config, "weights_dtype": dtype}) == digits(config)


@pytest.mark.parametrize(("dtype", "text"), [("fp32", "dtype=fp32"), (None, "dtype=fp32")])
def test_weights_narrower_than_what_is_computed_are_refused(dtype, text, tiny_config):
    with pytest.raises(ConfigError, match=f"weights_dtype=bf16: {text} would compute"):
        run_recipe(tiny_config(dtype=dtype, weights_dtype="bf16"))


def loss_and_norm(config):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in run_recipe(config)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_training_goes_on_bit_for_bit(world_size, tiny_config):
    config = tiny_config(**MIXED, max_steps_per_epoch=4, save_every_n_steps=2)
    whole = run_distributed(loss_and_norm, world_size, config)[0]
    newest = Path(config["output_dir"], "step_4")
    newest.rename(newest.with_name("put_aside"))
    resumed = {**config, "resume_from_checkpoint": True}
    for changes in ({"weights_dtype": None}, {"dtype": "fp64", "weights_dtype": None}):
        (error, *_) = run_distributed(
            loss_and_norm, world_size, {**resumed, **changes}, expect_failures=True
        )
        assert "set model, dtype and weights_dtype as then" in error
    assert run_distributed(loss_and_norm, world_size, resumed)[0] == whole[2:]


@pytest.mark.parametrize(("asked", "expected"), [(None, torch.bfloat16), ("fp32", torch.float32)])
def test_an_export_is_in_dtype_unless_asked_otherwise(asked, expected, tiny_config):
    config = tiny_config(**MIXED, export_dtype=asked, max_steps_per_epoch=1)
    run_recipe(config)
    (path,) = Path(config["output_dir"], "epoch_0").glob("*.bin")
    exported = torch.load(path, weights_only=True)
    assert {weight.dtype for weight in exported.values()} == {expected}


def test_adapters_are_exported_as_they_were_trained(tiny_config):
    """Beside the model that they are merged into, in its own precision."""
    config = tiny_config(model=WIDE_ADAPTED, **MIXED, max_steps_per_epoch=1)
    run_recipe(config)
    folder = Path(config["output_dir"], "epoch_0")
    adapters = torch.load(folder / "adapter" / "adapter_model.pt", weights_only=True)
    (path,) = [path for path in folder.glob("*.bin") if "adapter" not in path.name]
    assert {weight.dtype for weight in adapters.values()} == {torch.float32}
    assert {w.dtype for w in torch.load(path, weights_only=True).values()} == {torch.bfloat16}


def test_wrapped_and_frozen_parameters_are_told_apart(tiny_config):
    config = tiny_config(model=WIDE_ADAPTED, **MIXED, max_steps_per_epoch=1)
    cfg = OmegaConf.create(config)
    made = recipe_class()(cfg)
    with made.run:
        made.setup(cfg)
        adapters = find_adapters(made.model).trained
        wide = {n for n, p in made.model.named_parameters() if p.dtype == torch.float32}
        assert wide == adapters
