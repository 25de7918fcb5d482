"""Gradients are clipped by their total norm, with any sharding."""

from functools import partial
from types import SimpleNamespace

import pytest
import tiny
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from recipe_utils.models.pipeline.microbatches import Pipeline
from recipe_utils.models.runner import Whole
from recipe_utils.optim.grad_norm import clip_grad_norm_, grad_norms
from recipe_utils.parallel.fsdp import shard_model
from recipe_utils.parallel.ranks import ParallelDims, build_mesh
from recipe_utils.parallel.settings import RankSettings

CPU = torch.device("cpu")
ZERO = torch.zeros(1)


def whole(model):
    return Whole(model, CPU)


def model_with_gradients(scale=1.0, dtype=torch.float32, size=1):
    torch.manual_seed(0)
    shapes = [(3 * size, 4), (5 * size,), (2, 2)]
    model = nn.ParameterList([nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes])
    for parameter in list(model)[:2]:  # the last one was not used
        parameter.grad = (scale * torch.randn(parameter.shape)).to(dtype)
    return model


def gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_same_gradients(model, other):
    for mine, its in zip(gradients(model), gradients(other), strict=True):
        torch.testing.assert_close(mine, its, equal_nan=True)


def norm_in_float64(grads):
    return torch.cat([grad.flatten() for grad in grads]).double().norm().item()


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e6, float("inf")])
def test_plain_gradients_are_clipped_as_torch_clips_them(max_norm):
    ours, theirs = model_with_gradients(), model_with_gradients()
    norm = clip_grad_norm_(whole(ours), max_norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), max_norm))
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, float("inf"), float("nan")])
def test_without_a_limit_the_norm_is_torch_s_bit_for_bit_and_gradients_are_unchanged(scale, dtype):
    measured = model_with_gradients(scale, dtype)
    expected = nn.utils.get_total_norm(gradients(measured))
    torch.testing.assert_close(clip_grad_norm_(whole(measured)), expected, rtol=0, atol=0, equal_nan=True)
    assert_same_gradients(measured, model_with_gradients(scale, dtype))


def test_the_norm_of_bf16_gradients_has_the_digits_of_fp32():
    model = model_with_gradients(dtype=torch.bfloat16, size=100)
    expected = norm_in_float64(gradients(model))
    of_torch = nn.utils.get_total_norm(gradients(model)).item()
    assert abs(of_torch - expected) > 1e-4 * expected
    norm = clip_grad_norm_(whole(model), 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert {grad.dtype for grad in gradients(model)} == {torch.bfloat16}
    assert norm_in_float64(gradients(model)) == pytest.approx(1, rel=1e-3)


def test_without_gradients_there_is_no_norm():
    assert clip_grad_norm_(whole(nn.Linear(2, 2)), 1.0) is None


# ---- On two ranks -------------------------------------------------------------------------------


def sharded_and_plain(dtype):
    """Copies of the tiny model with the same gradients."""
    plain, sharded = tiny.tiny_model().to(dtype), tiny.tiny_model().to(dtype)
    shard_model(
        sharded,
        build_mesh(CPU, ParallelDims(1, 2, 1)),
        custom_sharded_layers=None,
        cpu_offload=False,
        reshard_after_forward=True,
    )
    for model in (plain, sharded):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(tiny.VOCAB_SIZE, (1, 9), generator=generator)
        model(tokens).square().mean().backward()
    return plain, sharded


def clip_on_two_ranks():
    plain, sharded = sharded_and_plain(torch.float32)
    norms = [clip_grad_norm_(whole(model), 0.01).item() for model in (plain, sharded)]
    pairs = list(zip(gradients(plain), gradients(sharded), strict=True))
    distance = max((p - s.full_tensor()).abs().max().item() for p, s in pairs)
    largest = max(p.abs().max().item() for p, _ in pairs)
    _, bf16 = sharded_and_plain(torch.bfloat16)
    expected = norm_in_float64([grad.full_tensor() for grad in gradients(bf16)])
    in_bf16 = clip_grad_norm_(whole(bf16)).item(), expected
    return norms, distance / largest, in_bf16, clip_stages()


def clip_stages():
    """Returns the norm over two stages with a common parameter, and this rank's clipped gradients."""
    ranks = RankSettings(device="cpu", pipeline_parallel_dim=2, gradient_sync="last_microbatch").join()
    stage = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("own", "shared")})
    stage["own"].grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]][dist.get_rank()])
    stage["shared"].grad = torch.tensor([12.0, 0.0])
    copies = {id(stage["shared"])} if dist.get_rank() == 1 else set()
    names = ["own", "shared", "of the second rank"]
    over_stages = partial(Pipeline.norms_over_stages, SimpleNamespace(group=ranks.pp_group, _num_ranks=2))
    stages = SimpleNamespace(
        module=stage, is_cut=True, tied_copies=copies, trained_names=names, norms_over_stages=over_stages
    )
    if dist.get_rank() == 1:
        stage["of the second rank"] = nn.Parameter(torch.zeros(1))
        stage["of the second rank"].grad = torch.zeros(1)
    by_name = {name: norm.item() for name, norm in grad_norms(stages, str).items()}
    norm = clip_grad_norm_(stages, 1.0)
    return norm.item(), stage["own"].grad.tolist(), stage["shared"].grad.tolist(), by_name


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(clip_on_two_ranks, 2)


def test_sharded_gradients_are_clipped_by_the_norm_of_all_shards(two_ranks):
    for (plain, of_shards), distance, (in_bf16, expected), _ in two_ranks:
        assert of_shards == pytest.approx(plain, rel=1e-5)
        assert plain > 0.01
        assert distance < 1e-4
        assert in_bf16 == pytest.approx(expected, rel=1e-6)


def test_the_norm_over_stages_counts_each_parameter_once_and_clips_every_copy(two_ranks):
    for rank, (*_, (norm, own, shared, by_name)) in enumerate(two_ranks):
        assert by_name == pytest.approx({"own": 5, "shared": 12, "of the second rank": 0})
        assert norm == pytest.approx(13)  # of 3, 4 and 12
        assert own == pytest.approx([[3 / 13, 0], [0, 4 / 13]][rank])
        assert shared == pytest.approx([12 / 13, 0])


# ---- By name ------------------------------------------------------------------------------------


def model_of_layers():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"layers": nn.ModuleDict({name: nn.Linear(4, 3) for name in "ab"}), "output": nn.Linear(3, 5)}
    )
    model["unused"] = nn.Linear(2, 2)
    for parameter, scale in zip(model.parameters(), (1.0, 1.0, 10.0, 10.0, 0.01, 0.01), strict=False):
        parameter.grad = scale * torch.randn(parameter.shape)
    return nn.ModuleDict({"stage_0": model})


def part_of(name):
    return name.rpartition(".")[0]


def test_the_gradients_of_each_name_are_measured_and_clipped_by_their_own_norm():
    model, expected = model_of_layers(), model_of_layers()
    layers = model["stage_0"]["layers"]
    layers["a"] = torch.compile(checkpoint_wrapper(layers["a"]))  # names are those within wrappers
    norms = {name: norm.item() for name, norm in grad_norms(whole(model), part_of).items()}
    parts = {name: expected["stage_0"].get_submodule(name) for name in norms}
    assert list(parts) == ["layers.a", "layers.b", "output", "unused"]
    assert norms == pytest.approx({name: norm_in_float64(gradients(part) or [ZERO]) for name, part in parts.items()})
    assert clip_grad_norm_(whole(model), 1.0, name_of=part_of).item() == pytest.approx(
        norm_in_float64(gradients(expected))
    )
    for part in parts.values():
        nn.utils.clip_grad_norm_(part.parameters(), 1.0)
    assert_same_gradients(model, expected)
    assert_same_gradients(*(each["stage_0"]["output"] for each in (model, model_of_layers())))  # small


def test_norms_of_nothing_are_refused_with_names_of_parameters():
    with pytest.raises(ValueError, match=r"none of the 8 trained parameters, which are called layers\.a\.weight, l"):
        grad_norms(whole(model_of_layers()), lambda name: "norm" if name.startswith("layer.0.") else None)
    with pytest.raises(ValueError, match="no parameter has a gradient; measure norms before zero_grad"):
        grad_norms(whole(nn.Linear(2, 2)), str)


def test_norms_do_not_wait_for_the_device():
    with FakeTensorMode():  # its tensors have no values to wait for
        assert len(grad_norms(whole(model_of_layers()), part_of)) == 4
