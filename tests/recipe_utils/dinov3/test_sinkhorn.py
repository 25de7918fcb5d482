"""Sinkhorn-Knopp streamed over chunks, microbatches and ranks is Sinkhorn-Knopp on the whole matrix."""

import pytest
import torch
import torch.distributed as dist
from distributed_runs import run_distributed

from recipe_utils.dinov3.sinkhorn import num_prototypes_used, sinkhorn

pytestmark = pytest.mark.usefixtures("in_float64")

DIM, NUM_PROTOTYPES = 5, 7


def drawn(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def direct(logits, num_iterations):
    """Targets [n, k] by scaling the matrix itself, each prototype first."""
    targets = torch.exp(logits - logits.max())
    for _ in range(num_iterations):
        targets = targets / targets.sum(0, keepdim=True)
        targets = targets / targets.sum(1, keepdim=True)
    return targets


def targets_of(rows, weight, temperature, dual):
    return torch.softmax(rows @ weight.T / temperature + dual, dim=1)


@pytest.mark.parametrize(
    ("cut", "rows_per_chunk", "num_iterations"),
    [([23], 1000, 1), ([23], 1, 3), ([1] * 23, 4, 3), ([0, 10, 0, 1, 12, 0], 4, 10)],
)
def test_streamed_is_direct_for_any_chunks_and_cuts(cut, rows_per_chunk, num_iterations):
    rows, weight = drawn(23, DIM), drawn(NUM_PROTOTYPES, DIM, seed=1)
    parts = rows.split(cut)
    dual = sinkhorn(parts, weight, 0.3, num_iterations, rows_per_chunk=rows_per_chunk)
    found = targets_of(rows, weight, 0.3, dual)
    expected = direct(rows @ weight.T / 0.3, num_iterations)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("temperature", "scale"), [(0.01, 20.0), (0.04, 1.0), (0.07, 20.0), (1.0, 1.0)])
def test_fp32_neither_overflows_nor_loses_a_row_at_usual_temperatures(temperature, scale):
    rows, weight = drawn(64, DIM), scale * drawn(NUM_PROTOTYPES, DIM, seed=1)
    rows = torch.nn.functional.normalize(rows, dim=1)
    exact = sinkhorn([rows], weight, temperature)
    for dtype in (torch.float32, torch.bfloat16):
        dual = sinkhorn([rows.to(dtype)], weight.to(dtype), temperature)
        assert dual.dtype == torch.float32
        assert dual.isfinite().all()
    dual = sinkhorn([rows.float()], weight.float(), temperature)
    largest = rows @ weight.T / temperature
    # The precision of such large logits in fp32.
    assert (dual - exact).abs().max() < 1e-5 * max(largest.abs().max().item(), 1.0)
    targets = targets_of(rows.float(), weight.float(), temperature, dual)
    torch.testing.assert_close(targets.sum(1), torch.ones(64))


def over_ranks(cases):
    """Returns for each case the results of each rank, whose rows are cut as given."""
    rows, weight = drawn(23, DIM), drawn(NUM_PROTOTYPES, DIM, seed=1)
    found = []
    for of_ranks in cases:
        starts = [sum(map(sum, of_ranks[:rank])) for rank in range(len(of_ranks))]
        rank = dist.get_rank()
        own = rows[starts[rank] : starts[rank] + sum(of_ranks[rank])].split(of_ranks[rank])
        group = dist.group.WORLD
        dual = sinkhorn(own, weight, 0.3, group=group, rows_per_chunk=4)
        found.append((dual, num_prototypes_used(own, weight, 0.3, [dual] * len(own), group)))
    return found


def test_over_ranks_it_is_that_of_all_rows():
    cases = [[[5, 7], [11]], [[23], [0, 0]], [[0], [10, 13]], [[0], [0, 0]]]
    for rank, found in enumerate(run_distributed(over_ranks, 2, cases)):
        for case, (dual, used) in zip(cases, found, strict=True):
            rows, weight = drawn(23, DIM), drawn(NUM_PROTOTYPES, DIM, seed=1)
            rows = rows[: sum(map(sum, case))]
            expected = sinkhorn([rows], weight, 0.3)
            torch.testing.assert_close(dual, expected, rtol=0, atol=1e-12, msg=f"{rank} {case}")
            assert dual.any() == (len(rows) > 0)
            targets = targets_of(rows, weight, 0.3, dual)
            assert used == targets.argmax(1).unique().numel()


def test_used_prototypes_are_the_likeliest_of_some_row():
    weight = torch.eye(4, dtype=torch.float64)
    rows = torch.eye(4, dtype=torch.float64)[[0, 0, 2]]
    nothing = torch.zeros(4, dtype=torch.float64)
    assert num_prototypes_used([rows[:1], rows[1:]], weight, 0.1, [nothing] * 2) == 2
    assert num_prototypes_used([rows[:0]], weight, 0.1, [nothing]) == 0
    towards_3 = torch.tensor([0.0, 0.0, 0.0, 100.0]).double()
    assert num_prototypes_used([rows], weight, 0.1, [towards_3]) == 1
    assert num_prototypes_used([rows[:1], rows[1:]], weight, 0.1, [towards_3, nothing]) == 3
