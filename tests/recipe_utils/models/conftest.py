"""Kernels for CUDA, on a CPU: FlashAttention by its formula, flex attention uncompiled."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention import varlen as varlen_module


def flash_attention(q, k, v, sizes, window_size, scale=None, grad=None):
    """Computes FlashAttention of documents of ``sizes``; given ``grad`` its gradients, by the formula.

    Takes q [t, h, d], k and v [t, h or fewer, d]. No autograd: it ends above a custom operator's kernels.
    """
    num_copies = q.size(1) // k.size(1)
    scale = q.size(-1) ** -0.5 if scale is None else scale
    made = []
    inputs = (q, k, v) if grad is None else (q, k, v, grad)
    for row in zip(*(each.transpose(0, 1).split(sizes, dim=1) for each in inputs), strict=True):
        q, k, v = row[0], *(each.repeat_interleave(num_copies, dim=0) for each in row[1:3])
        before = torch.arange(q.size(1))[:, None] - torch.arange(q.size(1))
        sees = (before >= 0) & ((before <= window_size[0]) | (window_size[0] == -1))
        p = (q @ k.mT * scale).masked_fill(~sees, -torch.inf).softmax(-1)
        if grad is None:
            made.append([p @ v])
            continue
        of_p = row[3] @ v.mT
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * scale
        of_k, of_v = (each.unflatten(0, (-1, num_copies)).sum(1) for each in (of_scores.mT @ q, p.mT @ row[3]))
        made.append([of_scores @ k, of_k, of_v])
    return tuple(torch.cat(parts, dim=1).transpose(0, 1).contiguous() for parts in zip(*made, strict=True))


@pytest.fixture(scope="module")
def flash_attention_on_a_cpu():
    """PyTorch's varlen_attn with kernels for a CPU; what its operators are called with is checked."""

    def check(cu_q, cu_k, max_q, max_k, window_size):
        sizes = cu_q.diff()
        assert cu_q.dtype == torch.int32
        assert torch.equal(cu_q, cu_k)
        assert sizes.min() > 0
        assert max_q == max_k
        assert max_q >= sizes.max()
        assert window_size[1] == 0
        return sizes.tolist()

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, _, scale=None, window_size=(-1, -1), *__, **___):
        (attended,) = flash_attention(q, k, v, check(cu_q, cu_k, max_q, max_k, window_size), window_size, scale)
        return attended, torch.zeros(q.size(1), q.size(0)), torch.zeros(2, dtype=torch.uint64)

    def backward(grad, q, k, v, _, __, *bounds_and_options):
        *bounds, _, _, scale, window_size = bounds_and_options[:8]
        return flash_attention(q, k, v, check(*bounds, window_size), window_size, scale, grad)

    varlen_module._varlen_attn.register_kernel("cpu", forward)
    varlen_module._varlen_attn_backward.register_kernel("cpu", backward)


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr("recipe_utils.models.attention.kernels.missing_for_triton", lambda: None)


@pytest.fixture
def flex_attention_on_a_cpu(monkeypatch, with_triton):
    """Allows flex attention with a backward on a CPU, where PyTorch has none."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
