import gc

import pytest
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B

from recipe_utils.models.pipeline.microbatches import Pipeline
from recipe_utils.models.pipeline.schedule import SCHEDULES, num_microbatches_to_run
from recipe_utils.update_steps.step import Microbatch, Targets

DIM = 8


class CountingStage(nn.Module):
    """A linear stage that counts its microbatches without a backward; the last returns three sums."""

    def __init__(self, index, num_stages, seed=0):
        super().__init__()
        torch.manual_seed(10 * seed + index)
        self.linear = nn.Linear(DIM, DIM, bias=False)
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.num_live = self.most_live = 0

    def forward(self, hidden, input_pos, targets=None):
        if self.is_first:
            hidden = hidden.unsqueeze(-1).float().expand(-1, -1, DIM)
        out = self.linear(hidden) + input_pos.unsqueeze(-1)
        if torch.is_grad_enabled():
            self.num_live += 1
            self.most_live = max(self.most_live, self.num_live)
            out.register_hook(self.count_backward)
        return self.head(out, targets) if self.is_last else out

    def head(self, out, targets):
        return torch.stack([out.square().sum(), out.abs().sum(), targets.labels.sum().float()])

    def count_backward(self, _):
        self.num_live -= 1


def microbatches(num, shapes=((2, 3), (1, 5))):
    made = []
    for i in range(num):
        tokens = torch.full(shapes[i % len(shapes)], i + 1)
        # Different numbers of targets.
        targets = Targets(tokens + 1, torch.arange(0, tokens.numel(), 1 + i % 2))
        input_pos = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
        made.append(Microbatch({"tokens": tokens, "input_pos": input_pos}, targets))
    return made


def through_all(stages, microbatch):
    """Returns the output of all stages one after the other, in one process."""
    hidden, targets = microbatch.inputs["tokens"], microbatch.targets
    for stage in stages:
        hidden = stage(hidden, microbatch.inputs["input_pos"], targets)
    return hidden


def second(sums):
    """Returns a view, which zero-bubble schedules could not detach in place."""
    return sums[1]


def make_pipeline(schedule, num_stages, make_stage=CountingStage, num_sums=3):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    stages = {i: make_stage(i, num_stages) for i in range(rank, num_stages, num_ranks)}
    pipeline = Pipeline(
        nn.ModuleDict({f"stage_{i}": stage for i, stage in stages.items()}),
        num_stages=num_stages,
        schedule=schedule,
        embed_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
        num_sums=num_sums,
    )
    return pipeline, stages


def numel_of_hidden_states():
    """Returns the number of elements of all live tensors of hidden states."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    return sum(t.numel() for t in tensors if t.dim() == 3 and t.shape[-1] == DIM)


def live_microbatches(schedule, num_stages, numbers):
    pipeline, stages = make_pipeline(schedule, num_stages)
    most, left = [], []
    for num in numbers:
        for stage in stages.values():
            stage.most_live = 0
        pipeline.forward_backward(microbatches(num), second)
        assert all(stage.num_live == 0 for stage in stages.values())
        most.append(max(stage.most_live for stage in stages.values()))
        left.append(numel_of_hidden_states())
    return most, left


@pytest.mark.parametrize(("schedule", "of_first_rank"), [("1F1B", [2, 2, 2]), ("GPipe", [4, 8, 16])])
def test_live_microbatches_of_1f1b_do_not_depend_on_their_number(schedule, of_first_rank):
    (first, left), (last, _) = run_distributed(live_microbatches, 2, schedule, 2, [4, 8, 16])
    assert first == of_first_rank
    assert last == ([1, 1, 1] if schedule == "1F1B" else of_first_rank)
    assert left[0] == left[1] == left[2]


NUM_STAGES = {schedule: 4 if "Interleaved" in schedule else 2 for schedule in SCHEDULES}


def on_two_ranks(function, schedules=tuple(SCHEDULES)):
    """Returns a fixture: results of ``function(schedule)`` on each of two ranks, by schedule."""

    @pytest.fixture(scope="module")
    def by_schedule():
        of_ranks = run_distributed(by_its_argument, 2, function, schedules)
        return {schedule: [of_rank[schedule] for of_rank in of_ranks] for schedule in schedules}

    return by_schedule


def by_its_argument(function, arguments):
    return {argument: function(argument) for argument in arguments}


def results_by_number(schedule):
    return {num: results_of(schedule, NUM_STAGES[schedule], num) for num in (4, 6)}


def results_of(schedule, num_stages, num):
    pipeline, stages = make_pipeline(schedule, num_stages)
    validated = pipeline.forward(microbatches(num))
    assert all(stage.linear.weight.grad is None for stage in stages.values())
    trained = pipeline.forward_backward(microbatches(num), second)
    again = pipeline.forward(microbatches(num))
    assert not validated.requires_grad
    assert not trained.requires_grad
    return validated, trained, again, {i: stage.linear.weight.grad for i, stage in stages.items()}


results = on_two_ranks(results_by_number)


@pytest.mark.parametrize("num", [4, 6])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_of_different_shapes_give_sums_and_gradients_of_the_stages_in_a_row(schedule, num, results):
    """Gradients are those of the second sum only."""
    stages = [CountingStage(i, NUM_STAGES[schedule]) for i in range(NUM_STAGES[schedule])]
    expected = torch.zeros(3)
    for microbatch in microbatches(num):
        sums = through_all(stages, microbatch)
        second(sums).backward()
        expected += sums.detach()
    assert (expected > 1).all()
    of_ranks = [by_number[num] for by_number in results[schedule]]
    for *all_sums, grads in of_ranks:
        assert len(all_sums) == 3
        for index, grad in grads.items():
            torch.testing.assert_close(grad, stages[index].linear.weight.grad)
    for of_first_rank, of_last_rank in zip(*(r[:3] for r in of_ranks), strict=True):
        assert not of_first_rank.any()
        # The mean over both ranks: the one without the last stage counts as 0.
        torch.testing.assert_close((of_first_rank + of_last_rank) / 2, expected.double())


class TeacherStage(CountingStage):
    """Returns the hidden states at target positions, [n, d]."""

    def __init__(self, index, num_stages):
        super().__init__(index, num_stages, seed=1)

    def head(self, out, targets):
        return out.flatten(0, 1)[targets.positions]


def outputs_in_both_orders(schedule):
    pipeline, _ = make_pipeline(schedule, NUM_STAGES[schedule], TeacherStage)
    some = microbatches(6)
    # Interleaved schedules need more than 5, and 1F1B more than 1.
    return [pipeline.outputs(each) for each in (some, some[::-1], some[:5], some[:1])]


outputs = on_two_ranks(outputs_in_both_orders)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_outputs_are_those_of_the_stages_in_a_row_by_index(schedule, outputs):
    stages = [TeacherStage(i, NUM_STAGES[schedule]) for i in range(NUM_STAGES[schedule])]
    expected = [through_all(stages, microbatch).detach() for microbatch in microbatches(6)]
    assert {len(hidden) for hidden in expected} == {6, 3}
    first, (in_order, reversed_order, five, one) = outputs[schedule]
    assert first == [{}, {}, {}, {}]
    assert (list(five), list(one)) == ([0, 1, 2, 3, 4], [0])
    torch.testing.assert_close(five, {index: in_order[index] for index in range(5)})
    torch.testing.assert_close(one, {0: in_order[0]})
    assert sorted(in_order) == sorted(reversed_order) == list(range(6))
    for index, hidden in enumerate(expected):
        assert not in_order[index].requires_grad
        torch.testing.assert_close(in_order[index], hidden)
        torch.testing.assert_close(reversed_order[5 - index], hidden)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_number_of_microbatches_is_the_least_that_pytorch_accepts(schedule, num_ranks):
    several = "Interleaved" in schedule
    num_stages = num_ranks * (2 if several else 1)
    for num in range(1, 20):
        to_run = num_microbatches_to_run(num, schedule, num_ranks, num_stages)
        accepted = (n for n in range(num, 60) if accepts(schedule, num_ranks, num_stages, n))
        assert to_run == next(accepted)


def accepts(schedule, num_ranks, num_stages, num_microbatches):
    """Calls the constructor of PyTorch's class with the attributes of a stage that it reads."""
    schedule_class = SCHEDULES[schedule]
    stage = type("Stage", (), {"group_size": num_ranks, "group_rank": 0, "num_stages": num_stages})()
    stage.submod, stage.stage_index, stage.is_last = None, 0, False
    many = issubclass(schedule_class, ScheduleInterleaved1F1B) or "ZeroBubble" in schedule
    try:
        schedule_class([stage] * (num_stages // num_ranks) if many else stage, num_microbatches)
    except ValueError:
        return False
    return schedule_class is not ScheduleGPipe or num_microbatches >= 1


class StageOfOneSum(CountingStage):
    def head(self, out, targets):
        return out.square().sum()


class FailingStage(CountingStage):
    def head(self, out, targets):
        if out.shape[1] == 5:
            raise ArithmeticError("planted")
        return super().head(out, targets)


def train_with_sums(make_stage, num_sums):
    pipeline, _ = make_pipeline("1F1B", 2, make_stage, num_sums)
    pipeline.forward_backward(microbatches(4), second)


@pytest.mark.parametrize(
    ("make_stage", "num_sums", "text"),
    [
        (FailingStage, 3, "microbatch 1 of 4: its forward failed (ArithmeticError: planted)"),
        (CountingStage, 1, "loss._component_: it returns [3] and not [1]"),
        (StageOfOneSum, 3, "loss._component_: it returns [] and not [3]"),
    ],
)
def test_a_failing_stage_is_named_with_its_microbatch_and_no_rank_hangs(make_stage, num_sums, text):
    waiting, failing = run_distributed(
        train_with_sums, 2, make_stage, num_sums, timeout_seconds=15, expect_failures=True
    )
    assert "PipelineError: pipeline stage 1 of 2, microbatch" in failing
    assert text in failing
    assert "RuntimeError" in waiting
