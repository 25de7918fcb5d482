"""The gradient of every parameter is that of one big batch, in float64, on any layout."""

import dataclasses
import itertools

import pytest
import tiny
import torch
import torch.nn.functional as F
from arrays import LAYOUTS, covering_array
from distributed_runs import run_distributed
from gradient_rows import (
    RECOMPUTED,
    SCHEDULES,
    SYNCS,
    Row,
    assert_exact,
    case_of,
    error_of_mutant,
    on_ranks,
    run_rows,
    spanning,
)
from recipe_runs import recipe_class, slow

from recipe_utils.models.attention import attend, exchange
from recipe_utils.models.pipeline import microbatches as pipeline
from recipe_utils.models.runner import Whole
from recipe_utils.parallel import settings as rank_settings
from recipe_utils.text import collator
from recipe_utils.text.limits import ModelLimits
from recipe_utils.update_steps.step import UpdateStep

FAST = [  # one per way to train
    Row("one", "tied", "in_order", 1, "each_microbatch"),
    Row("fsdp-2", "dora", "packed", 4, "each_microbatch", "tokens"),
    Row("fsdp-2", "tied", "packed", changes=spanning(2)),
    Row("fsdp-3", "untied", "in_order", 1, "last_microbatch", "datasets"),
    Row("pp-2", "tied", "in_order", 4, "1F1B", "tokens"),
    Row("one", "tied", "packed", 4, objective="targets"),
    Row("fsdp-2", "untied", "in_order", 2, objective="targets"),
    Row("fsdp-2", "untied", objective="targets and datasets", changes=spanning(2)),
    Row("pp-2", "lora", "in_order", 1, "1F1B"),
    *(Row("one", name) for name in ("qwen3", "gpt_oss", "lfm2", "qwen2_5_vl")),
    Row("fsdp-2", "lfm2", changes=RECOMPUTED),
    Row("fsdp-2", "qwen3", changes=spanning(2)),
    Row("pp-2", "gemma3_text"),  # its output is tied
]


def possible_rows():
    """Yields all combinations except those that the recipe refuses."""
    models = ("tied", "untied", "lora", "dora")
    plans = ("in_order", "least_padding", "packed")
    sizes = (1, 3, 4)  # 3: the last microbatch of a share is smaller
    layouts = [layout for layout in LAYOUTS if layout != "fsdp-3"]
    factors = layouts, models, plans, sizes, [*SYNCS, *SCHEDULES], ("ce", "tokens", "datasets")
    for layout, model, *others in itertools.product(*factors):
        row = Row(layout, model, *others)
        refused = [
            layout.startswith("pp") != (row.order in SCHEDULES),
            "tp" in layout and model != "untied",  # torchtune's plans split no tied output
            layout == "pp-4" and row.order.startswith("Interleaved"),  # 8 stages of 4 layers
        ]
        if not any(refused):
            yield row


ROWS = [
    *covering_array(FAST, list(possible_rows())),
    Row("one", "tied lora", "in_order", changes=RECOMPUTED),
    Row("fsdp-2", "lora", "in_order", 2, changes={"custom_sharded_layers": ["tok_embeddings", "output"]}),
    Row("pp-2", "tied", "least_padding", 4, "1F1B", "targets"),
    Row("hsdp-2x2", "tied", "least_padding", 4, objective="targets and tokens"),
    Row("fsdp-4", "untied", objective="targets", changes=spanning(4)),
    # Rows of several ranks
    Row("fsdp-4", "tied", changes=spanning(4, **RECOMPUTED)),
    Row("fsdp-4", "untied", changes=spanning(4, fsdp_reshard_after_forward=False)),
    Row("fsdp-4", "4 keys", changes=spanning(4)),
    Row("fsdp-4", "1 key", order="last_microbatch", changes=spanning(4)),
    Row("fsdp-4", "tied lora", objective="tokens", changes=spanning(4, **RECOMPUTED)),
    Row("fsdp-4", "dora", objective="datasets", changes=spanning(2)),
    Row("hsdp-2x2", "tied", order="last_microbatch", changes=spanning(4)),
    Row("fsdp-2-tp-2", "untied", changes=spanning(2)),
    Row("pp-2-fsdp-2", "tied", order="GPipe", changes=spanning(2)),
    Row("pp-2-fsdp-2", "untied", order="InterleavedZeroBubble", changes=spanning(2)),
    # Models of transformers
    Row("one", "gemma3_text", "least_padding", 4),
    Row("one", "qwen3_moe", "packed", 4, changes=RECOMPUTED),
    Row("one", "lfm2", "in_order", 2),
    Row("fsdp-2", "qwen3", changes={"ac_mode": "selective", "ac_option": 2}),
    Row("fsdp-2", "gpt_oss", "packed", 4),
    Row("fsdp-2", "gemma3_text", "least_padding", 4),
    Row("fsdp-2", "qwen3_moe"),
    Row("fsdp-4", "deepseek_v3", changes=spanning(2, **RECOMPUTED)),
    Row("hsdp-2x2", "gemma3_text", changes=spanning(2)),
    Row("hsdp-2x2", "gpt_oss", changes=RECOMPUTED),
    Row("hsdp-2x2", "qwen3_moe", changes=spanning(2)),
    Row("pp-2", "gemma2"),  # its tail is more than the output layer
    Row("pp-2", "qwen3", "in_order", 2, "Interleaved1F1B"),
    Row("pp-2", "gpt_oss"),
    Row("pp-2", "lfm2", "in_order", 2, "Interleaved1F1B"),
    Row("pp-2-fsdp-2", "gemma3_text", order="InterleavedZeroBubble", changes=RECOMPUTED),
    # With a tower that text does not train
    Row("fsdp-2", "gemma3", changes=RECOMPUTED),
    Row("pp-2-fsdp-2", "gemma3"),
    Row("fsdp-2", "llava", changes=RECOMPUTED),
    Row("pp-2", "qwen2_5_vl"),
    Row("pp-2-fsdp-2", "lfm2"),
]  # fmt: skip


@on_ranks(FAST, ROWS)
def test_gradient_and_metrics_are_those_of_one_big_batch(rows, weights_folder, tmp_path):
    """Samples have uneven numbers of targets, and some microbatches have none."""
    assert_exact(rows, weights_folder, tmp_path)


# ---- Wrong recipes -----------------------------------------------------------------------------------


def weights_normalized_by_microbatch(patches):
    """Normalizes weights of datasets over the targets of each microbatch, not of the update step."""
    sums = Whole.sums

    def sums_by_microbatch(self, m):
        number = m.counts.get("target_tokens", 0) or 1
        return sums(self, m) * (number / (m.counts.get("weights") or number))

    patches.setattr(Whole, "sums", sums_by_microbatch)
    patches.setattr(UpdateStep, "scale", lambda self, _: self.dp_degree / self.totals["target_tokens"])


def a_mean_of_means(patches):
    sums = Whole.sums
    patches.setattr(UpdateStep, "scale", lambda *_: 1 / 8)
    patches.setattr(Whole, "sums", lambda self, m: sums(self, m) / max(m.counts["target_tokens"], 1))


def scale_of_one_rank(patches):
    patches.setattr(UpdateStep, "scale", lambda step, count: 1 / step.totals[count])


def documents_seen_by_each_other(patches):
    def of_row(q, k, v, *_):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    patches.setattr(attend, "by_document", of_row)


def a_microbatch_left_out(patches):
    run = pipeline.Pipeline.forward_backward
    patches.setattr(
        pipeline.Pipeline, "forward_backward", lambda self, microbatches, *rest: run(self, microbatches[1:], *rest)
    )


def gradients_of_tied_copies_not_summed(patches):
    run = pipeline.Pipeline.forward_backward

    def forward_backward(self, *arguments):
        self._tied_weights = []
        return run(self, *arguments)

    patches.setattr(pipeline.Pipeline, "forward_backward", forward_backward)


class ScalingSchedule(pipeline.SCHEDULES["1F1B"]):
    """Schedule that divides gradients by the number of microbatches, PyTorch's default."""

    def __init__(self, *args, scale_grads, **kwargs):
        super().__init__(*args, scale_grads=True, **kwargs)


def gradients_scaled_by_the_schedule(patches):
    patches.setitem(pipeline.SCHEDULES, "1F1B", ScalingSchedule)


def tensor_parallel_ranks_counted_twice(patches):
    leads = lambda join: lambda *args: dataclasses.replace(join(*args), is_dp_leader=True)  # noqa: E731
    patches.setattr(rank_settings, "join_ranks", leads(rank_settings.join_ranks))


def no_sync_at_the_last_microbatch(patches):
    never = lambda sync: lambda model, _, mode: sync(model, False, "last_microbatch")  # noqa: E731
    names = recipe_class().update.__globals__
    patches.setitem(names, "gradient_sync", never(names["gradient_sync"]))


def weights_of_targets_not_counted(patches):
    patches.setattr(UpdateStep, "scale", lambda self, _: self.dp_degree / self.totals["target_tokens"])


# Of rows that several ranks compute


def change_shares(patches, change):
    """Has ``change`` make a share from that share and the whole row."""
    cut = collator.share_of_row
    patches.setattr(collator, "share_of_row", lambda row, *args: change(cut(row, *args), row))


def labels_shifted_after_the_cut(patches):
    def change(own, row):
        tokens = own.inputs["tokens"]
        labels = tokens.roll(-1).where(own.targets.labels != tiny.IGNORE, tiny.IGNORE)
        return type(own)(own.inputs, own.targets._replace(labels=labels), own.counts)

    change_shares(patches, change)


def positions_restarted_in_each_share(patches):
    def change(own, row):
        positions = torch.arange(own.inputs["tokens"].numel()).unsqueeze(0)
        return type(own)({**own.inputs, "input_pos": positions}, own.targets, own.counts)

    change_shares(patches, change)


def targets_counted_on_each_rank(patches):
    change_shares(patches, lambda own, row: type(own)(own.inputs, own.targets, row.counts))


def no_exchange_in_the_backward(patches):
    backward = staticmethod(lambda ctx, grad: (grad, None))
    patches.setattr(exchange._AllToAll, "backward", backward)


def rows_not_cut(patches):
    change_shares(patches, lambda _, row: row)


def shares_padded(patches):
    patches.setattr(ModelLimits, "multiple_of_packed_rows", lambda *_, **__: 4)


ONE, TWO = Row("one", "untied", "in_order", 2), Row("fsdp-2", "untied", "in_order", 2)
STAGES = Row("pp-2", "tied", "in_order", 2, changes={"max_steps_per_epoch": 1})
SHARES = FAST[2]
MUTANTS = {
    a_mean_of_means: ONE,
    scale_of_one_rank: TWO,
    documents_seen_by_each_other: Row("one", "untied"),
    labels_shifted_after_the_cut: SHARES,
    # slow
    weights_normalized_by_microbatch: ONE._replace(objective="tokens"),
    weights_of_targets_not_counted: ONE._replace(objective="targets"),
    tensor_parallel_ranks_counted_twice: Row("tp-2", "untied", "in_order", 2),
    a_microbatch_left_out: STAGES,
    gradients_of_tied_copies_not_summed: STAGES,
    gradients_scaled_by_the_schedule: STAGES,
    positions_restarted_in_each_share: SHARES,
    targets_counted_on_each_rank: SHARES,
    no_exchange_in_the_backward: SHARES,
    rows_not_cut: SHARES,
}


@pytest.mark.parametrize(
    "mutate", [*list(MUTANTS)[:4], *map(slow, list(MUTANTS)[4:])], ids=lambda mutate: mutate.__name__
)
def test_a_wrong_recipe_misses_the_big_batch(mutate, weights_folder, tmp_path):
    assert error_of_mutant(mutate, MUTANTS[mutate], weights_folder, tmp_path) > 1e-2


@pytest.mark.slow
def test_padded_shares_are_exact(weights_folder, tmp_path):
    """Rows are padded on CUDA, and where they have few lengths."""
    assert error_of_mutant(shares_padded, SHARES, weights_folder, tmp_path) < 1e-9


@pytest.mark.slow
def test_without_a_sync_at_the_last_microbatch_gradients_are_missing(weights_folder, tmp_path):
    case = case_of(TWO, weights_folder, tmp_path)
    mutate = no_sync_at_the_last_microbatch
    found = run_distributed(run_rows, 2, [case], mutate, expect_failures=True)
    assert all("grad" in each for each in found)
