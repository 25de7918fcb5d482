"""Models of transformers have the gradients of separate samples, whatever the plan and the layout."""

import shutil

import pytest
import torch
from big_batch import STEP_OF_16, TOLERANCE, error
from distributed_runs import run_distributed
from recipe_runs import (
    losses,
    refusal,
    run_compiled_recipe,
    run_recipe,
    run_recipe_keeping_warnings,
    set_up,
    slow,
)
from tiny_transformers import gradients_in_float64, reference_gradients, save_tiny

OF_WAYS = ("qwen3", "gpt_oss", "lfm2")
PACKED = {"microbatching": "packed", "batch_size": 4, "max_tokens_per_microbatch": 64}
RECOMPUTED = {**PACKED, "enable_activation_checkpointing": True}
PADDED = {"microbatching": "least_padding", "batch_size": 4}
HSDP = {"data_parallel_replicate_dim": 2}
SPANNING = {**PACKED, "max_tokens_per_microbatch": 12, "max_ranks_per_row": 2}


@pytest.mark.parametrize(
    ("model_types", "layouts", "world_size"),
    [
        (OF_WAYS, [PACKED], 1),
        (("lfm2",), [RECOMPUTED], 2),
        (("qwen3",), [SPANNING], 2),
        slow(
            ("qwen3", "qwen3_moe", "deepseek_v3", "gemma3_text"),
            [{**RECOMPUTED, **SPANNING}, {**SPANNING, **HSDP}],
            4,
        ),
        slow(("qwen3",), [{**PACKED, "ac_mode": "selective", "ac_option": 2}], 2),
        slow((*OF_WAYS, "gemma3_text", "qwen3_moe"), [PADDED, RECOMPUTED, {}], 1),
        slow(
            (*OF_WAYS, "gemma3_text", "qwen3_moe"),
            [PACKED, PADDED, RECOMPUTED, {"batch_size": 2}],
            2,
        ),
        slow((*OF_WAYS, "gemma3_text"), [PACKED, {**RECOMPUTED, **HSDP}], 4),
    ],
)
def test_gradient_is_that_of_separate_samples(
    model_types, layouts, world_size, tiny_config, tmp_path
):
    cases = [
        (model_type, save_tiny(tmp_path / model_type, model_type), layout)
        for model_type in model_types
        for layout in layouts
    ]
    configs = [tiny_config(**keys, **STEP_OF_16, **layout) for _, keys, layout in cases]
    ranks = run_distributed(gradients_in_float64, world_size, configs, timeout_seconds=300)
    for (model_type, _, layout), *of_ranks in zip(cases, *ranks, strict=True):
        for step, expected in enumerate(reference_gradients(tmp_path / model_type)):
            found = {name: g for each in of_ranks for name, g in each[step].items()}
            assert found.keys() == expected.keys()
            recomputes = {"enable_activation_checkpointing", "ac_mode"} & layout.keys()
            bound = 1e-6 if recomputes else TOLERANCE
            assert error(found, expected) < bound, (model_type, layout)


def test_the_plan_is_packed_where_that_is_exact_and_padded_otherwise(tiny_config, tmp_path):
    for model_type, plan in (("qwen3", "packed"), ("roberta", "least_padding")):
        config = tiny_config(**save_tiny(tmp_path / model_type, model_type))
        with set_up(config) as made:
            assert made.settings.microbatching == plan
    module = "roberta.embeddings (RobertaEmbeddings)"
    text = f"microbatching=packed: {module} mixes the documents of a row; set microbatching=least_padding"
    assert text in refusal({**config, "microbatching": "packed"})
    config["model"]["path"] = "/not/there"
    text = "microbatching: the model chooses it, which cannot be built: model.path=/not/there: no config.json"
    assert text in refusal({**config, "max_tokens_per_microbatch": 64})


@pytest.mark.parametrize("model_type", map(slow, OF_WAYS))
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
        global_batch_size=4,
        gradient_accumulation_steps=...,
    )
    whole = run_recipe(config)
    assert sum("val_loss" in metrics for metrics in whole) == 2
    shutil.rmtree(f"{config['output_dir']}/step_4")
    shutil.rmtree(f"{config['output_dir']}/epoch_0")
    (rest, _) = run_distributed(run_recipe, 2, {**config, "resume_from_checkpoint": True})
    assert losses(rest) == pytest.approx(losses(whole)[2:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3", "lfm2"])
def test_compiled_layers_have_the_same_losses(model_type, tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / model_type, model_type), **PACKED)
    expected = losses(run_recipe(config))
    torch.compiler.reset()
    assert losses(run_compiled_recipe(config)) == pytest.approx(expected, rel=1e-5)


def test_dropout_of_a_folder_is_warned_of(tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path / "gpt2", "gpt2"), max_steps_per_epoch=1)
    _, warnings = run_recipe_keeping_warnings(config)
    assert any(
        "dropout=0.1: dropout depends on microbatches and ranks" in text for text in warnings
    )
