"""Weights reach a meta model whole and checked, and what does not fit is named."""

import re

import pytest
import tiny
import torch
from omegaconf import OmegaConf
from torch import nn
from torchtune import config
from torchtune.modules.model_fusion import FusionEmbedding

from recipe_utils.model.build import (
    build_on_meta,
    load_weights,
    parallelize_model,
    vocab_size_and_max_seq_len,
)
from recipe_utils.parallel.ranks import ParallelDims, build_mesh, init_process_group

CPU = torch.device("cpu")


def on_meta(sizes=tiny.MODEL, dtype=torch.float32):
    return build_on_meta(lambda: config.instantiate(OmegaConf.create(sizes)), dtype)


@pytest.fixture
def mesh():
    init_process_group(CPU)
    yield build_mesh(CPU, ParallelDims(1, 1, 1))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_built_without_memory_in_its_precision(dtype):
    parameters = list(on_meta(dtype=dtype).parameters())
    assert {parameter.dtype for parameter in parameters} == {dtype}
    assert all(parameter.is_meta for parameter in parameters)


@pytest.mark.parametrize("sizes", [tiny.MODEL, tiny.UNTIED_MODEL], ids=["tied", "untied"])
def test_a_loaded_model_computes_what_the_saved_one_did(sizes):
    saved = tiny.tiny_model(sizes)
    model = on_meta(sizes)
    load_weights(model, saved.state_dict(), CPU, torch.float32)
    tokens = torch.randint(tiny.VOCAB_SIZE, (2, 20))
    torch.testing.assert_close(model(tokens), saved(tokens), rtol=0, atol=1e-6)


def test_loaded_weights_have_the_models_precision_and_their_own_memory():
    state_dict = tiny.tiny_model().state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        model = on_meta(dtype=dtype)
        load_weights(model, state_dict, CPU, dtype)
        weight = model.tok_embeddings.weight
        assert weight.dtype == dtype
        assert weight.data_ptr() != state_dict["tok_embeddings.weight"].data_ptr()
        assert torch.equal(weight, state_dict["tok_embeddings.weight"].to(dtype))
        assert weight.requires_grad


def without(state_dict):
    del state_dict["layers.1.attn.q_proj.weight"]


def with_more(state_dict):
    state_dict["layers.2.attn.q_proj.weight"] = torch.zeros(32, 32)


def with_other_shape(state_dict):
    state_dict["norm.scale"] = torch.zeros(31)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without, "lacks weights of the model: layers.1.attn.q_proj.weight"),
        (with_more, "has weights that the model has not: layers.2.attn.q_proj.weight"),
        (with_other_shape, "another shape: norm.scale (31,) instead of (32,)"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message):
    state_dict = dict(tiny.tiny_model().state_dict())
    change(state_dict)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_weights(on_meta(), state_dict, CPU, torch.float32)


def test_a_buffer_that_no_checkpoint_holds_is_refused():
    model = on_meta()
    model.register_buffer("scale", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(RuntimeError, match="scale"):
        load_weights(model, tiny.tiny_model().state_dict(), CPU, torch.float32)


def test_limits_of_samples_are_those_of_the_model():
    assert vocab_size_and_max_seq_len(on_meta()) == (tiny.VOCAB_SIZE, 64)


def test_special_tokens_with_embeddings_of_their_own_belong_to_the_vocabulary():
    decoder = on_meta()
    decoder.tok_embeddings = FusionEmbedding(tiny.VOCAB_SIZE, 7, 32)
    fusion_model = nn.Module()
    fusion_model.decoder = decoder
    for model in (decoder, fusion_model):
        assert vocab_size_and_max_seq_len(model) == (tiny.VOCAB_SIZE + 7, 64)
    assert decoder.tok_embeddings(torch.tensor([[tiny.VOCAB_SIZE + 6]])).shape == (1, 1, 32)


def test_token_embeddings_that_the_output_shares_are_not_sharded_alone(mesh):
    with pytest.raises(ValueError, match=r"custom_sharded_layers=\['tok_embeddings'\]"):
        parallelize_model(on_meta(), mesh, custom_sharded_layers=["tok_embeddings"])
    parallelize_model(on_meta(tiny.UNTIED_MODEL), mesh, custom_sharded_layers=["tok_embeddings"])


@pytest.mark.parametrize(
    "wrapping",
    [{"enable_activation_checkpointing": True}, {"ac_mode": "selective", "ac_option": 2}],
)
def test_wrapped_models_load_the_weights_of_plain_ones(mesh, wrapping):
    saved = tiny.tiny_model()
    model = parallelize_model(on_meta(), mesh, **wrapping)
    load_weights(model, saved.state_dict(), CPU, torch.float32)
    tokens = torch.randint(tiny.VOCAB_SIZE, (2, 20))
    torch.testing.assert_close(model(tokens), saved(tokens), rtol=0, atol=1e-6)
    recomputing = [m for m in model.modules() if "CheckpointWrapper" in type(m).__name__]
    assert len(recomputing) == (2 if "enable_activation_checkpointing" in wrapping else 1)
