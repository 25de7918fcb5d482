"""Queries, keys and values of a row's chains of segments.

Shapes: b rows, h heads, s positions of a row, n of a chain, m of a chain and its ancestors, d head width.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from recipe_utils.data.text.documents import Document, chains, spans


def parts_of_chains(
    row: Sequence[Document], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Yields queries [b, h, n, d] of each chain, keys and values [b, h, m, d], and its part of ``mask``.

    ``mask`` is [b, h, s, s], its parts are [b, h, n, m].
    """
    found, segments = list(chains(row)), list(spans(row))
    starts = [start for start, *_ in segments]
    # split and cat, because the backward of a slice fills a gradient of the whole row.
    queries = q.split([chain.stop - chain.start for chain in found], dim=2)
    keys, values = (each.split([b - a for a, b, _ in segments], dim=2) for each in (k, v))
    for chain, of_chain in zip(found, queries, strict=True):
        bounds = [
            (bisect_left(starts, low), bisect_left(starts, high)) for low, high in chain.ranges
        ]
        seen = [index for bound in bounds for index in range(*bound)]
        of_keys, of_values = (
            each[seen[0]] if len(seen) == 1 else torch.cat([each[i] for i in seen], dim=2)
            for each in (keys, values)
        )
        of_mask = None
        if mask is not None:
            rows = mask[:, :, chain.start : chain.stop]
            of_mask = torch.cat([rows[..., low:high] for low, high in chain.ranges], dim=3)
        yield of_chain, of_keys, of_values, of_mask


def mask_of_chain(q: Tensor, k: Tensor, window: int | None = None) -> Tensor:
    """Returns the causal mask [1, 1, n, m] of a chain; with a ``window`` of so many positions."""
    n, m = q.size(2), k.size(2)
    seen = torch.ones(1, 1, n, m, dtype=torch.bool, device=q.device).tril(m - n)
    return seen if window is None else seen.triu(m - n + 1 - window)
