import gc

import pytest
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B

from recipe_utils.data.collate import Microbatch, Targets
from recipe_utils.model.pipeline import (
    SCHEDULES,
    Pipeline,
    num_microbatches_to_run,
    stages_of_rank,
)

DIM = 8


class CountingStage(nn.Module):
    """A linear stage that knows how many of its microbatches wait for their backward."""

    def __init__(self, index, num_stages):
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(DIM, DIM, bias=False)
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.num_live = self.most_live = 0

    def forward(self, hidden, targets=None):
        if self.is_first:
            hidden = hidden.unsqueeze(-1).float().expand(-1, -1, DIM)
        out = self.linear(hidden)
        if torch.is_grad_enabled():
            self.num_live += 1
            self.most_live = max(self.most_live, self.num_live)
            out.register_hook(self.one_less)
        return out.square().sum() if self.is_last else out

    def one_less(self, _):
        self.num_live -= 1


def microbatches(num, shapes=((2, 3), (1, 5))):
    made = []
    for i in range(num):
        tokens = torch.full(shapes[i % len(shapes)], i + 1)
        targets = Targets(tokens, torch.arange(tokens.numel()))
        made.append(Microbatch({"tokens": tokens}, targets, 1, 1, tokens.numel()))
    return made


def scaled(sums):
    return sums[0] * 0.25


def make_pipeline(schedule, num_stages, make_stage=CountingStage):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    stages = {i: make_stage(i, num_stages) for i in stages_of_rank(rank, num_ranks, num_stages)}
    pipeline = Pipeline(
        stages,
        num_stages=num_stages,
        schedule=schedule,
        embed_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
    )
    return pipeline, stages


def room_of_receives():
    """Numbers in the tensors of hidden states that are alive now, but for the examples."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    return sum(t.numel() for t in tensors if t.dim() == 3 and t.shape[-1] == DIM)


def live_microbatches(schedule, num_stages, numbers):
    pipeline, stages = make_pipeline(schedule, num_stages)
    most, left = [], []
    for num in numbers:
        for stage in stages.values():
            stage.most_live = 0
        pipeline.forward_backward(microbatches(num), scaled)
        assert all(stage.num_live == 0 for stage in stages.values())
        most.append(max(stage.most_live for stage in stages.values()))
        left.append(room_of_receives())
    return most, left


@pytest.mark.parametrize(
    ("schedule", "of_first_rank"), [("1F1B", [2, 2, 2]), ("GPipe", [4, 8, 16])]
)
def test_under_1f1b_no_more_microbatches_live_however_many_there_are(schedule, of_first_rank):
    (first, left), (last, _) = run_distributed(live_microbatches, 2, schedule, 2, [4, 8, 16])
    assert first == of_first_rank
    assert last == ([1, 1, 1] if schedule == "1F1B" else of_first_rank)
    assert left[0] == left[1] == left[2]


def results_of(schedule, num_stages, num):
    pipeline, stages = make_pipeline(schedule, num_stages)
    validated = pipeline.forward(microbatches(num)).item()
    assert all(stage.linear.weight.grad is None for stage in stages.values())
    loss = pipeline.forward_backward(microbatches(num), scaled).item()
    again = pipeline.forward(microbatches(num)).item()
    grads = {i: stage.linear.weight.grad for i, stage in stages.items()}
    return loss, validated, again, grads


@pytest.mark.parametrize("num", [4, 6])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_of_different_shapes_give_the_gradients_of_the_stages_in_a_row(schedule, num):
    num_stages = 4 if "Interleaved" in schedule else 2
    stages = [CountingStage(i, num_stages) for i in range(num_stages)]
    expected = 0.0
    for microbatch in microbatches(num):
        hidden = microbatch.inputs["tokens"]
        for stage in stages:
            hidden = stage(hidden, None)
        (hidden * 0.25).backward()
        expected += hidden.item()
    results = run_distributed(results_of, 2, schedule, num_stages, num)
    # Of both ranks the mean, which counts the one without the last stage as 0.
    assert sum(loss for loss, *_ in results) / 2 == pytest.approx(expected / 4, rel=1e-6)
    for position in (1, 2):
        assert sum(r[position] for r in results) / 2 == pytest.approx(expected, rel=1e-6)
    for *_, grads in results:
        for index, grad in grads.items():
            torch.testing.assert_close(grad, stages[index].linear.weight.grad)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_number_of_microbatches_is_the_least_that_pytorch_accepts(schedule, num_ranks):
    several = "Interleaved" in schedule
    num_stages = num_ranks * (2 if several else 1)
    for num in range(1, 20):
        to_run = num_microbatches_to_run(
            num, schedule=schedule, num_ranks=num_ranks, num_stages=num_stages
        )
        accepted = (n for n in range(num, 60) if accepts(schedule, num_ranks, num_stages, n))
        assert to_run == next(accepted)


def accepts(schedule, num_ranks, num_stages, num_microbatches):
    """By PyTorch's own class, with no more of a stage than it looks at."""
    schedule_class = SCHEDULES[schedule]
    stage = type(
        "Stage", (), {"group_size": num_ranks, "group_rank": 0, "num_stages": num_stages}
    )()
    stage.submod, stage.stage_index, stage.is_last = None, 0, False
    many = issubclass(schedule_class, ScheduleInterleaved1F1B) or "ZeroBubble" in schedule
    try:
        schedule_class([stage] * (num_stages // num_ranks) if many else stage, num_microbatches)
    except ValueError:
        return False
    return schedule_class is not ScheduleGPipe or num_microbatches >= 1


class FailingStage(CountingStage):
    def forward(self, hidden, targets=None):
        if hidden.shape[1] == 5 and self.is_last:
            raise ArithmeticError("planted")
        return super().forward(hidden, targets)


def fail_in_the_second_microbatch():
    pipeline, _ = make_pipeline("1F1B", 2, FailingStage)
    pipeline.forward_backward(microbatches(4), scaled)


def test_a_failing_stage_is_named_with_its_microbatch_and_no_rank_hangs():
    waiting, failing = run_distributed(
        fail_in_the_second_microbatch, 2, timeout_seconds=15, expect_failures=True
    )
    assert (
        "PipelineError: pipeline stage 1 of 2, microbatch 1 of 4: its forward failed "
        "(ArithmeticError: planted)"
    ) in failing
    assert "RuntimeError" in waiting
