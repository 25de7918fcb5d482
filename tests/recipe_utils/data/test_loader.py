"""An update step holds what all ranks agreed on before its first forward."""

import gc
import itertools
import math
import weakref
from functools import partial

import pytest
import tiny
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from torchtune.data import padded_collate_sft

from recipe_utils.data.collate import collate_microbatch
from recipe_utils.data.count import OtherRankFailedError, StepCounts
from recipe_utils.data.loader import UpdateStep, prefetch_update_steps
from recipe_utils.data.plan import plan_in_order
from recipe_utils.data.samples import CheckedDataset, SampleError
from recipe_utils.parallel.ranks import init_process_group

COLLATE = partial(padded_collate_sft, padding_idx=0, ignore_idx=tiny.IGNORE)
SAMPLES = tiny.make_samples(12, num_without_targets=2)
# Per rank: the dataset indices of each update step.
UNEQUAL = [
    [[0, 1, 2, 3, 4], [5, 6], [], [10, 11]],
    [[7], [], [8, 9, 0], []],
]


def num_targets(samples):
    return sum(label != tiny.IGNORE for sample in samples for label in sample["labels"][1:])


def update_steps(samples, indices_per_step, collate_fn=COLLATE, **changes):
    arguments = {
        "plan": partial(plan_in_order, batch_size=2),
        "collate": partial(collate_microbatch, collate_fn=collate_fn, ignore_index=tiny.IGNORE),
        "ignore_index": tiny.IGNORE,
        "dp_degree": dist.get_world_size(),
        "counts_once": True,
        "group": dist.group.WORLD,
        "depth": 2,
        **changes,
    }
    dataset = CheckedDataset(tiny.Samples(samples), "dataset", tiny.IGNORE, tiny.VOCAB_SIZE, 64)
    return prefetch_update_steps(dataset, indices_per_step, **arguments)


@pytest.fixture
def one_process():
    init_process_group(torch.device("cpu"))
    yield
    dist.destroy_process_group()


def describe_unequal_steps(depth):
    described = []
    with update_steps(SAMPLES, UNEQUAL[dist.get_rank()], depth=depth) as steps:
        for step in steps:
            microbatches = list(step)
            described.append(
                {
                    "index": step.index,
                    "num_target_tokens": step.num_target_tokens,
                    "num_real_tokens": step.num_real_tokens,
                    "loss_scale": step.loss_scale,
                    "is_last": [is_last for _, is_last in microbatches],
                    "targets": sum(m.num_target_tokens for m, _ in microbatches),
                    "real": sum(m.num_real_tokens for m, _ in microbatches),
                }
            )
    return described


def describe_at_depths(depths):
    return [describe_unequal_steps(depth) for depth in depths]


@pytest.fixture(scope="module")
def unequal_steps():
    """Per rank and depth (0, 2), what it saw of each step of ``UNEQUAL``."""
    return run_distributed(describe_at_depths, 2, (0, 2))


def test_ranks_with_unequal_samples_run_equally_many_microbatches(unequal_steps):
    for rank in unequal_steps:
        for step, *shares in zip(rank[1], *UNEQUAL, strict=True):
            most = max(math.ceil(len(share) / 2) for share in shares)
            assert step["is_last"] == [False] * (most - 1) + [True]


def test_more_microbatches_than_there_are_data_for_have_no_targets_and_are_not_counted(one_process):
    indices = [[0, 1, 2], [3]]
    with update_steps(SAMPLES, indices, num_microbatches_to_run=lambda n: max(n, 4)) as steps:
        for step, of_step in zip(steps, indices, strict=True):
            microbatches = [microbatch for microbatch, _ in step]
            num_filled = 4 - math.ceil(len(of_step) / 2)
            assert len(microbatches) == 4
            assert [m.num_target_tokens for m in microbatches[-num_filled:]] == [0] * num_filled
            assert step.num_target_tokens == num_targets([SAMPLES[i] for i in of_step])
            assert step.num_real_tokens == sum(len(SAMPLES[i]["tokens"]) for i in of_step)
            assert step.num_slots == sum(m.num_slots for m in microbatches[:-num_filled])


def test_counts_and_scale_are_of_all_ranks_and_each_sample_counts_once(unequal_steps):
    for step_index, shares in enumerate(zip(*UNEQUAL, strict=True)):
        samples = [SAMPLES[i] for share in shares for i in share]
        total = num_targets(samples)
        for rank in unequal_steps:
            step = rank[1][step_index]
            assert step["index"] == step_index
            assert step["num_target_tokens"] == total
            assert step["num_real_tokens"] == sum(len(sample["tokens"]) for sample in samples)
            assert step["loss_scale"] == 2 / max(total, 1)
        for name, expected in (("targets", total), ("real", step["num_real_tokens"])):
            assert sum(rank[1][step_index][name] for rank in unequal_steps) == expected
    assert total == 0  # the last update step is one without any target


def test_prefetching_changes_nothing(unequal_steps):
    for without, ahead in unequal_steps:
        assert without == ahead


def scales_of_ranks_with_the_same_data():
    indices = [[0, 1, 2], [3]]
    with update_steps(SAMPLES, indices, dp_degree=1, counts_once=dist.get_rank() == 0) as steps:
        return [(step.num_target_tokens, step.loss_scale) for step in steps]


def test_data_that_two_ranks_share_counts_once():
    totals = [num_targets(SAMPLES[:3]), num_targets(SAMPLES[3:4])]
    for rank in run_distributed(scales_of_ranks_with_the_same_data, 2):
        assert rank == [(total, 1 / total) for total in totals]


def run_until_it_stops(samples, indices_of_rank, collate_fn=COLLATE):
    seen = 0
    try:
        with update_steps(samples, indices_of_rank[dist.get_rank()], collate_fn) as steps:
            for _ in steps:
                seen += 1
    except (SampleError, OtherRankFailedError) as error:
        dist.barrier()
        return seen, type(error), str(error)
    dist.barrier()
    return seen, None, ""


def test_a_bad_sample_stops_every_rank_before_the_same_update_step():
    samples = list(SAMPLES)
    samples[9] = {"tokens": [1, 2], "labels": [1]}
    good, bad = run_distributed(
        run_until_it_stops, 2, samples, [[[0], [1], [2], [3]], [[4], [5], [9], [6]]]
    )
    assert good[:2] == (2, OtherRankFailedError)
    assert "rank(s) [1]" in good[2]
    assert bad[:2] == (2, SampleError)
    assert "sample 9 of dataset" in bad[2]


def collate_with_a_weight_per_sample(samples):
    """Works on the samples that the dataset returns, not on one cut to a single token."""
    if any(len(sample["tokens"]) < 2 for sample in samples):
        raise SampleError("cannot collate a single token")
    return COLLATE(samples)


def test_a_stand_in_that_cannot_be_collated_stops_every_rank_before_the_first_update_step():
    stopped = run_distributed(
        run_until_it_stops, 2, SAMPLES, [[[0], [1, 2]], [[3], []]], collate_with_a_weight_per_sample
    )
    assert [(seen, error) for seen, error, _ in stopped] == [(0, SampleError), (0, SampleError)]


def test_microbatches_are_let_go_as_they_are_consumed(one_process):
    with update_steps(SAMPLES, [list(range(8)), list(range(8))], depth=1) as steps:
        for step in steps:
            earlier = []
            for microbatch, _ in step:
                gc.collect()
                assert [ref for ref in earlier if ref() is not None] == []
                earlier.append(weakref.ref(microbatch.inputs["tokens"]))
                earlier.append(weakref.ref(microbatch.targets.labels))
            del microbatch
            assert len(earlier) == 8
            assert [ref for ref in earlier if ref() is not None] == []


def test_the_tokens_are_those_of_the_planned_samples_in_order(one_process):
    indices = [[5, 0, 3], [2]]
    with update_steps(SAMPLES, indices, depth=2, num_workers=1) as steps:
        for step, of_step in zip(steps, indices, strict=True):
            rows = itertools.chain.from_iterable(m.inputs["tokens"] for m, _ in step)
            for row, i in zip(rows, of_step, strict=True):
                tokens = SAMPLES[i]["tokens"]
                assert row.tolist()[: len(tokens)] == tokens
                assert not row[len(tokens) :].any()


def test_an_update_step_without_targets_has_a_finite_scale():
    step = UpdateStep(0, [], StepCounts(0, 10, 10, 1), dp_degree=4)
    assert math.isfinite(step.loss_scale)
