"""Rows of documents and trees, and which positions of a row are one sequence."""

from recipe_utils.text.documents import length_of, segments_of, tree

FOREST = [
    tree(7, tree(3, tree(1, tree(9, 4, 8), 2)), 5), 6, tree(4, 3, 9), 1, tree(1, 1, tree(2, 5, 1), 1),
]  # fmt: skip
"""Trees of up to five levels beside plain documents, with segments of one token."""


def sequences_of(row):
    """Positions in the row of each sequence: a plain document, or segments from a root to a leaf."""
    segments, start = [], 0
    for document in row:
        for length, reach in segments_of(document):
            segments.append((start, start + length, start + reach))
            start += length
    for begin, stop, end in segments:
        if begin < stop == end:
            seen = [(a, b) for a, b, last in segments if a <= begin < last]
            yield [position for a, b in seen for position in range(a, b)]


def mask_of(row):
    """Returns ``mask[q][k]``, True if position q attends to position k."""
    size = sum(map(length_of, row))
    seen = [[False] * size for _ in range(size)]
    for sequence in sequences_of(row):
        for i, q in enumerate(sequence):
            for k in sequence[: i + 1]:
                seen[q][k] = True
    return seen


def some_tree(size, draw):
    """Returns a tree of some positions: most are cut into a segment and up to four smaller children."""
    if size < 3 or draw.random() < 0.2:
        return size
    first = draw.randint(1, size - 2)
    children, left = [], size - first
    while left:
        part = left if len(children) == 3 else draw.randint(1, left)
        children.append(some_tree(part, draw))
        left -= part
    return tree(first, *children) if len(children) > 1 else size
