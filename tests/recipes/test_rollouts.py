"""Policy gradients on given rollouts, and a head on last tokens, are exact with what the pages declare."""

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import rollouts
import tiny
import torch
from arrays import LAYOUTS
from big_batch import metrics_and_gradients
from distributed_runs import run_distributed
from gradient_rows import assert_steps, run_row, run_row_in, spanning
from recipe_runs import changed_recipe, recipe_of_page, slow, tiny_config

from recipe_utils.checkpoint.own_modules import fresh_weights
from recipe_utils.long_rows import shares
from recipe_utils.text.reader import TextReader

NUM_GROUPS, PER_STEP, RATE = 10, 5, 0.5  # the second update step has a gradient of the KL
PACKED = {"microbatching": "packed", "max_tokens_per_microbatch": 64}
PADDED = {"microbatching": "least_padding", "batch_size": 2}
CUT = {"microbatching": "packed", "max_tokens_per_microbatch": 24}
SPANNING = {"microbatching": "packed", **spanning(2, 32)}
KEYS = {
    "model": tiny.DEEP_UNTIED_MODEL,
    "optimizer": {"_component_": "tiny.RecordingSGD", "lr": RATE},
    "shuffle": False,
    "gradient_accumulation_steps": ...,
}
OF_START = {
    "        self.attached: models.Attached = models.nothing_attached  # or a pass before the pass\n": """        start = frozen_copy(
            "start", meta_model, LinearLogProbs(), self.checkpointer, settings.model, ranks, collator.longest_row, groups
        )
        self.attached, fingerprints = start.attached, fingerprints | start.fingerprints
""",
    "class FullFinetuneRecipe:": """from recipe_utils.losses.log_probs import LinearLogProbs
from recipe_utils.models.frozen import frozen_copy


class FullFinetuneRecipe:""",
}


@cache
def expected_steps(by_answers):
    found, samples = [], rollouts.answers(None, NUM_GROUPS)
    size = PER_STEP * rollouts.ANSWERS_PER_GROUP
    with tiny.float64_throughout():
        models = model, _ = [tiny.tiny_model(tiny.DEEP_UNTIED_MODEL).double() for _ in range(2)]
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for start in range(0, len(samples), size):
            step = samples[start : start + size]
            found.append(metrics_and_gradients(rollouts.policy_gradient, models, step, by_answers))
            optimizer.step()
    assert by_answers or 0.05 < found[0][0]["clipped"] < 0.95
    return found


def a_column_shifted(patches):
    prepare = TextReader.prepare

    def shifted(self, *args):
        sample = prepare(self, *args)
        return sample._replace(columns={name: np.roll(column, 1) for name, column in sample.columns.items()})

    patches.setattr(TextReader, "prepare", shifted)


def a_default_for_a_missing_column(patches):
    """As if each third sample had no advantages, and trained with 1."""
    prepare = TextReader.prepare

    def without(self, sample, name, at):
        made = prepare(self, sample, name, at)
        if at.item % 3 or "advantages" not in made.columns:
            return made
        return made._replace(columns={**made.columns, "advantages": np.ones(len(made.tokens))})

    patches.setattr(TextReader, "prepare", without)


def a_group_counted_by_each_of_its_ranks(patches):
    cut = shares.cut
    patches.setattr(
        shares,
        "cut",
        lambda row, share, *args: replace(
            cut(row, share, *args), counts=cut(row, share._replace(first=0), *args).counts
        ),
    )


@pytest.mark.parametrize(
    ("layout", "data", "changes", "by_answers", "mutate"),
    [
        ("fsdp-2", "answers", PADDED, False, None),
        ("fsdp-2", "groups", PACKED, True, None),
        ("fsdp-2", "groups", SPANNING, True, None),
        ("fsdp-2", "groups", SPANNING, True, a_group_counted_by_each_of_its_ranks),
        ("one", "answers", PACKED, False, None),
        ("one", "groups", PACKED, False, a_column_shifted),
        ("one", "answers", PADDED, False, a_default_for_a_missing_column),
        slow("one", "answers", PADDED, True, None),
        slow("one", "groups", CUT, True, None),
        slow("fsdp-2", "answers", PACKED, True, None),
        slow("fsdp-2", "groups", CUT, False, None),
        slow("pp-2", "groups", PACKED, True, None),
        slow("pp-2", "answers", PADDED, False, None),
    ],
)
def test_policy_gradients_are_those_of_single_answers(
    layout, data, changes, by_answers, mutate, weights_folder, tmp_path, monkeypatch
):
    rollouts.write_objective(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    world_size, dims = LAYOUTS[layout]
    loss = "rollouts.LossByAnswers" if by_answers else "my_objective.GRPOLoss"
    size = PER_STEP * (1 if data == "groups" else rollouts.ANSWERS_PER_GROUP)
    own = {"dataset": {"_component_": f"rollouts.{data}", "num_groups": NUM_GROUPS}, "global_batch_size": size}
    loss = {"loss": {"_component_": loss, "tokens_per_chunk": 7}}
    config = tiny_config(weights_folder, output_dir=str(tmp_path / "out"), **KEYS, **own, **loss, **dims, **changes)
    recipe = changed_recipe(tmp_path, OF_START if by_answers else {})
    ranks = run_distributed(run_row_in, world_size, str(tmp_path), config, recipe, False, mutate)
    assert_steps(ranks, expected_steps(by_answers), mutate)
    assert ranks[0][2] == ({1, 2} if "max_ranks_per_row" in changes else ranks[0][2])


# ---- The head of the page ------------------------------------------------------------------------


def graded(tokenizer, num_samples):
    """Returns samples with three grades each and no other target."""
    draw = random.Random(3)
    samples = []
    for sample in tiny.make_samples(num_samples):
        grades = [draw.random() for _ in range(3)]
        samples.append({"tokens": sample["tokens"], "labels": [tiny.IGNORE] * len(sample["tokens"]), "grades": grades})
    return samples


def loss_of_grades(model, head, samples):
    hidden, found = [], []
    model.norm.register_forward_hook(lambda _, __, states: hidden.append(states))
    for sample in samples:
        model(torch.tensor([sample["tokens"]]))
        logits, grades = head(hidden[-1][0, -1]), torch.tensor(sample["grades"], dtype=torch.float64)
        loss = -(grades * logits.sigmoid().log() + (1 - grades) * (-logits).sigmoid().log()).sum()
        found.append(torch.stack([loss, ((logits > 0) == (grades > 0.5)).all().double()]))
    loss, correct = torch.stack(found).mean(0)
    return {"loss": loss, "correct": correct.detach()}


@pytest.mark.parametrize(
    ("layout", "changes"),
    [("fsdp-2", PADDED), ("one", PACKED), slow("fsdp-2", PACKED), slow("one", PADDED), slow("pp-2", PACKED)],
)
def test_a_head_on_last_tokens_is_that_of_single_samples(layout, changes, weights_folder, tmp_path):
    world_size, dims = LAYOUTS[layout]
    own = {"dataset": {"_component_": f"{__name__}.graded", "num_samples": 12}, "global_batch_size": 12}
    config = tiny_config(weights_folder, output_dir=str(tmp_path / "out"), **KEYS, **own, **dims, **changes)
    ranks = run_distributed(run_row, world_size, config, recipe_of_page(tmp_path, "## 13."), False, None)
    with tiny.float64_throughout():
        of_head = fresh_weights("grades", torch.nn.Linear(32, 3, device="meta", dtype=torch.float64), config["seed"])
        model, head = tiny.tiny_model(tiny.DEEP_UNTIED_MODEL).double(), torch.nn.Linear(32, 3).double()
        head.load_state_dict({name.removeprefix("grades."): weight for name, weight in of_head.items()})
        metrics, gradients = metrics_and_gradients(loss_of_grades, (model, head), graded(None, 12))
        gradients["output.weight"] = torch.zeros_like(model.output.weight)
        gradients |= {f"grades.{name}": p.grad for name, p in head.named_parameters()}
    assert_steps(ranks, [(metrics, gradients)])
