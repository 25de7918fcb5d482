"""Models are built without memory, prepared before they are wrapped, and wrapped as configured."""

from functools import partial

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from tiny import on_meta
from torch.distributed.fsdp import FSDPModule
from torchtune import config

from recipe_utils.models.construct import ModelSettings, build_model, parallelize_model
from recipe_utils.models.pipeline.stages import NotOnThisStage, Stages
from recipe_utils.models.weights import load_weights
from recipe_utils.parallel.ranks import RankSettings, join_ranks

CPU = torch.device("cpu")


def make(sizes=tiny.MODEL):
    return config.instantiate(OmegaConf.create(sizes))


def test_token_embeddings_that_the_output_shares_are_not_sharded_alone(one_process):
    settings = ModelSettings(custom_sharded_layers=["tok_embeddings"])
    with pytest.raises(ValueError, match=r"custom_sharded_layers=\['tok_embeddings'\]"):
        parallelize_model(on_meta(), settings, one_process)
    parallelize_model(on_meta(tiny.UNTIED_MODEL), settings, one_process)


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
    model = parallelize_model(on_meta(sizes), settings, one_process)
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
        parallelize_model(model, ModelSettings(**how), one_process)
        torch.manual_seed(3)
        loss = model(torch.arange(10).view(2, 5)).square().sum()
        torch.rand(7)  # another microbatch
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) > 10
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_a_whole_model_is_prepared_once_with_its_output_before_it_is_wrapped(one_process):
    prepared = []

    def prepare(model, has_output):
        wrapped = any("CheckpointWrapper" in type(m).__name__ for m in model.modules())
        on_meta = all(parameter.is_meta for parameter in model.parameters())
        prepared.append((model, has_output, wrapped, on_meta))

    settings = ModelSettings(enable_activation_checkpointing=True, dtype="bf16")
    model = build_model(make, prepare, settings, one_process)
    assert prepared == [(model, True, False, True)]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def build_on_two_ranks(layouts):
    """Returns for each layout the layers that ``prepare`` was called with, and if they had the output."""
    found = []
    for layout, schedule in layouts:
        ranks = join_ranks(RankSettings(device="cpu", **dict(layout)))
        prepared = []

        def prepare(model, has_output, prepared=prepared):
            layers = enumerate(model.layers)
            own = [index for index, layer in layers if not isinstance(layer, NotOnThisStage)]
            assert not isinstance(model, FSDPModule)
            prepared.append((own, has_output))

        settings = ModelSettings(pipeline_parallel_schedule=schedule)
        of_model = partial(make, tiny.DEEP_UNTIED_MODEL)
        model = build_model(of_model, prepare, settings, ranks)
        if isinstance(model, Stages):
            assert len(model.whole.adapters.trained) == 39
            assert len(model) == len(prepared)
        assert isinstance(model, FSDPModule) == ("data_parallel_shard_dim" in dict(layout))
        found.append(prepared)
    return found


def test_each_stage_is_prepared_by_itself_and_only_the_last_has_the_output():
    layouts = [
        ({"data_parallel_shard_dim": 2}, "1F1B"),
        ({"pipeline_parallel_dim": 2}, "1F1B"),
        ({"pipeline_parallel_dim": 2}, "Interleaved1F1B"),
    ]
    first, second = run_distributed(build_on_two_ranks, 2, layouts)
    assert first[0] == second[0] == [([0, 1, 2, 3], True)]
    assert first[1:] == [[([0, 1], False)], [([0], False), ([2], False)]]
    assert second[1:] == [[([2, 3], True)], [([1], False), ([3], True)]]


# ---- Settings -----------------------------------------------------------------------------------


OFFLOADING, RECOMPUTING = ({"enable_activation_offloading": True}, {"enable_activation_checkpointing": True})


@pytest.mark.parametrize(
    ("settings", "ranks", "problem"),
    [
        (OFFLOADING, {}, "enable_activation_offloading=True: it needs enable_activation_checkpointing"),
        ({**OFFLOADING, **RECOMPUTING}, {}, "enable_activation_offloading=True: it needs device=cuda"),
        ({**RECOMPUTING, "ac_mode": "full"}, {}, "ac_mode=full: "),
        ({"ac_mode": "selective"}, {}, "ac_mode=selective: set ac_option, too"),
        ({}, {"tensor_parallel_dim": 2}, "tensor_parallel_dim=2: set tensor_parallel_plan, too"),
        ({"packed_attention": "flex"}, {}, "packed_attention=flex: it needs device=cuda"),
    ],
)  # fmt: skip
def test_keys_that_do_not_go_together_are_problems_by_name(settings, ranks, problem):
    settings = ModelSettings(device="cpu", **settings, **ranks)
    assert any(str(each).startswith(problem) for each in settings.problems())
    assert not [*ModelSettings(device="cpu", packed_attention="by_document").problems()]


def test_weights_stay_on_the_cpu_only_where_the_device_is_another():
    settings = ModelSettings(fsdp_cpu_offload=True)
    assert settings.offloads_to_cpu(torch.device("cuda"))
    assert not settings.offloads_to_cpu(CPU)
    assert not ModelSettings().offloads_to_cpu(torch.device("cuda"))
