"""Which schedules fit a pipeline is said before any model is built, with the numbers."""

import pytest
import torch
from distributed_runs import run_distributed
from torch.torch_version import TorchVersion

from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.model.pipeline.schedule import SCHEDULES, PipelineSettings
from recipe_utils.parallel.ranks import RankSettings, join_ranks
from recipe_utils.settings.problems import ConfigError


def settings(schedule="1F1B", split_points=None):
    return PipelineSettings(
        pipeline_parallel_schedule=schedule, pipeline_parallel_split_points=split_points
    )


def problems(pipeline, monkeypatch, data=None, world_size=2, **ranks):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    ranks = RankSettings(device="cpu", **{"pipeline_parallel_dim": 2, **ranks})
    problems = pipeline.problems_with(ranks, data or DataSettings(microbatching="packed"))
    return [*map(str, problems)]


@pytest.mark.parametrize(
    ("schedule", "split_points", "num_stages"),
    [
        ("1F1B", None, 4),
        ("GPipe", None, 4),
        ("Interleaved1F1B", None, 8),
        ("InterleavedZeroBubble", None, 8),
        ("1F1B", [1, 2, 3], 4),
        ("Interleaved1F1B", [1, 2, 3, 4, 5, 6, 7], 8),
        ("Interleaved1F1B", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 12),
    ],
)
def test_stages_are_one_on_each_rank_or_two_or_as_many_as_the_split_points_make(
    schedule, split_points, num_stages
):
    assert settings(schedule, split_points).num_stages(4) == num_stages


@pytest.mark.parametrize(
    ("schedule", "split_points", "parts"),
    [
        ("1F1B", [1], ["split_points=[1]", "2 stages", "one on each of 4 ranks", "give 3 points"]),
        ("1F1B", [1, 2, 3, 4, 5, 6, 7], ["8 stages", "wants one on each of 4 ranks"]),
        ("Interleaved1F1B", [1, 2, 3], ["4 stages", "two or more", "give 7 points"]),
        ("Interleaved1F1B", [1, 2, 3, 4, 5, 6, 7, 8], ["9 stages", "two or more"]),
    ],
)
def test_split_points_that_make_no_such_number_of_stages_are_refused(
    schedule, split_points, parts, monkeypatch
):
    pipeline = settings(schedule, split_points)
    with pytest.raises(ConfigError, match="pipeline_parallel_split_points") as raised:
        pipeline.num_stages(4)
    for part in parts:
        assert part in str(raised.value)
    found = problems(pipeline, monkeypatch, world_size=4, pipeline_parallel_dim=4)
    assert found == [str(problem) for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "num_ranks", "to_run"),
    [
        ("1F1B", 1, 4, 4),
        ("1F1B", 7, 4, 7),
        ("GPipe", 1, 4, 1),
        ("Interleaved1F1B", 1, 4, 1),
        ("Interleaved1F1B", 9, 4, 10),
        ("InterleavedZeroBubble", 11, 4, 12),
    ],
)
def test_a_schedule_runs_at_least_the_microbatches_that_there_are(
    schedule, num_microbatches, num_ranks, to_run
):
    assert settings(schedule).num_microbatches_to_run(num_microbatches, num_ranks) == to_run


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_zero_bubble_schedules_split_the_backward(schedule):
    assert settings(schedule).splits_backward == (schedule == "InterleavedZeroBubble")


def test_a_model_in_one_piece_runs_the_microbatches_that_there_are():
    ranks = join_ranks(RankSettings(device="cpu"))
    try:
        assert settings().fill(ranks) is None
    finally:
        ranks.leave()


def fill_on_two_ranks():
    ranks = join_ranks(RankSettings(device="cpu", pipeline_parallel_dim=2))
    return [settings(schedule).fill(ranks)(5) for schedule in ("1F1B", "Interleaved1F1B")]


def test_every_rank_fills_an_update_step_up_to_what_the_schedule_accepts():
    assert run_distributed(fill_on_two_ranks, 2) == [[5, 6]] * 2


def test_without_a_pipeline_nothing_is_a_problem(monkeypatch):
    pipeline = settings("Interleaved1F1B", [5])
    assert problems(pipeline, monkeypatch, pipeline_parallel_dim=1) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_of_microbatches_that_are_planned_is_no_problem(schedule, monkeypatch):
    assert problems(settings(schedule), monkeypatch) == []


def test_stages_on_an_older_torch_are_refused_with_both_versions(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu128"))
    (problem,) = problems(settings(), monkeypatch)
    assert problem.startswith("pipeline_parallel_dim=2: it needs torch 2.13, this is 2.11.0+cu128")


def test_stages_and_split_layers_do_not_go_together(monkeypatch):
    (problem,) = problems(settings(), monkeypatch, world_size=4, tensor_parallel_dim=2)
    assert problem.startswith("tensor_parallel_dim=2: it does not go with pipeline_parallel_dim=2")


@pytest.mark.parametrize(
    ("schedule", "steps", "needed"),
    [("1F1B", 1, 2), ("GPipe", 1, 2), ("Interleaved1F1B", 1, 2), ("Interleaved1F1B", 5, 6)],
)
def test_too_few_microbatches_as_they_come_are_refused_with_how_many_are_needed(
    schedule, steps, needed, monkeypatch
):
    def told(steps):
        data = DataSettings(gradient_accumulation_steps=steps)
        return problems(settings(schedule), monkeypatch, data)

    (problem,) = told(steps)
    assert problem.startswith(f"gradient_accumulation_steps={steps}: pipeline_parallel_dim=2")
    assert f"needs {needed} microbatches or more" in problem
    assert told(needed) == []
