"""Models are cut into stages that keep what was changed on the meta device, and are wrapped as configured."""

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from tiny import on_meta
from torch.distributed.fsdp import FSDPModule

from recipe_utils.model_kinds import NotOnThisStage
from recipe_utils.models.construct import build_stages
from recipe_utils.models.distribute import parallelize
from recipe_utils.models.pipeline.schedule import PipelineSettings
from recipe_utils.models.pipeline.stages import Stages, has_output, local_stages
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.weights import load_weights
from recipe_utils.parallel.settings import RankSettings

CPU = torch.device("cpu")


def test_token_embeddings_that_the_output_shares_are_not_sharded_alone(one_process):
    settings = ModelSettings(custom_sharded_layers=["tok_embeddings"])
    with pytest.raises(ValueError, match=r"custom_sharded_layers=\['tok_embeddings'\]"):
        parallelize(on_meta(), settings, one_process)
    parallelize(on_meta(tiny.UNTIED_MODEL), settings, one_process)


@pytest.mark.parametrize(
    ("sizes", "wrapping", "num_wrapped"),
    [
        (tiny.MODEL, {}, 0),
        (tiny.UNTIED_MODEL, {}, 0),
        (tiny.MODEL, {"enable_activation_checkpointing": True}, 2),
        (tiny.MODEL, {"ac_mode": "selective", "ac_option": 2}, 1),
    ],
)
def test_plain_and_wrapped_models_load_the_weights_of_plain_ones(one_process, sizes, wrapping, num_wrapped):
    saved, settings = tiny.tiny_model(sizes), ModelSettings(**wrapping)
    model = on_meta(sizes)
    parallelize(model, settings, one_process)
    load_weights(model, {"model": saved.state_dict()}, settings, CPU)
    tokens = torch.randint(tiny.VOCAB_SIZE, (2, 20))
    torch.testing.assert_close(model(tokens), saved(tokens), rtol=0, atol=1e-6)
    recomputing = [m for m in model.modules() if "CheckpointWrapper" in type(m).__name__]
    assert len(recomputing) == num_wrapped


@pytest.mark.parametrize(
    "wrapping", [{"enable_activation_checkpointing": True}, {"ac_mode": "selective", "ac_option": 1}]
)
def test_recomputed_layers_have_the_dropout_of_their_forward(wrapping, one_process):
    gradients = []
    for how in ({}, wrapping):
        model = tiny.tiny_model(tiny.adapted(tiny.MODEL, lora_dropout=0.3))
        parallelize(model, ModelSettings(**how), one_process)
        torch.manual_seed(3)
        loss = model(torch.arange(10).view(2, 5)).square().sum()
        torch.rand(7)  # another microbatch
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) > 10
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_a_model_without_a_pipeline_is_one_stage_with_its_output_and_leaves_the_meta_model_unchanged(one_process):
    meta_model = on_meta()
    model = build_stages(meta_model, PipelineSettings(), one_process)
    assert local_stages(model) == [model]
    assert has_output(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    parallelize(model, ModelSettings(enable_activation_checkpointing=True), one_process)
    assert not any("CheckpointWrapper" in type(m).__name__ for m in meta_model.modules())


def build_on_two_ranks(layouts):
    """Returns for each layout the layers, the output and the trained layers of each stage of this rank."""
    described = []
    for layout, schedule in layouts:
        ranks = RankSettings(device="cpu", **dict(layout)).join()
        meta_model = on_meta(tiny.DEEP_UNTIED_MODEL)
        for index in (1, 2):
            meta_model.layers[index].attn.requires_grad_(False)
        meta_model.value_head = torch.nn.Linear(8, 1, device="meta")
        model, stages = build_stages(meta_model, PipelineSettings(pipeline_parallel_schedule=schedule), ranks), []
        for stage in local_stages(model):
            layers = {i: layer for i, layer in enumerate(stage.layers) if not isinstance(layer, NotOnThisStage)}
            trained = [i for i, layer in layers.items() if all(p.requires_grad for p in layer.parameters())]
            assert has_output(stage) == isinstance(stage.value_head, torch.nn.Linear)
            stages.append(([*layers], has_output(stage), trained))
            parallelize(stage, ModelSettings(), ranks)
        if isinstance(model, Stages):
            assert len(model.adapters.trained) == 39 - 2 * 4 + 2
        assert isinstance(model, FSDPModule) == ("data_parallel_shard_dim" in dict(layout))
        described.append(stages)
    return described


def test_only_the_last_stage_has_the_output_and_own_modules_and_frozen_layers_stay_frozen():
    layouts = [
        ({"data_parallel_shard_dim": 2}, "1F1B"),
        ({"pipeline_parallel_dim": 2}, "1F1B"),
        ({"pipeline_parallel_dim": 2}, "Interleaved1F1B"),
    ]
    first, second = run_distributed(build_on_two_ranks, 2, layouts)
    assert first[0] == second[0] == [([0, 1, 2, 3], True, [0, 3])]
    assert first[1:] == [[([0, 1], False, [0])], [([0], False, [0]), ([2], False, [])]]
    assert second[1:] == [[([2, 3], True, [3])], [([1], False, []), ([3], True, [3])]]
