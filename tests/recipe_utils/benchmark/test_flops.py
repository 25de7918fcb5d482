from functools import partial

import pytest
import tiny
import torch
from recipe_runs import slow
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode
from torchtune.models.qwen2 import qwen2

from recipe_utils.benchmark.flops import countable_decoder, decoder_flops, product_rate
from recipe_utils.losses import LinearCrossEntropyLoss
from recipe_utils.losses.attach import attach_loss
from recipe_utils.models.attention.document_mask import attend_within_documents
from recipe_utils.models.attention.packed_attention import attention_of
from recipe_utils.models.construct import build_on_meta
from recipe_utils.models.settings import ModelSettings
from recipe_utils.torchtune_names import IGNORE_INDEX
from recipe_utils.update_steps.step import Targets


@pytest.mark.parametrize("own", [{}, slow({"tie_word_embeddings": True})])
def test_flops_of_a_decoder_are_those_that_pytorch_counts(own):
    sizes = {"vocab_size": 101, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32}
    sizes |= {"intermediate_dim": 48, "max_seq_len": 64, **own}
    model = build_on_meta(partial(qwen2, **sizes), ModelSettings())
    attend_within_documents(model, attention_of(model, torch.device("cpu")), 64)
    attach_loss(model, LinearCrossEntropyLoss(tokens_per_chunk=7))
    lengths = [5, 11, 24]
    samples = [{"tokens": [1] * n, "labels": [IGNORE_INDEX] * (n // 2) + [1] * -(-n // 2)} for n in lengths]
    row = tiny.packed_row(samples)
    with torch.device("meta"):
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()
        inputs = {**row.inputs, "tokens": row.inputs["tokens"].to("meta")}
        inputs["input_pos"] = inputs["input_pos"].to("meta")
    targets = Targets(row.targets.labels.to("meta"), row.targets.positions.to("meta"))

    def flops_of_addmm(_, left, right, **__):  # PyTorch does not count it in place
        return 2 * left[0] * left[1] * right[1]

    in_place = {torch.ops.aten.addmm_: flops_of_addmm}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter, sdpa_kernel(SDPBackend.MATH):
        model(**inputs, targets=targets)[0].backward()
    of_weights, of_attention = decoder_flops(model, lengths, len(row.targets.positions))
    # PyTorch counts all pairs of queries and keys, of which causal attention needs half.
    assert counter.get_total_flops() == of_weights + 2 * of_attention


def test_flops_are_counted_for_torchtunes_decoders_without_adapters_only():
    assert countable_decoder(tiny.MODEL).num_heads == tiny.MODEL["num_heads"]
    assert countable_decoder(tiny.adapted(tiny.MODEL)) is None
    assert countable_decoder({"_component_": "torch.nn.Linear", "in_features": 2, "out_features": 3}) is None


def test_a_product_takes_its_flops_over_its_rate():
    size, rate = product_rate(torch.device("cpu"), "fp32")
    left = torch.randn(size, size)
    seconds = Timer("left @ left", globals={"left": left}, num_threads=torch.get_num_threads()).timeit(3).mean
    assert 0.1 < rate * seconds / (2 * size**3) < 10
