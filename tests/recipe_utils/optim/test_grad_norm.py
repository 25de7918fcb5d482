"""Gradients are clipped by the norm of all of them together, however they are sharded."""

import pytest
import tiny
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from torch import nn
from torch.distributed.tensor import DTensor

from recipe_utils.optim.grad_norm import clip_grad_norm_, clip_grad_norm_by_part_
from recipe_utils.parallel.fsdp import shard_model
from recipe_utils.parallel.ranks import ParallelDims, RankSettings, build_mesh, join_ranks

CPU = torch.device("cpu")


def model_with_gradients(scale=1.0):
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.zeros(s)) for s in [(3, 4), (5,), (2, 2)]])
    for parameter in list(model)[:2]:  # the last one was not used
        parameter.grad = scale * torch.randn(parameter.shape)
    return model


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e6, float("inf")])
def test_plain_gradients_are_clipped_as_torch_clips_them(max_norm):
    ours, theirs = model_with_gradients(), model_with_gradients()
    norm = clip_grad_norm_(ours, max_norm)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    torch.testing.assert_close(norm, expected)
    for our, their in zip(list(ours)[:2], list(theirs)[:2], strict=True):
        torch.testing.assert_close(our.grad, their.grad)


@pytest.mark.parametrize("scale", [1.0, float("inf"), float("nan")])
def test_without_a_limit_gradients_are_measured_and_nothing_is_changed(scale):
    measured, untouched = model_with_gradients(scale), model_with_gradients(scale)
    norm = clip_grad_norm_(measured)
    torch.testing.assert_close(
        norm,
        torch.cat([p.grad.flatten() for p in list(untouched)[:2]]).norm(),
        equal_nan=True,
    )
    for parameter, same in zip(list(measured)[:2], list(untouched)[:2], strict=True):
        assert torch.equal(parameter.grad.nan_to_num(7), same.grad.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_fp32_and_fp64_gradients_the_norm_is_torch_s_bit_for_bit(dtype):
    model = model_with_gradients().to(dtype)
    grads = [p.grad for p in model if p.grad is not None]
    assert grads[0].dtype == dtype
    assert torch.equal(clip_grad_norm_(model), nn.utils.get_total_norm(grads))


def bf16_model():
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.zeros(64, 9)) for _ in range(3)]).bfloat16()
    for parameter in model:
        parameter.grad = torch.randn(parameter.shape).bfloat16()
    return model


def norm_in_float64(model):
    grads = [p.grad for p in model.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    return torch.cat([g.flatten() for g in whole]).double().norm().item()


def test_of_bf16_gradients_the_norm_has_the_digits_of_fp32():
    model = bf16_model()
    expected = norm_in_float64(model)
    of_torch = nn.utils.get_total_norm([p.grad for p in model]).item()
    assert abs(of_torch - expected) > 1e-3 * expected  # or there is nothing to mend
    norm = clip_grad_norm_(model)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected, rel=1e-6)


def test_bf16_gradients_are_clipped_by_that_norm_and_stay_bf16():
    model = bf16_model()
    clip_grad_norm_(model, 1.0)
    assert {p.grad.dtype for p in model} == {torch.bfloat16}
    assert norm_in_float64(model) == pytest.approx(1, rel=1e-3)


def norm_of_bf16_shards():
    model = tiny.tiny_model().bfloat16()
    wrapping = {"custom_sharded_layers": None, "cpu_offload": False, "reshard_after_forward": True}
    shard_model(model, build_mesh(CPU, ParallelDims(1, 2, 1)), **wrapping)
    backward(model)
    expected = norm_in_float64(model)
    return clip_grad_norm_(model).item(), expected


def test_of_sharded_bf16_gradients_too():
    for norm, expected in run_distributed(norm_of_bf16_shards, 2):
        assert norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_without_any_gradient_there_is_no_norm(max_norm):
    """As after a backward that has stepped; a stage's ranks still agree on one."""
    assert clip_grad_norm_(nn.Linear(2, 2), max_norm) is None


def backward(model):
    generator = torch.Generator().manual_seed(0)
    model(torch.randint(tiny.VOCAB_SIZE, (1, 9), generator=generator)).square().mean().backward()


def clip_on_two_ranks():
    plain, model = tiny.tiny_model(), tiny.tiny_model()
    shard_model(
        model,
        build_mesh(CPU, ParallelDims(1, 2, 1)),
        custom_sharded_layers=None,
        cpu_offload=False,
        reshard_after_forward=True,
    )
    norms = []
    for each in (plain, model):
        backward(each)
        norms.append(clip_grad_norm_(each, 0.01).item())
    gradients = [
        (p.grad, sharded.grad.full_tensor())
        for p, sharded in zip(plain.parameters(), model.parameters(), strict=True)
    ]
    distance = max((p - s).abs().max().item() for p, s in gradients)
    largest = max(p.abs().max().item() for p, _ in gradients)
    return norms, distance / largest, *clip_stages()


class TwoStages:
    """What a norm must know of a pipeline: its ranks, and which gradients another one counts."""

    def __init__(self, group, copies):
        self.group = group
        self.tied_copies = frozenset(map(id, copies))


def clip_stages():
    """The norm over two stages that hold one parameter both, and what is left of this one's gradients."""
    ranks = join_ranks(
        RankSettings(device="cpu", pipeline_parallel_dim=2, gradient_sync="last_microbatch")
    )
    stage = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("own", "shared")})
    stage["own"].grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]][dist.get_rank()])
    stage["shared"].grad = torch.tensor([12.0, 0.0])
    copies = [stage["shared"]] if dist.get_rank() == 1 else []
    norm = clip_grad_norm_(stage, 1.0, TwoStages(ranks.pp_group, copies))
    return norm.item(), [stage[name].grad.tolist() for name in ("own", "shared")]


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(clip_on_two_ranks, 2)


def test_sharded_gradients_are_clipped_by_the_norm_of_all_shards(two_ranks):
    for (plain, of_shards), distance, *_ in two_ranks:
        assert of_shards == pytest.approx(plain, rel=1e-5)
        assert plain > 0.01  # something was clipped
        assert distance < 1e-4


def test_the_norm_over_stages_counts_each_parameter_once_and_clips_every_copy(two_ranks):
    for rank, (*_, norm, (own, shared)) in enumerate(two_ranks):
        assert norm == pytest.approx(13)  # of 3, 4 and 12
        assert own == pytest.approx([[3 / 13, 0], [0, 4 / 13]][rank])
        assert shared == pytest.approx([12 / 13, 0])


# ---- Part by part ----------------------------------------------------------------------------------


def model_of_parts(scales=(1.0, 10.0, 0.01)):
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.Linear(4, 3), "output": nn.ModuleDict()})
    model["output"]["dino"], model["output"]["ibot"] = nn.Linear(3, 5), nn.Linear(3, 6)
    for part, scale in zip((model["layers"], *model["output"].values()), scales, strict=True):
        for parameter in part.parameters():
            parameter.grad = scale * torch.randn(parameter.shape)
    return model


PARTS = ("output.dino", "output.ibot")


def test_each_part_is_clipped_by_its_own_norm_and_the_norm_is_that_of_all():
    model, untouched = model_of_parts(), model_of_parts()
    norm = clip_grad_norm_by_part_(model, PARTS, 1.0)
    everything = torch.cat([p.grad.flatten() for p in untouched.parameters()])
    torch.testing.assert_close(norm, everything.norm())
    of_parts = zip(
        (model["layers"], *model["output"].values()),
        (untouched["layers"], *untouched["output"].values()),
        strict=True,
    )
    for part, before in of_parts:
        nn.utils.clip_grad_norm_(before.parameters(), 1.0)
        for mine, its in zip(part.parameters(), before.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
    # The small part is as it was: it does not pay for the others.
    small = model["output"]["ibot"].weight.grad
    torch.testing.assert_close(small, model_of_parts()["output"]["ibot"].weight.grad)


def test_without_a_limit_parts_are_measured_only_and_a_part_without_gradients_is_none():
    model, untouched = model_of_parts(), model_of_parts()
    clip_grad_norm_by_part_(model, PARTS)
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(model.parameters(), untouched.parameters(), strict=True)
    )
    for parameter in model["output"]["dino"].parameters():
        parameter.grad = None
    rest = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(clip_grad_norm_by_part_(model, PARTS, 1.0), rest.norm())
    for parameter in model.parameters():
        parameter.grad = None
    assert clip_grad_norm_by_part_(model, PARTS, 1.0) is None


def test_a_name_that_only_begins_alike_is_of_another_part():
    model = model_of_parts()
    model["output"]["dino_too"] = nn.Linear(2, 2)
    for parameter in model["output"]["dino_too"].parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    before = model["output"]["dino"].weight.grad.clone()
    clip_grad_norm_by_part_(model, PARTS, 1e6)
    torch.testing.assert_close(model["output"]["dino"].weight.grad, before)
