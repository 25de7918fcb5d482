"""Properties of a model that data depends on are read from its modules, on any device."""

import pytest
import tiny
import torch
from tiny import on_meta
from torch import nn
from torchtune.modules.model_fusion import FusionEmbedding

from recipe_utils.models.sizes import equal_attention_length, limits_of, vocab_size_and_max_seq_len
from recipe_utils.plans.cost import MicrobatchCost

CPU = torch.device("cpu")


def test_limits_of_samples_are_those_of_the_model():
    assert vocab_size_and_max_seq_len(on_meta()) == (tiny.VOCAB_SIZE, 64)
    limits = limits_of(on_meta(), CPU)
    assert (limits.vocab_size, limits.max_seq_len) == (tiny.VOCAB_SIZE, 64)
    assert limits.merges_rows
    assert not limits_of(on_meta(tiny.GEMMA2_MODEL), CPU).merges_rows


def test_special_tokens_with_embeddings_of_their_own_belong_to_the_vocabulary():
    fusion_model = nn.Module()
    fusion_model.decoder = decoder = on_meta()
    decoder.tok_embeddings = FusionEmbedding(tiny.VOCAB_SIZE, 7, 32)
    for model in (decoder, fusion_model):
        assert vocab_size_and_max_seq_len(model) == (tiny.VOCAB_SIZE + 7, 64)


def test_attention_costs_as_much_as_the_parameters_at_a_length_that_the_model_sets():
    model = on_meta()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    expected = num_parameters / (2 * 32)
    assert equal_attention_length(model) == pytest.approx(expected)
    for device, overhead, slowness in (("cpu", 75, 3.6), ("cuda", 400, 2)):
        limits = limits_of(model, torch.device(device))
        assert limits.cost == pytest.approx(MicrobatchCost(overhead, expected / slowness))
