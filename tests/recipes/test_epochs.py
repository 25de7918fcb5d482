"""Every sample exactly once per epoch; short, empty and left-out update steps."""

import shutil
from contextlib import nullcontext

import pytest
import tiny
import torch.distributed as dist
from distributed_runs import run_distributed
from recipe_runs import (
    run_recipe,
    run_recipe_keeping_warnings,
    run_recipe_recording_gradients,
)

from recipe_utils.data.loader.sampler import epoch_permutation


def data(num_samples, **more):
    return {"_component_": "tiny.tiny_dataset", "num_samples": num_samples, **more}


def num_targets(samples):
    return sum(label != tiny.IGNORE for sample in samples for label in sample["labels"][1:])


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "num_samples"), [(1, 21), (2, 21), (4, 19), (4, 2)])
def test_each_epoch_trains_on_every_sample_once(world_size, num_samples, tiny_config):
    """Also with fewer samples than ranks; nothing leaks into the next epoch."""
    config = tiny_config(
        dataset=data(num_samples), epochs=2, batch_size=2, gradient_accumulation_steps=2
    )
    samples = tiny.make_samples(num_samples)
    global_batch_size = 4 * world_size
    expected = []
    for epoch in range(2):
        order = epoch_permutation(num_samples, epoch, shuffle=True).tolist()
        for start in range(0, num_samples, global_batch_size):
            step = [samples[i] for i in order[start : start + global_batch_size]]
            expected.append(num_targets(step))
    logged = run_distributed(run_recipe, world_size, config)[0]
    assert [metrics["num_tokens"] for metrics in logged] == expected


def test_the_first_step_of_an_epoch_has_nothing_of_the_epoch_before(tiny_config):
    """21 samples, 8 per step: stock carries the left-over microbatches into the next epoch."""
    config = tiny_config(dataset=data(21), epochs=2, batch_size=2, gradient_accumulation_steps=4)
    (gradients,) = run_distributed(run_recipe_recording_gradients, 1, config)
    assert len(gradients) == 6
    samples = tiny.make_samples(21)
    with tiny.float64_throughout():
        model = tiny.tiny_model().double()
        for epoch, step in ((0, 2), (1, 0)):
            order = epoch_permutation(21, epoch, shuffle=True).tolist()[8 * step : 8 * step + 8]
            _, expected = tiny.big_batch_gradients(model, [samples[i] for i in order])
            for name, grad in gradients[3 * epoch + step].items():
                assert (grad - expected[name]).abs().max() < 1e-10


@pytest.mark.slow
def test_drop_leaves_the_short_step_out(tiny_config):
    config = tiny_config(dataset=data(21), batch_size=2, gradient_accumulation_steps=4)
    config["last_update_step"] = "drop"
    ((logged, warnings),) = run_distributed(run_recipe_keeping_warnings, 1, config)
    assert "5 of 21 samples are skipped" in " ".join(warnings)
    order = epoch_permutation(21, epoch=0, shuffle=True).tolist()
    samples = [tiny.make_samples(21)[i] for i in order]
    assert [m["num_tokens"] for m in logged] == [
        num_targets(samples[:8]),
        num_targets(samples[8:16]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_step_without_targets_is_skipped_on_all_ranks(world_size, tiny_config):
    """Not shuffled, the last 8 of 16 samples have no target: step 2 of 2, in both epochs."""
    config = tiny_config(
        dataset=data(16, num_without_targets=8),
        shuffle=False,
        epochs=2,
        batch_size=2,
        global_batch_size=8,
        gradient_accumulation_steps=...,
        lr_scheduler={
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 10,
        },
    )
    logged, warnings = run_distributed(run_recipe_keeping_warnings, world_size, config)[0]
    assert [metrics["step"] for metrics in logged] == [1, 2]
    assert all(metrics["loss"] == metrics["loss"] for metrics in logged)
    assert [metrics["lr"] for metrics in logged] == pytest.approx([0.0, 0.001])
    skipped = [text for text in warnings if "update step" in text]
    assert [text.split(": it has no target tokens")[0] for text in skipped] == [
        "epoch 1, update step 2",
        "epoch 2, update step 2",
    ]


@pytest.mark.slow
def test_max_steps_per_epoch_counts_update_steps_and_the_schedule_knows_the_total(tiny_config):
    config = tiny_config(
        dataset=data(40),
        epochs=2,
        max_steps_per_epoch=3,
        lr_scheduler={
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 0,
        },
    )
    (logged,) = run_distributed(run_recipe, 1, config)
    assert [metrics["step"] for metrics in logged] == [1, 2, 3, 4, 5, 6]
    assert logged[3]["lr"] == pytest.approx(0.005)  # half way down a cosine over 6 steps


def run_recipe_in(dtype, config):
    with tiny.float64_throughout() if dtype == "fp64" else nullcontext():
        return run_recipe({**config, "dtype": dtype})


LAYOUTS = [(1, {}), (2, {}), (2, {"pipeline_parallel_dim": 2}), (4, {})]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "dims"), LAYOUTS)
@pytest.mark.parametrize(("dtype", "error"), [("fp32", 1e-6), ("fp64", 1e-13)])
def test_losses_are_exact_over_all_ranks(world_size, dims, dtype, error, tiny_config):
    """Those of training and of validation, summed in the precision of the model."""
    config = tiny_config(
        dataset=data(16),
        dataset_val=data(7, seed=5),
        run_val_every_n_steps=2,
        batch_size_val=2,
        optimizer={"_component_": "torch.optim.SGD", "lr": 0.0},
        global_batch_size=8,
        gradient_accumulation_steps=...,
        shuffle=False,
        **dims,
    )
    with tiny.float64_throughout():
        model = tiny.tiny_model().double()
        samples = tiny.make_samples(16), tiny.make_samples(7, seed=5)
        expected = [
            tiny.big_batch_gradients(model, each)[0]
            for each in (samples[0][:8], samples[0][8:], samples[1])
        ]
    logged = run_distributed(run_recipe_in, world_size, dtype, config)[0]
    losses = [m["loss"] for m in logged if "loss" in m]
    val_losses = [m["val_loss"] for m in logged if "val_loss" in m]
    assert [*losses, *val_losses] == pytest.approx(expected, rel=error)


@pytest.mark.slow
@pytest.mark.parametrize("enable_async_checkpointing", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_from_the_end_of_an_epoch(
    world_size, enable_async_checkpointing, tiny_config
):
    config = tiny_config(
        dataset=data(16),
        epochs=2,
        global_batch_size=4,
        gradient_accumulation_steps=...,
        enable_async_checkpointing=enable_async_checkpointing,
    )
    uninterrupted = run_distributed(run_then_forget_the_last_epoch, world_size, config)[0]
    resumed = {**config, "resume_from_checkpoint": True}
    logged = run_distributed(run_recipe, world_size, resumed)[0]
    assert [m["step"] for m in logged] == [5, 6, 7, 8]
    assert [m["loss"] for m in logged] == [m["loss"] for m in uninterrupted[4:]]


def run_then_forget_the_last_epoch(config):
    """Trains two epochs; what the second saved is removed, as if the job had ended in it."""
    logged = run_recipe(config)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{config['output_dir']}/epoch_1")
    return logged
