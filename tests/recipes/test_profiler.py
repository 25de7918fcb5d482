"""One profiler step is one update step, and a trace names what it is spent on."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from distributed_runs import run_distributed
from recipe_runs import run_recipe, slow

IN_LOOP = {"wait for data", "to device", "forward", "backward", "clip"}
IN_DATA_THREAD = {"load", "plan", "collate", "count"}
RANGES = IN_LOOP | IN_DATA_THREAD | {"exchange"}


@pytest.mark.parametrize(("accumulation", "world_size"), [(1, 1), slow(4, 1), slow(2, 2)])
def test_two_active_steps_record_exactly_two_update_steps_by_named_ranges(
    accumulation, world_size, tiny_config, tmp_path
):
    config = tiny_config(
        dataset={"_component_": "tiny.tiny_dataset", "num_samples": 96},
        batch_size=8 // accumulation // world_size,
        gradient_accumulation_steps=accumulation,
        clip_grad_norm=1.0,
        microbatching="in_order" if world_size == 1 else "least_padding",
        profiler={
            "_component_": "torchtune.training.setup_torch_profiler",
            "enabled": True,
            "output_dir": "traces",
            "cpu": True,
            "cuda": False,
            "xpu": False,
            "wait_steps": 1,
            "warmup_steps": 1,
            "active_steps": 2,
            "num_cycles": 1,
        },
    )
    logged, *_ = run_distributed(run_recipe, world_size, config)
    assert len(logged) == 12
    traces = list(Path(config["output_dir"]).glob("traces/iteration_4/*.pt.trace.json.gz"))
    assert len(traces) == world_size
    for trace in traces:
        with gzip.open(trace) as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        names = Counter(event["name"] for event in events)
        steps = {name for name in names if name.startswith("ProfilerStep")}
        assert steps == {"ProfilerStep#2", "ProfilerStep#3"}
        assert sum(number for name, number in names.items() if name.startswith("Optimizer.step#")) == 2
        assert names["aten::embedding_dense_backward"] == names["forward"] == names["backward"]
        assert names["forward"] == 2 * accumulation or world_size > 1
        assert names["clip"] == 2
        threads = {event["name"]: event["tid"] for event in events if event["name"] in RANGES}
        assert threads.keys() == (RANGES if world_size > 1 else RANGES - {"exchange"})
        assert {threads[name] for name in IN_LOOP}.isdisjoint({threads[name] for name in IN_DATA_THREAD})
