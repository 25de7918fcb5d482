"""Weights reach a meta model whole and checked, and what does not fit is named."""

import copy
import json
import re

import pytest
import tiny
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from tiny import on_meta
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.models.adapters.adapted_linear import speed_up_adapters
from recipe_utils.models.construct import build_stages
from recipe_utils.models.distribute import parallelize
from recipe_utils.models.pipeline.schedule import PipelineSettings
from recipe_utils.models.pipeline.stages import local_stages
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.weights import differences_from_config, gather_weights, load_weights, with_weights
from recipe_utils.parallel.settings import RankSettings

CPU, META = torch.device("cpu"), torch.device("meta")
FP32 = ModelSettings()


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_loaded_weights_have_the_models_precision_and_their_own_memory(name, dtype):
    given = tiny.tiny_model().state_dict()
    settings = ModelSettings(dtype=name)
    model = on_meta(dtype=name)
    load_weights(model, {"model": given}, settings, CPU)
    weight = model.tok_embeddings.weight
    assert weight.data_ptr() != given["tok_embeddings.weight"].data_ptr()
    assert torch.equal(weight, given["tok_embeddings.weight"].to(dtype))
    assert weight.requires_grad


def test_weights_that_do_not_fit_are_named():
    changed = {**tiny.tiny_model().state_dict(), "norm.scale": torch.zeros(31), "extra": torch.ones(1)}
    del changed["layers.1.attn.q_proj.weight"]
    text = (
        "the checkpoint does not fit the model: it lacks layers.1.attn.q_proj.weight; it has extra, "
        "which the model does not have; its shapes differ: norm.scale (31,) instead of (32,);"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        load_weights(on_meta(), {"model": changed}, FP32, CPU)


def test_a_buffer_that_no_checkpoint_holds_is_refused():
    model = on_meta()
    model.register_buffer("scale", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(RuntimeError, match="scale"):
        load_weights(model, {"model": tiny.tiny_model().state_dict()}, FP32, CPU)


def test_cpu_offload_keeps_parameters_on_the_cpu_and_buffers_on_the_device(monkeypatch):
    monkeypatch.setattr("torchtune.training.validate_no_params_on_meta_device", lambda _: None)
    model = on_meta()
    model.register_buffer("scale", torch.empty(3, device="meta"))
    weights = {**tiny.tiny_model().state_dict(), "scale": torch.ones(3)}
    load_weights(model, {"model": weights}, ModelSettings(fsdp_cpu_offload=True), META)
    assert {parameter.device for parameter in model.parameters()} == {CPU}
    assert model.scale.device == META


# ---- Ranks --------------------------------------------------------------------------------------


def load_and_gather(layouts):
    """Returns for each layout True if all ranks' weights came back whole, in order, on rank 0 only."""
    found = []
    saved = tiny.tiny_model(tiny.DEEP_MODEL).state_dict()
    for layout in layouts:
        ranks = RankSettings(device="cpu", gradient_sync="last_microbatch", **dict(layout)).join()
        model = build_stages(on_meta(tiny.DEEP_MODEL), PipelineSettings(), ranks)
        for stage in local_stages(model):
            parallelize(stage, FP32, ranks)
        load_weights(model, {"model": saved}, FP32, CPU)
        gathered = gather_weights(model, CPU, ranks.dp_rank == 0, ranks.cpu_group)
        # Tied weights occur in the state dict once, under the name of the embeddings.
        is_same = list(gathered) == list(saved) and all(
            torch.equal(weight, saved[name]) for name, weight in gathered.items()
        )
        found.append(is_same if dist.get_rank() == 0 else not gathered)
    return found


def test_weights_of_shards_and_stages_are_gathered_whole_in_the_models_order_on_rank_0():
    layouts = [{"data_parallel_shard_dim": 2}, {"data_parallel_replicate_dim": 2}, {"pipeline_parallel_dim": 2}]
    assert run_distributed(load_and_gather, 2, layouts) == [[True] * 3] * 2


def load_with_shards_on_the_cpu():
    """Loads on rank 1 of 4 with a mesh of GPUs that do not exist: moving a shard to one would fail."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("dp_shard",))
    layers = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))  # positions would be made on a GPU
    whole, model = layers.state_dict(), copy.deepcopy(layers).to("meta")
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            rows = parameter.split(-(-len(parameter) // 4))
            local = rows[1].detach() if len(rows) > 1 else parameter[:0].detach()
            sharded = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )  # fmt: skip
            module._parameters[name] = nn.Parameter(sharded)
    load_weights(model, {"model": whole}, ModelSettings(fsdp_cpu_offload=True), torch.device("cuda"))
    found = {name: weight.to_local() for name, weight in model.state_dict().items()}
    for name, weight in whole.items():
        size = -(-len(weight) // 4)
        assert found[name].device.type == "cpu"
        assert torch.equal(found[name], weight[size : 2 * size]), name
    return len(found)


def test_shards_that_fsdp_keeps_on_the_cpu_stay_there_whatever_the_mesh_is_of():
    assert run_distributed(load_with_shards_on_the_cpu, 1) == [4]


@pytest.mark.parametrize("rope", [{"rope_theta": 10_000}, {"rope_parameters": {"rope_theta": 10_000}}])
def test_what_a_model_computes_otherwise_than_its_config_json_is_named(rope, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-5, **rope}))
    (text,) = differences_from_config(tiny.tiny_model(), tmp_path)
    assert "rope_theta is 500000, and 10000 in" in text
    same = tiny.tiny_model({**tiny.MODEL, "rope_base": 10_000})
    assert not list(differences_from_config(same, tmp_path))
    assert not list(differences_from_config(same, tmp_path / "nowhere"))


@torch.no_grad()
def test_other_weights_are_computed_with_in_the_block_only():
    """DoRA's norms are computed once per optimizer step, and of other weights once more."""
    sizes = tiny.adapted(tiny.MODEL, use_dora=True)
    model, tokens = tiny.adapted_model(sizes), torch.arange(8).unsqueeze(0)
    speed_up_adapters(model, torch.optim.SGD(p for p in model.parameters() if p.requires_grad))
    others = {name: parameter * 1.5 for name, parameter in parameters_by_name(model).items()}
    expected = tiny.adapted_model(sizes)
    expected.load_state_dict(others, strict=False)
    before = model(tokens)
    with with_weights(model, others):
        torch.testing.assert_close(model(tokens), expected(tokens))
    assert torch.equal(model(tokens), before)
