"""Ranks of a row exchange tokens for heads exactly, with gradients; models that cannot are refused by name."""

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from recipe_runs import slow
from tiny import on_meta

from recipe_utils.models.attention.exchange import row_groups
from recipe_utils.models.sizes import limits_of
from recipe_utils.parallel.ranks import join_ranks
from recipe_utils.settings.problems import ConfigError

NUM_HEADS, WIDTH = 12, 3


def exchange(num_keys):
    """Returns this rank's q, its heads of the row, q exchanged back, gradients, and the row."""
    ranks = join_ranks("cpu")
    c, rank = ranks.world_size, ranks.dp_rank
    group = row_groups(ranks, c)[c]
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(5 * c, NUM_HEADS + 2 * num_keys, WIDTH, generator=generator, dtype=torch.float64)
    sizes = [NUM_HEADS, num_keys, num_keys]
    q, k, v = (each.requires_grad_() for each in row[rank::c].split(sizes, dim=1))
    of_heads = group.heads_of_row(q, k, v)
    back = group.tokens_of_part(of_heads[0])

    def output(q, k, v):
        q, k, v = group.heads_of_row(q, k, v)
        k, v = (each.repeat_interleave(q.size(1) // k.size(1), dim=1) for each in (k, v))
        attended = torch.einsum("shd,thd,the->she", q, k, v)
        share = group.tokens_of_part(attended)
        return share.sum() + share.square().sum()

    gradients = torch.autograd.grad(output(q, k, v), (q, k, v))
    ranks.leave()
    return q.detach(), [each.detach() for each in of_heads], back.detach(), gradients, row


@pytest.mark.parametrize(("world_size", "num_keys"), [(2, 4), *(slow(4, number) for number in (1, 2, 3, 4, 12))])
def test_the_exchange_is_exact_and_so_is_its_gradient(world_size, num_keys):
    found = run_distributed(exchange, world_size, num_keys)
    row = found[0][-1].requires_grad_()
    q, k, v = row.split([NUM_HEADS, num_keys, num_keys], dim=1)
    k, v = (each.repeat_interleave(NUM_HEADS // num_keys, dim=1) for each in (k, v))
    attended = torch.einsum("shd,thd,the->she", q, k, v)
    (expected,) = torch.autograd.grad(attended.sum() + attended.square().sum(), row)
    heads = [each.detach().chunk(world_size, dim=1) for each in (q, k, v)]
    for rank, (own, of_heads, back, gradients, _) in enumerate(found):
        assert torch.equal(back, own)
        for each, whole in zip(of_heads, heads, strict=True):
            num_copies = whole[rank].size(1) // each.size(1)
            assert torch.equal(each.repeat_interleave(num_copies, dim=1), whole[rank])
        torch.testing.assert_close(torch.cat(gradients, dim=1), expected[rank::world_size], rtol=1e-12, atol=1e-9)  # fmt: skip


def test_heads_that_cannot_be_divided_are_refused_with_their_number():
    limits = limits_of(on_meta(), torch.device("cpu"))
    assert limits.multiple_of_packed_rows(64, max_ranks_per_row=4) is None
    with pytest.raises(ConfigError, match=r"=8: model.num_heads=4 cannot be .* 8 ranks; set it to 4"):
        limits.multiple_of_packed_rows(64, max_ranks_per_row=8)
    split = limits_of(on_meta(), torch.device("cpu"), tensor_parallel_dim=2)
    with pytest.raises(ConfigError, match=r"model.num_heads / tensor_parallel_dim=2 .*; set it to 2"):
        split.multiple_of_packed_rows(64, max_ranks_per_row=4)
    teacher = on_meta({**tiny.MODEL, "num_heads": 6, "num_kv_heads": 6, "embed_dim": 48})
    both = limits_of(on_meta(), torch.device("cpu"), teacher=teacher)
    with pytest.raises(ConfigError, match=r"teacher_model.num_heads=6 .*; set it to 2"):
        both.multiple_of_packed_rows(64, max_ranks_per_row=4)
    gemma = limits_of(on_meta(tiny.GEMMA2_MODEL), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"Gemma2Attention"):
        gemma.multiple_of_packed_rows(64, max_ranks_per_row=2)
