"""An update step is a value with counts over all ranks, determined before its first forward."""

import dataclasses
import math
import threading

import pytest
import tiny
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from torchtune.data import padded_collate_sft

from recipe_utils.data.loader.collectives import OtherRankFailedError
from recipe_utils.data.loader.loader import UpdateStep, UpdateStepLoader
from recipe_utils.data.loader.microbatch import Microbatch, Targets
from recipe_utils.data.loader.plan import MicrobatchCost, plan_in_order
from recipe_utils.data.loader.samples import SampleError
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.data.text.collator import TextCollator
from recipe_utils.data.text.limits import ModelLimits
from recipe_utils.parallel.ranks import RankSettings, join_ranks
from recipe_utils.settings.problems import ConfigError

LIMITS = ModelLimits(tiny.VOCAB_SIZE, 64, MicrobatchCost())
SAMPLES = tiny.make_samples(12, num_without_targets=2)
# Per rank: the dataset indices of each update step.
UNEQUAL = [
    [[0, 1, 2, 3, 4], [5, 6], [], [10, 11]],
    [[7], [], [8, 9, 0], []],
]


def num_targets(samples):
    return sum(label != tiny.IGNORE for sample in samples for label in sample["labels"][1:])


def make_loader(samples, ranks=(), fill=None, collator=None, **settings):
    """``ranks`` are changes to this process's settings among the others."""
    settings = DataSettings(batch_size=2, **settings)
    return UpdateStepLoader(
        tiny.Samples(samples),
        collator or TextCollator(settings, tiny.tiny_tokenizer(), tiny.IGNORE, LIMITS),
        settings,
        join_ranks(RankSettings(device="cpu", **dict(ranks))),
        "dataset",
        fill,
    )


@pytest.fixture
def one_process():
    ranks = join_ranks(RankSettings(device="cpu"))
    yield
    ranks.leave()


def samples_of(step):
    return [row.tolist() for m in step.microbatches for row in m.inputs["tokens"]]


def describe_unequal_steps(depth):
    loader = make_loader(SAMPLES, prefetch_update_steps=depth)
    with loader.of_samples(UNEQUAL[dist.get_rank()]) as steps:
        return [
            (
                step.index,
                dict(step.totals),
                step.scale("target_tokens"),
                [dict(microbatch.counts) for microbatch in step.microbatches],
            )
            for step in steps
        ]


def test_totals_are_those_of_all_ranks_and_prefetching_changes_nothing():
    of_ranks = run_distributed(describe_unequal_steps, 2, 2)
    assert run_distributed(describe_unequal_steps, 2, 0) == of_ranks
    for index, shares in enumerate(zip(*UNEQUAL, strict=True)):
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


def test_dummy_microbatches_have_no_targets_and_are_not_counted(one_process):
    indices = [[0, 1, 2], [3]]
    loader = make_loader(SAMPLES, fill=lambda n: max(n, 4))
    with loader.of_samples(indices) as steps:
        for step, of_step in zip(steps, indices, strict=True):
            num_filled = 4 - math.ceil(len(of_step) / 2)
            assert len(step.microbatches) == 4
            for microbatch in step.microbatches[-num_filled:]:
                assert microbatch.counts == {}
                assert len(microbatch.targets.positions) == 0
            samples = [SAMPLES[i] for i in of_step]
            assert step.totals["target_tokens"] == num_targets(samples)
            assert step.totals["real_tokens"] == sum(len(s["tokens"]) for s in samples)
            assert step.totals["positions"] == sum(
                m.inputs["tokens"].numel() for m in step.microbatches[:-num_filled]
            )


def scales_of_ranks_with_the_same_data():
    loader = make_loader(SAMPLES, {"tensor_parallel_dim": 2})
    with loader.of_samples([[0, 1, 2], [3]]) as steps:
        return [(step.totals["target_tokens"], step.scale("target_tokens")) for step in steps]


def test_data_that_two_ranks_share_counts_once():
    totals = [num_targets(SAMPLES[:3]), num_targets(SAMPLES[3:4])]
    for rank in run_distributed(scales_of_ranks_with_the_same_data, 2):
        assert rank == [(total, 1 / total) for total in totals]


# ---- Failures -------------------------------------------------------------------------------------


def collate_longer_samples(samples, **arguments):
    """Fails for a dummy microbatch of a single token."""
    if any(len(sample["tokens"]) < 2 for sample in samples):
        raise SampleError("cannot collate a single token")
    return padded_collate_sft(samples, **arguments)


def run_until_it_stops(samples, indices_of_rank, settings):
    """Returns the number of update steps, and the error."""
    num_steps = 0
    loader = make_loader(samples, **settings)
    try:
        with loader.of_samples(indices_of_rank[dist.get_rank()]) as steps:
            for _ in steps:
                num_steps += 1
    except (SampleError, OtherRankFailedError) as error:
        dist.barrier()
        return num_steps, type(error), str(error)


@pytest.mark.parametrize("microbatching", ["in_order", "least_padding"])
def test_a_bad_sample_stops_every_rank_before_the_same_update_step(microbatching):
    samples = list(SAMPLES)
    samples[9] = {"tokens": [1, 2], "labels": [1]}
    shares = [[[0], [1], [2], [3]], [[4], [5], [9], [6]]]
    settings = {"microbatching": microbatching}
    good, bad = run_distributed(run_until_it_stops, 2, samples, shares, settings)
    assert good[:2] == (2, OtherRankFailedError)
    assert "rank(s) [1]" in good[2]
    assert bad[:2] == (2, SampleError)
    assert "sample 9 of dataset" in bad[2]


def test_a_dummy_that_cannot_be_collated_stops_every_rank_before_the_first_update_step():
    shares = [[[0], [1, 2]], [[3], []]]
    settings = {"collate_fn": f"{__name__}.collate_longer_samples"}
    ends = run_distributed(run_until_it_stops, 2, SAMPLES, shares, settings)
    assert [end[:2] for end in ends] == [(0, SampleError)] * 2


@pytest.mark.parametrize(
    ("number", "steps", "text"),
    [(0, 1, "dataset: it has 0 samples"), (3, 2, "last_update_step")],
)
def test_an_epoch_without_an_update_step_is_refused_by_its_key(number, steps, text, one_process):
    settings = {"last_update_step": "drop", "gradient_accumulation_steps": steps}
    with pytest.raises(ConfigError, match=text):
        make_loader(SAMPLES[:number], **settings)


# ---- The value ------------------------------------------------------------------------------------


def tokens_of(steps):
    return [[token for token in row if token] for step in steps for row in samples_of(step)]


def test_the_tokens_are_those_of_the_planned_samples_in_order(one_process):
    with make_loader(SAMPLES, num_workers=1).of_samples([[5, 0, 3], [2]]) as steps:
        assert tokens_of(steps) == [SAMPLES[i]["tokens"] for i in (5, 0, 3, 2)]


@pytest.mark.parametrize("num_epochs", [1, 2, 9])
def test_one_pass_has_each_sample_once_that_so_many_epochs_consume(num_epochs, one_process):
    loader = make_loader(SAMPLES, gradient_accumulation_steps=2, max_steps_per_epoch=1)
    consumed = []
    for epoch in range(num_epochs):
        with loader.epoch(epoch) as steps:
            consumed += tokens_of(steps)
    expected = [sample["tokens"] for sample in SAMPLES if sample["tokens"] in consumed]
    num_steps, steps = loader.one_pass(num_epochs)
    with steps:
        assert tokens_of(steps) == expected
    assert num_steps == math.ceil(len(expected) / 4)


def test_a_scale_is_the_dp_degree_over_the_total_of_its_name():
    step = UpdateStep(0, (), {"target_tokens": 10, "pairs": 8}, dp_degree=4)
    assert (step.scale("target_tokens"), step.scale("pairs")) == (0.4, 0.5)
    assert math.isfinite(UpdateStep(0, (), {"pairs": 0}, dp_degree=4).scale("pairs"))
    with pytest.raises(KeyError):
        step.scale("images")


# ---- Epochs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 2])
def test_an_epoch_resumes_after_the_consumed_samples(one_process, depth):
    loader = make_loader(SAMPLES, gradient_accumulation_steps=2, prefetch_update_steps=depth)
    assert (loader.global_batch_size, loader.steps_per_epoch) == (4, 3)

    def described(**consumed):
        with loader.epoch(1, **consumed) as steps:
            return [(s.index, s.samples_consumed, s.is_last_of_epoch, samples_of(s)) for s in steps]

    whole = described()
    assert [each[:3] for each in whole] == [(0, 4, False), (1, 8, False), (2, 12, True)]
    assert described(samples_consumed=4) == whole[1:]


def test_an_epoch_of_fewer_steps_ends_with_the_last_of_them(one_process):
    loader = make_loader(SAMPLES, max_steps_per_epoch=2)
    with loader.epoch(0) as steps:
        assert [step.is_last_of_epoch for step in steps] == [False, True]


def test_update_steps_counted_after_a_request_to_stop_have_it(one_process):
    stop = threading.Event()
    loader = make_loader(SAMPLES, prefetch_update_steps=0)
    with loader.of_samples([[0], [1], [2]], stop=stop) as steps:
        requested = []
        for step in steps:
            requested.append(step.stop_requested)
            if step.index == 1:
                stop.set()
    assert requested == [False, False, True]


# ---- Another collator -----------------------------------------------------------------------------


class Pairs:
    """Samples of two numbers each, counted as pairs."""

    counts = ("pairs", "numbers")
    fingerprint_keys = ("pair",)

    def plan(self, lengths, num_ranks, /):
        return plan_in_order(lengths, num_ranks, batch_size=2)

    def prepare(self, sample, name):
        if len(sample["pair"]) != 2:
            raise SampleError(f"{name}: it is no pair")
        return sample

    def length(self, sample):
        return 1

    def collate(self, samples):
        pairs = torch.tensor([sample["pair"] for sample in samples])
        targets = Targets(pairs, torch.arange(pairs.numel()))
        return Microbatch(
            {"tokens": pairs}, targets, {"pairs": len(pairs), "numbers": pairs.numel()}
        )

    def dummy(self, sample):
        return dataclasses.replace(self.collate([sample]), counts={})

    def warnings(self):
        yield from ()


def totals_of_pairs(indices_of_rank):
    loader = make_loader([{"pair": [i, i + 1]} for i in range(9)], collator=Pairs())
    with loader.of_samples(indices_of_rank[dist.get_rank()]) as steps:
        return [(dict(step.totals), len(step.microbatches), samples_of(step)) for step in steps]


def test_totals_are_those_of_the_collator_s_counts_by_name_over_all_ranks():
    shares = [[[0, 1, 2], [3]], [[4], [5, 6]]]
    for found, share in zip(run_distributed(totals_of_pairs, 2, shares), shares, strict=True):
        totals, num_microbatches, rows = zip(*found, strict=True)
        assert totals == ({"pairs": 4, "numbers": 8}, {"pairs": 3, "numbers": 6})
        assert num_microbatches == (2, 1)
        for of_step, indices in zip(rows, share, strict=True):
            assert of_step[: len(indices)] == [[i, i + 1] for i in indices]


def test_errors_of_a_collator_name_the_sample(one_process):
    loader = make_loader([{"pair": [1, 2]}, {"pair": [1]}], collator=Pairs())
    with (
        loader.of_samples([[0], [1]]) as steps,
        pytest.raises(SampleError, match="sample 1 of dataset: it is no pair"),
    ):
        list(steps)
