"""Self-supervised training through the recipe: alike on every layout, kept, resumed, exported."""

import gzip
import json
import logging
import math
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from big_batch_of_views import step_of_16
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import DINO, ListLogger, recipe_class, run_recipe
from torch.distributed.tensor import DTensor
from torchtune.utils import get_logger

from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.loss.self_distillation import SUMS
from recipe_utils.settings.problems import ConfigError

PP_2 = {"pipeline_parallel_dim": 2}
LAYOUTS = {
    "one-process": (1, {}),
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
ADAMW = {"_component_": "torch.optim.AdamW", "lr": 0.01, "weight_decay": 0.04}
SCHEDULED = {
    "optimizer": ADAMW,
    "lr_scheduler": {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 2,
    },
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
    """Three update steps of 16, 16 and 5 images an epoch, in microbatches of two."""
    optimizer = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}}
    return step_of_16(tiny_config, **{"batch_size": 2, **optimizer, **changes})


def full(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def everything(recipe):
    """Weights of student, teacher and Gram teacher, and the optimizer's state, in full, of this rank's stages."""
    found = {}
    for name, parameter in parameters_by_name(recipe.models).items():
        found[name] = full(parameter)
        for key, value in recipe.optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = full(value) if isinstance(value, torch.Tensor) else value
    return found


def run(config, stop_at=None):
    """What was logged, all that training changes, and warnings; asked to stop in the update step before ``stop_at``."""
    ListLogger.logged.clear()
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    get_logger().addHandler(handler)
    cfg = OmegaConf.create({"prefetch_update_steps": 0, **config})
    recipe = recipe_class(recipe=DINO)(cfg)
    update = recipe.update

    def watched(step):
        if recipe.run.global_step + 2 == stop_at:
            recipe.run.stop.set()
        return update(step)

    recipe.update = watched
    with recipe.run:
        recipe.setup(cfg)
        recipe.train()
        found = everything(recipe)
    get_logger().removeHandler(handler)
    return list(ListLogger.logged), found, warnings


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


def assert_bitwise(found, expected):
    assert found.keys() == expected.keys()
    assert any(name.startswith("teacher.") for name in found)
    assert any(name.startswith("gram_teacher.") for name in found)
    for name, value in found.items():
        same = (
            torch.equal(value, expected[name])
            if torch.is_tensor(value)
            else value == expected[name]
        )
        assert same, name


def of_all_ranks(results):
    """Weights of all stages by their names in the whole model."""
    return {name: value for _, weights, _ in results for name, value in weights.items()}


# ---- Alike on every layout -------------------------------------------------------------------------


def module_folder(config, folder):
    config["output_dir"] = config["checkpointer"]["output_dir"] = str(folder)
    return config


@pytest.fixture(scope="module")
def curve(module_config):
    """What one process logs, validations included."""
    config = config_of(module_config, **HELD_OUT)
    ((logged, _, _),) = run_distributed(run_in_float64, 1, config)
    return logged


def test_every_term_is_logged(curve):
    assert len(figures(curve)) == 3 * (len(METRICS) - 1) + 1
    for metrics in curve:
        if "loss" not in metrics:
            continue
        dino = (3 * metrics["dino_local_loss"] + metrics["dino_global_loss"]) / 4
        loss = dino + sum(
            weight * metrics[f"{name}_loss"]
            for name, weight in (("ibot", 0.8), ("koleo", 0.3), ("gram", 0.5))
        )
        assert metrics["loss"] == pytest.approx(loss)
        assert 0 < metrics["target_entropy"] < math.log(12)
        assert 1 <= metrics["prototypes_used"] <= 12
        assert metrics["effective_local_batch"] == 16
    assert [m["effective_global_batch"] for m in curve if "loss" in m] == [16, 16, 5]
    accuracies = [m["knn_accuracy"] for m in curve if "knn_accuracy" in m]
    assert all(0 < a < 1 and a * 21 == pytest.approx(round(a * 21)) for a in accuracies), accuracies


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one-process"])
def test_terms_and_neighbours_are_those_of_one_process(layout, tiny_config, curve):
    world_size, dims = LAYOUTS[layout]
    (logged, _, _), *_ = run_distributed(
        run_in_float64, world_size, config_of(tiny_config, **HELD_OUT, **dims)
    )
    assert_same(logged, curve, rel=1e-6)
    dp_degree = world_size // dims.get("pipeline_parallel_dim", 1)
    assert {m["effective_local_batch"] for m in logged if "loss" in m} == {16 // dp_degree}


def counted_by_a_fake_clock(config):
    """By which every update step takes 4 seconds."""
    from recipe_utils.run import metrics as throughput

    seconds = [0.0]
    throughput.time = SimpleNamespace(perf_counter=lambda: seconds[0])
    add = throughput.Throughput.add

    def added(self, step, wait_seconds):
        seconds[0] += 4.0
        add(self, step, wait_seconds)

    throughput.Throughput.add = added
    logged, _, _ = run(config)
    return logged


@pytest.mark.slow
def test_images_and_their_tokens_are_counted_once_over_stages_ranks_and_microbatches(tiny_config):
    config = config_of(tiny_config, global_batch_size=12, **PP_2)  # 3 microbatches on 2 dp ranks
    logged, *_ = run_distributed(counted_by_a_fake_clock, 4, config)
    tokens_of_image = 2 * (1 + 1 + 9) + 3 * (1 + 1 + 4)
    for metrics, num_images in zip(logged, (12, 12, 12, 1), strict=True):
        assert metrics["images_per_second_per_gpu"] == num_images / 4 / 4
        assert metrics["crop_tokens_per_second_per_gpu"] == num_images * tokens_of_image / 4 / 4
        assert metrics["effective_local_batch"] == 6
        assert metrics["effective_global_batch"] == num_images


@pytest.mark.slow
def test_a_list_of_datasets_is_one_after_the_other(tiny_config):
    part = {"_component_": "tiny.tiny_images", "num_images": 9}
    config = step_of_16(tiny_config, dataset=[part, part], batch_size=4)
    logged = run_recipe(config, recipe=DINO)
    assert [line["effective_global_batch"] for line in logged] == [16, 2]


def test_a_last_update_step_of_one_image_has_no_neighbours_and_is_trained_on(tiny_config):
    data = {"dataset": {"_component_": "tiny.tiny_images", "num_images": 33}}
    configs = [
        config_of(tiny_config, **data, koleo_group_size=size, batch_size=batch_size)
        for size, batch_size in ((2, 4), (None, 4))
    ]
    ((one, *_),) = run_distributed(run_all, 1, configs[:1], True)
    alone = one[0][-1]
    assert alone["koleo_loss"] == 0
    assert alone["effective_global_batch"] == 1
    assert 0 < alone["grad_norm"] < 100
    grouped, two_passes = run_distributed(run_all, 2, configs, True)[0]
    assert_same(grouped[0], one[0], rel=1e-6)
    assert two_passes[0][-1]["koleo_loss"] == 0
    assert math.isfinite(two_passes[0][-1]["grad_norm"])


# ---- Ways of computing -----------------------------------------------------------------------------


WAYS = {
    "compiled": ({"compile": True}, 1e-5),
    "recomputed": ({"enable_activation_checkpointing": True}, 1e-6),
    "fused": ({"optimizer": {**ADAMW, "fused": True}}, 1e-4),
    "bf16 over fp32": ({"dtype": "bf16", "weights_dtype": "fp32"}, 3e-2),
}


def run_ways(configs):
    os.environ["TORCH_COMPILE_BACKEND"] = "aot_eager"  # inductor takes a minute
    return run_all(configs)


@pytest.mark.slow
def test_other_ways_to_compute_the_same_give_the_same(tiny_config):
    plain = config_of(tiny_config, optimizer=ADAMW, batch_size=8)
    configs = [plain, *({**plain, **changes} for changes, _ in WAYS.values())]
    ((expected, *found),) = run_distributed(run_ways, 1, configs)
    names = ("loss", "dino_local_loss", "dino_global_loss", "ibot_loss", "gram_loss")
    for way, (logged, _, _) in zip(WAYS, found, strict=True):
        _, rel = WAYS[way]
        assert all(math.isfinite(m["grad_norm"]) for m in logged)
        # In bf16 up to the first Adam step, which follows the sign of tiny gradients.
        num_steps = 1 if "bf16" in way else 3
        assert_same(logged[:num_steps], expected[0][:num_steps], rel, names)
        assert len(logged) == 3, way


# ---- Going on --------------------------------------------------------------------------------------


def undisturbed_and_resumed(config, folder):
    """The same training twice, once asked to stop on its way."""
    own = [
        module_folder(OmegaConf.to_container(OmegaConf.create(config)), f"{folder}/{i}")
        for i in (0, 1)
    ]
    whole = run(own[0])
    first = run(own[1], stop_at=3)
    second = run({**own[1], "resume_from_checkpoint": True})
    return whole, first, second


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one-process", "fsdp-2", "pp-2"])
def test_it_goes_on_bitwise_with_its_teachers(layout, tiny_config, tmp_path):
    world_size, dims = LAYOUTS[layout]
    config = config_of(
        tiny_config, **SCHEDULED, **HELD_OUT, **dims, epochs=2, max_steps_per_epoch=2, batch_size=4
    )
    results = run_distributed(undisturbed_and_resumed, world_size, config, str(tmp_path))
    for rank, (whole, first, second) in enumerate(results):
        assert_bitwise(second[1], whole[1])
        if rank == 0:
            steps = [m["step"] for m in first[0] if "loss" in m]
            assert steps == [1, 2, 3]
            found = figures(first[0], CURVE) + figures(second[0], CURVE)
            # The validation that a stop leaves out.
            left_out = [f for f in figures(whole[0], CURVE) if f not in found]
            assert left_out == []
            assert len(found) == len(figures(whole[0], CURVE))


@pytest.mark.slow
def test_another_layout_goes_on_where_one_process_was(tiny_config, tmp_path):
    config = config_of(tiny_config, **{**SCHEDULED, "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}})  # fmt: skip
    config |= {"epochs": 2, "max_steps_per_epoch": 2, "batch_size": 4}
    ((_, expected, _),) = run_distributed(
        run_in_float64, 1, module_folder(config, tmp_path / "whole")
    )
    config = module_folder(config, tmp_path / "stopped")
    run_distributed(partial(run_in_float64, stop_at=2), 1, config)
    for layout in ("fsdp-2", "pp-2"):
        world_size, dims = LAYOUTS[layout]
        folder = tmp_path / layout
        shutil.copytree(tmp_path / "stopped", folder)
        resumed = {
            **module_folder({**config, "checkpointer": {**config["checkpointer"]}}, folder),
            **dims,
        }
        resumed["resume_from_checkpoint"] = True
        results = run_distributed(run_in_float64, world_size, resumed)
        assert [m["step"] for m in results[0][0]] == [3, 4]
        found = of_all_ranks(results)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).abs().max() < 1e-12, name


@pytest.mark.slow
def test_another_seed_is_told_and_other_data_are_refused(tiny_config):
    config = config_of(tiny_config, batch_size=16, save_every_n_steps=1, max_steps_per_epoch=2)
    run(config)
    resumed = {**config, "resume_from_checkpoint": True, "epochs": 2}
    for changes, text in (
        ({"data_seed": 1}, "data_seed=1"),
        ({"dataset": {"_component_": "tiny.tiny_images", "num_images": 36}}, "num_samples=36"),
        ({"dataset": {"_component_": "tiny.tiny_images", "num_images": 37, "num_classes": 3}}, "hash_of_samples"),
        ({"global_batch_size": 32, "batch_size": 16}, "global_batch_size=32"),
    ):  # fmt: skip
        with pytest.raises((ConfigError, ValueError), match=text):
            run({**resumed, **changes})
    _, _, warnings = run({**resumed, "seed": 1})
    assert "seed=1: the checkpoint was saved with 0" in " ".join(warnings)


# ---- What is left out ------------------------------------------------------------------------------


def run_with_a_spoilt_step(config, spoilt):
    """Which of student, teacher and Gram teacher has moved in each update step."""
    cfg = OmegaConf.create(config)
    recipe = recipe_class(recipe=DINO)(cfg)
    with recipe.run:
        recipe.setup(cfg)
        sums, update = recipe.sums, recipe.update
        moved = []
        recipe.sums = lambda microbatch: (
            sums(microbatch) * (math.nan if recipe.run.global_step + 1 == spoilt else 1.0)
        )

        def own_weights():
            return {
                name: [getattr(p, "to_local", lambda p=p: p)().clone() for p in model.parameters()]
                for name, model in recipe.models.named_children()
            }

        def watched(step):
            before = own_weights()
            result = update(step)
            moved.append(
                {
                    name
                    for name, weights in own_weights().items()
                    if not all(map(torch.equal, weights, before[name]))
                }
            )
            return result

        recipe.update = watched
        recipe.train()
    return moved


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["not-fused", "fused"])
def test_an_update_step_that_is_not_finite_moves_neither_student_nor_average(fused, tiny_config):
    config = config_of(
        tiny_config,
        optimizer={**ADAMW, "fused": fused},
        on_nonfinite="skip",
        batch_size=4,
        epochs=2,
        gram_teacher_every_n_steps=2,
    )
    for moved in run_distributed(run_with_a_spoilt_step, 2, config, 4):
        # The Gram teacher is renewed in the fourth, too: from an average that has moved in the third.
        both, all_three = {"student", "teacher"}, {"student", "teacher", "gram_teacher"}
        assert moved == [both, all_three, both, {"gram_teacher"}, both, all_three]


@pytest.mark.slow
def test_an_update_step_without_any_image_is_no_step_of_the_schedules(tiny_config):
    config = config_of(
        tiny_config,
        dataset={"_component_": "tiny.broken_images", "num_images": 8, "index": 3},
        on_bad_sample="skip",
        shuffle=False,
        batch_size=1,
        global_batch_size=1,
        koleo_loss_weight=0.0,
        koleo_group_size=None,
        ema_momentum_end=1.0,
    )
    logged, _, warnings = run(config)
    assert "epoch 1, update step 4: it has no images" in " ".join(warnings)
    assert [m["step"] for m in logged] == list(range(1, 8))
    momentum = [m["ema_momentum"] for m in logged]
    assert len(set(momentum)) == 7
    assert momentum == sorted(momentum)


# ---- What is left on the disk ----------------------------------------------------------------------


def setup_weights(config):
    cfg = OmegaConf.create(config)
    recipe = recipe_class(recipe=DINO)(cfg)
    with recipe.run:
        recipe.setup(cfg)
        found = everything(recipe)
        recipe.train()
    return found, list(ListLogger.logged)


def test_an_export_is_the_average_with_its_heads_and_training_goes_on_from_it(
    tiny_config, tmp_path
):
    config = config_of(tiny_config, batch_size=8)
    _, trained, _ = run(config)
    given = {**config["checkpointer"], "checkpoint_dir": f"{config['output_dir']}/epoch_0"}
    other = module_folder({**config, "checkpointer": given}, tmp_path / "on")
    found, logged = setup_weights(other)
    names = [name.removeprefix("teacher.") for name in trained if name.startswith("teacher.")]
    assert any("output.ibot.prototypes" in name for name in names)
    for name in names:
        for model in ("student", "teacher", "gram_teacher"):
            assert torch.equal(found[f"{model}.{name}"], trained[f"teacher.{name}"]), name
    assert not torch.equal(trained["student.norm.weight"], trained["teacher.norm.weight"])
    assert all(math.isfinite(m["loss"]) for m in logged)


@pytest.mark.slow
def test_two_active_steps_of_the_profiler_are_two_update_steps(tiny_config, tmp_path):
    profiler = {
        "_component_": "torchtune.training.setup_torch_profiler",
        "enabled": True,
        "output_dir": f"{tmp_path}/profile",
        "cpu": True,
        "cuda": False,
        "xpu": False,
        "wait_steps": 0,
        "warmup_steps": 1,
        "active_steps": 2,
        "num_cycles": 1,
    }
    run_distributed(run, 1, config_of(tiny_config, batch_size=8, profiler=profiler))
    (trace,) = tmp_path.glob("profile/*/*.pt.trace.json.gz")
    with gzip.open(trace) as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#") for name in names) == 2
    of_profiler = {name for name in names if name.startswith("ProfilerStep")}
    assert len(of_profiler) == 2


@pytest.mark.slow
def test_images_are_counted_in_the_metrics_file_and_over_a_resume(tiny_config):
    config = config_of(tiny_config, batch_size=16, epochs=2, save_every_n_steps=1)
    run(config, stop_at=2)
    run({**config, "resume_from_checkpoint": True})
    path = Path(config["output_dir"], "logs", "metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["num_images_seen"] for line in lines] == [16, 32, 37, 53, 69, 74]
    assert not any("num_tokens_seen" in line for line in lines)
