"""The worked example at the head of the bare loop, and its gradient beside that of padded samples."""

from functools import partial

import tiny
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

from recipe_utils.benchmark.baselines.bare_loop import BareModel, pack

PROMPTS_AND_LENGTHS = [(2, 5), (1, 3), (2, 9), (1, 2)]


def samples():
    tokens = torch.arange(1, 20).split([length for _, length in PROMPTS_AND_LENGTHS])
    return [
        {"tokens": t.tolist(), "labels": [tiny.IGNORE] * prompt + t[prompt:].tolist()}
        for t, (prompt, _) in zip(tokens, PROMPTS_AND_LENGTHS, strict=True)
    ]


def test_the_four_samples_of_the_example_are_one_row_with_13_targets():
    row = pack(samples())
    assert row.lengths == [5, 3, 9, 2]
    assert row.positions.tolist() == [[*range(5), *range(3), *range(9), *range(2)]]
    assert row.target_positions.tolist() == [1, 2, 3, 5, 6, *range(9, 16), 17]
    assert row.labels.tolist() == (row.tokens[0][row.target_positions + 1]).tolist()


def test_rows_in_any_grouping_have_the_gradient_of_separate_samples(tiny_config, in_float64):
    bare = BareModel(OmegaConf.create(tiny_config(device="cpu", dtype="fp32")))
    bare.model.double()

    def gradient(*sums):
        bare.model.zero_grad()
        for loss_sum in sums:
            (loss_sum() / 13).backward()
        return torch.cat([parameter.grad.flatten() for parameter in bare.model.parameters()])

    def sum_alone(sample):
        bare._lengths = [len(sample["tokens"])]
        logits = bare.model.output(bare.model.norm(bare.model(torch.tensor([sample["tokens"]]))[0]))
        return F.cross_entropy(logits[:-1], torch.tensor(sample["labels"][1:]), reduction="sum")

    a, b, c, d = samples()
    expected = gradient(*[partial(sum_alone, sample) for sample in (a, b, c, d)])
    for rows in ([[a, b, c, d]], [[c], [d, b, a]]):
        computed = gradient(*[partial(bare.loss_sum, pack(row)) for row in rows])
        torch.testing.assert_close(computed, expected, rtol=1e-10, atol=1e-12)
