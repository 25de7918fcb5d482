"""Distillation through the recipe: equivalences, metrics, resume, and refused configs."""

import math
from functools import partial

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from recipe_runs import (
    KD,
    SFT,
    STEP_OF_8,
    STOCK_LOSS,
    cosine,
    exported_model,
    refusal,
    run_compiled_recipe,
    run_recipe,
    run_stock_recipe,
    slow,
    with_adapters,
    writing_to,
)
from recipe_runs import tiny_kd_config as tiny_kd_config_of

from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.parallel import process_group
from recipe_utils.settings.problems import ConfigError

METRICS = ("loss", "ce_loss", "kd_loss", "teacher_entropy", "teacher_agreement")
DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 38, "num_without_targets": 3}
HELD_OUT = {
    "dataset_val": {"_component_": "tiny.tiny_dataset", "num_samples": 13, "seed": 5},
    "run_val_every_n_steps": 2,
}
OURS = {"_component_": "recipe_utils.distillation.LinearDistillationLoss", "temperature": 2.0}
PP_2 = {"pipeline_parallel_dim": 2}


def run(config):
    return run_recipe(config, KD)


def figures(logged, *names):
    names = names or (*METRICS, *(f"val_{name}" for name in METRICS))
    return [(m["step"], name, m[name]) for m in logged for name in names if name in m]


def assert_same(found, expected, rel):
    assert [figure[:2] for figure in found] == [figure[:2] for figure in expected]
    assert [f[2] for f in found] == pytest.approx([f[2] for f in expected], rel=rel, abs=1e-7)


def curve_config(tiny_kd_config, **changes):
    return tiny_kd_config(
        **{
            "model": tiny.DEEP_MODEL,
            "teacher_sizes": tiny.TEACHER_MODEL,
            "kd_loss": OURS,
            "kd_ratio": 0.5,
            "dataset": DATA,
            "dtype": "fp64",
            **STEP_OF_8,
            **HELD_OUT,
            **changes,
        }
    )


# ---- Equivalences --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "world_size"),
    [("recipe_utils.losses.LinearCrossEntropyLoss", 2), slow("torchtune.modules.loss.CEWithChunkedOutputLoss", 1)],
)
def test_a_ratio_of_zero_is_fine_tuning_bitwise_and_opens_no_file_of_a_teacher(
    loss, world_size, tiny_kd_config, tiny_config
):
    of_both = {"dataset": DATA, "loss": {"_component_": loss}, **STEP_OF_8, **HELD_OUT}
    config = tiny_kd_config(kd_ratio=0.0, kd_loss=OURS, **of_both)
    config["teacher_checkpointer"]["checkpoint_dir"] = "/nowhere"
    ours = figures(run_distributed(run, world_size, config)[0], "loss", "grad_norm", "val_loss")
    of_ours = torch.load(exported_model(config))
    theirs = run_distributed(run_recipe, world_size, tiny_config(**of_both), SFT)[0]
    assert ours == figures(theirs, "loss", "grad_norm", "val_loss")
    for name, weight in torch.load(exported_model(config)).items():
        assert torch.equal(weight, of_ours[name])


def test_a_student_that_is_its_teacher_has_a_divergence_and_a_gradient_of_zero(tiny_kd_config):
    config = tiny_kd_config(
        teacher_sizes=tiny.MODEL,
        kd_loss=OURS,
        kd_ratio=1.0,
        optimizer={"_component_": "torch.optim.SGD", "lr": 0.0},
        dtype="fp64",
    )
    config["teacher_checkpointer"] = config["checkpointer"]
    for metrics in run(config):
        assert abs(metrics["kd_loss"]) <= 1e-12
        assert metrics["teacher_agreement"] == pytest.approx(1)
        assert metrics["grad_norm"] <= 1e-12


LAYOUTS = {
    "fsdp-2, packed": (2, {"microbatching": "packed", "balance_over_ranks": False}),
    "pp-2": (2, PP_2),
    "own cut": (2, {**PP_2, "teacher_pipeline_parallel_split_points": [4]}),
}


@pytest.fixture(scope="module")
def curve(weights_folder, tmp_path_factory):
    config = curve_config(partial(tiny_kd_config_of, weights_folder))
    config = writing_to(tmp_path_factory.mktemp("curve"), config)
    return figures(run_distributed(run, 1, config)[0])


def test_metrics_are_there_for_training_and_validation(curve):
    names = [name for step, name, _ in curve if step == 2]
    assert names == [*METRICS, *(f"val_{name}" for name in METRICS)]
    for _, name, value in curve:
        assert value > 0 or "agreement" in name
    for step in (1, 2, 3):
        of_step = {name: value for at, name, value in curve if at == step}
        loss = 0.5 * of_step["ce_loss"] + 0.5 * 2.0**2 * of_step["kd_loss"]
        assert of_step["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("layout", ["pp-2", slow("own cut")])
def test_the_curve_and_validation_are_those_of_one_process(layout, tiny_kd_config, curve):
    world_size, changes = LAYOUTS[layout]
    logged = run_distributed(run, world_size, curve_config(tiny_kd_config, **changes))[0]
    assert_same(figures(logged), curve, rel=1e-6)
    assert all(m["teacher_seconds"] > 0 for m in logged if "loss" in m)


@pytest.mark.slow
def test_compiled_layers_and_loss_give_the_same_curve(tiny_kd_config, curve):
    config = curve_config(tiny_kd_config)
    (logged,) = run_distributed(run_compiled_recipe, 1, config, KD, timeout_seconds=300)
    assert_same(figures(logged), curve, rel=1e-6)


def test_of_one_microbatch_stock_losses_are_ours_plus_the_teacher_s_entropy(tiny_kd_config, tmp_path):
    config = tiny_kd_config(
        model=tiny.adapted(tiny.MODEL),
        loss=STOCK_LOSS,
        kd_loss={"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"},
        batch_size=8,
        gradient_accumulation_steps=1,
        max_steps_per_epoch=1,
    )
    config = with_adapters(config, tmp_path)
    stock = {**config, "lr_scheduler": cosine(1)}  # it requires one
    (theirs,) = run_stock_recipe(stock, "knowledge_distillation")
    (ours,) = run(config)
    kd_loss = ours["kd_loss"] + ours["teacher_entropy"]
    assert theirs["class_loss"] == pytest.approx(ours["ce_loss"], rel=1e-5)
    assert theirs["kd_loss"] == pytest.approx(kd_loss, rel=1e-5)


# ---- Resume ------------------------------------------------------------------------------------------


def test_a_resumed_training_has_the_same_teacher_or_none(tiny_kd_config):
    config = curve_config(tiny_kd_config, save_every_n_steps=2, max_steps_per_epoch=3)
    run(config)
    resumed = {**config, "epochs": 2, "resume_from_checkpoint": True}
    other = {**config["teacher_checkpointer"], "checkpoint_files": ["teacher.pt"]}
    with pytest.raises(ValueError, match=r"teacher_checkpointer: .* with other frozen weights"):
        run({**resumed, "teacher_checkpointer": other})
    assert len(figures(run({**resumed, "kd_ratio": 0.0}), "loss")) == 3


# ---- Bad input ---------------------------------------------------------------------------------------


def test_weights_of_another_model_are_refused(tiny_kd_config):
    config = {**curve_config(tiny_kd_config), "teacher_model": tiny.WIDE_MODEL}
    assert "teacher_checkpointer: the checkpoint does not fit" in refusal(config, KD)


def test_a_sample_too_long_for_the_teacher_is_named_with_the_teacher_s_limit(tiny_kd_config):
    short = {**tiny.TEACHER_MODEL, "max_seq_len": 16}
    config = curve_config(tiny_kd_config)
    text = "tokenizer.max_seq_len=64: longer samples than the teacher_model's max_seq_len=16 fail"
    with pytest.raises(ConfigError, match=text):
        run({**config, "teacher_model": short})


def test_a_teacher_s_nan_is_named(tiny_kd_config, tmp_path):
    config = curve_config(tiny_kd_config)
    weights = tiny.tiny_model(tiny.TEACHER_MODEL).state_dict()
    weights["layers.0.attn.q_proj.weight"][0] = math.nan
    torch.save(weights, tmp_path / "teacher.pt")
    given = {"checkpoint_dir": str(tmp_path), "checkpoint_files": ["teacher.pt"]}
    config["teacher_checkpointer"] = {**config["teacher_checkpointer"], **given}
    with pytest.raises(NonfiniteError, match="teacher_checkpointer: the teacher's hidden states are"):
        run(config)


def test_images_are_inputs_of_both_models_or_of_none(tiny_kd_config, tmp_path):
    folder = tmp_path / "given"
    folder.mkdir()
    torch.save(tiny.tiny_fusion_model().state_dict(), folder / "fusion.pt")
    fusion = {"_component_": "tiny.tiny_fusion_model"}
    config = curve_config(
        tiny_kd_config,
        model=fusion,
        dataset={"_component_": "tiny.tiny_image_dataset", "num_samples": 8},
        collate_fn="tiny.collate_images",
        run_val_every_n_steps=None,
        dataset_val=None,
    )
    given = {"checkpoint_dir": str(folder), "checkpoint_files": ["fusion.pt"]}
    config["checkpointer"] = {**config["checkpointer"], **given}
    both = {**config, "teacher_model": fusion, "teacher_checkpointer": config["checkpointer"]}
    (metrics,) = run(both)
    assert abs(metrics["kd_loss"]) < 1e-6
    assert metrics["teacher_entropy"] > 1
    with pytest.raises(ConfigError, match="teacher_model: a TransformerDecoder does not take the inputs of"):
        run(config)


def count_gloo_groups(config):
    groups = []
    make = process_group.new_cpu_group
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(process_group, "new_cpu_group", lambda *args: groups.append(make(*args)) or groups[-1])
        run(config)
    return len(groups)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"process_group_timeout_seconds": None}, 2),
        slow({"process_group_timeout_seconds": None, "enable_async_checkpointing": True}, 3),
        slow({"process_group_timeout_seconds": 99}, 3),
    ],
)
def test_training_and_validation_add_one_gloo_group_each(changes, expected, tiny_kd_config):
    """A gloo group connects each rank with all others. The main thread uses the default group."""
    config = curve_config(tiny_kd_config, max_steps_per_epoch=1, **changes)
    assert run_distributed(count_gloo_groups, 2, config) == [expected] * 2
