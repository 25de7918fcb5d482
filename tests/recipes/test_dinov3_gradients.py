"""The gradient of every parameter is that of one batch with its teacher, in float64, whatever the layout and the split."""

from dataclasses import replace
from functools import cache

import big_batch_of_views
import numpy as np
import pytest
import tiny
import torch
from big_batch import TOLERANCE, error
from big_batch_of_views import step_of_16
from distributed_runs import run_distributed
from recipe_runs import DINO, ListLogger, run_recipe_recording_gradients

from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.data.images.collator import ViewCollator

collate = ViewCollator.collate
PP_2, PP_4 = {"pipeline_parallel_dim": 2}, {"pipeline_parallel_dim": 4}
LAYOUTS = {  # world size, dimensions, schedules
    "one-process": (1, {}, [None]),
    "fsdp-2": (2, {}, [None]),
    "fsdp-4": (4, {}, [None]),
    "hsdp-2x2": (4, {"data_parallel_replicate_dim": 2}, [None]),
    "pp-2": (2, PP_2, ["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"]),
    "pp-4": (4, PP_4, ["1F1B", "GPipe"]),
    "pp-2-fsdp-2": (4, PP_2, ["1F1B", "Interleaved1F1B"]),
}


@cache
def reference(group_size, **only):
    return big_batch_of_views.reference(group_size, **only)


def gradients_and_metrics(configs, mutation=()):
    found = []
    for config in configs:
        ListLogger.logged.clear()
        gradients = run_recipe_recording_gradients(config, mutation, recipe=DINO)
        found.append((gradients, list(ListLogger.logged)))
    return found


def assert_is_one_batch(of_ranks, expected):
    for step, (metrics, gradients) in enumerate(
        zip(expected.metrics, expected.gradients, strict=True)
    ):
        assert set().union(*(found[step] for found, _ in of_ranks)) == gradients.keys()
        for found, _ in of_ranks:
            assert error(found[step], gradients) < TOLERANCE
        _, logged = of_ranks[0]
        for name, value in metrics.items():
            assert logged[step][name] == pytest.approx(value, rel=1e-6, abs=1e-7), name


def splits_of(dp_degree, schedule):
    """Images per microbatch, as far as the layout has so many; with stages two of them."""
    sizes = [size for size in (16, 8, 4, 2) if size * dp_degree <= 16]
    if schedule is not None:
        sizes = [size for size in (4, 2) if size * dp_degree * 2 <= 16]
    for size in sizes:
        # Groups of two are whole in every microbatch; None takes two passes.
        yield {"batch_size": size, "koleo_group_size": 2}
        if size < 8:
            yield {"batch_size": size, "koleo_group_size": None}


FAST = ("one-process", "fsdp-2")


@pytest.mark.parametrize(
    "layout", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_gradient_and_metrics_are_those_of_one_batch(layout, tiny_config):
    world_size, dims, schedules = LAYOUTS[layout]
    dp_degree = world_size // dims.get("pipeline_parallel_dim", 1)
    configs = []
    for schedule in schedules:
        of_schedule = {} if schedule is None else {"pipeline_parallel_schedule": schedule}
        for split in splits_of(dp_degree, schedule):
            configs.append(step_of_16(tiny_config, **split, **of_schedule, **dims))
    ranks = run_distributed(gradients_and_metrics, world_size, configs, timeout_seconds=300)
    for config, *of_ranks in zip(configs, *ranks, strict=True):
        assert_is_one_batch(of_ranks, reference(config["koleo_group_size"]))


MUTANTS = {
    "Sinkhorn of each microbatch": {"sinkhorn_over": "microbatch"},
    "KoLeo of each microbatch": {"koleo_group_size": 2},
}
EDITS = {
    "no scale": (
        'scale = step.scale("images")',
        "scale = 1 / len(step.microbatches[0].targets.names)",
    ),
    "a microbatch left out": ("mark_last(taught)", "mark_last(taught[:3] + taught[4:])"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MUTANTS, *EDITS])
def test_a_naive_split_misses_it(name, tiny_config):
    split = {"batch_size": 2, "koleo_group_size": None, "max_steps_per_epoch": 1}
    config = step_of_16(tiny_config, **{**split, **MUTANTS.get(name, {})})
    ((found, _),) = gradients_and_metrics([config], EDITS.get(name, ()))
    assert error(found[0], reference(None, num_steps=1).gradients[0]) > 5e-2


@pytest.mark.slow
def test_a_rank_that_counts_twice_misses_it(tiny_config):
    edit = (
        'scale = step.scale("images")',
        'scale = 2 / (step.totals["images"] + sum(m.counts["images"] for m in step.microbatches))',
    )
    split = {"batch_size": 4, "koleo_group_size": 2, "max_steps_per_epoch": 1}
    configs = [step_of_16(tiny_config, **split)]
    expected = reference(2, num_steps=1).gradients[0]
    for ((found, _),) in run_distributed(gradients_and_metrics, 2, configs, edit):
        assert error(found[0], expected) > 5e-2


def over_all_patches(self, samples):
    """iBOT as a mean over the masked patches of a microbatch, whichever crops they are of."""
    made = collate(self, samples)
    weights = made.targets.masked_weights
    even = torch.full_like(weights, 2 * len(samples) / max(len(weights), 1))
    return replace(made, targets=made.targets._replace(masked_weights=even))


def crop_major(self, samples):
    """As if crops were dealt to microbatches, the first of all images and then the second of all."""
    dealt = [dict(sample) for sample in samples]
    for key in ("global_crops", "masks", "draws"):
        of_crops = [sample[key][crop] for crop in (0, 1) for sample in samples]
        for image, sample in enumerate(dealt):
            rest = samples[image][key][2:]
            sample[key] = np.stack([*of_crops[2 * image : 2 * image + 2], *rest])
    return collate(self, dealt)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [over_all_patches, crop_major])
def test_naive_microbatches_miss_it(mutant, tiny_config, monkeypatch):
    monkeypatch.setattr(ViewCollator, "collate", mutant)
    split = {"batch_size": 2, "koleo_group_size": None, "max_steps_per_epoch": 1}
    ((found, _),) = gradients_and_metrics([step_of_16(tiny_config, **split)])
    assert error(found[0], reference(None, num_steps=1).gradients[0]) > 5e-2


@pytest.mark.slow
def test_stages_that_divide_by_their_microbatches_miss_it(tiny_config):
    """As PyTorch's schedules do unless they are told not to."""
    edit = ("lambda sums: sums[0] * scale", "lambda sums: sums[0] * scale / len(taught)")
    split = {"batch_size": 4, "koleo_group_size": 2, "max_steps_per_epoch": 1}
    configs = [step_of_16(tiny_config, **split, **PP_2)]
    expected = reference(2, num_steps=1).gradients[0]
    of_ranks = run_distributed(gradients_and_metrics, 2, configs, edit)
    # The largest entries are of one stage.
    assert max(error(found[0], expected) for ((found, _),) in of_ranks) > 5e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "without", ["dino", "ibot", "koleo", "gram", "drop path", "rescaled positions"]
)
def test_a_reference_without_a_part_is_another(without, tiny_config):
    """So all parts are in what the tests above compare."""
    expected = reference(2, num_steps=1).gradients[0]
    assert error(reference(2, num_steps=1, without=without).gradients[0], expected) > 1e-2


def weights_after(config):
    """Of student and teacher after an epoch, in full."""
    from omegaconf import OmegaConf
    from recipe_runs import recipe_class

    cfg = OmegaConf.create(config)
    with tiny.float64_throughout():
        made = recipe_class(recipe=DINO)(cfg)
        with made.run:
            made.setup(cfg)
            made.train()
            return {
                name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
                for name, p in parameters_by_name(made.models).items()
            }


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one-process", "fsdp-2", "pp-2"])
def test_student_and_teacher_are_those_of_one_batch_after_three_updates(layout, tiny_config):
    world_size, dims, _ = LAYOUTS[layout]
    config = step_of_16(tiny_config, batch_size=2, **dims)
    expected = reference(2)
    whole = {}
    for of_rank in run_distributed(weights_after, world_size, config):
        whole |= of_rank
    for prefix, weights in (("student", expected.student), ("teacher", expected.teacher)):
        mine = {name: whole[f"{prefix}.{name}"] for name in weights}
        assert error(mine, weights) < 1e-12
