"""Batch sizes are resolved or refused with their numbers; contradicting keys are problems."""

import dataclasses
import re

import pytest

from recipe_utils.data.loader.plan import MicrobatchCost
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.parallel.ranks import RankSettings


def accumulated(batch_size, steps, global_batch_size, dp_degree):
    settings = DataSettings(
        batch_size=batch_size,
        gradient_accumulation_steps=steps,
        global_batch_size=global_batch_size,
    )
    return settings.num_accumulated(dp_degree)


@pytest.mark.parametrize(
    ("batch_size", "steps", "global_batch_size", "dp_degree", "expected"),
    [(4, 3, None, 2, 3), (4, None, None, 2, 1), (4, None, 24, 2, 3), (4, 3, 24, 2, 3)],
)
def test_accumulation_steps_follow_from_whichever_key_is_given(
    batch_size, steps, global_batch_size, dp_degree, expected
):
    resolved = accumulated(batch_size, steps, global_batch_size, dp_degree)
    assert resolved == expected
    if global_batch_size is not None:
        assert batch_size * resolved * dp_degree == global_batch_size


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((4, None, 20, 2), "global_batch_size=20: .* batch_size=4 * 2 .* = 8; .* are 16 and 24"),
        ((4, None, 5, 2), "global_batch_size=5: .* = 8; the nearest multiples are 8 and 16"),
        ((4, 2, 24, 2), "global_batch_size=24: .* gradient_accumulation_steps=2 .* = 16; "),
        ((0, None, 8, 1), "batch_size\n.*greater than or equal to 1"),
        ((4, 0, None, 1), "gradient_accumulation_steps\n.*greater than or equal to 1"),
        ((4, None, -8, 1), "global_batch_size\n.*greater than or equal to 1"),
    ],
)
def test_a_batch_that_does_not_work_out_is_refused_with_its_numbers(arguments, text):
    with pytest.raises(ValueError, match=text.replace(" * ", r" \* ")):
        accumulated(*arguments)


def test_a_validation_takes_every_sample_once_in_its_order_in_batches_of_its_own():
    training = DataSettings(
        batch_size=4,
        batch_size_val=3,
        global_batch_size=16,
        microbatching="packed",
        last_update_step="drop",
        max_steps_per_epoch=2,
        num_workers=1,
    )
    validation = training.of_validation()
    assert validation == DataSettings(
        batch_size=3,
        batch_size_val=3,
        microbatching="packed",
        shuffle=False,
        num_workers=1,
    )
    assert validation.num_accumulated(dp_degree=2) == 1
    without_own = dataclasses.replace(training, batch_size_val=None)
    assert without_own.of_validation().batch_size == 4


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"max_tokens_per_microbatch": 8}, "max_tokens_per_microbatch=8: "),
        ({"balance_over_ranks": True}, "balance_over_ranks=True: "),
        ({"microbatching": "packed", "collate_fn": "torch.stack"}, "collate_fn=torch.stack: "),
        ({"collate_fn": "torchtune.data.left_pad_sequence"}, "collate_fn=.*pads for inference"),
        ({"collate_fn": "nowhere.collate"}, "collate_fn=nowhere.collate: "),
    ],
)
def test_keys_that_do_not_go_together_are_problems_by_name(settings, key):
    (problem,) = DataSettings(**settings).problems()
    assert re.match(key, str(problem))
    assert list(DataSettings().problems()) == []


def test_a_batch_that_so_many_ranks_cannot_share_is_a_problem():
    (problem,) = DataSettings(batch_size=4, global_batch_size=9).problems_with(RankSettings())
    assert str(problem).startswith("global_batch_size=9: ")
    assert list(DataSettings(batch_size=3, global_batch_size=9).problems_with(RankSettings())) == []


def test_the_config_overrides_the_overhead_of_a_microbatch():
    cost = MicrobatchCost(75, 30)
    assert DataSettings(microbatch_overhead_slots=7.0).cost(cost) == MicrobatchCost(7, 30)
    assert DataSettings().cost(cost) == cost
