"""Plan and collate function fit each other for each value of ``microbatching``."""

from functools import partial

import pytest
import tiny
from torchtune.data import padded_collate_sft

from recipe_utils.data.microbatching import plan_and_collate
from recipe_utils.data.plan import PLANS, MicrobatchCost

SAMPLES = tiny.make_samples(9)


def microbatches(name, **changes):
    arguments = {
        "batch_size": 2,
        "max_tokens": 80,
        "cost": MicrobatchCost(),
        "collate_fn": partial(padded_collate_sft, padding_idx=0, ignore_idx=tiny.IGNORE),
        "ignore_index": tiny.IGNORE,
        "padding_idx": 0,
        "merge_packed_rows": False,
        "num_row_lengths": None,
        **changes,
    }
    plan, collate = plan_and_collate(name, **arguments)
    (parts,) = plan([len(sample["tokens"]) for sample in SAMPLES], 1)
    return [collate([SAMPLES[i] for i in part]) for part in parts]


@pytest.mark.parametrize("name", PLANS)
def test_all_targets_are_in_the_microbatches_of_every_plan(name):
    made = microbatches(name)
    expected = sum(label != tiny.IGNORE for s in SAMPLES for label in s["labels"][1:])
    assert sum(m.num_target_tokens for m in made) == expected
    assert all(m.num_slots <= 80 for m in made)
    padding = sum(m.num_slots - m.num_real_tokens for m in made)
    assert (padding == 0) == (name == "packed")


@pytest.mark.parametrize(("num_row_lengths", "lengths"), [(1, {80}), (4, {20, 40, 60, 80})])
def test_packed_rows_have_as_many_lengths_as_asked_for(num_row_lengths, lengths):
    made = microbatches("packed", num_row_lengths=num_row_lengths)
    assert {m.num_slots for m in made} <= lengths
