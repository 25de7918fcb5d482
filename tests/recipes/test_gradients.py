"""The gradient of every parameter is that of one big batch, in float64, whatever the layout."""

import pytest
import tiny
from distributed_runs import run_distributed
from recipe_runs import run_recipe_recording_gradients

from recipe_utils.sampler import epoch_permutation

TOLERANCE = 1e-10
NUM_SAMPLES = 19  # no multiple of 16: the last update step holds 3 samples


@pytest.fixture(scope="module", params=["tied", "untied"])
def model_and_reference(request):
    """A model and, per update step of 16 samples, its big-batch gradients in plain PyTorch."""
    sizes = tiny.MODEL if request.param == "tied" else tiny.UNTIED_MODEL
    model = tiny.tiny_model(sizes).double()
    samples = tiny.make_samples(NUM_SAMPLES, num_without_targets=3)
    order = epoch_permutation(NUM_SAMPLES, epoch=0, shuffle=True).tolist()
    with tiny.float64_throughout():
        return sizes, [
            tiny.big_batch_gradients(model, [samples[i] for i in step])[1]
            for step in (order[:16], order[16:])
        ]


def error(gradients, reference):
    """Largest deviation relative to the largest entry, over all parameters."""
    assert gradients.keys() == reference.keys()
    scale = max(grad.abs().max() for grad in reference.values())
    return max((gradients[n] - reference[n]).abs().max() for n in reference).item() / scale.item()


LAYOUTS = {
    "one-process": (1, {}),
    "fsdp-2": (2, {}),
    "fsdp-4": (4, {}),
    "hsdp-2x2": (4, {"data_parallel_replicate_dim": 2}),
    "tp-2": (2, {"tensor_parallel_dim": 2}),
    "fsdp-2-tp-2": (4, {"tensor_parallel_dim": 2}),
}
TP_PLAN = {"tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}}


def gradients_of_all_splits(configs):
    return [run_recipe_recording_gradients(config) for config in configs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_is_that_of_one_big_batch(layout, tiny_config, model_and_reference):
    sizes, reference = model_and_reference
    world_size, dims = LAYOUTS[layout]
    if "tp" in layout:
        dims |= TP_PLAN
        if sizes == tiny.MODEL:
            pytest.skip("torchtune's plans shard no tied output layer")
    data = {
        "_component_": "tiny.tiny_dataset",
        "num_samples": NUM_SAMPLES,
        "num_without_targets": 3,
    }
    configs = [
        tiny_config(
            model=sizes,
            dataset=data,
            batch_size=batch_size,
            global_batch_size=16,
            gradient_accumulation_steps=...,
            gradient_sync=gradient_sync,
            **dims,
        )
        for batch_size in (1, 2, 4)
        for gradient_sync in ("each_microbatch", "last_microbatch")
    ]
    for splits in run_distributed(gradients_of_all_splits, world_size, configs):
        for gradients in splits:
            assert len(gradients) == len(reference)
            for step, expected in zip(gradients, reference, strict=True):
                assert error(step, expected) < TOLERANCE
