"""Self-supervised training through the recipe: metrics on all layouts, resume, skipped steps, exports."""

import json
import math
import os
import shutil
from functools import partial

import pytest
import tiny
import torch
from big_batch_of_views import step_of_16
from checkpoint_runs import resuming_in
from distributed_runs import run_distributed
from recipe_runs import DINO, ListLogger, call_in_step, cosine, set_up, writing_to
from torch.distributed.tensor import DTensor

from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.dinov3.self_distillation import SUMS

PP_2 = {"pipeline_parallel_dim": 2}
LAYOUTS = {
    "fsdp-2": (2, {}),
    "hsdp-2x2": (4, {"data_parallel_replicate_dim": 2}),
    "pp-2": (2, PP_2),
    "pp-2-fsdp-2": (4, PP_2),
}
HELD_OUT = {
    "dataset_knn": {"_component_": "tiny.tiny_images", "num_images": 31, "num_classes": 13},
    "dataset_val": {"_component_": "tiny.tiny_images", "num_images": 21, "num_classes": 13},
    "run_val_every_n_steps": 2,
    "knn_neighbors": 5,
    "batch_size_val": 8,
}
SGD = {"_component_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}
ADAMW = {"_component_": "torch.optim.AdamW", "lr": 0.01, "weight_decay": 0.04}
SCHEDULED = {
    "optimizer": ADAMW,
    "lr_scheduler": cosine(2),
    "layerwise_lr_decay": 0.8,
    "weight_decay_end": 0.4,
    "ema_momentum_end": 1.0,
    "teacher_temperature_start": 0.04,
    "teacher_temperature_warmup_steps": 4,
    "freeze_last_layer_steps": 1,
    "clip_grad_norm": 3.0,
    "rope_rescale": 2.0,
}
METRICS = (*SUMS, "prototypes_used", "grad_norm", "knn_accuracy")
CURVE = (*METRICS, "lr", "ema_momentum", "teacher_temperature")


def config_of(tiny_config, **changes):
    """Returns a config of update steps of 16, 16 and 5 images per epoch, in microbatches of two."""
    return step_of_16(tiny_config, **{"batch_size": 2, "optimizer": SGD, **changes})


def full(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def everything(recipe):
    """Returns full weights of all three models and the optimizer's state, of this rank's stages."""
    found = {}
    for name, parameter in parameters_by_name(recipe.run.checkpointing.trained.model).items():
        found[name] = full(parameter)
        for key, value in recipe.stepper.optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = full(value) if isinstance(value, torch.Tensor) else value
    return found


def run(config, stop_at=None):
    """Returns logged metrics and :func:`everything`; stops in update step ``stop_at``."""
    with set_up(config, DINO) as recipe:
        call_in_step(recipe, stop_at, recipe.run.stop.set)
        recipe.train()
        return list(ListLogger.logged), everything(recipe)


def run_in_float64(config, **arguments):
    with tiny.float64_throughout():
        return run({**config, "dtype": "fp64"}, **arguments)


def run_all(configs, in_float64=False):
    return [(run_in_float64 if in_float64 else run)(config) for config in configs]


def figures(logged, names=METRICS):
    return [(m["step"], name, m[name]) for m in logged for name in names if name in m]


def assert_same(found, expected, rel, names=METRICS):
    found, expected = figures(found, names), figures(expected, names)
    assert [figure[:2] for figure in found] == [figure[:2] for figure in expected]
    assert [f[2] for f in found] == pytest.approx([f[2] for f in expected], rel=rel, abs=1e-7)


# ---- Metrics ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def curve(module_config):
    config = config_of(module_config, **HELD_OUT)
    ((logged, _),) = run_distributed(run_in_float64, 1, config)
    return logged


def test_every_term_is_logged(curve):
    assert len(figures(curve)) == 3 * (len(METRICS) - 1) + 3  # k-NN before, between and after
    for metrics in curve:
        if "loss" not in metrics:
            continue
        dino = (3 * metrics["dino_local_loss"] + metrics["dino_global_loss"]) / 4
        others = {"ibot": 0.8, "koleo": 0.3, "gram": 0.5}
        loss = 0.9 * dino + sum(others[name] * metrics[f"{name}_loss"] for name in others)
        assert metrics["loss"] == pytest.approx(loss)
        assert 0 < metrics["target_entropy"] < math.log(12)
        assert 1 <= metrics["prototypes_used"] <= 12
        assert metrics["effective_local_batch"] == 16
    assert [m["effective_global_batch"] for m in curve if "loss" in m] == [16, 16, 5]
    accuracies = [m["knn_accuracy"] for m in curve if "knn_accuracy" in m]
    assert all(0 < a < 1 and a * 21 == pytest.approx(round(a * 21)) for a in accuracies), accuracies


def test_training_without_labels_ignores_those_of_a_dataset(tiny_config):
    """-1 is the label in STL-10's unlabeled split; others are captions, boxes and attributes."""
    images = {"_component_": "tiny.unlabeled_images", "num_images": 16}
    labels = ({}, {"label": -1}, {"label": "a cat"}, {"label": [3, 4]}, {"label": {"size": 2}})
    configs = [config_of(tiny_config, dataset=images | label, max_steps_per_epoch=1) for label in labels]
    (expected, _), *others = run_all(configs)
    for logged, _ in others:
        assert figures(logged) == figures(expected) != []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["hsdp-2x2", "pp-2-fsdp-2"])
def test_terms_and_neighbors_are_those_of_one_process(layout, tiny_config, curve):
    world_size, dims = LAYOUTS[layout]
    config = config_of(tiny_config, **HELD_OUT, **dims)
    (logged, _), *_ = run_distributed(run_in_float64, world_size, config)
    assert_same(logged, curve, rel=1e-6)
    dp_degree = world_size // dims.get("pipeline_parallel_dim", 1)
    tokens_of_image = 2 * (1 + 1 + 9) + 3 * (1 + 1 + 4)
    for metrics in logged:
        if "loss" in metrics:
            assert metrics["effective_local_batch"] == 16 // dp_degree
            rates = [metrics[f"{n}_per_second_per_gpu"] for n in ("crop_tokens", "images")]
            assert rates[0] / rates[1] == pytest.approx(tokens_of_image)


@pytest.mark.slow
def test_a_last_update_step_of_one_image_has_no_koleo_loss(tiny_config):
    data = {"dataset": {"_component_": "tiny.tiny_images", "num_images": 33}}
    configs = [config_of(tiny_config, **data, koleo_group_size=size, batch_size=4) for size in (2, None)]
    ((one, *_),) = run_distributed(run_all, 1, configs[:1], True)
    alone = one[0][-1]
    assert alone["koleo_loss"] == 0
    assert alone["effective_global_batch"] == 1
    assert 0 < alone["grad_norm"] < 100
    grouped, two_passes = run_distributed(run_all, 2, configs, True)[0]
    assert_same(grouped[0], one[0], rel=1e-6)
    assert two_passes[0][-1]["koleo_loss"] == 0
    assert math.isfinite(two_passes[0][-1]["grad_norm"])


# ---- Ways to compute -------------------------------------------------------------------------------


WAYS = {
    "compiled": ({"compile": True}, 1e-6),
    "recomputed": ({"enable_activation_checkpointing": True}, 1e-6),
    "partly recomputed": ({"ac_mode": "selective", "ac_option": 2}, 1e-6),
    "fused": ({"optimizer": {**ADAMW, "fused": True}}, 1e-6),
    "bf16 over fp32": ({"dtype": "bf16", "weights_dtype": "fp32"}, 3e-2),
}


def run_ways(configs):
    os.environ["TORCH_COMPILE_BACKEND"] = "aot_eager"  # inductor takes a minute
    return run_all(configs)


@pytest.mark.slow
def test_compiled_recomputed_fused_and_mixed_training_have_equal_losses(tiny_config):
    plain = config_of(tiny_config, optimizer=ADAMW, batch_size=8, dtype="fp64")
    configs = [plain, *({**plain, **changes} for changes, _ in WAYS.values())]
    ((expected, *found),) = run_distributed(run_ways, 1, configs)
    names = ("loss", "dino_local_loss", "dino_global_loss", "ibot_loss", "gram_loss")
    for way, (logged, _) in zip(WAYS, found, strict=True):
        _, rel = WAYS[way]
        assert all(math.isfinite(m["grad_norm"]) for m in logged)
        # In bf16 up to the first Adam step, which follows the sign of tiny gradients.
        num_steps = 1 if "bf16" in way else 3
        assert_same(logged[:num_steps], expected[0][:num_steps], rel, names)
        assert len(logged) == 3, way


# ---- Resume ----------------------------------------------------------------------------------------


def undisturbed_and_resumed(config, folder):
    configs = [writing_to(f"{folder}/{name}", config) for name in ("undisturbed", "stopped")]
    whole, first = run(configs[0]), run(configs[1], stop_at=3)
    return whole, first, run({**configs[1], "resume_from_checkpoint": True})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp-2", "pp-2"])
def test_a_resume_is_bitwise_with_all_teachers(layout, tiny_config, tmp_path):
    world_size, dims = LAYOUTS[layout]
    config = config_of(tiny_config, **SCHEDULED, **HELD_OUT, **dims, epochs=2, max_steps_per_epoch=2, batch_size=4)
    results = run_distributed(undisturbed_and_resumed, world_size, config, str(tmp_path))
    for whole, _, second in results:
        models = {name.partition(".")[0] for name in whole[1]}
        assert models == {"student", "teacher", "gram_teacher"}
        torch.testing.assert_close(second[1], whole[1], rtol=0, atol=0)
    whole, first, second = results[0]
    assert [m["step"] for m in first[0] if "loss" in m] == [1, 2, 3]
    found = figures(first[0], CURVE) + figures(second[0], CURVE)
    assert sorted(found) == sorted(figures(whole[0], CURVE))
    lines = (tmp_path / "stopped/logs/metrics.jsonl").read_text().splitlines()
    seen = [json.loads(line)["num_images_seen"] for line in lines if '"loss"' in line]
    assert seen == [16, 32, 48, 64]


def test_changed_options_of_groups_are_applied_at_a_resume(tiny_config, tmp_path):
    short = {"epochs": 2, "max_steps_per_epoch": 2, "batch_size": 4}
    config = config_of(tiny_config, **SCHEDULED, **short)
    stopped = writing_to(tmp_path / "stopped", config)
    run(stopped, stop_at=2)
    changes = {"layerwise_lr_decay": 0.3, "optimizer": {**ADAMW, "weight_decay": 0.1}}
    _, found = run({**stopped, **changes, "resume_from_checkpoint": True})

    def change_by_hand():
        for group in recipe.stepper.optimizer.param_groups:
            depth_from_top = round(math.log(group["initial_lr"] / 0.01, 0.8))
            group["initial_lr"] = 0.01 * 0.3**depth_from_top
            group["lr"] = group["initial_lr"] * recipe.stepper.lr_scheduler.lr_lambdas[0](2)
            group["decays_from"] *= 0.1 / 0.04
        rates = [group["initial_lr"] for group in recipe.stepper.optimizer.param_groups]
        recipe.stepper.lr_scheduler.base_lrs = rates

    with set_up(config, DINO) as recipe:
        call_in_step(recipe, 3, change_by_hand)
        recipe.train()
        torch.testing.assert_close(found, everything(recipe), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_another_layout_resumes_the_checkpoint_of_one_process(tiny_config, tmp_path):
    short = {"epochs": 2, "max_steps_per_epoch": 2, "batch_size": 4}
    config = config_of(tiny_config, **{**SCHEDULED, "optimizer": {**SGD, "weight_decay": 0.04}, **short})
    whole = writing_to(tmp_path / "whole", config)
    ((_, expected),) = run_distributed(run_in_float64, 1, whole)
    config = writing_to(tmp_path / "stopped", config)
    run_distributed(partial(run_in_float64, stop_at=2), 1, config)
    for layout in ("fsdp-2", "pp-2"):
        world_size, dims = LAYOUTS[layout]
        shutil.copytree(tmp_path / "stopped", tmp_path / layout)
        resumed = {**resuming_in(tmp_path / layout, config), **dims}
        results = run_distributed(run_in_float64, world_size, resumed)
        assert [m["step"] for m in results[0][0]] == [3, 4]
        found = {name: value for _, weights in results for name, value in weights.items()}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).abs().max() < 1e-12, name


# ---- Skipped steps ---------------------------------------------------------------------------------


def run_with_a_spoilt_step(config, spoilt):
    """Returns the names of the models that each update step changed."""
    with set_up(config, DINO) as recipe:
        sums, update = recipe.model.sums, recipe.update
        changed = []
        recipe.model.sums = lambda microbatch: (
            sums(microbatch) * (math.nan if recipe.run.global_step + 1 == spoilt else 1.0)
        )

        def watched(step):
            before = everything(recipe)
            result = update(step)
            after = everything(recipe)
            changed.append(
                {
                    name.partition(".")[0]
                    for name, weight in before.items()
                    if "/" not in name and not torch.equal(weight, after[name])
                }
            )
            return result

        recipe.update = watched
        recipe.train()
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["not-fused", "fused"])
def test_a_nonfinite_update_step_changes_neither_student_nor_average(fused, tiny_config):
    config = config_of(
        tiny_config,
        optimizer={**ADAMW, "fused": fused},
        on_nonfinite="skip",
        batch_size=4,
        epochs=2,
        gram_teacher_every_n_steps=2,
    )
    for changed in run_distributed(run_with_a_spoilt_step, 2, config, 4):
        # The fourth step copies the average, which the third one changed, to the Gram teacher.
        both, all_three = {"student", "teacher"}, {"student", "teacher", "gram_teacher"}
        assert changed == [both, all_three, both, {"gram_teacher"}, both, all_three]


# ---- Exports ---------------------------------------------------------------------------------------


def test_an_export_is_the_average_with_heads_from_which_training_starts(tiny_config, tmp_path):
    config = config_of(tiny_config, batch_size=8)
    _, trained = run(config)
    given = {**config["checkpointer"], "checkpoint_dir": f"{config['output_dir']}/epoch_0"}
    other = writing_to(tmp_path / "on", {**config, "checkpointer": given})
    with set_up(other, DINO) as recipe:
        found = everything(recipe)
        recipe.train()
    names = [name.removeprefix("teacher.") for name in trained if name.startswith("teacher.")]
    assert any("output.ibot.prototypes" in name for name in names)
    for name in names:
        for model in ("student", "teacher", "gram_teacher"):
            assert torch.equal(found[f"{model}.{name}"], trained[f"teacher.{name}"]), name
    assert not torch.equal(trained["student.norm.weight"], trained["teacher.norm.weight"])
    assert not list(tmp_path.glob("*/generation.yaml"))
    assert all(math.isfinite(m["loss"]) for m in ListLogger.logged)
