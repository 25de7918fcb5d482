"""Where the documents of packed rows begin and end: numbers for the host, and the same as tensors that travel.

Shapes: b rows, s slots (positions) per row, p parts of documents in all rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

Document: TypeAlias = int | tuple[int, int, int]
"""Tokens of a document. Three numbers are a prefix-shared pair: the shared prefix, the first answer and the second,
neither of which sees the other."""

DocumentLengths: TypeAlias = Sequence[Sequence[Document]]
"""Tokens of each document, for each row; rows of one microbatch have as many slots."""


class Documents(Sequence[Sequence[Document]]):
    """The documents of a microbatch: a sequence of its rows, and the same in tensors, made on the CPU.

    Tensors are copied with the microbatch, so that no mask has to wait for the device: what is computed
    from them there needs no number back. Neither list nor tuple: FSDP2 would make plain ones of it.

    Args:
        lengths: at least one row.
    """

    lengths: DocumentLengths
    boundaries: Tensor
    """[p + 1], int32: where each part begins in the flattened [b * s] slots, and where the last one ends. No
    part is empty: FlashAttention's backward does not stand documents without tokens. Where no document is a
    prefix-shared pair these are cumulative sequence lengths."""
    segments: Tensor | None
    """[2, p], int32: the document of each part, and its segment: 0 is the shared prefix, or a plain document,
    1 and 2 are the answers. None without prefix-shared pairs."""

    def __init__(self, lengths: DocumentLengths) -> None:
        self.lengths = lengths
        sizes: list[int] = []
        documents: list[int] = []
        ends: list[int] = []
        for row in lengths:
            for document in row:
                for part in _documents_of_one_look(document):
                    number = documents[-1] + 1 if documents else 0
                    for end, size in enumerate(part):
                        sizes.append(size)
                        documents.append(number)
                        ends.append(end)
        self.boundaries = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        self.segments = None
        if any(ends):
            self.segments = torch.tensor([documents, ends], dtype=torch.int32)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows b and slots s."""
        return len(self.lengths), sum(parts_of(self.lengths[0]))

    @property
    def longest(self) -> int:
        """Tokens of the longest document, both ends included."""
        return max(sum(parts_of([document])) for row in self.lengths for document in row)

    def of_positions(self) -> tuple[Tensor, Tensor | None]:
        """The document of each slot and its end, both [b, s] and int32, on the tensors' device.

        Documents are numbered over all rows. The ends are None where no document has two. Nobody waits for
        the device.
        """
        slots = torch.arange(
            self.shape[0] * self.shape[1], dtype=torch.int32, device=self.boundaries.device
        )
        parts = torch.searchsorted(self.boundaries[1:], slots, right=True, out_int32=True)
        if self.segments is None:
            return parts.view(self.shape), None
        documents, ends = self.segments.index_select(1, parts)
        return documents.view(self.shape), ends.view(self.shape)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        return self.lengths[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Documents):
            other = other.lengths
        return self.lengths == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Documents({self.lengths})"


def parts_of(row: Sequence[Document]) -> list[int]:
    """Returns the tokens of each document of a row; for prefix-shared pairs those of each segment."""
    return list(_parts_of(row))


def _parts_of(row: Sequence[Document]) -> Iterator[int]:
    for document in row:
        if isinstance(document, tuple):
            yield from document
        else:
            yield document


def _documents_of_one_look(document: Document) -> Iterator[tuple[int, ...]]:
    """Documents of the same meaning, of one part or of three, none of them empty."""
    shared, *ends = document if isinstance(document, tuple) else (document,)
    if shared and all(ends):
        yield (shared, *ends)
    elif shared:  # and one answer at most
        yield (shared + sum(ends),)
    else:
        yield from ((end,) for end in ends if end)


def _flatten(documents: Documents) -> tuple[list[Any], DocumentLengths]:
    return [documents.boundaries, documents.segments], documents.lengths


def _unflatten(tensors: Any, lengths: DocumentLengths) -> Documents:
    documents = Documents.__new__(Documents)
    documents.lengths = lengths
    documents.boundaries, documents.segments = tensors
    return documents


# As a tree of its tensors it is pinned and copied with the microbatch that it is part of.
register_pytree_node(Documents, _flatten, _unflatten)
