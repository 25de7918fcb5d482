"""Layouts of ranks, and covering arrays: every pair of two factors' values occurs in one row or more."""

import itertools
from typing import Any

TP_PLAN = {"tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}}
TP_2, PP_2, HSDP_2 = (
    {"tensor_parallel_dim": 2, **TP_PLAN},
    {"pipeline_parallel_dim": 2},
    {"data_parallel_replicate_dim": 2},
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, dimensions
    "one": (1, {}),
    "fsdp-2": (2, {}),
    "fsdp-3": (3, {}),  # their shares of 16 samples are 6, 5 and 5
    "fsdp-4": (4, {}),
    "hsdp-2x2": (4, HSDP_2),
    "tp-2": (2, TP_2),
    "fsdp-2-tp-2": (4, TP_2),
    "pp-2": (2, PP_2),
    "pp-4": (4, {"pipeline_parallel_dim": 4}),
    "pp-2-fsdp-2": (4, PP_2),
    "pp-2-hsdp-2": (4, {**PP_2, **HSDP_2}),
}


def pairs_of(row):
    """Returns pairs of two factors' values in a row."""
    factors = [each for each in row._asdict().items() if not isinstance(each[1], dict)]
    return set(itertools.combinations(factors, 2))


def covering_array(first, possible, items_of=pairs_of):
    """Returns ``first``, and greedily few more until every item that is possible occurs."""
    rows, items = list(first), [items_of(row) for row in possible]
    missing = set().union(*items).difference(*map(items_of, rows))
    while missing:
        best = max(range(len(items)), key=lambda i: len(missing & items[i]))
        rows.append(possible[best])
        missing -= items[best]
    return rows
