"""Budgets of checkpoints, and advice after an update step that ran out of memory."""

from types import SimpleNamespace

import pytest
import tiny
import torch

from recipe_utils.data.collators import text_collator
from recipe_utils.data.loaders import build_loaders
from recipe_utils.plans.cost import MicrobatchCost
from recipe_utils.plans.rounds import Share
from recipe_utils.text.limits import ModelLimits
from recipe_utils.training.parts.budget import RowsDoNotFitError, StepMemory, longest_row
from recipe_utils.update_steps.settings import DataSettings
from recipe_utils.update_steps.step import UpdateStep


class Fixed:
    """Data settings of a model without pipeline stages."""

    def __init__(self, settings):
        self._settings = settings

    def fill(self, ranks):
        return None

    def __getattr__(self, name):
        return getattr(self._settings, name)


def make_loader(ranks, max_tokens):
    """Returns a loader of rows that are padded to multiples of 64."""
    settings = DataSettings(microbatching="packed", max_tokens_per_microbatch=max_tokens)
    limits = ModelLimits(tiny.VOCAB_SIZE, 64, MicrobatchCost(), row_multiple=64)
    collator = text_collator(settings, tiny.tiny_tokenizer(), tiny.IGNORE, limits)
    return build_loaders(tiny.Samples(tiny.make_samples(12)), None, collator, Fixed(settings), ranks)[0]


def at_start(ranks):
    """Returns what the part needs of a run."""
    return SimpleNamespace(ranks=ranks, global_step=0)


@pytest.mark.parametrize("max_tokens", [70, 100, 127])
def test_a_row_of_several_samples_and_padding_is_not_taken_for_one_sample(max_tokens, one_process):
    loader = make_loader(one_process, max_tokens)
    samples = tiny.make_samples(12)[:6]  # 68 tokens, in a row of 128 positions
    prepared = [loader.budget.collator().prepare(sample, "sample") for sample in samples]
    step = UpdateStep(0, loader.budget.collator().collate(prepared), {}, 1)
    memory = StepMemory(at_start(one_process), loader, None)
    # With 0.85 of 128 tokens, rows would be padded to 128 positions again.
    text = "at rows of 128 tokens; set max_tokens_per_microbatch=64, with which a resume"
    memory.before(step)
    with pytest.raises(RowsDoNotFitError, match=text):
        memory.close(torch.OutOfMemoryError())


def test_the_longest_share_of_a_row_is_that_of_the_rank(one_process):
    loader = make_loader(one_process, 64)
    sample = loader.budget.collator().prepare(tiny.make_samples(12)[0], "sample")
    shares = [row for first in range(4) for row in loader.budget.collator().collate([sample], Share(first, 4))]
    assert {longest_row(UpdateStep(0, [share], {}, 4)) for share in shares} == {64}
