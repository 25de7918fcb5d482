"""Document boundaries of packed rows, as numbers on the host and as tensors on the device.

Shapes: b rows, s positions per row, p segments in all rows. A segment is a plain document, or one
of the three parts of a prefix-shared pair.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

Document: TypeAlias = int | tuple[int, int, int]
"""Tokens of a document, or of the parts of a prefix-shared pair: the shared prefix and two answers,
which do not attend to each other."""

DocumentLengths: TypeAlias = Sequence[Sequence[Document]]
"""Tokens of each document, for each row; rows of one microbatch have the same number of positions."""


class Documents(Sequence[Sequence[Document]]):
    """Documents of a microbatch: a sequence of at least one row, and tensors made on the CPU.

    Tensors are copied with the microbatch, so that masks are computed on the device without a
    synchronization. The class is neither a list nor a tuple, which FSDP2 would convert.
    """

    lengths: DocumentLengths
    boundaries: Tensor
    """[p + 1], int32: start of each segment in the flattened [b * s] positions, and end of the
    last. No segment is empty, which FlashAttention's backward does not support. Without
    prefix-shared pairs these are cumulative sequence lengths."""
    segments: Tensor | None
    """[2, p], int32: document and branch of each segment; branch 0 is a shared prefix or a plain
    document, 1 and 2 are answers. None without prefix-shared pairs."""
    longest: int
    """Tokens of the longest document, including both answers of a pair."""
    num_ranks: int
    """Ranks that compute the row together, each a part of the positions; documents are the whole row's."""

    def __init__(self, lengths: DocumentLengths, num_ranks: int = 1) -> None:
        self.lengths = lengths
        self.num_ranks = num_ranks
        self.longest = max(sum(segment_lengths([each])) for row in lengths for each in row)
        documents = [
            segments
            for row in lengths
            for document in row
            for segments in _without_empty_segments(document)
        ]
        sizes = list(chain.from_iterable(documents))
        self.boundaries = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        self.segments = None
        if len(sizes) > len(documents):
            pairs = [(i, branch) for i, part in enumerate(documents) for branch in range(len(part))]
            self.segments = torch.tensor(pairs, dtype=torch.int32).T.contiguous()

    @property
    def shape(self) -> tuple[int, int]:
        """Returns rows b and positions s."""
        return len(self.lengths), sum(segment_lengths(self.lengths[0]))

    def of_positions(self) -> tuple[Tensor, Tensor | None]:
        """Returns document and branch of each position, both [b, s] int32 on the device of the tensors.

        Documents are numbered over all rows. Branches are None without prefix-shared pairs. There
        is no device synchronization.
        """
        positions = torch.arange(
            self.shape[0] * self.shape[1], dtype=torch.int32, device=self.boundaries.device
        )
        segments = torch.searchsorted(self.boundaries[1:], positions, right=True, out_int32=True)
        if self.segments is None:
            return segments.view(self.shape), None
        documents, branches = self.segments.index_select(1, segments)
        return documents.view(self.shape), branches.view(self.shape)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        return self.lengths[index]

    def __eq__(self, other: object) -> bool:
        return self.lengths == (other.lengths if isinstance(other, Documents) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Documents({self.lengths})"


def segment_lengths(row: Sequence[Document]) -> list[int]:
    """Returns the tokens of each segment of a row."""
    parts = (document if isinstance(document, tuple) else (document,) for document in row)
    return list(chain.from_iterable(parts))


def _without_empty_segments(document: Document) -> Iterator[tuple[int, ...]]:
    """Yields equivalent documents of one or three segments, none of them empty."""
    prefix, *answers = document if isinstance(document, tuple) else (document,)
    if prefix and all(answers):
        yield (prefix, *answers)
    elif prefix:  # and at most one answer
        yield (prefix + sum(answers),)
    else:
        yield from ((answer,) for answer in answers if answer)


def _flatten(documents: Documents) -> tuple[list[Any], tuple[DocumentLengths, int, int]]:
    numbers = documents.lengths, documents.longest, documents.num_ranks
    return [documents.boundaries, documents.segments], numbers


def _unflatten(tensors: Any, numbers: tuple[DocumentLengths, int, int]) -> Documents:
    documents = Documents.__new__(Documents)
    documents.lengths, documents.longest, documents.num_ranks = numbers
    documents.boundaries, documents.segments = tensors
    return documents


# PyTorch's tree functions pin and copy its tensors with the microbatch.
register_pytree_node(Documents, _flatten, _unflatten)
