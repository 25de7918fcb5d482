"""Upper bounds of the operations and bytes of a microbatch, counted on the meta device."""

from functools import partial

import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtune.models.llama3_2 import llama3_2

from recipe_utils.losses.attach import attach_loss
from recipe_utils.losses.cross_entropy import LinearCrossEntropyLoss
from recipe_utils.models.attention.document_mask import attend_within_documents
from recipe_utils.models.attention.packed_attention import attention_of
from recipe_utils.models.construct import build_on_meta
from recipe_utils.models.kernels import fuse_norms_and_rope
from recipe_utils.models.settings import ModelSettings
from recipe_utils.parallel.to_device import to_device_ahead

META = torch.device("meta")
LLAMA = partial(
    llama3_2, vocab_size=128_256, num_heads=32, num_kv_heads=8, embed_dim=2048,
    intermediate_dim=8192, max_seq_len=131_072, rope_base=500_000,
)  # fmt: skip
"""Llama 3.2 1B, whose 16 layers are alike."""


class Traffic(TorchDispatchMode):
    """Number of operations that are no views, and bytes of all that they read and write."""

    def __init__(self):
        super().__init__()
        self.num_operations = self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        is_empty = func in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
        if not (func.is_view or is_empty):
            leaves = tree_leaves((args, [value for name, value in kwargs.items() if name != "out"], made))
            self.num_operations += 1
            self.num_bytes += sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor))
        return made


def traffic_of(num_layers):
    model = build_on_meta(partial(LLAMA, num_layers=num_layers), ModelSettings(dtype="bf16"))
    attend_within_documents(model, attention_of(model, torch.device("cuda")), 8192)  # by FlashAttention
    fuse_norms_and_rope(model)
    for module in model.modules():
        if hasattr(module, "rope_init"):
            module.rope_init()
            module.to(META)
    attach_loss(model, LinearCrossEntropyLoss())
    samples = [{"tokens": list(range(1, 1025)), "labels": list(range(1, 1025))}] * 8
    (arrived,) = to_device_ahead([tiny.packed_row(samples, row_multiple=128)], META)
    with Traffic() as traffic:
        (model(**arrived.inputs, targets=arrived.targets) * 0.5).sum().backward()
    return traffic.num_operations, traffic.num_bytes / 1e9


BOUNDS = (110, 12.04 * 1.004, 95, 68.71 * 1.004)
"""Forward and backward of 8192 positions, all targets (torch 2.13.0 and 2.14.1).

One layer: 110 operations, 12.03 GB. One more fp32 copy of the activations [8192, 2048] is at least 0.8 %. All else
(embeddings, last norm, four chunks of logits): 95 operations, 68.7 GB. One more pass over the logits in fp32 is 12 %.
"""


def test_a_microbatch_takes_no_more_operations_and_bytes_than_it_did():
    (in_one, gb_in_one), (in_two, gb_in_two) = traffic_of(1), traffic_of(2)
    of_layer, gb_of_layer = in_two - in_one, gb_in_two - gb_in_one
    found = (of_layer, gb_of_layer, in_one - of_layer, gb_in_one - gb_of_layer)
    assert all(each <= bound for each, bound in zip(found, BOUNDS, strict=True)), found
