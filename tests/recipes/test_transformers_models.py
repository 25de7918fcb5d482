"""Models of transformers in the recipes: plan, check, resume, and refusals by name.

``test_gradients.py`` and its like have their gradients.
"""

import json
import math
import shutil
from functools import partial

import peft
import policies
import pytest
import torch
from decoder_types import tiny_config_of
from distributed_runs import run_distributed
from image_folders import write_image_folder
from PIL import Image
from recipe_runs import (
    DPO,
    POLICY,
    keep_messages,
    losses,
    refusal,
    run_recipe,
    run_recipe_keeping_warnings,
    set_up,
    slow,
)
from tiny_transformers import save_tiny, save_weights, tensors_of
from transformers import AutoConfig, AutoModelForImageTextToText, masking_utils

from recipe_utils.models.attention import chains
from recipe_utils.models.transformers import decoder, masks, packing_check
from recipe_utils.text.documents import chains as chains_of
from recipe_utils.text.documents import length_of

PP_2, TP_2 = {"pipeline_parallel_dim": 2}, {"tensor_parallel_dim": 2}
TP_PLAN = {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}


def test_the_plan_is_packed_where_that_is_exact_and_padded_otherwise(tiny_config, tmp_path):
    for model_type, plan in (("qwen3", "packed"), ("roberta", "least_padding")):
        config = tiny_config(**save_tiny(tmp_path / model_type, model_type))
        with set_up(config) as made:
            assert made.settings.data.microbatching == plan
    module = "roberta.embeddings (RobertaEmbeddings)"
    text = f"microbatching=packed: {module} mixes the documents of a row; set microbatching=least_padding"
    assert text in refusal({**config, "microbatching": "packed"})
    config["model"]["path"] = "/not/there"
    text = "model.path=/not/there: no config.json"
    assert text in refusal({**config, "max_tokens_per_microbatch": 64})


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt_oss", "lfm2"])
def test_it_validates_samples_and_resumes_on_other_ranks(model_type, tiny_config, tmp_path):
    config = tiny_config(
        **save_tiny(tmp_path / model_type, model_type),
        **{"dataset_val": {"_component_": "tiny.tiny_dataset", "num_samples": 5}},
        run_val_every_n_steps=2,
        sample_prompts=["Why?"],
        sample_every_n_steps=2,
        sample_max_new_tokens=3,
        save_every_n_steps=2,
        keep_last_n_checkpoints=9,
        max_steps_per_epoch=4,
        dtype="fp64",
        global_batch_size=4,
        gradient_accumulation_steps=...,
    )
    whole = run_recipe(config)
    assert [m["step"] for m in whole if "val_loss" in m] == [0, 2, 4]
    shutil.rmtree(f"{config['output_dir']}/step_4")
    shutil.rmtree(f"{config['output_dir']}/epoch_0")
    (rest, _) = run_distributed(run_recipe, 2, {**config, "resume_from_checkpoint": True})
    assert losses(rest) == pytest.approx(losses(whole)[2:], rel=1e-5)


ALL_PARTS = {"_component_": "recipe_utils.models.causal_lm", "trains": ["text", "projector", "tower"]}
ADAPTERS = {"_component_": "recipe_utils.models.lora_causal_lm", "r": 2}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("qwen3_5", ALL_PARTS),
        ("qwen3_5", ADAPTERS),
        *(slow("qwen3_5", {**ALL_PARTS, "trains": [part]}) for part in ("text", "projector")),
        *(slow(kind, keys) for kind in ("gemma3", "gemma4") for keys in (ALL_PARTS, ADAPTERS)),
    ],
)
def test_an_export_with_images_is_the_folder_that_came_in_with_other_weights(kind, keys, tiny_config, tmp_path):
    """Qwen3.5 has a model of text alone, too, whose weights have other names."""
    folder, exported = write_image_folder(tmp_path / "in", kind), tmp_path / "out" / "epoch_0"
    config = save_weights(folder, AutoConfig.from_pretrained(folder))
    config["model"] |= {**keys, "images": True}
    config["tokenizer"] = {"_component_": "recipe_utils.text.folder_tokenizer", "path": str(folder)}
    data = {"path": str(tmp_path / "chats.jsonl"), "image_folder": str(tmp_path)}
    config["dataset"] = {"_component_": "recipe_utils.text.conversation_dataset", **data}
    Image.effect_noise((48, 32), 90).save(tmp_path / "noise.png")
    user = {"role": "user", "content": [{"type": "image", "path": "noise.png"}, {"type": "text", "text": "What?"}]}
    row = {"messages": [user, {"role": "assistant", "content": "Noise."}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n")
    with set_up(tiny_config(**config, batch_size=1, gradient_accumulation_steps=1)) as made:
        made.train()
        module = made.model.module.eval()
    trained = {name.removeprefix("model."): p for name, p in module.named_parameters() if p.requires_grad}
    of_adapters = {f"{name.rpartition('.lora_')[0]}.weight" for name in trained if ".lora_" in name}
    before, after = tensors_of(folder), tensors_of(exported)
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    base, model = map(AutoModelForImageTextToText.from_pretrained, (folder, exported))
    moved = {name: p for name, p in model.named_parameters() if not torch.equal(p, base.get_parameter(name))}
    assert moved.keys() == (of_adapters or trained.keys())
    assert of_adapters or all(torch.equal(p, trained[name]) for name, p in moved.items())
    models = [model, peft.PeftModel.from_pretrained(base, exported / "adapter")] if of_adapters else [model]
    tokens = torch.arange(3, 43)[None]
    for model in models:  # those of adapters are merged in fp32; without them, logits differ by more than 1
        torch.testing.assert_close(model.eval()(input_ids=tokens).logits, module(tokens), rtol=1e-3, atol=1e-3)


def test_dropout_of_a_folder_is_warned_of(tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / "gpt2", "gpt2"), max_steps_per_epoch=1)
    _, warnings = run_recipe_keeping_warnings(config)
    assert any("dropout=0.1: dropout depends on microbatches and ranks" in text for text in warnings)


@pytest.mark.parametrize(
    ("component", "model_type"), [("causal_lm", "gpt2"), ("lora_causal_lm", "opt"), slow("causal_lm", "opt")]
)
def test_policies_and_pairs_have_no_dropout_of_their_folder(
    component, model_type, tiny_config, tiny_dpo_config, tmp_path
):
    """A second forward of unchanged weights has the same log-probabilities: ratios of 1, margins of 0."""
    of_all = save_tiny(tmp_path / model_type, model_type)
    of_all["model"] = {**of_all["model"], "_component_": f"recipe_utils.models.{component}"}
    policies.write(tmp_path / "rollouts.jsonl", policies.make_groups(8))
    own = {
        "dataset": {"_component_": "recipe_utils.policy.rollout_dataset", "path": str(tmp_path / "rollouts.jsonl")},
        "loss": {"_component_": "recipe_utils.policy.PolicyLoss", "old": "start"},
        "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.0},
    }
    with keep_messages() as messages:
        ratios = [m for m in run_recipe(tiny_config(**of_all, **own, max_steps_per_epoch=2), POLICY) if "ratio" in m]
        reference = None if "lora" in component else of_all["checkpointer"]
        pairs = run_recipe(tiny_dpo_config(**of_all, ref_checkpointer=reference, max_steps_per_epoch=1), DPO)
    assert [(m["ratio_max"], m["ratio"]) for m in ratios] == [(1.0, pytest.approx(1.0, abs=1e-6))] * 2
    assert losses(pairs)[0] == pytest.approx(math.log(2), abs=1e-5)  # of fp32
    assert sum("dropout=0.1" in text and "is 0 here: each forward would draw" in text for text in messages) == 2


# ---- What is proved ------------------------------------------------------------------------------


def test_what_cannot_be_split_is_refused_by_name(tiny_config, tiny_dpo_config, tmp_path):
    of_all = save_tiny(tmp_path, "gpt2")
    of_pairs = tiny_dpo_config(**of_all, ref_checkpointer=of_all["checkpointer"], **PP_2)
    texts = [
        *run_distributed(refusal, 2, of_pairs, DPO),
        *run_distributed(refusal, 2, tiny_config(**of_all, **TP_2, tensor_parallel_plan=TP_PLAN)),
    ]
    for text, key in zip(texts, ["pipeline_parallel_dim"] * 2 + ["tensor_parallel_dim"] * 2, strict=True):
        assert key in text
        assert "GPT2LMHeadModel" in text
        assert text.strip().endswith(f"set {key}=1")


@pytest.mark.parametrize("keeps_documents", [True, False])
def test_a_recomputation_has_the_documents_of_its_forward(keeps_documents, monkeypatch):
    """A recomputation without them raises, instead of computing the row as one document."""
    config = tiny_config_of("lfm2")
    model = decoder.Decoder(decoder.build(config, "sdpa"), packing_check.check_packing(config, "sdpa"))
    samples = torch.arange(3, 12).split([4, 5])
    of_row = partial(packing_check.logits_of_row, [model], torch.cat(samples), [4, 5])
    expected = torch.autograd.grad(torch.cat(of_row()).sum(), [*model.parameters()])
    if not keeps_documents:
        wrap = decoder.checkpoint_wrapper
        monkeypatch.setattr(decoder, "checkpoint_wrapper", lambda module, context_fn: wrap(module))
    model.recompute_layers(1)
    logits = torch.cat(of_row())
    if not keeps_documents:
        with pytest.raises(RuntimeError, match="Lfm2ShortConv runs by document, and documents"):
            logits.sum().backward()
        return
    for _ in range(2):  # as a backward in two parts, which recomputes twice
        logits.sum().backward(retain_graph=True)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)


def test_a_model_that_computes_no_trees_shares_no_prefix(tiny_dpo_config, tmp_path):
    keys = save_tiny(tmp_path, "bloom")
    config = tiny_dpo_config(**keys, ref_checkpointer=keys["checkpointer"], microbatching="packed")
    with set_up(config, DPO) as made:
        assert not made.loader.budget.collator().reader.shares
    text = refusal({**config, "prefix_sharing": True}, DPO)
    assert "prefix_sharing=True: BloomForCausalLM does not compute trees" in text
    assert text.strip().endswith("set prefix_sharing=False")


def chunks_of_places_in_the_row(patches):
    def overlay(size, _):
        return lambda b, h, q, k: q // size == k // size

    patches.setattr(masking_utils, "chunked_overlay", overlay)


def one_mask_for_all_layers(patches):
    patches.setattr(masks, "and_masks", lambda of_documents, _: of_documents)


def ancestors_beyond_the_window(patches):
    mask_of = chains.mask_of_chain

    def mask_of_chain(q, k, window):
        return mask_of(q, k, window if q.size(2) == k.size(2) else None)

    patches.setattr(chains, "mask_of_chain", mask_of_chain)


def siblings_that_see_each_other(patches):
    of_chains = masks.chains

    def one_chain_for_each_tree(row):
        return of_chains(list(map(length_of, row)))

    patches.setattr(masks, "chains", one_chain_for_each_tree)
    patches.setattr(chains, "chains", one_chain_for_each_tree)


def ancestors_but_the_nearest(patches):
    def without_the_nearest(row):
        for chain in chains_of(row):
            yield chain._replace(ancestors=chain.ancestors[:-1])

    patches.setattr(masks, "chains", without_the_nearest)
    patches.setattr(chains, "chains", without_the_nearest)


@pytest.mark.parametrize(
    ("mutate", "model_type"),
    [
        (ancestors_beyond_the_window, "gemma3_text"),
        (siblings_that_see_each_other, "qwen3"),
        (ancestors_but_the_nearest, "qwen3"),
        (siblings_that_see_each_other, "lfm2"),
        slow(ancestors_but_the_nearest, "gemma3_text"),
        slow(ancestors_but_the_nearest, "mamba2"),
        slow(siblings_that_see_each_other, "gpt_oss"),
        slow(chunks_of_places_in_the_row, "llama4_text"),
        slow(one_mask_for_all_layers, "llama4_text"),
    ],
)
def test_a_wrong_mask_is_not_proved(mutate, model_type, monkeypatch):
    mutate(monkeypatch)
    assert not packing_check.check_packing(tiny_config_of(model_type), "sdpa").computes_trees
