"""Records of update steps that ran out of memory, and the peak that is compared with its forecast."""

import logging
from dataclasses import dataclass

import pytest
import tiny
import torch
from torch import nn

from recipe_utils.data.loader.loader import UpdateStep, UpdateStepLoader
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.data.plan.cost import MicrobatchCost
from recipe_utils.data.plan.plan import Part
from recipe_utils.data.text.collator import TextCollator
from recipe_utils.data.text.limits import ModelLimits
from recipe_utils.memory.expected import ExpectedPeak
from recipe_utils.memory.out_of_memory import RowsDoNotFitError, read
from recipe_utils.memory.steps import StepMemory


@dataclass(frozen=True, kw_only=True)
class Settings(DataSettings):
    output_dir: str
    enable_activation_offloading: bool = False


def make_memory(ranks, folder, max_tokens):
    settings = Settings(
        output_dir=str(folder), microbatching="packed", max_tokens_per_microbatch=max_tokens
    )
    limits = ModelLimits(tiny.VOCAB_SIZE, 64, MicrobatchCost(), row_multiple=64)
    collator = TextCollator(settings, tiny.tiny_tokenizer(), tiny.IGNORE, limits)
    loader = UpdateStepLoader(tiny.Samples(tiny.make_samples(12)), collator, settings, ranks)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    return StepMemory(loader, model, optimizer, ranks, {}, logging.getLogger()), loader


@pytest.mark.parametrize("max_tokens", [70, 100, 127])
def test_a_row_of_several_samples_and_padding_is_not_taken_for_one_sample(
    max_tokens, one_process, tmp_path
):
    memory, loader = make_memory(one_process, tmp_path, max_tokens)
    samples = tiny.make_samples(12)[:6]  # 68 tokens, in a row of 128 positions
    prepared = [loader.collator.prepare(sample, "sample") for sample in samples]
    step = UpdateStep(0, [loader.collator.collate(prepared)], {}, 1)
    memory.start(step, 1)
    with pytest.raises(RowsDoNotFitError, match="next start has rows of at most"):
        memory.__exit__(None, torch.OutOfMemoryError(), None)
    record = read(tmp_path)
    assert record.tokens == step.longest == 128
    assert not record.is_one_sample


def test_the_longest_part_of_a_row_is_that_of_the_rank(one_process, tmp_path):
    _, loader = make_memory(one_process, tmp_path, 64)
    sample = loader.collator.prepare(tiny.make_samples(12)[0], "sample")
    parts = [loader.collator.collate([sample], Part(first, 4)) for first in range(4)]
    assert {UpdateStep(0, [part], {}, 4).longest for part in parts} == {64}


def test_the_peak_of_the_second_update_step_excludes_a_validation_before_it(
    one_process, tmp_path, monkeypatch
):
    memory, loader = make_memory(one_process, tmp_path, 64)
    memory._expected = expected = ExpectedPeak("none.py", tmp_path / "none.yaml", 1)  # as on CUDA
    peaks = [0]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.clear())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: max(peaks))
    sample = loader.collator.prepare(tiny.make_samples(12)[0], "sample")
    step = UpdateStep(0, [loader.collator.collate([sample])], {}, 1)
    for number, peak, validation in ((1, 3, 5), (2, 2, 5)):
        memory.start(step, number)
        peaks.append(peak)
        memory.stop(step)
        peaks.append(validation)
    expected.close()
    assert expected._measured == 2
