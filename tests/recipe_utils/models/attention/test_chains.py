"""Attention of chains, merged by log-sum-exp, is attention with a mask."""

import pytest
import torch
import torch.nn.functional as F

from recipe_utils.models.attention import chains
from recipe_utils.text.documents import Documents, tree

ROW = (7, tree(5, tree(3, 4, 2), 6, tree(1, tree(2, 1, 1), 3)), 4, tree(10, 3, 2))


def outputs_and_gradients(attend, dtype=torch.float64):
    torch.manual_seed(0)
    inputs = [torch.randn(1, 3, Documents([ROW]).shape[1], 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.randn(out.shape, dtype=dtype))]


def with_mask(*inputs):
    ends = Documents([ROW]).last_queries()[0]
    queries, keys = torch.arange(len(ends))[:, None], torch.arange(len(ends))
    return F.scaled_dot_product_attention(*inputs, (keys <= queries) & (queries < ends))


def merged(*inputs):
    return chains.MergedAttention.apply(*inputs, ROW)


def test_it_equals_attention_with_a_mask():
    found = zip(outputs_and_gradients(merged), outputs_and_gradients(with_mask), strict=True)
    assert max(float((ours - theirs).abs().max()) for ours, theirs in found) < 1e-14


@pytest.mark.parametrize("mutant", ["ancestors alone", "a part's own log-sum-exp"])
def test_a_wrong_merge_is_seen(mutant, monkeypatch):
    if mutant == "ancestors alone":
        monkeypatch.setattr(torch, "logaddexp", lambda lse, of_part: of_part)
    else:
        flash = chains._flash_backward
        wrong = lambda *args: flash(*args[:5], args[5] + 0.1, *args[6:])  # noqa: E731
        monkeypatch.setattr(chains, "_flash_backward", wrong)
    found = zip(outputs_and_gradients(merged), outputs_and_gradients(with_mask), strict=True)
    assert max(float((ours - theirs).abs().max()) for ours, theirs in found) > 1e-2


def test_other_devices_precisions_and_dropout_take_masks():
    q = torch.zeros(1, 1, 2, 4)
    assert chains.can_merge(q, q, 0.0)
    for other in (q.bfloat16(), q.to("meta")):
        assert not chains.can_merge(other, other, 0.0)
    assert not chains.can_merge(q, q[..., :2], 0.0)
    assert not chains.can_merge(q, q, 0.1)
