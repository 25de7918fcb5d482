"""The gradient of every parameter is that of one big batch, in float64, whatever the layout."""

import dataclasses

import arrays
import big_batch
import pytest
import tiny
from big_batch import STEP_OF_16, TOLERANCE, error
from distributed_runs import run_distributed
from recipe_runs import (
    recipe_class,
    run_recipe_recording_gradients,
    run_recording_gradients_and_metrics,
)

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.model.attention import document_mask
from recipe_utils.model.pipeline import pipeline

MODELS = {"tied": tiny.DEEP_MODEL, "untied": tiny.DEEP_UNTIED_MODEL}


@pytest.fixture(scope="module")
def references():
    """By model and per update step of 16 samples, the big-batch gradients in plain PyTorch."""
    return {name: big_batch.reference_gradients(sizes) for name, sizes in MODELS.items()}


def gradients_of_all(configs):
    return [run_recipe_recording_gradients(config) for config in configs]


@arrays.on_ranks(arrays.FAST, arrays.ROWS)
def test_gradient_is_that_of_one_big_batch(rows, world_size, tiny_config, references):
    """With samples of uneven numbers of targets, and microbatches that have none at all."""
    rows = arrays.rows_on(rows, world_size)
    configs = [tiny_config(model=MODELS[row.model], **STEP_OF_16, **row.changes) for row in rows]
    ranks = run_distributed(gradients_of_all, world_size, configs, timeout_seconds=300)
    for row, *of_ranks in zip(rows, *ranks, strict=True):
        for step, expected in enumerate(references[row.model]):
            assert set().union(*(found[step] for found in of_ranks)) == expected.keys(), row
            assert max(error(found[step], expected) for found in of_ranks) < TOLERANCE, row


WEIGHINGS = ("tokens", "datasets")
WEIGHTED = [
    *arrays.FAST,
    arrays.Row("one", "untied", "packed", 2, "each_microbatch"),
    arrays.Row("fsdp-2", "untied", "least_padding", 2, "last_microbatch"),
    arrays.Row("tp-2", "untied", "in_order", 4, "each_microbatch"),
    arrays.Row("pp-2", "untied", "packed", 2, "InterleavedZeroBubble"),
    arrays.Row("fsdp-4", "untied", "in_order", 1, "each_microbatch"),
    arrays.Row("hsdp-2x2", "tied", "packed", 1, "last_microbatch"),
    arrays.Row("pp-2-fsdp-2", "tied", "packed", 1, "Interleaved1F1B"),
]


def weighted(tiny_config, how, model=tiny.DEEP_UNTIED_MODEL, **changes):
    data = {**STEP_OF_16, "dataset": big_batch.MIXED, "loss_weights": how}
    return tiny_config(model=model, **{**data, **changes})


@arrays.on_ranks(arrays.FAST[:3], WEIGHTED)
def test_datasets_with_loss_weights_have_the_gradient_and_losses_of_one_big_batch(
    rows, world_size, tiny_config
):
    cases = [(row, how) for row in arrays.rows_on(rows, world_size) for how in WEIGHINGS]
    val = {"dataset_val": big_batch.HELD_OUT, "run_val_every_n_steps": 1}
    configs = [
        weighted(tiny_config, how, MODELS[row.model], **row.changes, **val) for row, how in cases
    ]
    run = run_recording_gradients_and_metrics
    ranks = run_distributed(run, world_size, configs, timeout_seconds=300)
    for case, *of_ranks in zip(cases, *ranks, strict=True):
        row, how = case
        with tiny.float64_throughout():
            expected = big_batch.weighted_references(MODELS[row.model], how)
            validated = big_batch.validation_losses(MODELS[row.model])
        of_steps, of_validations = of_ranks[0][1][::2], of_ranks[0][1][1::2]
        for found in of_validations:
            assert found == pytest.approx({"step": found["step"], **validated}, rel=1e-12), case
        for step, (gradients, loss, datasets) in enumerate(expected):
            found = max(error(each[step], gradients) for each, _ in of_ranks)
            assert found < TOLERANCE, (case, found)
            logged = of_steps[step]
            assert logged["loss"] == pytest.approx(loss, rel=1e-12), case
            of_datasets = {name: logged[name] for name in logged if name.startswith("loss/")}
            means = {f"loss/{name}": mean for name, (mean, _) in datasets.items()}
            assert of_datasets == pytest.approx(means, rel=1e-12), case
            for name in ("chat", "code", "math"):
                number = datasets.get(name, (0, 0))[1]
                assert logged[f"token_share/{name}"] == number / logged["num_tokens"]


def gradients_normalised_by_microbatch(config):
    """The weights of datasets average 1 over the targets of each microbatch, not of the update step."""
    recipe = recipe_class()
    sums = recipe.sums

    def sums_by_microbatch(self, m):
        counts = [m.targets.num_of_dataset(i) for i in range(3)]
        given = [part.get("loss_weight", 1) for part in big_batch.MIXED]
        return sums(self, m.with_dataset_weights(self.settings.weigh(given, counts)))

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(recipe, "sums", sums_by_microbatch)
        return run_recipe_recording_gradients(config)


@pytest.mark.parametrize("how", WEIGHINGS)
def test_weights_normalised_by_microbatch_miss_the_big_batch(how, tiny_config):
    config = weighted(tiny_config, how, batch_size=2, max_steps_per_epoch=1)
    (found,) = run_distributed(gradients_normalised_by_microbatch, 1, config)
    with tiny.float64_throughout():
        expected = big_batch.weighted_references(tiny.DEEP_UNTIED_MODEL, how)
    assert error(found[0], expected[0][0]) > 1e-2


def replace(name, make):
    """A mutant that puts another function in the place of one that the recipe imports."""

    def patch(patches):
        names = recipe_class().update.__globals__
        patches.setitem(names, name, make(names[name]))

    return patch


def a_mean_of_means(patches):
    recipe = recipe_class()
    sums = recipe.sums
    patches.setattr(UpdateStep, "scale", lambda *_: 1 / 8)
    patches.setattr(
        recipe, "sums", lambda self, m: sums(self, m) / max(m.counts["target_tokens"], 1)
    )


def scale_of_one_rank(patches):
    patches.setattr(UpdateStep, "scale", lambda step, count: 1 / step.totals[count])


def documents_seen_by_each_other(patches):
    def of_row(q, k, v, _, dropout_p):
        return document_mask._attend_causally(q, k, v, dropout_p)

    patches.setattr(document_mask, "_attend_by_document", of_row)


def a_microbatch_left_out(patches):
    run = pipeline.Pipeline.forward_backward
    patches.setattr(
        pipeline.Pipeline,
        "forward_backward",
        lambda self, microbatches, *rest: run(self, microbatches[1:], *rest),
    )


def gradients_of_tied_copies_not_summed(patches):
    run = pipeline.Pipeline.forward_backward

    def forward_backward(self, *arguments):
        self._tied_weights = []
        return run(self, *arguments)

    patches.setattr(pipeline.Pipeline, "forward_backward", forward_backward)


class ScalingSchedule(pipeline.SCHEDULES["1F1B"]):
    """As PyTorch's schedules are by default: divides gradients by the number of microbatches."""

    def __init__(self, *args, scale_grads, **kwargs):
        super().__init__(*args, scale_grads=True, **kwargs)


def gradients_scaled_by_the_schedule(patches):
    patches.setitem(pipeline.SCHEDULES, "1F1B", ScalingSchedule)


PP_2, TP_2 = arrays.LAYOUTS["pp-2"][1], arrays.LAYOUTS["tp-2"][1]
PACKED = {"microbatching": "packed", "max_tokens_per_microbatch": 64}
MUTANTS = {  # ranks, the patch, keys of the config, model
    "mean of means": (1, a_mean_of_means, {}, "untied"),
    "scale of one rank": (2, scale_of_one_rank, {}, "untied"),
    "no sync at the last microbatch": (
        2,
        replace("gradient_sync", lambda sync: lambda model, _, mode: sync(model, False, "last_microbatch")),
        {},
        "untied",
    ),
    "tensor-parallel ranks counted twice": (
        2,
        replace("join_ranks", lambda join: lambda *args: dataclasses.replace(join(*args), is_dp_leader=True)),
        TP_2,
        "untied",
    ),
    "documents of a row seen by each other": (1, documents_seen_by_each_other, PACKED, "untied"),
    "stages: a microbatch left out": (2, a_microbatch_left_out, PP_2, "tied"),
    "stages: gradients of tied weights not summed": (2, gradients_of_tied_copies_not_summed, PP_2, "tied"),
    "stages: gradients scaled by the schedule": (2, gradients_scaled_by_the_schedule, PP_2, "tied"),
}  # fmt: skip
IN_FAST_TIER = ("mean of means", "scale of one rank", "documents of a row seen by each other")


def gradients_of_a_mutant(name, config):
    with pytest.MonkeyPatch.context() as patches:
        MUTANTS[name][1](patches)
        return run_recipe_recording_gradients(config)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(name, marks=[] if name in IN_FAST_TIER else pytest.mark.slow)
        for name in MUTANTS
    ],
)
def test_a_wrong_recipe_misses_the_big_batch(mutant, tiny_config, references):
    world_size, _, changes, model = MUTANTS[mutant]
    changes = {"batch_size": 2, "max_steps_per_epoch": 1, **STEP_OF_16, **changes}
    config = tiny_config(model=MODELS[model], **changes)
    found = run_distributed(gradients_of_a_mutant, world_size, mutant, config, expect_failures=True)
    if mutant == "no sync at the last microbatch":  # a rank's gradient is missing altogether
        assert all("grad" in each for each in found)
    else:
        assert max(error(each[0], references[model][0]) for each in found) > 1e-2
