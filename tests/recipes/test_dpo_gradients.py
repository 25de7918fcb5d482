"""The gradient of every parameter is that of its pairs one by one, in float64, whatever the layout."""

from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import arrays
import big_batch
import big_batch_of_pairs
import pytest
import tiny
import torch
from big_batch import TOLERANCE
from big_batch_of_pairs import NUM_PAIRS, PAIRS_PER_STEP
from distributed_runs import run_distributed
from recipe_runs import (
    DPO,
    recipe_class,
    run_mutant_recording_gradients,
    run_recording_gradients_and_metrics,
    with_adapters,
)

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.data.pairs.collator import PairCollator
from recipe_utils.data.text.documents import Documents
from recipe_utils.loss import preference
from recipe_utils.model.frozen import model as frozen_model

TORCHTUNE, OURS = "torchtune.rlhf.loss", "recipe_utils.loss.preference"
LOSSES = {
    "dpo": {"_component_": f"{TORCHTUNE}.DPOLoss", "beta": 0.3},
    "smoothed": {"_component_": f"{TORCHTUNE}.DPOLoss", "beta": 0.3, "label_smoothing": 0.2},
    "rso": {"_component_": f"{TORCHTUNE}.RSOLoss", "gamma": 0.02},
    "ipo": {"_component_": f"{OURS}.IPOLoss", "tau": 0.3},
    "robust": {"_component_": f"{OURS}.RobustDPOLoss", "beta": 0.3, "label_smoothing": 0.2},
    "normalized": {"_component_": f"{OURS}.NormalizedDPOLoss", "beta": 3.0},
    "simpo": {"_component_": f"{OURS}.SimPOLoss", "beta": 2.0, "gamma": 0.5},
}
COMBINATIONS = [  # kind of pairs, loss, weight of the SFT term
    ("masked", "dpo", 0.0),
    ("multi_turn", "dpo", 0.7),
    ("train_on_input", "smoothed", 0.0),
    ("nothing_common", "rso", 0.0),
    ("alike_beginnings", "ipo", 0.3),
    ("multi_turn", "robust", 0.0),
    ("alike_beginnings", "normalized", 0.0),
    ("masked", "simpo", 0.2),
]
PLANS = [
    {"microbatching": "in_order", "batch_size": 2, "gradient_sync": "last_microbatch"},
    {"microbatching": "least_padding", "batch_size": 2},
    {"microbatching": "packed", "batch_size": 1, "gradient_sync": "last_microbatch"},
    {"microbatching": "packed", "batch_size": 2, "prefix_sharing": False},
]
TIED, UNTIED = tiny.DEEP_MODEL, tiny.DEEP_UNTIED_MODEL
MODELS = {
    "tied": TIED,
    "untied": UNTIED,
    "lora": tiny.adapted(TIED),
    "untied lora": tiny.adapted(UNTIED),
    "dora": tiny.adapted(UNTIED, use_dora=True),
}
INTERLEAVED = {"pipeline_parallel_schedule": "Interleaved1F1B"}
OFFLOADED, CACHED = {"reference": "offload"}, {"reference": "cached"}
RECOMPUTED = {"enable_activation_checkpointing": True}


class Row(NamedTuple):
    """One training; indices of COMBINATIONS and PLANS."""

    layout: str
    model: str
    combination: int
    plan: int
    changes: dict[str, Any] = {}  # noqa: RUF012


FAST = [
    Row("one", "tied", 1, 2),
    Row("fsdp-2", "untied", 4, 0),
    Row("pp-2", "tied", 0, 2),
    Row("pp-2", "lora", 5, 1, INTERLEAVED),
]
ROWS = [
    *FAST,
    # All losses and kinds of pairs with padded and with packed rows
    *(Row("one", "untied" if i % 2 else "tied", i, (i + 1) % 4) for i in range(8)),
    *(Row("one", "tied" if i % 2 else "untied", i, (i + 3) % 4) for i in range(8)),
    Row("one", "lora", 4, 2, RECOMPUTED),
    Row("one", "untied lora", 0, 0, CACHED),
    Row("fsdp-2", "tied", 3, 2, OFFLOADED),
    Row("fsdp-2", "tied", 6, 1, CACHED),
    Row("fsdp-2", "dora", 4, 3),
    Row("fsdp-2", "untied lora", 2, 2, RECOMPUTED),
    Row("fsdp-4", "tied", 5, 2),
    Row("fsdp-4", "untied", 7, 1, RECOMPUTED),
    Row("hsdp-2x2", "untied", 2, 2),
    Row("hsdp-2x2", "tied", 4, 0),
    Row("tp-2", "untied", 1, 2),
    Row("tp-2", "untied", 6, 1),
    Row("fsdp-2-tp-2", "untied", 3, 3),
    Row("fsdp-2-tp-2", "untied", 0, 0),
    Row("pp-2", "untied", 1, 3, INTERLEAVED),
    Row("pp-2", "tied", 7, 0, INTERLEAVED),
    Row("pp-2", "untied", 4, 1, {"pipeline_parallel_schedule": "GPipe", **OFFLOADED}),
    Row("pp-2", "tied", 6, 2, {**INTERLEAVED, **CACHED}),
    Row("pp-2", "untied lora", 3, 0),
    Row("pp-2", "dora", 1, 2, CACHED),
    Row("pp-2", "lora", 2, 3, {**INTERLEAVED, **CACHED}),
    Row("pp-4", "untied", 2, 2),
    Row("pp-2-fsdp-2", "tied", 0, 2),
    Row("pp-2-fsdp-2", "untied", 1, 1, INTERLEAVED),
    Row("pp-2-fsdp-2", "tied", 5, 0, {**INTERLEAVED, **CACHED}),
    Row("pp-2-fsdp-2", "untied lora", 4, 2),
    Row("pp-2-fsdp-2", "lora", 3, 3, INTERLEAVED),
    Row("pp-2-hsdp-2", "untied", 6, 2),
]


@cache
def reference(combination, model):
    kind, loss, weight = COMBINATIONS[combination]
    return big_batch_of_pairs.reference_of_steps(MODELS[model], kind, LOSSES[loss], weight)


@pytest.fixture
def config_of(tiny_dpo_config, tmp_path):
    """Makes the config of a row."""

    def make(row):
        kind, loss, weight = COMBINATIONS[row.combination]
        data = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": NUM_PAIRS, "kind": kind}
        config = tiny_dpo_config(
            model=MODELS[row.model],
            dataset=data,
            loss=LOSSES[loss],
            sft_loss_weight=weight,
            global_batch_size=PAIRS_PER_STEP,
            gradient_accumulation_steps=...,
            **PLANS[row.plan],
            **arrays.LAYOUTS[row.layout][1],
            **row.changes,
        )
        return with_adapters(config, tmp_path) if "lora_rank" in MODELS[row.model] else config

    return make


@arrays.on_ranks(FAST, ROWS)
def test_gradient_and_metrics_are_those_of_the_pairs_one_by_one(rows, world_size, config_of):
    rows = arrays.rows_on(rows, world_size)
    configs = [config_of(row) for row in rows]
    ranks = run_distributed(
        run_recording_gradients_and_metrics, world_size, configs, DPO, timeout_seconds=300
    )
    for row, *of_ranks in zip(rows, *ranks, strict=True):
        expected = reference(row.combination, row.model)
        assert len(expected) == 3
        for step, (metrics, gradients) in enumerate(expected):
            assert set().union(*(found[step] for found, _ in of_ranks)) == gradients.keys(), row
            assert max(big_batch.error(f[step], gradients) for f, _ in of_ranks) < TOLERANCE, row
            _, logged = of_ranks[0]
            for name, value in metrics.items():
                assert logged[step][name] == pytest.approx(value, rel=1e-9, abs=1e-9), (row, name)


# ---- Wrong recipes -----------------------------------------------------------------------------------


def rejected_sees_chosen(patches):
    names = recipe_class(recipe=DPO).setup.__globals__
    attend = names["attend_within_documents"]

    def one_document(_, args, kwargs):
        rows = kwargs["document_lengths"]
        plain = [[sum(d) if isinstance(d, tuple) else d for d in row] for row in rows]
        return args, {**kwargs, "document_lengths": Documents(plain)}

    def attend_to_both(decoder, *args):
        attend(decoder, *args)
        decoder.register_forward_pre_hook(one_document, with_kwargs=True, prepend=True)

    patches.setitem(names, "attend_within_documents", attend_to_both)


def shared_targets_counted_for_chosen_alone(patches):
    def sums(of_tokens, pairs):
        lengths = pairs.segment_lengths
        found = torch.segment_reduce(of_tokens.double(), "sum", lengths=lengths, initial=0)
        shared, chosen, rejected = found.view(-1, 3).unbind(1)
        return torch.stack([shared + chosen, rejected])

    patches.setattr(preference, "sums_of_answers", sums)


def one_more_token_shared(patches):
    prepare = PairCollator.prepare

    def share_one_more(self, *args):
        pair = prepare(self, *args)
        return {**pair, "num_shared": pair["num_shared"] + 1}

    patches.setattr(PairCollator, "prepare", share_one_more)


def pairs_of_one_rank(patches):
    patches.setattr(UpdateStep, "scale", lambda step, count: 1 / step.totals[count])


def dummy_counted_as_a_pair(patches):
    patches.setattr(PairCollator, "dummy", lambda self, sample: self.collate([sample]))


def reference_with_adapters(patches):
    patches.setattr(frozen_model, "disable_adapter", lambda _: nullcontext())


SHORT_ROWS = {"max_tokens_per_microbatch": 100}
MUTANTS = {
    rejected_sees_chosen: Row("one", "tied", 5, 2, SHORT_ROWS),
    shared_targets_counted_for_chosen_alone: Row("one", "tied", 1, 2, SHORT_ROWS),
    one_more_token_shared: Row("one", "tied", 5, 2, SHORT_ROWS),
    pairs_of_one_rank: Row("fsdp-2", "tied", 5, 2, SHORT_ROWS),
    dummy_counted_as_a_pair: Row("fsdp-4", "tied", 5, 3, SHORT_ROWS),
    reference_with_adapters: Row("pp-2", "lora", 5, 0),
}


@pytest.mark.parametrize(
    "mutate",
    [
        pytest.param(m, id=m.__name__, marks=[] if m is rejected_sees_chosen else pytest.mark.slow)
        for m in MUTANTS
    ],
)
def test_a_wrong_recipe_misses_the_pairs(mutate, config_of):
    row = MUTANTS[mutate]
    world_size = arrays.LAYOUTS[row.layout][0]
    found = run_distributed(run_mutant_recording_gradients, world_size, mutate, config_of(row), DPO)
    expected = reference(row.combination, row.model)
    errors = [
        big_batch.error(step, of_step)
        for gradients in found
        for step, (_, of_step) in zip(gradients, expected, strict=True)
    ]
    assert max(errors) > 0.05
