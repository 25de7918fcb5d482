"""One profiler step is one update step."""

import gzip
import json

import pytest
from distributed_runs import run_distributed
from recipe_runs import run_recipe


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
def test_two_active_steps_record_exactly_two_update_steps(accumulation, tiny_config, tmp_path):
    config = tiny_config(
        dataset={"_component_": "tiny.tiny_dataset", "num_samples": 48},
        batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
        profiler={
            "_component_": "torchtune.training.setup_torch_profiler",
            "enabled": True,
            "output_dir": f"{tmp_path}/profile",
            "cpu": True,
            "cuda": False,
            "xpu": False,
            "wait_steps": 1,
            "warmup_steps": 1,
            "active_steps": 2,
            "num_cycles": 1,
        },
    )
    (logged,) = run_distributed(run_recipe, 1, config)
    assert len(logged) == 6
    (trace,) = tmp_path.glob("profile/iteration_4/*.pt.trace.json.gz")
    with gzip.open(trace) as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert {name for name in names if name.startswith("ProfilerStep")} == {"ProfilerStep#2", "ProfilerStep#3"}
    assert sum(name.startswith("Optimizer.step#") for name in names) == 2
    assert names.count("aten::embedding_dense_backward") == 2 * accumulation
