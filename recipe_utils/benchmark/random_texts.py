"""Samples of random tokens, for benchmarks without a download."""

import math
import random
from collections.abc import Sequence
from typing import Any, cast

import torch
from torchtune.datasets import PackedDataset

from recipe_utils.benchmark.token_audit import IGNORE_INDEX
from recipe_utils.update_steps.samples import Sample


def random_texts(
    tokenizer: Any, vocab_size: int, num_samples: int, median: int, sigma: float = 0.9, packed: bool = False
) -> Sequence[Sample]:
    """Returns samples whose second half are targets, the same ones in every call.

    Lengths are log-normal: ``median`` [tokens], ``sigma`` of their logarithm, at most ``tokenizer.max_seq_len``.
    ``packed`` returns them in rows of that length, as torchtune packs them.
    """
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    samples: list[Sample] = []
    for _ in range(num_samples):
        length = min(max(round(rng.lognormvariate(math.log(median), sigma)), 2), tokenizer.max_seq_len)
        # Not 0 and not pad_id, which fingerprints of tokens take for padding.
        tokens = torch.randint(tokenizer.pad_id + 1, vocab_size, (length,), generator=generator).tolist()
        samples.append({"tokens": tokens, "labels": [IGNORE_INDEX] * (length // 2) + tokens[length // 2 :]})
    given = {"max_seq_len": tokenizer.max_seq_len, "padding_idx": tokenizer.pad_id}
    return cast(Sequence[Sample], PackedDataset(samples, **given)) if packed else samples
