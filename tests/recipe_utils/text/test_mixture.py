"""Shares of a mixture are exact in every update step, and no sample repeats before all others came."""

from collections import Counter
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
import pytest
import tiny
import torch
from distributed_runs import run_distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from recipe_runs import slow

from recipe_utils.data.collators import text_collator
from recipe_utils.data.inspect_samples import log_data
from recipe_utils.data.loaders import build_loader
from recipe_utils.parallel.ranks import join_ranks
from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.settings.components import split_entry
from recipe_utils.text.limits import ModelLimits
from recipe_utils.text.mixture import Mixture, MixtureOrder, Shares, load_dataset
from recipe_utils.update_steps.loader import RowBudget
from recipe_utils.update_steps.settings import DataSettings

WEIGHTS = st.lists(st.decimals("0.001", "999", places=3), min_size=1, max_size=30)


def shares_of(weights, size):
    return Shares([Fraction(str(weight)) for weight in weights], size)


@settings(max_examples=40)
@given(WEIGHTS, st.integers(1, 256), st.integers(0, 150))
def test_every_update_step_has_floor_or_ceil_of_each_share(weights, size, step):
    total = sum(map(Fraction, weights))
    exact = [Fraction(weight) * size / total for weight in weights]
    shares = shares_of(weights, size)
    before, counts = shares.before_and_in(step)
    assert sum(counts) == size
    assert sum(before) == size * step
    for count, share in zip(counts, exact, strict=True):
        assert abs(count - share) < 1
    after, _ = shares_of(weights, size).before_and_in(step + 1)
    assert after == [a + b for a, b in zip(before, counts, strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_no_dataset_is_ever_a_sample_ahead_or_behind(seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 10 ** rng.integers(1, 6), rng.integers(2, 40)).tolist()
    if seed == 0:
        weights = [10**6 // n for n in range(1, 40)]
    size, total = int(rng.integers(1, 257)), sum(weights)
    shares, drawn = shares_of(weights, size), [0] * len(weights)
    for step in range(500):
        before, counts = shares.before_and_in(step)
        assert list(before) == drawn
        drawn = [a + b for a, b in zip(drawn, counts, strict=True)]
        for number, weight in zip(drawn, weights, strict=True):
            assert abs(number * total - (step + 1) * size * weight) < total


LENGTHS, SHARES = (40, 7, 300), ("0.5", "0.3", "0.2")
NAMES = ("chat", "code", "math")


def mixture_of(datasets, weights=SHARES, **keys):
    entries = zip(NAMES, weights, strict=True)
    return Mixture(datasets, [{"name": name, "weight": weight, **keys} for name, weight in entries])


def order_of(shuffle=True):
    mixture = mixture_of([tiny.Samples(range(n)) for n in LENGTHS])
    return MixtureOrder(mixture, 16, shuffle=shuffle, seed=3)


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_dataset_is_passed_through_without_repetition_also_across_epochs(shuffle):
    order, drawn = order_of(shuffle), Counter()
    starts = [0, *accumulate(LENGTHS)]
    assert order.num_steps(0) == 347 // 16
    for epoch in range(3):
        for step in range(order.num_steps(0)):
            drawn.update(order.samples(epoch, step).tolist())
            for first, end in pairwise(starts):
                of_dataset = [drawn[i] for i in range(first, end)]
                assert max(of_dataset) - min(of_dataset) <= 1
    assert sum(drawn.values()) == 3 * 21 * 16


def test_passes_have_new_orders_and_datasets_of_equal_length_their_own():
    order = order_of()
    passes = {tuple(order._pass(which, number).tolist()) for which in (0, 2) for number in (0, 1)}
    assert len(passes) == 4
    first = [order.samples(0, n).tolist() for n in range(60)]
    assert [order_of().samples(0, n).tolist() for n in reversed(range(60))] == first[::-1]


@pytest.mark.parametrize("length", [slow(2**23), 2**23 + 1])
def test_orders_of_more_samples_than_the_limit_are_computed_by_index(length):
    """Two datasets of 2^23 samples are at the limit; each keeps the orders of two passes."""
    entries = [{"name": name, "weight": 1} for name in NAMES[:2]]
    mixture = Mixture([range(length), range(length)], entries)
    order = MixtureOrder(mixture, 16, seed=3)
    permutation = order._pass(1, 0)
    assert isinstance(permutation, torch.Tensor) == (length == 2**23)
    assert len(set(order.samples(0, 7).tolist())) == 16


# ---- Through the loader ---------------------------------------------------------------------------

SOURCES = [tiny.make_samples(n, seed=n) for n in (40, 7, 60)]
SETTINGS = {"global_batch_size": 12, "num_workers": 0}


def make_loader(weights=SHARES, **settings):
    data = DataSettings(**{**SETTINGS, **settings})
    limits = ModelLimits(tiny.VOCAB_SIZE, 64, MicrobatchCost())
    mixture = mixture_of([tiny.Samples(list(source)) for source in SOURCES], weights)
    collator = text_collator(data, tiny.tiny_tokenizer(), tiny.IGNORE, limits)
    return build_loader(mixture, RowBudget(collator), data, join_ranks("cpu"))


def steps_of_rank(settings, epoch, consumed):
    loader = make_loader(**settings)
    with loader.epoch(epoch, consumed) as steps:
        return [
            ([row.tolist() for m in step.microbatches if m.counts for row in m.inputs["tokens"]], dict(step.totals))
            for step in steps
        ]  # fmt: skip


def update_steps(world_size, epoch=1, consumed=0, **settings):
    """Returns sorted rows without padding, and the total, of each update step."""
    of_ranks = run_distributed(steps_of_rank, world_size, settings, epoch, consumed)
    return [
        (sorted([token for token in row if token] for rows, _ in ranks for row in rows), ranks[0][1]["target_tokens"])
        for ranks in zip(*of_ranks, strict=True)
    ]


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [(2, {}), (3, {"num_workers": 2}), (4, {"microbatching": "least_padding", "max_tokens_per_microbatch": 90})],
)  # fmt: skip
def test_update_steps_are_the_same_on_any_layout_and_after_a_resume(world_size, settings):
    whole = update_steps(1)
    assert len(whole) == 107 // 12
    assert update_steps(world_size, **settings) == whole
    for num_done in (1, 5, 8):
        assert update_steps(world_size, consumed=12 * num_done, **settings) == whole[num_done:]


def test_samples_carry_their_dataset_and_errors_its_name(one_process):
    loader = make_loader()
    assert [loader.dataset[i].at.item for i in (0, 39, 40, 46, 47)] == [0, 39, 40, 46, 47]
    loader.dataset.dataset._datasets[1].samples[2] = {}
    with pytest.raises(ValueError, match=r"^sample 2 of dataset.code: it has no 'tokens'"):
        loader.dataset[42]


def test_a_table_shows_samples_shares_and_passes(one_process, caplog):
    loader = make_loader(weights=("0.5", "0.49", "0.01"), max_steps_per_epoch=5)
    log_data(loader, 2, "in_order")
    rows = [line.split() for line in caplog.messages]
    assert ["chat", "40", "50.0%", "0.75", "1.50"] in rows
    assert ["code", "7", "49.2%", "4.21", "8.43"] in rows
    assert "math: 0.12 samples per update step, in one of 8.33" in caplog.messages


def takes_names(tokenizer, name, weight=1):
    """Component with parameters of these names."""


def passes_on(tokenizer, **arguments):
    return tiny.Samples(SOURCES[0])


def test_a_component_keeps_its_own_parameters_and_a_subset_of_the_hub_its_name(caplog):
    entry = {"_component_": f"{__name__}.takes_names", "name": "a", "weight": 2, "loss_weight": 3}
    assert split_entry(entry)[1] == {"loss_weight": 3}
    one = {"_component_": f"{__name__}.passes_on"}
    subset = {**one, "name": "a", "subset": "main"}
    assert split_entry(subset) == ({**one, "name": "main"}, {"name": "a"})
    local = {**one, "name": "b", "data_files": "chats.json"}
    dataset = load_dataset(OmegaConf.create([subset, local, {**one, "name": "c"}]), "tokenizer")
    assert dataset.names == ("a", "b", "c")
    # torchtune would pass it to ``datasets.load_dataset``, as the name of a subset.
    assert [text.partition(" ")[0] for text in caplog.messages] == ["name=c"]
