"""A covering array: every pair of what may change how a gradient is computed occurs in one row or more."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from recipe_runs import slow
from torch.torch_version import TorchVersion

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
MODELS = ("tied", "untied")
PLANS = ("in_order", "least_padding", "packed")
BATCH_SIZES = (1, 3, 4)  # 3: the last microbatch of a share is smaller
SYNCS = ("each_microbatch", "last_microbatch")
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble")


def rows_on(rows, world_size):
    """Those whose layout has that many ranks, without pipeline stages before torch 2.13."""
    has_pipelines = TorchVersion(torch.__version__) >= "2.13"
    on = [row for row in rows if LAYOUTS[row.layout][0] == world_size]
    return [row for row in on if has_pipelines or not row.layout.startswith("pp")]


def on_ranks(fast, rows):
    """Parametrizes a test with rows and the number of ranks of their layouts: ``fast`` ones, then the rest."""
    rest = [row for row in rows if row not in fast]
    sizes_of_fast, sizes = (
        sorted({LAYOUTS[row.layout][0] for row in each}) for each in (fast, rest)
    )
    return pytest.mark.parametrize(
        ("rows", "world_size"),
        [*((fast, size) for size in sizes_of_fast), *(slow(rest, size) for size in sizes)],
        ids=[*(f"fast-{size}" for size in sizes_of_fast), *(f"rest-{size}" for size in sizes)],
    )


class Row(NamedTuple):
    """One training whose gradients are compared."""

    layout: str
    model: str
    """Whether the output shares the embeddings' weight."""
    plan: str
    batch_size: int
    """Samples per microbatch, or tokens of as many rows where a plan goes by tokens."""
    order: str
    """When gradients are reduced; the schedule where there are pipeline stages."""

    @property
    def world_size(self):
        """Ranks that it runs on."""
        return LAYOUTS[self.layout][0]

    @property
    def changes(self):
        """Keys of the config, but the model's."""
        by_schedule = "pipeline_parallel_dim" in LAYOUTS[self.layout][1]
        return {
            **LAYOUTS[self.layout][1],
            "microbatching": self.plan,
            "batch_size": self.batch_size,
            "pipeline_parallel_schedule" if by_schedule else "gradient_sync": self.order,
        }


FAST = [
    Row("one", "tied", "in_order", 1, "each_microbatch"),
    Row("fsdp-2", "tied", "packed", 4, "each_microbatch"),
    Row("pp-2", "tied", "in_order", 4, "1F1B"),
    Row("fsdp-3", "untied", "in_order", 1, "last_microbatch"),
]
"""One per way to train; these run without ``--all``."""


def possible_rows():
    """All combinations but those that the recipes refuse."""
    for layout, *factors in itertools.product(
        LAYOUTS, MODELS, PLANS, BATCH_SIZES, [*SYNCS, *SCHEDULES]
    ):
        row = Row(layout, *factors)
        is_split = row.layout.startswith("pp")
        refused = [
            is_split != (row.order in SCHEDULES),
            "tp" in row.layout and row.model == "tied",  # torchtune's plans split no tied output
            row.layout == "pp-4" and row.order.startswith("Interleaved"),  # 8 stages of 4 layers
        ]
        if not any(refused):
            yield row


def pairs_of(row):
    """Pairs of two factors' values in a row."""
    return set(itertools.combinations(row._asdict().items(), 2))


def covering_array(first, possible, items_of=pairs_of):
    """``first``, and greedily few more until every item that is possible occurs."""
    rows = list(first)
    missing = set().union(*map(items_of, possible)).difference(*map(items_of, rows))
    while missing:
        rows.append(max(possible, key=lambda row: len(missing & items_of(row))))
        missing -= items_of(rows[-1])
    return rows


ROWS = covering_array(FAST, list(possible_rows()))
