"""Properties of a model that data depends on are read from its modules, on any device."""

import pytest
import tiny
import torch
from image_types import tiny_image_config_of
from tiny import on_meta
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchtune.modules.model_fusion import FusionEmbedding
from transformers import AutoModelForImageTextToText

from recipe_utils.models.sizes import equal_attention_length, limits_of, vocab_size_and_max_seq_len
from recipe_utils.models.transformers.decoder import Decoder
from recipe_utils.models.transformers.interface import PackingCheck
from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.text.images.sample import Join

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


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "aria", "qwen3_vl"])
def test_a_number_of_an_image_costs_its_share_of_the_operations_of_a_token(name):
    model = AutoModelForImageTextToText.from_config(tiny_image_config_of(name), experts_implementation="eager")
    decoder = Decoder(model, PackingCheck(head_is_tail=True, joins={"pixel_values": Join()}))
    with FlopCounterMode(display=False) as of_token:
        model(input_ids=torch.tensor([[1]]), use_cache=False)
    num_of_token = of_token.get_total_flops() / 2 - model.lm_head.weight.numel()  # a multiplication and an addition
    num_of_images = sum(parameter.numel() for parameter in decoder.of_images())
    tower = model.config.vision_config
    num_of_patch = 3 * tower.patch_size**2 * getattr(tower, "temporal_patch_size", 1)
    # Norms compute no products, and attention of a token to itself no weights. With all 8 experts instead of 2 it is 0.4 of it.
    expected = num_of_images / num_of_token / num_of_patch
    assert limits_of(decoder, CPU).tokens_per_pixel == pytest.approx(expected, rel=0.03)
