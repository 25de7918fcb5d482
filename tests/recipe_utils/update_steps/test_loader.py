"""An update step is a value with counts over all ranks, determined before its first forward."""

import math
import os
import sys
import threading
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from recipe_runs import keep_messages
from torchtune.data import padded_collate_sft

from recipe_utils.data.collators import text_collator
from recipe_utils.data.inspect_samples import log_data
from recipe_utils.data.loaders import build_loader
from recipe_utils.parallel.ranks import join_ranks
from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.reference.source import OnePass
from recipe_utils.text.limits import ModelLimits
from recipe_utils.update_steps.collectives import OtherRankFailedError
from recipe_utils.update_steps.loader import RowBudget
from recipe_utils.update_steps.order import OnRank
from recipe_utils.update_steps.samples import SampleError
from recipe_utils.update_steps.settings import DataSettings

LIMITS = ModelLimits(tiny.VOCAB_SIZE, 64, MicrobatchCost())
SAMPLES = tiny.make_samples(12, num_without_targets=2)
UNEQUAL = [[[0, 1, 2, 3, 4], [7]], [[5, 6], []], [[8, 9, 0], []], [[10, 11], []]]
"""For each update step, the dataset indices of each rank: blocks of 5."""


def num_targets(samples):
    return sum(label != tiny.IGNORE for sample in samples for label in sample["labels"][1:])


class Given:
    """Order of given samples."""

    def __init__(self, steps):
        self.steps = steps

    def num_steps(self, epoch):
        return len(self.steps)

    def samples(self, epoch, step):
        return np.array(self.steps[step], dtype=np.int64)

    def end(self, epoch, step):
        return step + 1


def make_loader(samples, num_to_run=None, dataset=None, steps=None, block=1, **settings):
    settings = DataSettings(batch_size=2, **settings)
    collator = text_collator(settings, tiny.tiny_tokenizer(), tiny.IGNORE, LIMITS)
    object.__setattr__(collator, "layout", replace(collator.layout, block=block))
    ranks = join_ranks("cpu")
    dataset = dataset or tiny.Samples(samples)
    loader = build_loader(dataset, RowBudget(collator), settings, ranks, num_to_run=num_to_run)
    return loader if steps is None else replace(loader, order=Given(steps))


def samples_of(step):
    return [row.tolist() for m in step.microbatches for row in m.inputs["tokens"]]


def describe_unequal_steps(depth):
    given = [list(chain(*of_ranks)) for of_ranks in UNEQUAL]
    with make_loader(SAMPLES, steps=given, block=5, prefetch_update_steps=depth).epoch(0) as steps:
        return [
            (
                step.index,
                dict(step.totals),
                step.scale("target_tokens"),
                [dict(microbatch.counts) for microbatch in step.microbatches],
            )
            for step in steps
        ]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts threads")
@pytest.mark.parametrize(
    ("microbatching", "num_common"), [("in_order", 0), ("least_padding", 0), ("packed", 0), ("packed", 20)]
)
def test_preparing_update_steps_starts_no_threads_of_openmp(microbatching, num_common, one_process):
    """A second team on the same cores makes both sleep between operations: a packed update step took 1.2 times as long.

    With 20 common tokens, samples of a packed row become trees. PyTorch computes operations in parallel from 3,000 or
    32,768 elements on: the rows of an update step have 40,000 tokens.
    """
    samples = tiny.make_samples(3000, num_common=num_common)
    one_row = {"max_tokens_per_microbatch": 10**6} if microbatching == "packed" else {}
    loader = make_loader(
        samples, microbatching=microbatching, global_batch_size=3000, prefetch_update_steps=0, **one_row
    )
    recorded, num_threads = [], torch.get_num_threads()

    def prepare():
        torch.set_num_threads(3)
        recorded.append(set(os.listdir("/proc/self/task")))
        with loader.epoch(0) as steps:
            (step,) = steps
        assert step.totals["real_tokens"] > 32_768
        recorded.append(set(os.listdir("/proc/self/task")))

    try:
        thread = threading.Thread(target=prepare)  # a new one has no team yet
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(num_threads)
    before, after = recorded
    assert not after - before  # others, of earlier tests, may end meanwhile


def describe_example():
    """Returns the samples that this rank takes and the rows that it computes, in the example of the loader's head."""
    lengths = {44: 5, 22: 3, 29: 9, 18: 2}
    samples = [{"tokens": [i] * lengths.get(i, 4), "labels": [i] * lengths.get(i, 4)} for i in range(48)]
    how = {"global_batch_size": 4, "microbatching": "packed", "max_tokens_per_microbatch": 10}
    loader = make_loader(samples, **how)
    ranks = loader.ranks
    taken = [step.item for step in OnRank(loader.order, 0, range(1), ranks.dp_rank, ranks.dp_degree)[0]]
    with loader.epoch(0) as steps:
        step = next(iter(steps))
    return taken, samples_of(step), step.totals["target_tokens"], len(step.microbatches), step.scale("target_tokens")


def test_the_worked_example_is_what_two_ranks_do():
    first, second = run_distributed(describe_example, 2)
    assert first == ([44, 29], [[44] * 5 + [22] * 3 + [18] * 2], 15, 1, 2 / 15)
    assert second == ([22, 18], [[29] * 9], 15, 1, 2 / 15)


def test_totals_are_those_of_all_ranks_and_prefetching_changes_nothing():
    of_ranks = run_distributed(describe_unequal_steps, 2, 2)
    assert run_distributed(describe_unequal_steps, 2, 0) == of_ranks
    for index, shares in enumerate(UNEQUAL):
        samples = [SAMPLES[i] for share in shares for i in share]
        expected = {
            "target_tokens": num_targets(samples),
            "real_tokens": sum(len(sample["tokens"]) for sample in samples),
        }
        counts = []
        for steps, share in zip(of_ranks, shares, strict=True):
            step_index, totals, scale, of_microbatches = steps[index]
            assert step_index == index
            assert totals.items() >= expected.items()
            assert scale == 2 / max(expected["target_tokens"], 1)
            # Ranks with fewer samples run as many microbatches; the dummy ones have no counts.
            assert len(of_microbatches) == max(math.ceil(len(each) / 2) for each in shares)
            assert [bool(each) for each in of_microbatches].count(True) == math.ceil(len(share) / 2)
            counts += of_microbatches
        for name in expected:
            assert sum(each.get(name, 0) for each in counts) == expected[name]
    assert expected["target_tokens"] == 0  # the last update step is one without any target


def test_skipped_and_truncated_samples_are_counted_before_training(one_process, caplog):
    bad = {"tokens": [1, 900], "labels": [1, 1]}
    long = {"tokens": [1] * 64, "labels": [1] * 64}
    log_data(make_loader([*SAMPLES, bad, long, long], on_bad_sample="skip"), 2, "in_order")
    assert "Data: 15 samples; 14 of them read: " in caplog.text
    assert "tokens in the mean, 64 at most" in caplog.text
    assert "Update steps: 16 (2 epochs of 8), 2 samples each, 1 in the last, in_order" in caplog.text
    assert "dataset: 2 of 15 samples read: tokenizer.max_seq_len=64 tokens, probably" in caplog.text
    assert "dataset: 1 of 15 samples read: skipped (token 900 is outside" in caplog.text


def test_dummy_microbatches_have_no_targets_and_are_not_counted(one_process):
    indices = [[0, 1, 2], [3]]
    with make_loader(SAMPLES, num_to_run=lambda n: max(n, 4), steps=indices).epoch(0) as steps:
        for step, of_step in zip(steps, indices, strict=True):
            num_filled = 4 - math.ceil(len(of_step) / 2)
            assert len(step.microbatches) == 4
            for microbatch in step.microbatches[-num_filled:]:
                assert microbatch.counts == {}
                assert len(microbatch.targets.positions) == 0
            assert step.totals["positions"] == sum(m.inputs["tokens"].numel() for m in step.microbatches[:-num_filled])


def describe_epoch(microbatching):
    """Returns totals, sorted tokens and number of microbatches of each update step, and the log."""
    loader = make_loader(SAMPLES, global_batch_size=7, microbatching=microbatching)
    with keep_messages() as logged:
        log_data(loader, 1, microbatching)
    found = []
    with loader.epoch(0) as steps:
        for step in steps:
            rows = [m.inputs["tokens"].flatten().tolist() for m in step.microbatches if m.counts]
            totals = [step.totals[name] for name in ("target_tokens", "real_tokens")]
            found.append((totals, [t for row in rows for t in row if t], len(step.microbatches)))
    return found, [text for text in logged if "ranks take" in text]


@pytest.mark.parametrize("microbatching", ["in_order", "least_padding", "packed"])
def test_update_steps_of_7_samples_are_the_same_on_1_2_and_3_ranks(microbatching):
    expected = None
    for num_ranks, shares in ((1, None), (2, "4 and 3"), (3, "3, 2 and 2")):
        found = run_distributed(describe_epoch, num_ranks, microbatching)
        of_ranks, (logged, *_) = zip(*found, strict=True)
        steps = []
        for parts in zip(*of_ranks, strict=True):
            totals, tokens, numbers = zip(*parts, strict=True)
            assert len(set(numbers)) == 1, "FSDP's collectives would not match"
            steps.append((totals[0], sorted(chain(*tokens))))
        expected = expected or steps
        assert steps == expected
        text = f"global_batch_size=7: {num_ranks} ranks take {shares} samples"
        assert logged == ([text] if shares else [])
    assert len(expected) == 2


# ---- Failures -------------------------------------------------------------------------------------


def collate_longer_samples(samples, **arguments):
    """Fails for a dummy microbatch of a single token."""
    if any(len(sample["tokens"]) < 2 for sample in samples):
        raise SampleError("cannot collate a single token")
    return padded_collate_sft(samples, **arguments)


def run_until_it_stops(samples, given, settings):
    """Returns the number of update steps, and the error."""
    num_steps = 0
    loader = make_loader(samples, steps=given, **settings)
    try:
        with loader.epoch(0) as steps:
            for _ in steps:
                num_steps += 1
    except (SampleError, OtherRankFailedError) as error:
        dist.barrier()
        return num_steps, type(error), str(error)


@pytest.mark.parametrize("microbatching", ["in_order", "least_padding"])
def test_a_bad_sample_stops_every_rank_before_the_same_update_step(microbatching):
    samples = list(SAMPLES)
    samples[9] = {"tokens": [1, 2], "labels": [1]}
    given = [[0, 4], [1, 5], [2, 9], [3, 6]]
    settings = {"microbatching": microbatching}
    good, bad = run_distributed(run_until_it_stops, 2, samples, given, settings)
    assert good[:2] == (2, OtherRankFailedError)
    assert "rank(s) [1]" in good[2]
    assert bad[:2] == (2, SampleError)
    assert "sample 9 of dataset" in bad[2]


def test_a_dummy_that_cannot_be_collated_stops_every_rank_before_the_first_update_step():
    given = [[0, 3], [1]]
    settings = {"collate_fn": f"{__name__}.collate_longer_samples"}
    ends = run_distributed(run_until_it_stops, 2, SAMPLES, given, settings)
    assert [end[:2] for end in ends] == [(0, SampleError)] * 2


# ---- The value ------------------------------------------------------------------------------------


def tokens_of(steps):
    return [[token for token in row if token] for step in steps for row in samples_of(step)]


@pytest.mark.parametrize("num_epochs", [1, 2, 9])
def test_one_pass_has_each_sample_once_that_so_many_epochs_consume(num_epochs, one_process):
    loader = make_loader(SAMPLES, gradient_accumulation_steps=2, max_steps_per_epoch=1)
    consumed = []
    for epoch in range(num_epochs):
        with loader.epoch(epoch) as steps:
            consumed += tokens_of(steps)
    expected = [sample["tokens"] for sample in SAMPLES if sample["tokens"] in consumed]
    order = OnePass(loader.order, num_epochs, len(SAMPLES), 4)
    with replace(loader, order=order).epoch(0) as steps:
        assert tokens_of(steps) == expected
    assert order.num_steps(0) == math.ceil(len(expected) / 4)


# ---- Epochs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 2])
def test_an_epoch_resumes_after_the_consumed_samples(one_process, depth):
    loader = make_loader(SAMPLES, gradient_accumulation_steps=2, prefetch_update_steps=depth)
    assert (loader.order.end(0, 0), loader.order.num_steps(0)) == (4, 3)

    def described(**consumed):
        with loader.epoch(1, **consumed) as steps:
            return [(s.index, s.samples_consumed, s.is_last_of_epoch, samples_of(s)) for s in steps]

    whole = described()
    assert [each[:3] for each in whole] == [(0, 4, False), (1, 8, False), (2, 12, True)]
    assert described(samples_consumed=4) == whole[1:]


class Many:
    most_objects = 0

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        Many.most_objects = max(Many.most_objects, sys.getallocatedblocks())
        return SAMPLES[index % 7]


@pytest.mark.parametrize("num_samples", [5 * 10**6, 10**11])
def test_an_epoch_makes_no_object_per_sample(one_process, num_samples):
    loader = make_loader([], gradient_accumulation_steps=2, dataset=Many(num_samples))
    Many.most_objects = 0
    num_objects = sys.getallocatedblocks()  # tracemalloc crashes when it ends beside gloo's threads
    with loader.epoch(0) as steps:
        found = [step.index for step, _ in zip(steps, range(3), strict=False)]
    assert found == [0, 1, 2]
    assert Many.most_objects - num_objects < 100_000
    assert ("order" in loader.dataset.fingerprint) == (num_samples > 2**24)
