"""Samples of random tokens, and rollouts of them, for benchmarks without a download."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Dataset
from torchtune.datasets import PackedDataset

from recipe_utils.files import write_atomically
from recipe_utils.policy import rollout_dataset
from recipe_utils.torchtune_names import IGNORE_INDEX
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


def random_rollouts(
    tokenizer: Any, path: str, vocab_size: int, num_groups: int, prompt_tokens: int, answer_tokens: int
) -> Dataset[Sample]:
    """Returns groups of eight random answers that it writes to ``path``, the same ones in every call.

    Prompts have ``prompt_tokens`` each. Lengths of answers are uniform, from a quarter to seven quarters of
    ``answer_tokens``.
    """
    rng, log_prob = random.Random(0), -math.log(vocab_size)
    lengths = range(answer_tokens // 4, 7 * answer_tokens // 4 + 1)

    def draw(length: int) -> list[int]:
        return [rng.randrange(tokenizer.pad_id + 1, vocab_size) for _ in range(length)]

    lines = []
    for _ in range(num_groups):
        answers = [draw(rng.choice(lengths)) for _ in range(8)]
        group = {
            "prompt_ids": draw(prompt_tokens),
            "completion_ids": answers,
            "logprobs": [[log_prob + rng.gauss(0, 0.1) for _ in answer] for answer in answers],
            "rewards": [rng.gauss(0, 1) for _ in answers],
        }
        lines.append(json.dumps(group) + "\n")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(path), "".join(lines))
    return rollout_dataset(tokenizer, path, advantage="mean")
