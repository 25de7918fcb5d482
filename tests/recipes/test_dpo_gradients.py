"""The gradient of every parameter is that of single pairs, in float64, on any layout."""

from contextlib import nullcontext

import pytest
import torch
from gradient_rows import CACHED, OFFLOADED, RECOMPUTED, Row, assert_exact, error_of_mutant, on_ranks
from recipe_runs import slow

from recipe_utils.models import frozen, runner
from recipe_utils.preference import pair_losses as preference
from recipe_utils.text import trees
from recipe_utils.text.collator import RowCollator
from recipe_utils.text.documents import Documents, length_of
from recipe_utils.update_steps.step import UpdateStep

PADDED, ONE_BY_ONE = ("least_padding", 2), ("in_order", 2, "last_microbatch")
PACKED, INTERLEAVED = ("packed", 1), ("packed", 1, "Interleaved1F1B")
APART = {"prefix_sharing": False}

FAST = [
    Row("one", "tied", *PACKED, "last_microbatch", "dpo + sft"),
    Row("fsdp-2", "untied", *ONE_BY_ONE, "ipo"),
    Row("fsdp-2", "untied", objective="normalized"),
    Row("pp-2", "tied", *PACKED, "1F1B", "dpo"),
    Row("fsdp-2", "dora", "packed", 2, None, "ipo", {**APART, "fsdp_reshard_after_forward": False}),
    Row("pp-2", "tied lora", "least_padding", 2, "Interleaved1F1B", "robust"),
    Row("one", "gemma3_text", objective="dpo"),
    Row("fsdp-2", "tied", objective="orpo"),
]
ROWS = [
    *FAST,
    # All losses and kinds of pairs with padded and with packed rows
    Row("one", "untied", *PADDED, None, "dpo"),
    Row("one", "tied", "packed", 2, None, "smoothed", APART),
    Row("one", "untied", *ONE_BY_ONE, "smoothed"),
    Row("one", "tied", *PACKED, None, "rso"),
    Row("one", "untied", *PADDED, None, "rso"),
    Row("one", "tied", "packed", 2, None, "ipo", APART),
    Row("one", "untied", *PACKED, None, "robust"),
    Row("one", "tied", *ONE_BY_ONE, "normalized"),
    Row("one", "untied", *PACKED, None, "simpo"),
    Row("one", "tied", *PADDED, None, "simpo"),
    Row("one", "tied lora", objective="ipo", changes=RECOMPUTED),
    Row("one", "lora", *ONE_BY_ONE, "dpo", CACHED),
    Row("one", "untied", *PADDED, None, "orpo"),
    # Layouts
    Row("fsdp-2", "tied", objective="rso", changes=OFFLOADED),
    Row("fsdp-2", "tied", *PADDED, None, "normalized", CACHED),
    Row("fsdp-4", "untied", *PADDED, None, "simpo", RECOMPUTED),
    Row("hsdp-2x2", "tied", *PACKED, "last_microbatch", "ipo"),
    Row("tp-2", "untied", objective="dpo + sft"),
    Row("fsdp-2-tp-2", "untied", *ONE_BY_ONE, "rso"),
    Row("pp-2", "untied", "packed", 2, "Interleaved1F1B", "dpo + sft", APART),
    Row("pp-2", "untied", "least_padding", 2, "GPipe", "ipo", OFFLOADED),
    Row("pp-2", "tied", *INTERLEAVED, "normalized", CACHED),
    Row("pp-2", "dora", *PACKED, None, "dpo + sft", CACHED),
    Row("pp-4", "untied", objective="smoothed"),
    Row("pp-2-fsdp-2", "tied", "in_order", 2, "Interleaved1F1B", "robust", CACHED),
    Row("pp-2-fsdp-2", "lora", *INTERLEAVED, "ipo"),
    Row("pp-2-hsdp-2", "untied", objective="normalized"),
    # Models of transformers
    *(Row("one", name, objective="ipo") for name in ("qwen3", "gpt_oss", "llama4_text", "gemma2")),
    *(Row("one", name, objective="ipo", changes=APART) for name in ("qwen3_moe", "gemma3_text")),
    Row("one", "cohere2", *PADDED, None, "ipo"),
    Row("one", "lfm2", objective="ipo"),
    Row("fsdp-2", "qwen3", objective="ipo"),
    *(Row("fsdp-2", name, objective="ipo", changes=RECOMPUTED) for name in ("gemma3_text", "gpt_oss")),
    Row("pp-2", "gemma3_text", objective="ipo"),
]  # fmt: skip


@on_ranks(FAST, ROWS)
def test_gradient_and_metrics_are_those_of_the_pairs_one_by_one(rows, weights_folder, tmp_path):
    assert_exact(rows, weights_folder, tmp_path)


# ---- Wrong recipes -----------------------------------------------------------------------------------


def rejected_sees_chosen(patches):
    attend = runner.attend_within_documents

    def one_document(_, args, kwargs):
        rows = kwargs["document_lengths"]
        plain = [list(map(length_of, row)) for row in rows]
        return args, {**kwargs, "document_lengths": Documents(plain)}

    def attend_to_both(decoder, *args):
        attend(decoder, *args)
        decoder.register_forward_pre_hook(one_document, with_kwargs=True, prepend=True)

    patches.setattr(runner, "attend_within_documents", attend_to_both)


def answers_summed_by_their_order_in_the_row(patches):
    sums_of = preference.sums_of_sequences

    def sums(of_targets, targets):
        _, numbers = sums_of(of_targets, targets)
        found = torch.segment_reduce(of_targets.double(), "sum", lengths=numbers.flatten(), unsafe=True, initial=0)
        return found.view(-1, 2), numbers

    patches.setattr(preference, "sums_of_sequences", sums)


def shared_targets_counted_for_chosen_alone(patches):
    patches.setattr(preference, "_of_answers", lambda of_sequences: of_sequences.sum(1))


def one_more_token_shared(patches):
    first = trees._first
    patches.setattr(trees, "_first", lambda flags: min(first(flags) + 1, len(flags)))


def pairs_of_one_rank(patches):
    patches.setattr(UpdateStep, "scale", lambda step, count: 1 / step.totals[count])


def dummy_counted_as_a_pair(patches):
    patches.setattr(RowCollator, "dummy", lambda self, sample: self.collate([sample])[0])


def reference_that_follows(patches):
    patches.setattr(frozen, "with_weights", lambda *_: nullcontext())


ONE = Row("one", "tied", objective="robust", changes={"max_tokens_per_microbatch": 100})
MUTANTS = {
    rejected_sees_chosen: ONE,
    shared_targets_counted_for_chosen_alone: ONE._replace(objective="dpo + sft"),
    answers_summed_by_their_order_in_the_row: ONE._replace(objective="dpo + sft"),
    one_more_token_shared: ONE,
    pairs_of_one_rank: ONE._replace(layout="fsdp-2"),
    # Its sample is of another update step, so losses by sample have no place for it.
    dummy_counted_as_a_pair: ONE._replace(
        layout="fsdp-4", changes={**APART, "max_tokens_per_microbatch": 100, "sample_losses": False}
    ),
    reference_that_follows: Row("pp-2", "tied lora", "in_order", 2, None, "robust"),
}


@pytest.mark.parametrize("mutate", [rejected_sees_chosen, *map(slow, list(MUTANTS)[1:])], ids=lambda m: m.__name__)
def test_a_wrong_recipe_misses_the_pairs(mutate, weights_folder, tmp_path):
    assert error_of_mutant(mutate, MUTANTS[mutate], weights_folder, tmp_path) > 0.05
