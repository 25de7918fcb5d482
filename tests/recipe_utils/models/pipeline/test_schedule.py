"""Schedules that do not fit a pipeline are refused before any model is built."""

import pytest
import torch
from torch.torch_version import TorchVersion

from recipe_utils.models.pipeline.schedule import PipelineSettings, pipeline_on_ranks
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.settings.problems import ConfigError
from recipe_utils.update_steps.settings import DataSettings


def settings(schedule="1F1B", split_points=None):
    return PipelineSettings(pipeline_parallel_schedule=schedule, pipeline_parallel_split_points=split_points)


def problems(pipeline, monkeypatch, num_ranks=2, tensor_parallel_dim=1, **data):
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks * tensor_parallel_dim))
    dims = {"pipeline_parallel_dim": num_ranks, "tensor_parallel_dim": tensor_parallel_dim}
    data = DataSettings(**({"microbatching": "packed"} | data))
    return [*map(str, pipeline_on_ranks(pipeline, data, RankSettings(device="cpu", **dims)))]


@pytest.mark.parametrize(
    ("schedule", "split_points", "num_stages"),
    [
        ("1F1B", None, 4),
        ("GPipe", None, 4),
        ("InterleavedZeroBubble", None, 8),
        ("1F1B", [1, 2, 3], 4),
        ("Interleaved1F1B", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 12),
    ],
)
def test_the_number_of_stages_is_that_of_the_split_points_or_one_or_two_per_rank(schedule, split_points, num_stages):
    assert settings(schedule, split_points).num_stages(4) == num_stages


@pytest.mark.parametrize(
    ("schedule", "split_points", "parts"),
    [
        ("1F1B", [1], ["split_points=[1]", "2 stages", "one on each of 4 ranks", "give 3 points"]),
        ("Interleaved1F1B", [1, 2, 3], ["4 stages", "two or more", "give 7 points"]),
    ],
)
def test_split_points_of_another_number_of_stages_are_refused(schedule, split_points, parts, monkeypatch):
    pipeline = settings(schedule, split_points)
    with pytest.raises(ConfigError, match="pipeline_parallel_split_points") as raised:
        pipeline.num_stages(4)
    for part in parts:
        assert part in str(raised.value)
    assert problems(pipeline, monkeypatch, num_ranks=4) == [str(problem) for problem in raised.value.problems]


def test_stages_on_an_older_torch_and_of_split_layers_are_refused(monkeypatch):
    (problem,) = problems(settings(), monkeypatch, tensor_parallel_dim=2)
    assert problem.startswith("tensor_parallel_dim=2: it cannot be combined with pipeline_parallel_dim=2")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu128"))
    (problem,) = problems(settings(), monkeypatch)
    assert problem.startswith("pipeline_parallel_dim=2: it needs torch 2.13, this is 2.11.0+cu128")


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "global_batch_size"])
@pytest.mark.parametrize(
    ("schedule", "steps", "needed"),
    [("1F1B", 1, 2), ("GPipe", 1, 2), ("Interleaved1F1B", 1, 2), ("Interleaved1F1B", 5, 6)],
)
def test_too_few_microbatches_are_refused_with_the_number_needed(key, schedule, steps, needed, monkeypatch):
    def problems_of(steps):
        return problems(settings(schedule), monkeypatch, **{key: steps, "microbatching": "in_order"})

    (problem,) = problems_of(steps)
    assert problem.startswith("pipeline_parallel_dim=2: ")
    assert f"needs {needed} microbatches or more" in problem
    assert f"set {key}={needed}, or a smaller" in problem
    assert problems_of(needed) == problems(settings(schedule), monkeypatch) == []
