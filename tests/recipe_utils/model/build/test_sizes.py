"""What data must know of a model is read off its modules, wherever they are."""

import pytest
import tiny
import torch
from omegaconf import OmegaConf
from torch import nn
from torchtune import config
from torchtune.modules.model_fusion import FusionEmbedding

from recipe_utils.data.loader.plan import ESTIMATED_COSTS, MEASURED_COSTS
from recipe_utils.model.build.build import ModelSettings, build_on_meta
from recipe_utils.model.build.sizes import (
    equal_attention_length,
    limits_of,
    vocab_size_and_max_seq_len,
)

CPU = torch.device("cpu")


def on_meta(sizes=tiny.MODEL):
    return build_on_meta(lambda: config.instantiate(OmegaConf.create(sizes)), ModelSettings())


def test_limits_of_samples_are_those_of_the_model():
    assert vocab_size_and_max_seq_len(on_meta()) == (tiny.VOCAB_SIZE, 64)
    limits = limits_of(on_meta(), CPU, compiles=False)
    assert (limits.vocab_size, limits.max_seq_len) == (tiny.VOCAB_SIZE, 64)


def test_special_tokens_with_embeddings_of_their_own_belong_to_the_vocabulary():
    decoder = on_meta()
    decoder.tok_embeddings = FusionEmbedding(tiny.VOCAB_SIZE, 7, 32)
    fusion_model = nn.Module()
    fusion_model.decoder = decoder
    for model in (decoder, fusion_model):
        assert vocab_size_and_max_seq_len(model) == (tiny.VOCAB_SIZE + 7, 64)
    assert decoder.tok_embeddings(torch.tensor([[tiny.VOCAB_SIZE + 6]])).shape == (1, 1, 32)


def test_attention_costs_as_much_as_the_parameters_at_a_length_that_the_model_sets():
    model = on_meta()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    expected = num_parameters / (2 * 32)
    assert equal_attention_length(model) == pytest.approx(expected)
    for device, costs in (("cpu", MEASURED_COSTS["cpu"]), ("cuda", ESTIMATED_COSTS)):
        limits = limits_of(model, torch.device(device), compiles=False)
        equal = expected / costs.attention_slowness
        assert limits.cost == pytest.approx((costs.overhead_slots, equal))
        assert limits.costs_are_estimated == (device == "cuda")


@pytest.mark.parametrize(
    ("device", "compiles", "num_row_lengths"),
    [("cpu", False, None), ("cpu", True, 1), ("cuda", False, 4), ("cuda", True, 4)],
)
def test_packed_rows_have_few_lengths_where_code_is_compiled_for_each(
    device, compiles, num_row_lengths
):
    limits = limits_of(on_meta(), torch.device(device), compiles)
    assert limits.num_row_lengths == num_row_lengths


def test_attention_that_cannot_keep_documents_apart_is_named():
    assert limits_of(on_meta(), CPU, False).other_attention is None
    assert "Gemma2" in limits_of(on_meta(tiny.GEMMA2_MODEL), CPU, False).other_attention
