"""Own losses with columns and values of samples, as pages declare them: policy gradients, and a head on last tokens."""

import random
import re

import policies
import pytest
import tiny
import torch
from arrays import LAYOUTS
from big_batch import TOLERANCE, error, metrics_and_gradients
from distributed_runs import run_distributed
from gradient_rows import assert_steps, folder_keys, run_row, run_row_in, spanning
from recipe_runs import SFT, recipe_of_page, section_of, slow, tiny_config
from tiny_transformers import Plain
from torch.nn.functional import cross_entropy

from recipe_utils.checkpoint.own_modules import fresh_weights
from recipe_utils.cli.registry import recipe_path
from recipe_utils.data import Facts
from recipe_utils.models.transformers.double_precision import DoublePrecision

PACKED = {"microbatching": "packed", "max_tokens_per_microbatch": 64}
PADDED = {"microbatching": "least_padding", "batch_size": 2}
KEYS = {
    "model": tiny.DEEP_UNTIED_MODEL,
    "optimizer": {"_component_": "tiny.RecordingSGD", "lr": 0.5},
    "shuffle": False,
    "gradient_accumulation_steps": ...,
}


def groups_of_the_page(tokenizer):
    """Returns the page's dataset of some groups."""
    from my_objective import Rollouts

    groups = [
        (rows[0]["prompt_ids"], [(r["completion_ids"], random.Random(i).gauss(0, 1), r["logprobs"]) for r in rows])
        for i, rows in enumerate(policies.make_groups(10))
    ]
    return Rollouts(groups)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [("fsdp-2", {**PACKED, **spanning(2, 32)}), slow("one", PACKED), slow("pp-2", PACKED)],
)
def test_the_loss_of_the_page_is_the_policy_loss(layout, changes, weights_folder, tmp_path):
    section = section_of(recipe_path(SFT).with_name("writing_a_recipe.md"), "## 12.")
    (tmp_path / "my_objective.py").write_text("\n".join(re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)))
    world_size, dims = LAYOUTS[layout]
    own = {"dataset": {"_component_": f"{__name__}.groups_of_the_page"}, "global_batch_size": 5, **dims, **changes}
    found = []
    for name in ("my_objective.GRPOLoss", "recipe_utils.policy.PolicyLoss"):
        out = str(tmp_path / name)
        loss = {"loss": {"_component_": name, "tokens_per_chunk": 7}}
        config = tiny_config(weights_folder, output_dir=out, **KEYS, **own, **loss)
        found.append(run_distributed(run_row_in, world_size, str(tmp_path), config, SFT, False, None))
    for one, other in zip(*found, strict=True):
        assert [metrics["loss"] for metrics in one[1]] == pytest.approx([metrics["loss"] for metrics in other[1]])
        assert len(one[0]) == len(other[0]) == 2
        assert max(error(*steps) for steps in zip(one[0], other[0], strict=True)) < TOLERANCE


# ---- A loss that couples the answers of a group ----------------------------------------------------


def ranked(tokenizer, num_groups=10):
    """Returns groups of ranked answers."""
    draw, samples = random.Random(5), []
    for rows in policies.make_groups(num_groups):
        ranks, sequences = draw.sample(range(len(rows)), len(rows)), []
        for row, rank in zip(rows, ranks, strict=True):
            prompt, answer = row["prompt_ids"], row["completion_ids"]
            labels = [tiny.IGNORE] * len(prompt) + answer
            sequences.append({"tokens": prompt + answer, "labels": labels, "rank": rank})
        samples.append({"sequences": sequences})
    return tiny.WithFacts(samples, Facts(has_sequences=True))


def listwise(model, groups):
    """Returns the mean over answers of -log P(order) with the padded answers of a group as rows, best first."""
    losses, num_answers = [], 0
    for group in groups:
        answers = sorted(group["sequences"], key=lambda answer: answer["rank"])
        rows = [[torch.tensor(answer[key]) for answer in answers] for key in ("tokens", "labels")]
        tokens, labels = (
            torch.nn.utils.rnn.pad_sequence(of, True, pad) for of, pad in zip(rows, (0, tiny.IGNORE), strict=True)
        )
        lengths = torch.tensor([len(row) for row in rows[0]])
        mask = (torch.arange(tokens.size(1)) < lengths[:, None]).long()
        logits = model.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
        losses_of_tokens = cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
        scores, num_answers = -losses_of_tokens.sum(1), num_answers + len(answers)
        losses += [scores[first:].logsumexp(0) - scores[first] for first in range(len(scores))]
    return {"loss": sum(losses) / num_answers}


def cut_groups(patches):
    patches.setattr("my_objective.ListwiseLoss.couples_sequences", False)


SHORT = {"microbatching": "packed", "max_tokens_per_microbatch": 24}  # shorter than groups


@pytest.mark.parametrize(
    ("layout", "changes", "mutate"),
    [("one", SHORT, None), ("fsdp-2", SHORT, None), ("one", SHORT, cut_groups), slow("one", PACKED, None)],
)
def test_groups_of_a_listwise_loss_are_never_cut(layout, changes, mutate, weights_folder, tmp_path):
    section = section_of(recipe_path(SFT).with_name("writing_a_recipe.md"), "## 12.")
    (tmp_path / "my_objective.py").write_text("\n".join(re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)))
    world_size, dims = LAYOUTS[layout]
    own = {
        "dataset": {"_component_": f"{__name__}.ranked"},
        "global_batch_size": 10,
        **folder_keys(weights_folder, "model", "qwen3"),
    }
    loss = {"loss": {"_component_": "my_objective.ListwiseLoss"}}
    config = tiny_config(weights_folder, output_dir=str(tmp_path / "out"), **{**KEYS, **own}, **loss, **dims, **changes)
    ranks = run_distributed(run_row_in, world_size, str(tmp_path), config, SFT, True, mutate)
    with tiny.float64_throughout(), DoublePrecision():
        model = Plain(weights_folder / "model" / "qwen3")
        expected = metrics_and_gradients(listwise, [model], ranked(None).samples)
    assert_steps(ranks, [expected], mutate)


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
