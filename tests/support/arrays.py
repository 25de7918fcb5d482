"""A covering array: every pair of what may change how a gradient is computed occurs in one row or more."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
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
BATCH_SIZES = (1, 2, 4)
SYNCS = ("each_microbatch", "last_microbatch")
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble")


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
    def world_size(self) -> int:
        """Ranks that it runs on."""
        return LAYOUTS[self.layout][0]

    @property
    def is_possible(self) -> bool:
        """Pipeline stages need torch 2.13."""
        return not self.layout.startswith("pp") or TorchVersion(torch.__version__) >= "2.13"

    @property
    def changes(self) -> dict[str, Any]:
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
]
"""One per way to train; these run without ``--all``."""
ROWS = [
    *FAST,
    Row("one", "untied", "least_padding", 4, "last_microbatch"),
    Row("one", "untied", "packed", 2, "last_microbatch"),
    Row("fsdp-2", "untied", "in_order", 2, "last_microbatch"),
    Row("fsdp-2", "tied", "least_padding", 1, "last_microbatch"),
    Row("fsdp-4", "untied", "packed", 2, "each_microbatch"),
    Row("fsdp-4", "tied", "least_padding", 4, "last_microbatch"),
    Row("fsdp-4", "tied", "in_order", 1, "last_microbatch"),
    Row("hsdp-2x2", "untied", "in_order", 1, "each_microbatch"),
    Row("hsdp-2x2", "tied", "packed", 4, "last_microbatch"),
    Row("hsdp-2x2", "untied", "least_padding", 2, "last_microbatch"),
    Row("tp-2", "untied", "least_padding", 4, "each_microbatch"),
    Row("tp-2", "untied", "packed", 1, "last_microbatch"),
    Row("tp-2", "untied", "in_order", 2, "last_microbatch"),
    Row("fsdp-2-tp-2", "untied", "in_order", 2, "each_microbatch"),
    Row("fsdp-2-tp-2", "untied", "packed", 4, "each_microbatch"),
    Row("fsdp-2-tp-2", "untied", "least_padding", 1, "last_microbatch"),
    Row("pp-2", "untied", "packed", 1, "GPipe"),
    Row("pp-2", "untied", "in_order", 2, "Interleaved1F1B"),
    Row("pp-2", "tied", "least_padding", 4, "InterleavedZeroBubble"),
    Row("pp-4", "untied", "packed", 1, "1F1B"),
    Row("pp-4", "untied", "in_order", 4, "1F1B"),
    Row("pp-4", "tied", "least_padding", 2, "GPipe"),
    Row("pp-2-fsdp-2", "tied", "in_order", 1, "1F1B"),
    Row("pp-2-fsdp-2", "untied", "least_padding", 2, "GPipe"),
    Row("pp-2-fsdp-2", "untied", "least_padding", 4, "Interleaved1F1B"),
    Row("pp-2-fsdp-2", "untied", "packed", 2, "InterleavedZeroBubble"),
    Row("pp-2-hsdp-2", "tied", "least_padding", 2, "1F1B"),
    Row("pp-2-hsdp-2", "untied", "in_order", 4, "GPipe"),
    Row("pp-2-hsdp-2", "tied", "packed", 1, "Interleaved1F1B"),
    Row("pp-2-hsdp-2", "untied", "in_order", 1, "InterleavedZeroBubble"),
]


def possible_rows() -> Iterator[Row]:
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


def missing_pairs() -> set[tuple[tuple[str, Any], ...]]:
    """Pairs of two factors' values that :data:`ROWS` lacks."""

    def pairs(rows: Any) -> set[tuple[tuple[str, Any], ...]]:
        return {pair for row in rows for pair in itertools.combinations(row._asdict().items(), 2)}

    return pairs(possible_rows()) - pairs(ROWS)
