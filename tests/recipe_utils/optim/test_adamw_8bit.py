"""8-bit states give the same weights on any number of ranks, resume bitwise, and take 2.06 bytes."""

import pytest
import torch
from checkpoint_runs import contents, state
from distributed_runs import run_distributed
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from recipe_utils.checkpoint.load import load
from recipe_utils.checkpoint.save import CheckpointWriter
from recipe_utils.forecast.live_bytes import LiveBytes
from recipe_utils.optim import AdamW8bit, adamw_8bit
from recipe_utils.optim.optimizer import OptimizerSettings, optimizer_on_ranks
from recipe_utils.parallel.process_group import new_cpu_group
from recipe_utils.parallel.ranks import ParallelDims, build_mesh
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.update_steps.settings import DataSettings

SHAPES = {"odd": (130, 300), "few_rows": (3, 2000), "experts": (5, 40, 30), "long": (5000,), "small": (8, 8)}


def make(mesh=None, **options):
    """Parameters that ranks cannot share evenly; a rank may have no row of one."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    for name, shape in SHAPES.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator) / 10))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, AdamW8bit(model.parameters(), lr=0.01, **options)


def step(model, optimizer, numbers):
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            grad = torch.randn(parameter.shape, generator=generator) ** 3
            if isinstance(parameter, DTensor):
                grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
            parameter.grad = grad
        optimizer.step()


def weights(model):
    found = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [each.detach() for each in found]


def mesh_of(replicate, shard):
    mesh = build_mesh(torch.device("cpu"), ParallelDims(replicate, shard, 1))
    return mesh["dp_replicate", "dp_shard"] if replicate > 1 else mesh["dp_shard"]


def run_and_save(folder, replicate, shard):
    model, optimizer = make(mesh_of(replicate, shard))
    step(model, optimizer, range(10))
    writer = CheckpointWriter(folder, group=new_cpu_group())
    assert writer.save(model, optimizer, state(10)).error is None
    step(model, optimizer, range(10, 20))
    return [each.numpy() for each in weights(model)]


def resume(folder, replicate, shard):
    model, optimizer = make(mesh_of(replicate, shard))
    load(folder / "step_10", model, optimizer, state(0), group=new_cpu_group())
    step(model, optimizer, range(10, 20))
    return [each.numpy() for each in weights(model)]


def as_tensors(found):
    return [torch.from_numpy(each) for each in found]


@pytest.mark.parametrize(("saved", "resumed"), [((1, 2), (1, 4)), ((1, 4), (1, 2)), ((2, 2), (1, 1))], ids=str)
def test_weights_are_bitwise_those_of_one_process_also_after_a_resume(saved, resumed, tmp_path):
    model, optimizer = make()
    step(model, optimizer, range(20))
    expected = weights(model)
    for found in run_distributed(run_and_save, saved[0] * saved[1], tmp_path, *saved):
        for name, ours, theirs in zip(SHAPES, as_tensors(found), expected, strict=True):
            assert torch.equal(ours, theirs), (name, (ours - theirs).abs().max())
    for found in run_distributed(resume, resumed[0] * resumed[1], tmp_path, *resumed):
        for name, ours, theirs in zip(SHAPES, as_tensors(found), expected, strict=True):
            assert torch.equal(ours, theirs), (name, (ours - theirs).abs().max())


def test_it_follows_adamw_and_is_it_where_states_are_not_quantized():
    (model, optimizer), (other, _) = make(), make()
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    step(model, optimizer, range(20))
    step(other, plain, range(20))
    start, _ = make()
    for name, ours in model.named_parameters():
        theirs = other.get_parameter(name)
        is_quantized = ours.ndim > 1 and ours.numel() >= 4096
        distance = (ours - theirs).norm() / (theirs - start.get_parameter(name)).norm()
        assert (0.01 if is_quantized else 0) <= distance < (0.1 if is_quantized else 1e-5)


def test_a_row_s_state_depends_on_that_row_only():
    """The mutant cuts blocks from flattened rows, as other 8-bit optimizers do."""
    found = []
    for scale in (1, 1000):
        weight = nn.Parameter(torch.ones(100, 100))
        weight.grad = torch.linspace(-1, 1, 100).expand(100, 100) * torch.ones(100, 1)
        weight.grad[1] *= scale
        optimizer = AdamW8bit([weight])
        optimizer.step()
        found.append(optimizer.state[weight]["exp_avg"])
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.slow
def test_a_compiled_step_is_the_eager_one(monkeypatch):
    """CUDA compiles it without a graph break; here it is only traced."""
    found = []
    for update in (adamw_8bit._update, adamw_8bit._compiled("eager")):
        monkeypatch.setattr(adamw_8bit, "_update", update)
        model, optimizer = make(fused=True)
        optimizer.found_inf = torch.zeros(())
        for lr in (0.01, 0.02):
            optimizer.param_groups[0]["lr"] = lr
            step(model, optimizer, range(2))
        found.append(weights(model))
    assert all(torch.allclose(*each, atol=1e-6) for each in zip(*found, strict=True))


WHOLE_BLOCKS = [(64, 256), (32, 256), (256, 256), (24, 768), (6, 8, 512)]
ODD_WIDTHS = [(64, 300), (32, 300), (64, 380), (64, 600), (40, 1000), (600, 8), (700, 40)]
VECTORS = [(256,), (300,), (8, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(("shapes", "num_graphs"), [(WHOLE_BLOCKS + VECTORS, 2), (ODD_WIDTHS + VECTORS, 5)], ids=str)
def test_parameters_of_many_sizes_share_few_compiled_updates(shapes, num_graphs, monkeypatch):
    """Also with rates that change, and groups with and without weight decay."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(adamw_8bit, "_update", adamw_8bit._compiled(counter))
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    groups = [{"params": weights[::2], "weight_decay": 0.1}, {"params": weights[1::2], "weight_decay": 0.0}]
    optimizer = AdamW8bit(groups, fused=True)
    optimizer.found_inf = torch.zeros(())
    for lr in (0.01, 0.02, 0.03):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        for group in groups:
            group["lr"] = lr
        optimizer.step()
    assert counter.frame_count <= num_graphs


@pytest.mark.parametrize("shape", [(7, 10, 300), (4, 8)], ids=str)
def test_strides_of_a_parameter_do_not_change_its_step(shape):
    values, grad = torch.randn(2, *shape).unbind()
    found = []
    for layout in (values, values.movedim(-1, 0).contiguous().movedim(0, -1)):
        weight = nn.Parameter(layout.clone())
        weight.grad = grad
        optimizer = AdamW8bit([weight], lr=0.1)
        for _ in range(2):
            optimizer.step()
        assert weight.stride() == layout.stride()
        found.append(weight.detach())
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("width", [200, 256, 896])
def test_the_default_compiler_gives_the_eager_step(width, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for update in (adamw_8bit._compiled(), adamw_8bit._update):
        with monkeypatch.context() as patch:
            patch.setattr(adamw_8bit, "_compiled", lambda update=update: update)
            patch.setattr(adamw_8bit, "_update", update)  # as on CUDA
            torch.manual_seed(0)
            weight = nn.Parameter(torch.randn(64, width, device=device))
            optimizer = AdamW8bit([weight], lr=0.01, fused=True)
            for _ in range(3):
                weight.grad = torch.randn_like(weight)
                optimizer.step()
        found.append(weight.detach())
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


def test_a_new_state_is_that_of_zeros_and_takes_no_more_memory():
    weight = nn.Parameter(torch.ones(4, 500, 300))
    with LiveBytes() as live:
        state = adamw_8bit._new_state(weight, is_fused=False)
    assert live.peak / weight.numel() < 3.2  # a moment's codes once more
    for name, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
        table = adamw_8bit._table(is_signed, weight.device)
        codes, scales = adamw_8bit._quantized(torch.zeros(4, 500, 2, 150), table)
        assert torch.equal(state[name], codes.flatten(2))
        assert torch.equal(state[f"{name}_scales"], scales.squeeze(-1))


def test_states_take_less_than_2_06_bytes_per_parameter():
    weight = nn.Parameter(torch.ones(512, 1024))
    weight.grad = torch.ones_like(weight)
    optimizer = AdamW8bit([weight])
    optimizer.step()
    num_bytes = sum(each.nbytes for each in optimizer.state[weight].values())
    assert 2 < num_bytes / weight.numel() <= 2.06


@pytest.mark.parametrize("name", ["odd", "small"])
def test_a_non_finite_gradient_changes_nothing_where_found_inf_is_set(name):
    model, optimizer = make(fused=True)
    optimizer.found_inf = torch.zeros(())
    step(model, optimizer, range(2))
    before = contents(model, optimizer)
    parameter = model.get_parameter(name)
    parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = contents(model, optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before if "options" not in key)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert contents(model, optimizer)[name].isnan().any()


def shard_within_rows():
    mesh = mesh_of(1, 2)
    weight = nn.Parameter(distribute_tensor(torch.ones(100, 100), mesh, [Shard(1)]))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="sharded within rows; set tensor_parallel_dim=1"):
        AdamW8bit([weight]).step()
    whole = nn.Parameter(distribute_tensor(torch.ones(100, 100), mesh, [Replicate()]))
    whole.grad = torch.ones_like(whole)
    AdamW8bit([whole]).step()


def test_rows_that_are_sharded_and_arguments_out_of_bounds_are_refused():
    run_distributed(shard_within_rows, 2)
    for name, value in (("lr", -1.0), ("betas", (0.9, 1.0)), ("eps", -1.0), ("weight_decay", -0.1)):
        with pytest.raises(ValueError, match=f"optimizer.{name}=.*: it is out of bounds"):
            AdamW8bit([nn.Parameter(torch.ones(1))], **{name: value})
    settings = OptimizerSettings(optimizer={"_component_": "recipe_utils.optim.AdamW8bit"}), DataSettings()
    (problem,) = optimizer_on_ranks(*settings, RankSettings(tensor_parallel_dim=2))
    assert str(problem).startswith("optimizer._component_=recipe_utils.optim.AdamW8bit: its blocks")
