"""The gradient of every parameter is that of one big batch, in float64, whatever the layout."""

import big_batch
import pytest
import tiny
from big_batch import LAYOUTS, STEP_OF_16, TOLERANCE, TP_PLAN
from distributed_runs import run_distributed
from recipe_runs import run_recipe_recording_gradients


@pytest.fixture(scope="module", params=["tied", "untied"])
def model_and_reference(request):
    """A model and, per update step of 16 samples, its big-batch gradients in plain PyTorch."""
    sizes = tiny.MODEL if request.param == "tied" else tiny.UNTIED_MODEL
    return sizes, big_batch.reference_gradients(sizes)


def error(gradients, reference):
    """Largest deviation relative to the largest entry, over all parameters."""
    assert gradients.keys() == reference.keys()
    return big_batch.error(gradients, reference)


SPLITS = [
    (1, "each_microbatch", "in_order"),
    (2, "last_microbatch", "in_order"),
    (4, "last_microbatch", "least_padding"),
    (4, "each_microbatch", "in_order"),
    (2, "each_microbatch", "least_padding"),
    (1, "last_microbatch", "packed"),
    (4, "each_microbatch", "packed"),
]


def gradients_of_all_splits(configs):
    return [run_recipe_recording_gradients(config) for config in configs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_is_that_of_one_big_batch(layout, tiny_config, model_and_reference):
    sizes, reference = model_and_reference
    world_size, dims = LAYOUTS[layout]
    if "tp" in layout:
        dims = {**dims, **TP_PLAN}
        if sizes == tiny.MODEL:
            pytest.skip("torchtune's plans split no tied output layer")
    configs = [
        tiny_config(
            model=sizes,
            batch_size=batch_size,
            gradient_sync=gradient_sync,
            microbatching=microbatching,
            **STEP_OF_16,
            **dims,
        )
        for batch_size, gradient_sync, microbatching in SPLITS[:: 3 if "tp" in layout else 1]
    ]
    for splits in run_distributed(gradients_of_all_splits, world_size, configs):
        for gradients in splits:
            assert len(gradients) == len(reference)
            for step, expected in zip(gradients, reference, strict=True):
                assert error(step, expected) < TOLERANCE


MUTANTS = {
    "mean of means": (
        1,
        (
            "self.sums(microbatch) * scale",
            "self.sums(microbatch) / max(microbatch.counts['target_tokens'], 1) / 8",
        ),
    ),
    "a microbatch left out": (
        1,
        (
            "                with gradient_sync(",
            "                if is_last: continue\n                with gradient_sync(",
        ),
    ),
    "scale of one rank": (
        2,
        (
            "self.sums(microbatch) * scale",
            "self.sums(microbatch) / step.totals['target_tokens']",
        ),
    ),
    "tensor-parallel ranks counted twice": (
        2,
        (
            "join_ranks(self.settings.ranks)",
            "__import__('dataclasses').replace(join_ranks(self.settings.ranks), is_dp_leader=True)",
        ),
    ),
    "documents of a row seen by each other": (
        1,
        (
            "            attend_within_documents(",
            "            (lambda model, *_, **__: model.register_forward_pre_hook(lambda _, args, kwargs: "
            "(args, {k: kwargs[k] for k in kwargs if k != 'document_lengths'}), with_kwargs=True))(",
        ),
    ),
    "no sync at the last microbatch": (
        2,
        ("is_last, self.settings.ranks.gradient_sync)", "False, 'last_microbatch')"),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_recipe_misses_the_big_batch(mutant, tiny_config, model_and_reference):
    sizes, reference = model_and_reference
    if sizes != tiny.UNTIED_MODEL:
        pytest.skip("one model is enough")
    world_size, mutation = MUTANTS[mutant]
    dims = {"tensor_parallel_dim": 2, **TP_PLAN} if "tensor-parallel" in mutant else {}
    if "documents" in mutant:
        dims = {"microbatching": "packed", "max_tokens_per_microbatch": 64}
    config = tiny_config(model=sizes, batch_size=2, **STEP_OF_16, **dims)
    (gradients, *_) = run_distributed(
        run_recipe_recording_gradients, world_size, config, mutation, expect_failures=True
    )
    if isinstance(gradients, str):  # without its sync a rank's gradient is missing altogether
        assert "grad" in gradients
        return
    assert error(gradients[0], reference[0]) > 1e-2
