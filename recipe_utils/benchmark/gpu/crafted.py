"""A recipe's components without a file: random weights and tokens, packed rows of known documents.

Shapes: c target tokens of a chunk, v vocabulary.
"""

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from torchtune import config, training

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.samples import Sample
from recipe_utils.data.text.collate import collate_packed_microbatch
from recipe_utils.model.build.build import ModelSettings, build_on_meta

IGNORE_INDEX = -100


class RandomWeights:
    """In the place of a torchtune checkpointer: normal weights with standard deviation 0.02, norms 1.

    Args:
        model: component of the model.
        device: where they are made.
        seed: of them.
    """

    def __init__(self, model: Mapping[str, Any], device: str, seed: int = 0, **_: Any) -> None:
        self._model, self._device, self._seed = dict(model), device, seed

    def load_checkpoint(self) -> dict[str, Any]:
        """As torchtune's; in bf16, since fp32 weights of a model that just fits would not."""
        make = partial(config.instantiate, OmegaConf.create(self._model))
        generator = torch.Generator(self._device).manual_seed(self._seed)
        weights = {}
        for name, like in build_on_meta(make, ModelSettings()).state_dict().items():
            weight = torch.ones(like.shape, dtype=torch.bfloat16, device=self._device)
            if weight.dim() > 1:
                weight.normal_(std=0.02, generator=generator)
            weights[name] = weight
        return {training.MODEL_KEY: weights}

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Nothing is exported."""


class NoTokenizer:
    """What the recipe asks a tokenizer for besides tokens."""

    pad_id = 0

    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len


class RandomTexts:
    """A dataset of samples of random tokens, the second half of each targets."""

    def __init__(self, tokenizer: Any, vocab_size: int, num_samples: int = 64) -> None:
        self._lengths = document_lengths(32 * num_samples, tokenizer.max_seq_len, seed=1)
        self._vocab_size, self._num_samples = vocab_size, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        return sample_of(self._lengths[index % len(self._lengths)], self._vocab_size, index)


def document_lengths(num_tokens: int, longest: int, seed: int) -> list[int]:
    """Lengths like those of instructions and answers: log-normal, median 90; they add up to ``num_tokens``."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0:
        lengths.append(min(max(int(rng.lognormvariate(4.5, 0.8)), 8), longest, left))
    return lengths


def sample_of(length: int, vocab_size: int, seed: int) -> Sample:
    """Random tokens; the first half of the labels is ignored."""
    tokens = torch.randint(
        vocab_size, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return {"tokens": tokens, "labels": [IGNORE_INDEX] * (length // 2) + tokens[length // 2 :]}


def packed_row(lengths: list[int], vocab_size: int, seed: int, **options: Any) -> Microbatch:
    """One row of documents, as the recipe's ``microbatching: packed`` makes it.

    Args:
        lengths: of the documents [tokens].
        vocab_size: of the model.
        seed: of the tokens.
        options: of :func:`recipe_utils.data.text.collate.collate_packed_microbatch`.
    """
    samples = [sample_of(n, vocab_size, seed + i) for i, n in enumerate(lengths)]
    return collate_packed_microbatch(samples, IGNORE_INDEX, **options)


def update_step(lengths_of_rows: list[list[int]], vocab_size: int, pins: bool) -> UpdateStep:
    """An update step of one packed row per microbatch.

    Args:
        lengths_of_rows: of each row's documents [tokens].
        vocab_size: of the model.
        pins: as the loader does where the device is CUDA.
    """
    rows = [packed_row(n, vocab_size, 1000 * i) for i, n in enumerate(lengths_of_rows)]
    totals = {name: sum(row.counts[name] for row in rows) for name in rows[0].counts}
    return UpdateStep(0, [row.pin_memory() if pins else row for row in rows], totals, dp_degree=1)
