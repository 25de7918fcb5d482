"""Every sample is trained once per epoch, also with short, empty and skipped update steps."""

import pytest
import tiny
from big_batch import big_batch, steps_of
from distributed_runs import run_distributed
from recipe_runs import STEP_OF_8, cosine, run_recipe, run_recipe_keeping_warnings, run_recipe_recording_gradients


def data(num_samples, **more):
    return {"_component_": "tiny.tiny_dataset", "num_samples": num_samples, **more}


def num_targets(samples):
    return sum(label != tiny.IGNORE for sample in samples for label in sample["labels"][1:])


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "num_samples"), [(1, 21), (2, 21), (4, 19), (4, 2)])
def test_each_epoch_trains_on_every_sample_once(world_size, num_samples, tiny_config):
    """There may be fewer samples than ranks."""
    config = tiny_config(dataset=data(num_samples), epochs=2, batch_size=2, gradient_accumulation_steps=2)
    samples = tiny.make_samples(num_samples)
    steps = [step for epoch in range(2) for step in steps_of(samples, 4 * world_size, epoch)]
    logged = run_distributed(run_recipe, world_size, config)[0]
    assert [metrics["num_tokens"] for metrics in logged] == [num_targets(step) for step in steps]


def test_the_first_step_of_an_epoch_has_nothing_of_the_epoch_before(tiny_config):
    """There are 21 samples, 8 per step: stock recipes add the last microbatches to the next epoch."""
    config = tiny_config(dataset=data(21), epochs=2, batch_size=2, gradient_accumulation_steps=4)
    (gradients,) = run_distributed(run_recipe_recording_gradients, 1, config)
    assert len(gradients) == 6
    with tiny.float64_throughout():
        model = tiny.tiny_model().double()
        for epoch, step in ((0, 2), (1, 0)):
            _, expected = big_batch(model, steps_of(tiny.make_samples(21), 8, epoch)[step])
            for name, grad in gradients[3 * epoch + step].items():
                assert (grad - expected[name]).abs().max() < 1e-10


@pytest.mark.slow
def test_drop_skips_the_short_step(tiny_config):
    batch = {"batch_size": 2, "gradient_accumulation_steps": 4, "last_update_step": "drop"}
    logged, warnings = run_recipe_keeping_warnings(tiny_config(dataset=data(21), **batch))
    assert "5 of 21 samples are skipped" in " ".join(warnings)
    steps = steps_of(tiny.make_samples(21), 8)[:2]
    assert [metrics["num_tokens"] for metrics in logged] == [num_targets(step) for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_step_without_targets_is_skipped_on_all_ranks(world_size, tiny_config):
    """The last 8 of 16 samples (not shuffled) have no target: step 2 of 2, in both epochs."""
    config = tiny_config(
        dataset=data(16, num_without_targets=8),
        shuffle=False,
        epochs=2,
        lr_scheduler=cosine(num_warmup_steps=10),
        **STEP_OF_8,
    )
    logged, warnings = run_distributed(run_recipe_keeping_warnings, world_size, config)[0]
    assert [metrics["step"] for metrics in logged] == [1, 2]
    assert all(metrics["loss"] == metrics["loss"] for metrics in logged)
    assert [metrics["lr"] for metrics in logged] == pytest.approx([0.0, 0.001])
    skipped = [text.split(": it has no target tokens")[0] for text in warnings]
    for epoch in (1, 2):
        assert skipped.count(f"epoch {epoch}, update step 2") == 1


@pytest.mark.slow
def test_max_steps_per_epoch_counts_update_steps_also_in_the_schedule(tiny_config):
    config = tiny_config(dataset=data(40), epochs=2, max_steps_per_epoch=3, lr_scheduler=cosine(0))
    logged = run_recipe(config)
    assert [metrics["step"] for metrics in logged] == [1, 2, 3, 4, 5, 6]
    assert logged[3]["lr"] == pytest.approx(0.005)  # half of a cosine over 6 steps
