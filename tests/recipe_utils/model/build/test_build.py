"""Models are built without memory, prepared before they are wrapped, and wrapped as asked for."""

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from torch.distributed.fsdp import FSDPModule
from torchtune import config

from recipe_utils.model.build.build import (
    ModelSettings,
    build_model,
    build_on_meta,
    parallelize_model,
)
from recipe_utils.model.build.weights import load_weights
from recipe_utils.model.pipeline.schedule import PipelineSettings
from recipe_utils.model.pipeline.stages import NotOnThisStage, Stages
from recipe_utils.parallel.ranks import RankSettings, join_ranks

CPU = torch.device("cpu")


def make(sizes=tiny.MODEL):
    return config.instantiate(OmegaConf.create(sizes))


def on_meta(sizes=tiny.MODEL, dtype="fp32"):
    return build_on_meta(lambda: make(sizes), ModelSettings(dtype=dtype))


@pytest.fixture
def ranks():
    ranks = join_ranks(RankSettings(device="cpu"))
    yield ranks
    ranks.leave()


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_model_is_built_without_memory_in_its_precision(name, dtype):
    parameters = list(on_meta(dtype=name).parameters())
    assert {parameter.dtype for parameter in parameters} == {dtype}
    assert all(parameter.is_meta for parameter in parameters)


def test_token_embeddings_that_the_output_shares_are_not_sharded_alone(ranks):
    settings = ModelSettings(custom_sharded_layers=["tok_embeddings"])
    with pytest.raises(ValueError, match=r"custom_sharded_layers=\['tok_embeddings'\]"):
        parallelize_model(on_meta(), settings, ranks)
    parallelize_model(on_meta(tiny.UNTIED_MODEL), settings, ranks)


@pytest.mark.parametrize(
    "wrapping",
    [{"enable_activation_checkpointing": True}, {"ac_mode": "selective", "ac_option": 2}],
)
def test_wrapped_models_load_the_weights_of_plain_ones(ranks, wrapping):
    saved, settings = tiny.tiny_model(), ModelSettings(**wrapping)
    model = parallelize_model(on_meta(), settings, ranks)
    load_weights(model, {"model": saved.state_dict()}, settings, CPU)
    tokens = torch.randint(tiny.VOCAB_SIZE, (2, 20))
    torch.testing.assert_close(model(tokens), saved(tokens), rtol=0, atol=1e-6)
    recomputing = [m for m in model.modules() if "CheckpointWrapper" in type(m).__name__]
    assert len(recomputing) == (2 if "enable_activation_checkpointing" in wrapping else 1)


def test_a_model_in_one_piece_is_prepared_once_with_its_output_before_it_is_wrapped(ranks):
    prepared = []

    def prepare(model, has_output):
        wrapped = any("CheckpointWrapper" in type(m).__name__ for m in model.modules())
        on_meta = all(parameter.is_meta for parameter in model.parameters())
        prepared.append((model, has_output, wrapped, on_meta))

    settings = ModelSettings(enable_activation_checkpointing=True, dtype="bf16")
    model = build_model(make, prepare, settings, ranks, PipelineSettings())
    assert [facts for _, *facts in prepared] == [[True, False, True]]
    assert prepared[0][0] is model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert any("CheckpointWrapper" in type(m).__name__ for m in model.modules())


def build_on_two_ranks(layouts):
    """For each layout what ``prepare`` was called with, and what became of the model."""
    found = []
    for layout, schedule in layouts:
        ranks = join_ranks(RankSettings(device="cpu", **dict(layout)))
        prepared = []

        def prepare(model, has_output, prepared=prepared):
            layers = [
                index
                for index, layer in enumerate(model.layers)
                if not isinstance(layer, NotOnThisStage)
            ]
            prepared.append((layers, has_output, isinstance(model, FSDPModule)))

        model = build_model(
            lambda: make(tiny.DEEP_UNTIED_MODEL),
            prepare,
            ModelSettings(),
            ranks,
            PipelineSettings(pipeline_parallel_schedule=schedule),
        )
        stages = sorted(model.by_index()) if isinstance(model, Stages) else None
        whole = model.whole._replace(names_of_weights=[]) if stages is not None else None
        found.append((prepared, stages, isinstance(model, FSDPModule), whole))
    return found


@pytest.fixture(scope="module")
def built_on_two_ranks():
    """Per rank: sharded over both, cut into 2 stages, cut into 4."""
    layouts = [
        ({"data_parallel_shard_dim": 2}, "1F1B"),
        ({"pipeline_parallel_dim": 2}, "1F1B"),
        ({"pipeline_parallel_dim": 2}, "Interleaved1F1B"),
    ]
    return run_distributed(build_on_two_ranks, 2, layouts)


def test_a_model_is_prepared_before_it_is_sharded(built_on_two_ranks):
    for sharded, *_ in built_on_two_ranks:
        assert sharded == ([([0, 1, 2, 3], True, False)], None, True, None)


def test_each_stage_is_prepared_by_itself_and_only_the_last_has_the_output(built_on_two_ranks):
    (_, first, _), (_, second, _) = built_on_two_ranks
    assert first[:3] == ([([0, 1], False, False)], [0], False)
    assert second[:3] == ([([2, 3], True, False)], [1], False)


def test_interleaved_schedules_have_every_other_stage_on_each_rank(built_on_two_ranks):
    (*_, first), (*_, second) = built_on_two_ranks
    assert first[:2] == ([([0], False, False), ([2], False, False)], [0, 2])
    assert second[:2] == ([([1], False, False), ([3], True, False)], [1, 3])


def test_stages_know_the_model_that_they_are_parts_of(built_on_two_ranks):
    for _, two, four in built_on_two_ranks:
        for (*_, whole), num_stages in ((two, 2), (four, 4)):
            assert whole[:4] == ([], num_stages, 32, False)
            assert len(whole.adapters.trained) == 39
            assert (whole.adapters.modules, whole.adapters.frozen) == ({}, {})


# ---- Settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (None, torch.float32),
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp64", torch.float64),
    ],
)
def test_dtypes_are_those_of_torch(name, dtype):
    settings = ModelSettings(dtype=name)
    assert settings.torch_dtype == dtype
    assert list(settings.problems_with(RankSettings(device="cpu"))) == []


@pytest.mark.parametrize("dtype", ["fp16", "fp13"])
def test_a_dtype_that_cannot_work_is_refused_by_key(dtype):
    with pytest.raises(ValueError, match=r"dtype\n.*'fp32', 'bf16' or 'fp64'"):
        ModelSettings(dtype=dtype)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"enable_activation_offloading": True}, "enable_activation_offloading=True: "),
        ({"enable_activation_checkpointing": True, "ac_mode": "full"}, "ac_mode=full: "),
        ({"ac_mode": "selective"}, "ac_mode=selective: set ac_option, too"),
    ],
)
def test_keys_that_do_not_go_together_are_problems_by_name(settings, key):
    (problem,) = ModelSettings(**settings).problems()
    assert str(problem).startswith(key)
    assert list(ModelSettings().problems()) == []


@pytest.mark.parametrize(
    ("settings", "ranks", "key"),
    [
        (
            {"enable_activation_offloading": True, "enable_activation_checkpointing": True},
            {},
            "enable_activation_offloading=True: it needs device=cuda",
        ),
        ({}, {"tensor_parallel_dim": 2}, "tensor_parallel_dim=2: set tensor_parallel_plan, too"),
    ],
)
def test_what_a_device_or_a_layout_cannot_do_is_a_problem_by_name(settings, ranks, key):
    ranks = RankSettings(device="cpu", **ranks)
    (problem,) = ModelSettings(**settings).problems_with(ranks)
    assert str(problem).startswith(key)


def test_weights_stay_on_the_cpu_only_where_the_device_is_another():
    settings = ModelSettings(fsdp_cpu_offload=True)
    assert settings.offloads_to_cpu(torch.device("cuda"))
    assert not settings.offloads_to_cpu(CPU)
    assert not ModelSettings().offloads_to_cpu(torch.device("cuda"))
