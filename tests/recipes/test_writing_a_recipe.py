"""Examples of "Writing a recipe" against plain loops over single samples."""

import runpy

import pytest
import tiny
import torch
from arrays import LAYOUTS
from distributed_runs import run_distributed
from recipe_runs import changed_recipe, exported_model, recipe_of_page, run_recipe, slow
from torch.nn.functional import cross_entropy

from recipe_utils.training.parts.answers import generate

PER_STEP, NUM_STEPS, RATE = 6, 4, 0.1
STEPS = {
    "dataset": {"_component_": "tiny.tiny_dataset", "num_samples": PER_STEP * NUM_STEPS},
    "model": tiny.DEEP_UNTIED_MODEL,
    "optimizer": {"_component_": "torch.optim.SGD", "lr": RATE},
    "shuffle": False,
    "global_batch_size": PER_STEP,
    "gradient_accumulation_steps": ...,
    "microbatching": "packed",
}


def plain_training(limit):
    """Returns metrics of each update step of samples one by one, without steps at norms of ``limit`` and more."""
    model, metrics = tiny.tiny_model(tiny.DEEP_UNTIED_MODEL), []
    samples = tiny.make_samples(PER_STEP * NUM_STEPS)
    for start in range(0, len(samples), PER_STEP):
        losses = []
        for sample in samples[start : start + PER_STEP]:
            labels = torch.tensor(sample["labels"])[1:]
            logits = model(torch.tensor([sample["tokens"]]))[0, :-1][labels != tiny.IGNORE]
            losses.append(cross_entropy(logits, labels[labels != tiny.IGNORE], reduction="none"))
        loss = torch.cat(losses).mean()
        loss.backward()
        norms = {
            f"norm/{i}": torch.cat([p.grad.flatten() for p in each.parameters()]).norm()
            for i, each in enumerate(model.layers)
        }
        grad_norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        with torch.no_grad():
            for p in model.parameters() if grad_norm < limit else ():
                p -= RATE * p.grad
        model.zero_grad()
        found = {"loss": loss, "grad_norm": grad_norm, **norms}
        metrics.append({name: value.item() for name, value in found.items()})
    return metrics


@pytest.mark.parametrize("layout", ["fsdp-2", slow("tp-2"), slow("pp-2")])
def test_norms_are_logged_by_layer_and_the_page_s_skipped_steps_change_nothing(layout, tiny_config, tmp_path):
    norms = sorted(line["grad_norm"] for line in plain_training(limit=0))
    limit = sum(norms[1:3]) / 2
    expected = plain_training(limit=limit)
    recipe = recipe_of_page(tmp_path, "## 9.", {"grad_norm < 100": f"grad_norm < {limit}"})
    world_size, dims = LAYOUTS[layout]
    logged = run_distributed(run_recipe, world_size, tiny_config(**STEPS, **dims), recipe)[0]
    logged = [line for line in logged if "loss" in line]
    for name in expected[0]:
        assert [line[name] for line in logged] == pytest.approx([line[name] for line in expected], rel=1e-4), name
    skipped = [line.get("num_skipped_steps", 0) for line in logged]
    assert skipped == [int(line["grad_norm"] >= limit) for line in expected]
    assert 0 < sum(skipped) < NUM_STEPS


@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_the_evaluation_of_the_page_counts_answers_of_the_trained_weights(world_size, tiny_config, tmp_path):
    config, model = tiny_config(**STEPS), tiny.tiny_model(tiny.DEEP_UNTIED_MODEL)
    run_recipe(config)
    model.load_state_dict(torch.load(exported_model(config), weights_only=True))
    (answer,) = generate(model, tiny.tiny_tokenizer(), ["What is 2 + 3?"], 8, torch.device("cpu"))
    changes = {'"5"': f'"{answer}"', "add_every(100,": f"add_every({NUM_STEPS},"}
    logged = run_distributed(run_recipe, world_size, config, recipe_of_page(tmp_path, "## 10.", changes))[0]
    assert [(line["step"], line["exact_match"]) for line in logged if "exact_match" in line] == [(NUM_STEPS, 0.5)]


def test_a_copy_of_an_older_recipe_says_how_to_make_a_new_one(tmp_path):
    recipe = changed_recipe(tmp_path, {'check_version("0.7"': 'check_version("0.6"'})
    with pytest.raises(
        RuntimeError, match=r"written for recipe_utils 0\.6, .* `tune cp full_finetune_update_step NEW\.py`"
    ):
        runpy.run_path(recipe)
