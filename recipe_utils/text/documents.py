"""Document boundaries of packed rows, as numbers on the host and as tensors on the device.

One inequality keeps documents apart: a query q attends to a key k if ``k <= q < end[k]``.

Example: documents of 5, 3, 9 and 2 tokens have ``cu_seqlens`` [0, 5, 8, 17, 19]; ``end`` is 5 for the first five
positions, then 8, 17, 19. Query 6 attends to keys 5 and 6. Key 4 is before it, too, but ends at 5.

A prompt of 2 tokens with answers of 3 and 4, ``tree(2, 3, 4)``, has the segments [0, 2), [2, 5) and [5, 9). The
prompt ends with its last answer: ``end`` is 9, 5 and 9. Query 6 attends to the prompt (0, 1) and to its own answer
(5, 6), not to the other one (2 to 4, which end at 5), by the same inequality.

Shapes: b rows, s positions per row, p segments in all rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

Tree: TypeAlias = tuple[tuple[int, int], ...]
"""Segments of a tree in depth-first order: tokens of each, and tokens of it and all its descendants."""

Document: TypeAlias = int | Tree
"""Tokens of a document, or a tree of segments. A token attends to the earlier ones of its segment and
to all of the segment's ancestors, and continues their positions."""

DocumentLengths: TypeAlias = Sequence[Sequence[Document]]
"""Documents of each row, equally long in positions."""


class Chain(NamedTuple):
    """Segments of which each is the parent of the next: consecutive positions of a row."""

    start: int
    stop: int
    ancestors: tuple[tuple[int, int], ...]
    """Ranges of earlier positions that all of its positions attend to."""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Returns the positions of one sequence: those of the ancestors, then the chain's."""
        return [*self.ancestors, (self.start, self.stop)]


class Documents(Sequence[Sequence[Document]]):
    """Documents of a microbatch: a sequence of at least one row, and tensors made on the CPU.

    Tensors are copied with the microbatch, so that masks are computed on the device without a
    synchronization. The class is neither a list nor a tuple, which FSDP2 would convert.
    """

    lengths: DocumentLengths
    cu_seqlens: Tensor
    """[p + 1], int32: start of each segment in the flattened [b * s] positions, and end of the last. No segment is
    empty, which FlashAttention's backward does not support. Without trees these are cumulative sequence lengths."""
    ends: Tensor | None
    """[p], int32: end in its row of each segment's last descendant; None without trees."""
    max_seqlen: int
    """Tokens of the longest document, all segments of a tree included."""
    num_ranks: int
    """Ranks that compute the row together, each a share of the positions; documents are the whole row's."""

    def __init__(self, lengths: DocumentLengths, num_ranks: int = 1) -> None:
        self.lengths = lengths
        self.num_ranks = num_ranks
        self.max_seqlen = max(length_of(document) for row in lengths for document in row)
        segments = [span for row in lengths for span in spans(row)]
        sizes = [stop - start for start, stop, _ in segments]
        self.cu_seqlens = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        self.ends = None
        if any(end > stop for _, stop, end in segments):
            self.ends = torch.tensor([end for *_, end in segments], dtype=torch.int32)

    @property
    def shape(self) -> tuple[int, int]:
        """Returns rows b and positions s."""
        return len(self.lengths), sum(map(length_of, self.lengths[0]))

    def last_queries(self) -> Tensor:
        """Returns ``end`` of each position, [b, s] int32, on the device of the tensors without a synchronization."""
        num_rows, row_length = self.shape
        positions = torch.arange(num_rows * row_length, dtype=torch.int32, device=self.cu_seqlens.device)
        segments = torch.searchsorted(self.cu_seqlens[1:], positions, right=True, out_int32=True)
        if self.ends is not None:
            return self.ends[segments].view(self.shape)
        ends = self.cu_seqlens[1:][segments].view(self.shape)
        return ends - positions[::row_length, None]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        return self.lengths[index]

    def __eq__(self, other: object) -> bool:
        return self.lengths == (other.lengths if isinstance(other, Documents) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Documents({self.lengths})"


def tree(first: int, *children: Document) -> Tree:
    """Returns a segment with its children, numbers or trees."""
    below = [segment for child in children for segment in segments_of(child)]
    return ((first, first + sum(length for length, _ in below)), *below)


def segments_of(document: Document) -> Tree:
    """Returns the segments of a document."""
    return ((document, document),) if isinstance(document, int) else document


def length_of(document: Document) -> int:
    """Returns the positions of a document."""
    return sum(length for length, _ in segments_of(document))


def spans(row: Sequence[Document]) -> Iterator[tuple[int, int, int]]:
    """Yields start and end of each segment that is not empty, and the end of its last descendant."""
    start = 0
    for document in row:
        for length, reach in segments_of(document):
            if length:
                yield start, start + length, start + reach
            start += length


def chains(row: Sequence[Document]) -> Iterator[Chain]:
    """Yields the chains of a row, one for each leaf; a plain document is one without ancestors."""
    path: list[tuple[int, int, int]] = []  # segments down to the current one
    begins_chain = True
    for segment in spans(row):
        start, stop, end = segment
        # A leaf ended the chain before, so this segment is a child of one further up: neighbors there are one range.
        if begins_chain:
            while path and path[-1][2] <= start:
                path.pop()
            first, ancestors = start, list[tuple[int, int]]()
            for low, high, _ in path:
                if ancestors and ancestors[-1][1] == low:
                    low = ancestors.pop()[0]
                ancestors.append((low, high))
        path.append(segment)
        begins_chain = end == stop
        if begins_chain:
            yield Chain(first, stop, tuple(ancestors))


def _flatten(documents: Documents) -> tuple[list[Any], tuple[DocumentLengths, int, int]]:
    numbers = documents.lengths, documents.max_seqlen, documents.num_ranks
    return [documents.cu_seqlens, documents.ends], numbers


def _unflatten(tensors: Any, numbers: tuple[DocumentLengths, int, int]) -> Documents:
    documents = Documents.__new__(Documents)
    documents.lengths, documents.max_seqlen, documents.num_ranks = numbers
    documents.cu_seqlens, documents.ends = tensors
    return documents


# PyTorch's tree functions pin and copy its tensors with the microbatch.
register_pytree_node(Documents, _flatten, _unflatten)
