"""Batch sizes are resolved or refused with their numbers; contradicting keys are problems."""

import dataclasses
import re

import pytest

from recipe_utils.parallel.settings import RankSettings
from recipe_utils.update_steps.settings import DataSettings, data_on_ranks


def accumulated(steps, global_batch_size, must_divide=False):
    """Returns microbatches per rank on two ranks with four samples per microbatch."""
    settings = DataSettings(batch_size=4, gradient_accumulation_steps=steps, global_batch_size=global_batch_size)
    return settings.num_accumulated(2, must_divide)


@pytest.mark.parametrize(
    ("steps", "global_batch_size", "expected"),
    [(3, None, 3), (None, None, 1), (None, 24, 3), (3, 24, 3), (None, 20, 3), (None, 5, 1)],
)
def test_accumulation_steps_follow_from_the_key_that_is_given(steps, global_batch_size, expected):
    assert accumulated(steps, global_batch_size) == expected


@pytest.mark.parametrize(
    ("steps", "global_batch_size", "must_divide", "text"),
    [
        (None, 20, True, "global_batch_size=20: .* batch_size=4 * 2 .* = 8; .* are 16 and 24"),
        (None, 5, True, "global_batch_size=5: .* = 8; the nearest multiples are 8 and 16"),
        (2, 24, False, "global_batch_size=24: .* gradient_accumulation_steps=2 .* = 16; "),
        (3, 20, False, "global_batch_size=20: .* gradient_accumulation_steps=3 .* = 24; "),
        (0, None, False, "gradient_accumulation_steps\n.*greater than or equal to 1"),
        (None, -8, False, r"global_batch_size\n.*greater than or equal to 1"),
    ],
)
def test_contradicting_batch_sizes_are_refused_with_their_numbers(steps, global_batch_size, must_divide, text):
    with pytest.raises(ValueError, match=text.replace(" * ", r" \* ")):
        accumulated(steps, global_batch_size, must_divide)


SPANNING = {"microbatching": "packed", "max_tokens_per_microbatch": 64}


@pytest.mark.parametrize(
    ("world_size", "on_this_node", "dims", "text"),
    [
        (12, 12, {}, "12 data-parallel ranks cannot be grouped by 8; set it to 4"),
        (16, 16, {"pipeline_parallel_dim": 4}, "4 data-parallel ranks .* by 8; set it to 4"),
        (16, 4, {}, "on one node, which has 4 neighboring data-parallel ranks; set it to 4"),
        (16, 8, {"tensor_parallel_dim": 2}, "which has 4 neighboring .*; set it to 4"),
        (16, 8, {}, None),
    ],
)
def test_rows_span_neighboring_ranks_of_a_node(world_size, on_this_node, dims, text, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_this_node))
    data, ranks = DataSettings(max_ranks_per_row=8, **SPANNING), RankSettings(device="cpu", **dims)
    problems = [*data.problems(), *data_on_ranks(data, ranks), *data.problems_of_long_rows(ranks)]
    assert len(problems) == (text is not None)
    assert all(re.search(f"max_ranks_per_row=8: .*{text}", str(each)) for each in problems)


def test_validation_takes_every_sample_once_in_order_with_batch_size_val():
    training = DataSettings(
        batch_size=4,
        batch_size_val=3,
        global_batch_size=16,
        microbatching="packed",
        last_update_step="drop",
        max_steps_per_epoch=2,
        num_workers=1,
        order={"_component_": "by_length.ByLength"},
    )
    assert training.of_validation() == DataSettings(
        batch_size=3, batch_size_val=3, microbatching="packed", shuffle=False, num_workers=1
    )
    without_own = dataclasses.replace(training, batch_size_val=None)
    assert without_own.of_validation().batch_size == 4


def test_a_collate_function_that_does_not_exist_is_a_problem():
    (problem,) = DataSettings(collate_fn="nowhere.collate").problems()
    assert str(problem).startswith("collate_fn=nowhere.collate: ")
