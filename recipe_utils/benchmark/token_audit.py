"""Tokens of update steps and of a model's inputs, compared to detect unfair baselines."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import Subset

from recipe_utils.plans.microbatching import MicrobatchSettings
from recipe_utils.preference.pairs import pair_as_group
from recipe_utils.text.limits import RowBounds
from recipe_utils.text.mixture import load_dataset
from recipe_utils.text.reader import TextReader
from recipe_utils.torchtune_names import IGNORE_INDEX
from recipe_utils.update_steps.permutation import epoch_permutation
from recipe_utils.update_steps.samples import Sample


def samples_in_order(config: DictConfig, tokenizer: Any, num_ranks: int) -> list[Sample]:
    """Returns the samples of ``max_steps_per_epoch`` update steps in the recipes' order."""
    dataset = dataset_in_order(config, tokenizer, num_ranks)
    return [dataset[index] for index in range(len(dataset))]


def dataset_in_order(config: DictConfig, tokenizer: Any, num_ranks: int) -> Subset[Sample]:
    """Returns the same, each loaded when it is asked for."""
    dataset = load_dataset(config.dataset, tokenizer)
    if (sft := config.get("sft", {})).get("packing"):
        dataset = _packed_by_trl(dataset, sft.max_length)
    order = epoch_permutation(len(dataset), epoch=0, shuffle=config.get("shuffle", True))
    per_step = config.batch_size * config.gradient_accumulation_steps * num_ranks
    return Subset(dataset, order[: config.max_steps_per_epoch * per_step].tolist())


def _packed_by_trl(dataset: Any, max_length: int) -> list[Sample]:
    """Returns the rows of TRL's best-fit decreasing packing, as those of torchtune's packed datasets."""
    from datasets import Dataset
    from trl import pack_dataset

    samples = [dataset[i] for i in range(len(dataset))]
    columns = {key: [list(map(int, sample[key])) for sample in samples] for key in ("tokens", "labels")}
    return list(pack_dataset(Dataset.from_dict(columns), max_length).rename_column("seq_lengths", "seq_lens"))


@dataclass(frozen=True)
class StepContents:
    """Contents of the samples of one update step, over all ranks."""

    num_target_tokens: int
    num_real_tokens: int
    """Tokens that the model computes."""
    fingerprint: int
    """Fingerprint of all tokens."""
    document_lengths: tuple[int, ...]
    """Numbers of tokens that attend to each other, without padding."""
    fingerprint_of_shared: int = 0
    """Fingerprint of the shared tokens of pairs, which the model computes once."""
    num_flops: int = 0
    """See :func:`.flops.decoder_flops`; 0 where it does not hold."""


def contents_of(samples: Iterable[Sample], pad_id: int) -> StepContents:
    """Counts the samples of an update step, or its rows of a packed dataset."""
    num_targets = tokens_fingerprint = 0
    lengths: list[int] = []
    for sample in samples:
        read = TextReader(IGNORE_INDEX, drops_columns=True).prepare(sample, "sample")
        documents = np.asarray(read.documents)
        num_targets += int((read.labels != IGNORE_INDEX).sum())
        lengths += documents[: len(read.owners_and_ends()[1])].tolist()  # without padding, the last one
        tokens_fingerprint += int(fingerprint(torch.as_tensor(sample["tokens"]), pad_id))
    return StepContents(num_targets, sum(lengths), tokens_fingerprint, tuple(lengths))


def contents_of_pairs(pairs: Iterable[Sample], pad_id: int, shares_prefixes: bool) -> StepContents:
    """Counts both sides of the pairs of an update step; what they share once, if shared."""
    pairs = list(pairs)
    alone, shared = (
        contents_of_groups(
            [{"sequences": [*pair_as_group(pair, "pair", shares)["sequences"].values()]} for pair in pairs],
            pad_id,
            shares,
        )
        for shares in (False, shares_prefixes)
    )
    return replace(shared, num_target_tokens=alone.num_target_tokens)


def contents_of_groups(groups: Sequence[Sample], pad_id: int, shares_prompts: bool) -> StepContents:
    """Counts the answers of the groups of an update step; what those of a group share once, if shared."""
    contents = contents_of([answer for group in groups for answer in group["sequences"]], pad_id)
    if not shares_prompts:
        return contents
    reader = TextReader(IGNORE_INDEX, RowBounds(MicrobatchSettings("packed")), has_trees=True, drops_columns=True)
    computed = torch.from_numpy(np.concatenate([reader.prepare(group, "group").tokens for group in groups]))
    shared = contents.fingerprint - int(fingerprint(computed, pad_id))
    return replace(contents, num_real_tokens=len(computed), fingerprint_of_shared=shared)


def fingerprint(tokens: Tensor, pad_id: int) -> Tensor:
    """Returns a hash of a multiset of tokens, int64 of shape [].

    The sum of a polynomial of each token does not depend on order, grouping, and padding with
    ``pad_id`` or 0 (torchtune's packs).
    """
    tokens = tokens.to(torch.int64) * (tokens != pad_id)
    return (tokens * (tokens * tokens + 7919)).sum()


class FedTokens:
    """Counter of the tokens that the model of this process computes with gradients enabled.

    All embeddings are counted, so the process must train one model with one embedding.
    """

    def __init__(self, pad_id: int) -> None:
        self._pad_id = pad_id
        self._num_positions = 0
        # Tensors, read at the end of a turn, to avoid synchronizations within a step.
        self._fingerprints: list[Tensor] = []

    def install(self) -> None:
        """Starts counting."""
        embed = nn.Embedding.forward

        def counted(module: nn.Embedding, input: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                self._num_positions += input.numel()
                if input.numel() > 1:  # a dummy microbatch is a single token
                    self._fingerprints.append(fingerprint(input.detach(), self._pad_id))
            return embed(module, input)

        # Patches the class, because models may be created later and wrapped.
        nn.Embedding.forward = counted  # type: ignore[method-assign, assignment]

    @property
    def are_none(self) -> bool:
        """True if nothing was computed since the last call: an optimizer is tried before the training."""
        return self._num_positions == 0

    def read_and_restart(self) -> tuple[int, int]:
        """Returns the number of positions since the last call and their fingerprint."""
        counts = self._num_positions, sum(map(int, self._fingerprints))
        self._num_positions, self._fingerprints = 0, []
        return counts
