"""Pairs with decoders of transformers: shared prefixes are exact, in windows and chunks too, or refused by name."""

import pytest
import tiny
from big_batch import TOLERANCE, error
from big_batch_of_pairs import PAIRS_PER_STEP, metrics_and_gradients
from decoder_types import tiny_config_of
from distributed_runs import run_distributed
from recipe_runs import DPO, refusal, slow
from tiny_transformers import Plain, gradients_in_float64, save_tiny

from recipe_utils.data.loader.sampler import epoch_permutation
from recipe_utils.model.transformers import documents, probe

NUM_PAIRS = 9
SHARED, PACKED, PADDED = (
    {"microbatching": "packed"},
    {"microbatching": "packed", "prefix_sharing": False},
    {"microbatching": "least_padding"},
)
RECOMPUTED = {"enable_activation_checkpointing": True}
LOSS = {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.3}


@pytest.fixture
def config_of(tiny_dpo_config, tmp_path):
    """Makes the config of a policy and a reference of a type."""

    def make(model_type, **changes):
        reference = save_tiny(tmp_path / "reference", model_type, seed=1)
        return tiny_dpo_config(
            **save_tiny(tmp_path / "policy", model_type),
            ref_checkpointer=reference["checkpointer"],
            dataset={
                "_component_": "tiny.tiny_pair_dataset",
                "num_pairs": NUM_PAIRS,
                "kind": "alike_beginnings",
            },
            loss=LOSS,
            batch_size=4,
            global_batch_size=PAIRS_PER_STEP,
            gradient_accumulation_steps=...,
            **changes,
        )

    return make


def one_by_one(folder):
    """Gradients of the update steps, with a forward of transformers for each side."""
    models = [Plain(folder / name) for name in ("policy", "reference")]
    pairs = tiny.make_pairs(NUM_PAIRS, "alike_beginnings")
    order = epoch_permutation(NUM_PAIRS, epoch=0, shuffle=True).tolist()
    steps = order[:PAIRS_PER_STEP], order[PAIRS_PER_STEP:]
    with probe.DoublePrecision():
        return [metrics_and_gradients(*models, [pairs[i] for i in s], LOSS)[1] for s in steps]


TYPES = ("qwen3", "gemma3_text", "gpt_oss", "llama4_text", "qwen3_moe", "gemma2", "cohere2")
ROWS = [
    *((t, 1, (SHARED, PACKED, PADDED)) for t in TYPES),
    *((t, 1, ({**SHARED, **RECOMPUTED},)) for t in ("gemma3_text", "gpt_oss")),
    *((t, 2, (SHARED, {**SHARED, **RECOMPUTED})) for t in ("gemma3_text", "gpt_oss")),
    ("gemma3_text", 2, ({**SHARED, "pipeline_parallel_dim": 2},)),
]


@pytest.mark.parametrize(
    ("model_type", "world_size", "plans"),
    [row if row in ROWS[1:2] else slow(*row) for row in ROWS],
)
def test_gradients_of_pairs_are_those_of_their_sides(
    model_type, world_size, plans, config_of, tmp_path
):
    configs = [config_of(model_type, **plan) for plan in plans]
    expected = one_by_one(tmp_path)
    for gradients in run_distributed(gradients_in_float64, world_size, configs, DPO):
        for plan, found in zip(plans, gradients, strict=True):
            assert len(found) == len(expected) == 2
            assert all(map(dict.keys, found)), plan
            errors = [error(step, of_step) for step, of_step in zip(found, expected, strict=True)]
            assert max(errors) < (1e-6 if RECOMPUTED.items() <= plan.items() else TOLERANCE), plan


# ---- What shares no prefix -------------------------------------------------------------------------


def test_a_model_that_runs_by_document_shares_no_prefix(config_of):
    text = refusal(config_of("lfm2", **SHARED), DPO)
    assert "prefix_sharing=True: not with Lfm2ForCausalLM: Lfm2ShortConv" in text
    assert text.strip().endswith("set prefix_sharing=False")


@pytest.mark.parametrize(("model_type", "shares"), [("bloom", False), slow("gpt2", True)])
def test_sharing_is_proved(model_type, shares):
    """Bloom's biases are of places in a row, which the rejected answer's are not."""
    assert probe.prove(tiny_config_of(model_type), "sdpa").shares_prefixes is shares


def windows_of_places_in_the_row(patches):
    patches.setattr(documents, "remap_positions_for_packed_sequence", lambda own, _: own)


def one_mask_for_all_layers(patches):
    patches.setattr(documents, "and_masks", lambda of_documents, _: of_documents)


def rejected_sees_chosen(patches):
    sees = documents.sees

    def sees_whole_pairs(rows):
        plain = [[sum(d) if isinstance(d, tuple) else d for d in row] for row in rows]
        return sees(documents.Documents(plain))

    patches.setattr(documents, "sees", sees_whole_pairs)


@pytest.mark.parametrize(
    ("mutate", "model_type"),
    [
        (windows_of_places_in_the_row, "gemma3_text"),
        (one_mask_for_all_layers, "gemma3_text"),
        (rejected_sees_chosen, "qwen3"),
        slow(windows_of_places_in_the_row, "gpt_oss"),
        slow(windows_of_places_in_the_row, "llama4_text"),
        slow(one_mask_for_all_layers, "llama4_text"),
    ],
)
def test_a_wrong_mask_is_not_proved(mutate, model_type, monkeypatch):
    mutate(monkeypatch)
    assert not probe.prove(tiny_config_of(model_type), "sdpa").shares_prefixes


@pytest.mark.slow
def test_a_wrong_mask_gives_other_gradients(config_of, tmp_path, monkeypatch):
    config = config_of("gemma3_text", **SHARED)
    expected = one_by_one(tmp_path)
    probe.proof_of(Plain(tmp_path / "policy").model.config, "sdpa")  # found again below
    windows_of_places_in_the_row(monkeypatch)
    (found,) = gradients_in_float64([config], DPO)
    assert error(found[0], expected[0]) > 1e-3
