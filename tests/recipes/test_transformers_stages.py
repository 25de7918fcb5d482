"""Pipeline stages of decoders of transformers: exact where the cut is proved, refused by name otherwise."""

import pytest
import torch
from big_batch import STEP_OF_16, TOLERANCE, error
from decoder_types import tiny_config_of
from distributed_runs import run_distributed
from recipe_runs import DPO, SFT, refusal, slow
from tiny_transformers import gradients_in_float64, reference_gradients, save_tiny

from recipe_utils.model.transformers import decoder, probe

PP_2, TP_2 = {"pipeline_parallel_dim": 2}, {"tensor_parallel_dim": 2}
PLAN = {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}
PACKED = {**PP_2, "microbatching": "packed", "max_tokens_per_microbatch": 64}
RECOMPUTED = {**PACKED, "enable_activation_checkpointing": True}
PADDED = {**PP_2, "pipeline_parallel_schedule": "Interleaved1F1B"}


@pytest.mark.parametrize(
    ("model_type", "world_size", "changes"),
    [
        ("gemma3_text", 2, [PACKED]),  # its output is tied
        slow("gemma2", 2, [PACKED]),  # its tail is more than the output layer
        slow("qwen3", 2, [PACKED, PADDED]),
        slow("gpt_oss", 2, [PACKED, PADDED]),
        slow("lfm2", 2, [PACKED, PADDED]),
        slow("gemma3_text", 4, [PACKED, RECOMPUTED]),  # and sharded
        slow("lfm2", 4, [PACKED, RECOMPUTED]),
    ],
)
def test_stages_have_the_gradients_of_the_model(
    model_type, world_size, changes, tiny_config, tmp_path
):
    of_all = {**save_tiny(tmp_path, model_type), **STEP_OF_16}
    configs = [tiny_config(**of_all, **each) for each in changes]
    ranks = run_distributed(gradients_in_float64, world_size, configs, SFT)
    for plan, *of_ranks in zip(changes, *ranks, strict=True):
        for step, expected in enumerate(reference_gradients(tmp_path)):
            assert set().union(*(found[step] for found in of_ranks)) == expected.keys()
            worst = max(error(found[step], expected) for found in of_ranks)
            assert worst < (1e-6 if plan is RECOMPUTED else TOLERANCE)


@pytest.mark.parametrize(
    ("model_type", "changes", "can_be_cut"),
    [
        ("granite", {}, True),
        ("granite", {"embedding_multiplier": 12.0}, False),  # every stage would multiply
        slow("gpt2", {}, False),  # every stage would add its positions
        slow("falcon_h1", {"embedding_multiplier": 2.0}, False),
        slow("cohere2", {}, True),
        slow("mamba2", {}, True),
    ],
)
def test_a_cut_is_proved(model_type, changes, can_be_cut):
    assert probe.prove(tiny_config_of(model_type, **changes), "sdpa").can_be_cut is can_be_cut


def test_what_cannot_be_split_is_refused_by_name(tiny_config, tiny_dpo_config, tmp_path):
    of_all = save_tiny(tmp_path, "gpt2")
    of_pairs = tiny_dpo_config(**of_all, ref_checkpointer=of_all["checkpointer"], **PP_2)
    texts = [
        *run_distributed(refusal, 2, of_pairs, DPO),
        *run_distributed(refusal, 2, tiny_config(**of_all, **TP_2, tensor_parallel_plan=PLAN)),
    ]
    for text, key in zip(
        texts, ["pipeline_parallel_dim"] * 2 + ["tensor_parallel_dim"] * 2, strict=True
    ):
        assert key in text
        assert "GPT2LMHeadModel" in text
        assert text.strip().endswith(f"set {key}=1")


@pytest.mark.parametrize("keeps_documents", [True, False])
def test_a_recomputation_has_the_documents_of_its_forward(keeps_documents, monkeypatch):
    """Without them it raises, instead of computing the row as one document."""
    config = tiny_config_of("lfm2")
    model = decoder.Decoder(decoder.build(config, "sdpa"), probe.prove(config, "sdpa"))
    samples = torch.arange(3, 12).split([4, 5])
    expected = torch.autograd.grad(probe._of_row(model, samples).sum(), [*model.parameters()])
    if not keeps_documents:
        wrap = decoder.checkpoint_wrapper
        monkeypatch.setattr(decoder, "checkpoint_wrapper", lambda module, context_fn: wrap(module))
    model.recompute_layers()
    logits = probe._of_row(model, samples)
    if not keeps_documents:
        with pytest.raises(RuntimeError, match="Lfm2ShortConv runs by document, and documents"):
            logits.sum().backward()
        return
    logits.sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
