"""What goes into a peer's model, and what should.

Shapes: b samples, s slots per sample.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from recipe_utils.data.loader.samples import Sample
from recipe_utils.data.pairs.collator import num_shared_tokens
from recipe_utils.data.text.collate import num_real_tokens


class StepContents(NamedTuple):
    """What the samples of one update step hold, over all ranks."""

    num_target_tokens: int
    """Labels of a next position within the same sample that are not ignored."""
    num_real_tokens: int
    """That go into the model."""
    fingerprint: int
    """Of all tokens of the samples."""
    fingerprint_of_shared: int = 0
    """Of those that pairs share and that go into the model once, although both sides hold them."""
    document_lengths: tuple[int, ...] = ()
    """[tokens], without padding."""


def contents_of(samples: Iterable[Sample], pad_id: int, ignore_index: int) -> StepContents:
    """Counts the samples of an update step.

    Args:
        samples: with ``tokens`` and ``labels``; those of a packed dataset also with ``seq_lens``.
        pad_id: the token that batches are padded with.
        ignore_index: the label of positions that are no targets.
    """
    num_targets = num_real = tokens_fingerprint = 0
    document_lengths: list[int] = []
    for sample in samples:
        labels = torch.as_tensor(sample["labels"])
        is_target = labels != ignore_index
        lengths = torch.as_tensor(sample.get("seq_lens", [len(labels)]))
        # Nothing comes before the first token of a document that it could be predicted from.
        first = lengths.cumsum(0) - lengths
        is_target[first[first < len(labels)]] = False
        num_targets += int(is_target.sum())
        num_real_of_sample = num_real_tokens(sample, ignore_index)
        num_real += num_real_of_sample
        has_padding = num_real_of_sample < len(labels)  # as one more document
        document_lengths += lengths.tolist()[: -1 if has_padding else None]
        tokens_fingerprint += int(fingerprint(torch.as_tensor(sample["tokens"]), pad_id))
    return StepContents(
        num_targets, num_real, tokens_fingerprint, document_lengths=tuple(document_lengths)
    )


def contents_of_pairs(
    pairs: Iterable[Sample], pad_id: int, ignore_index: int, shares_prefixes: bool
) -> StepContents:
    """Counts the pairs of an update step; both sides of each are samples.

    Args:
        pairs: by torchtune's keys.
        pad_id: the token that batches are padded with.
        ignore_index: the label of positions that are no targets.
        shares_prefixes: whether what both sides begin with goes into the model once.
    """
    sides, shared = [], []
    for pair in pairs:
        arrays = {key: np.asarray(values) for key, values in pair.items()}
        for side in ("chosen", "rejected"):
            tokens, labels = arrays[f"{side}_input_ids"], arrays[f"{side}_labels"]
            sides.append({"tokens": tokens, "labels": labels})
        if shares_prefixes:
            num_shared = num_shared_tokens(arrays) or 0
            shared.append(arrays["chosen_input_ids"][:num_shared])
    contents = contents_of(sides, pad_id, ignore_index)
    return contents._replace(
        num_real_tokens=contents.num_real_tokens - sum(map(len, shared)),
        fingerprint_of_shared=sum(int(fingerprint(torch.as_tensor(s), pad_id)) for s in shared),
    )


def fingerprint(tokens: Tensor, pad_id: int) -> Tensor:
    """A number that hardly ever agrees for two different sets of tokens.

    The sum of a polynomial of each token, so the order and the grouping of the samples do not enter.
    Padding does not either, neither with ``pad_id`` nor with 0, which torchtune packs with.

    Args:
        tokens: any shape, integers.
        pad_id: the token that batches are padded with.

    Returns:
        int64, shape [].
    """
    tokens = tokens.to(torch.int64) * (tokens != pad_id)
    return (tokens * (tokens * tokens + 7919)).sum()


class FedTokens:
    """Counts the tokens that go into the model of this process while gradients are recorded.

    All token embeddings of the process are counted, so it must train one model with one of them.

    Args:
        pad_id: the token that batches are padded with.
    """

    def __init__(self, pad_id: int) -> None:
        self._pad_id = pad_id
        self._num_slots = 0
        # Tensors, read at the end of a turn: a device must not be waited for in the middle.
        self._fingerprints: list[Tensor] = []

    def install(self) -> None:
        """Counts from now on."""
        embed = nn.Embedding.forward

        def counted(module: nn.Embedding, input: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                self._count(input)
            return embed(module, input)

        # The class and not a module: it covers models that do not exist yet, wrapped ones as well.
        nn.Embedding.forward = counted  # type: ignore[method-assign, assignment]

    def read_and_restart(self) -> tuple[int, int]:
        """The slots since the last call, and the fingerprint of their tokens."""
        counts = self._num_slots, sum(int(each) for each in self._fingerprints)
        self._num_slots, self._fingerprints = 0, []
        return counts

    def _count(self, tokens: Tensor) -> None:
        self._num_slots += tokens.numel()
        # A rank without samples of its own runs a single token, so that the collectives match.
        if tokens.numel() > 1:
            self._fingerprints.append(fingerprint(tokens.detach(), self._pad_id))
