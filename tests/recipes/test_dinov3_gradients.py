"""Gradients of all parameters are those of one batch with its teacher, in float64, for any layout and split."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import big_batch_of_views
import numpy as np
import pytest
import torch
from big_batch import TOLERANCE, error
from big_batch_of_views import step_of_16
from distributed_runs import run_distributed
from recipe_runs import DINO, ListLogger, run_recipe_recording_gradients, slow

from recipe_utils.dinov3.average_teacher import AverageTeacher
from recipe_utils.dinov3.images.views import ViewCollator
from recipe_utils.models.pipeline.microbatches import Pipeline
from recipe_utils.update_steps.step import UpdateStep

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


def gradients_and_metrics(configs, mutate=None):
    """Returns gradients and logged metrics of each config; :mod:`distributed_runs` undoes ``mutate``."""
    if mutate is not None:
        mutate()
    return [(run_recipe_recording_gradients(config, DINO), list(ListLogger.logged)) for config in configs]


def assert_is_one_batch(of_ranks, expected):
    for step, (metrics, gradients) in enumerate(zip(expected.metrics, expected.gradients, strict=True)):
        assert set().union(*(found[step] for found, _ in of_ranks)) == gradients.keys()
        for found, _ in of_ranks:
            assert error(found[step], gradients) < TOLERANCE
        _, logged = of_ranks[0]
        for name, value in metrics.items():
            assert logged[step][name] == pytest.approx(value, rel=1e-6, abs=1e-7), name


def splits_of(dp_degree, schedule):
    """Yields numbers of images per microbatch that the layout allows; stages need two microbatches."""
    sizes = [size for size in (16, 8, 4, 2) if size * dp_degree <= 16]
    if schedule is not None:
        sizes = [size for size in (4, 2) if size * dp_degree * 2 <= 16]
    for size in sizes:
        # Groups of two are whole in every microbatch; None takes two passes.
        yield {"batch_size": size, "koleo_group_size": 2}
        if size < 8:
            yield {"batch_size": size, "koleo_group_size": None}


FAST = ("one-process",)


@pytest.mark.parametrize("layout", [name if name in FAST else slow(name) for name in LAYOUTS])
def test_gradient_and_metrics_are_those_of_one_batch(layout, tiny_config):
    world_size, dims, schedules = LAYOUTS[layout]
    dp_degree = world_size // dims.get("pipeline_parallel_dim", 1)
    configs = []
    for number, schedule in enumerate(schedules):
        of_schedule = {} if schedule is None else {"pipeline_parallel_schedule": schedule}
        splits = list(splits_of(dp_degree, schedule))
        # Two of four splits with stages: each size and each kind of KoLeo with each schedule.
        if schedule is not None:
            splits = splits[1:3] if number % 2 else splits[::3]
        for split in splits:
            configs.append(step_of_16(tiny_config, **split, **of_schedule, **dims))
    ranks = run_distributed(gradients_and_metrics, world_size, configs, timeout_seconds=300)
    for config, *of_ranks in zip(configs, *ranks, strict=True):
        assert_is_one_batch(of_ranks, reference(config["koleo_group_size"]))


# ---- Wrong computations ---------------------------------------------------------------------------


def scale_by_the_first_microbatch():
    UpdateStep.scale = lambda step, _: 1 / len(step.microbatches[0].targets.koleo_groups)


def scale_by_images_that_a_rank_counts_twice():
    def scale(step, _):
        return 2 / (step.totals["images"] + sum(m.counts["images"] for m in step.microbatches))

    UpdateStep.scale = scale


def omit_a_microbatch():
    with_targets = AverageTeacher.with_targets

    @contextmanager
    def without_the_fourth(*args):
        with with_targets(*args) as (microbatches, num_used):
            yield [*microbatches[:3], *microbatches[4:]], num_used

    AverageTeacher.with_targets = without_the_fourth


def divide_by_the_microbatches_of_stages():
    """Divides losses by the number of microbatches, as PyTorch's schedules do by default."""
    run = Pipeline.forward_backward
    Pipeline.forward_backward = lambda self, microbatches, loss_of: run(
        self, microbatches, lambda sums: loss_of(sums) / len(microbatches)
    )


def average_ibot_over_all_patches():
    """Makes iBOT a mean over the masked patches of a microbatch instead of those of a crop."""

    def collated(self, samples):
        (made,) = collate(self, samples)
        weights = made.targets.masked_weights
        even = torch.full_like(weights, 2 * len(samples) / max(len(weights), 1))
        return [replace(made, targets=made.targets._replace(masked_weights=even))]

    ViewCollator.collate = collated


def deal_crops_to_microbatches():
    """Takes the first crops of all images, then the second ones."""

    def collated(self, samples):
        dealt = [dict(sample) for sample in samples]
        for key in ("global_crops", "masks", "draws"):
            of_crops = [sample[key][crop] for crop in (0, 1) for sample in samples]
            for image, sample in enumerate(dealt):
                rest = samples[image][key][2:]
                sample[key] = np.stack([*of_crops[2 * image : 2 * image + 2], *rest])
        return collate(self, dealt)

    ViewCollator.collate = collated


TWO_PASSES = {"batch_size": 2, "koleo_group_size": None}
IN_GROUPS = {"batch_size": 4, "koleo_group_size": 2}
MUTANTS = {  # ranks, keys, function that patches
    "Sinkhorn of each microbatch": (1, {**TWO_PASSES, "sinkhorn_over": "microbatch"}, None),
    "KoLeo of each microbatch": (1, {"batch_size": 2, "koleo_group_size": 2}, None),
    "the first microbatch's scale": (1, TWO_PASSES, scale_by_the_first_microbatch),
    "an omitted microbatch": (1, TWO_PASSES, omit_a_microbatch),
    "iBOT over all patches": (1, TWO_PASSES, average_ibot_over_all_patches),
    "dealt crops": (1, TWO_PASSES, deal_crops_to_microbatches),
    "images counted twice": (2, IN_GROUPS, scale_by_images_that_a_rank_counts_twice),
    "divided by microbatches": (2, {**IN_GROUPS, **PP_2}, divide_by_the_microbatches_of_stages),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_computation_is_noticed(name, tiny_config):
    world_size, changes, mutate = MUTANTS[name]
    config = step_of_16(tiny_config, max_steps_per_epoch=1, **changes)
    of_ranks = run_distributed(gradients_and_metrics, world_size, [config], mutate)
    expected = reference(None if world_size == 1 else 2, num_steps=1).gradients[0]
    # The largest entries may be on one stage.
    assert max(error(found[0], expected) for ((found, _),) in of_ranks) > 5e-2


@pytest.mark.slow
@pytest.mark.parametrize("without", ["dino", "ibot", "koleo", "gram", "drop path", "rescaled positions"])
def test_every_part_changes_the_reference(without):
    expected = reference(2, num_steps=1).gradients[0]
    assert error(reference(2, num_steps=1, without=without).gradients[0], expected) > 1e-2
