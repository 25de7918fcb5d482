"""Update steps of rollouts are those of single answers, on any layout: gradients, metrics, and wrong recipes."""

import logging
import math
import random
import re
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import policies
import pytest
import tiny
import torch
from arrays import LAYOUTS, covering_array, pairs_of
from big_batch import TOLERANCE, error, metrics_and_gradients
from distributed_runs import run_distributed
from gradient_rows import assert_steps, on_ranks, run_rows, spanning
from recipe_runs import POLICY, keep_messages, recipe_class, run_recipe, tiny_config, with_adapters, writing_to
from torch.torch_version import TorchVersion

from recipe_utils.models.runner import Whole
from recipe_utils.policy import policy_losses, rollouts
from recipe_utils.policy.policy_losses import PolicyLoss
from recipe_utils.policy.round_start import RoundStart
from recipe_utils.settings.problems import ConfigError
from recipe_utils.text import collator
from recipe_utils.text.reader import TextReader
from recipe_utils.update_steps.samples import SampleError
from recipe_utils.update_steps.step import UpdateStep


@pytest.mark.parametrize(
    ("kind", "terms"),
    [("clipped", (-0.6, 0.75)), ("sequence", (-0.6, 0.75)), ("cispo", (1.2, -1.2)), ("reinforce", (1, -1))],
)
def test_the_formulas_are_those_worked_by_hand(kind, terms):
    """Every token has probability 1/4, the sampler had 1/6: the ratio is 1.5, clipped at 1.2."""
    answers = [{"prompt_ids": [1], "completion_ids": [2] * n, "logprobs": [-math.log(6)] * n} for n in (1, 3)]
    rows = [{**answer, "reward": reward} for answer, reward in zip(answers, (1.0, 0.0), strict=True)]
    loss = {"kind": kind, "clip_low": 0.2, "clip_high": 0.2, "tokens_per_answer": 10}

    def uniform(tokens):
        return torch.zeros(*tokens.shape, 4, dtype=torch.float64, requires_grad=True)

    def found(normaliser):
        metrics = policies.policy_gradient(uniform, None, uniform, [rows], {**loss, "normaliser": normaliser}, "mean")
        return metrics["loss"].item()

    if kind in ("cispo", "reinforce"):  # advantages are +-0.5, the log-probability -ln 4
        terms = tuple(term * 0.5 * math.log(4) for term in terms)
    one, three = terms
    assert found("tokens") == found("prompts") == pytest.approx((one + 3 * three) / 4)
    assert found("answers") == pytest.approx((one + three) / 2)
    assert found("constant") == pytest.approx((one + 3 * three) / 20)


# ---- Through the recipe --------------------------------------------------------------------------

RATE = 0.5
PLANS = {
    "packed": {"microbatching": "packed", "max_tokens_per_microbatch": 64},
    "cut": {"microbatching": "packed", "max_tokens_per_microbatch": 24},  # shorter than groups
    "padded": {"microbatching": "least_padding", "batch_size": 2},
    "spanning": {"microbatching": "packed", **spanning(2, 32)},
    "output apart": {"microbatching": "packed", "custom_sharded_layers": ["tok_embeddings", "output"]},
}
MODELS = {"untied": tiny.DEEP_UNTIED_MODEL, "lora": tiny.adapted(tiny.DEEP_UNTIED_MODEL)}
BOUNDS = {"correction_low": 0.8, "correction_high": 1.2}
CLIPS = {"clipped": (0.15, 0.3), "sequence": (0.05, 0.1), "cispo": (None, 0.3), "reinforce": (None, None)}


class Row(NamedTuple):
    """One training on rollouts."""

    layout: str
    plan: str
    kind: str
    normaliser: str
    kl: str | None = None
    old: str = "file"
    correction: str | None = None
    advantage: str = "mean_std"
    model: str = "untied"
    reference: str = "model"
    """Of the KL, or of the advantage ``teacher``; or ``cached`` log-probabilities of that, or those of the ``file``."""
    epochs: int = 1
    dual: float | None = None

    @property
    def world_size(self):
        """Ranks that it runs on."""
        return LAYOUTS[self.layout][0]

    @property
    def needs_reference(self):
        """Returns True with a KL or a teacher."""
        return self.kl is not None or self.advantage == "teacher"

    @property
    def has_given_reference(self):
        """Returns True if the file has the reference's log-probabilities."""
        return self.needs_reference and self.reference == "file"

    @property
    def loss(self):
        """Keys of the loss."""
        own = {"kind": self.kind, "normaliser": self.normaliser, "old": self.old, "correction": self.correction}
        own |= {"clip_low": CLIPS[self.kind][0], "clip_high": CLIPS[self.kind][1]}
        own |= {"clip_dual": self.dual} if self.dual else {}
        if self.normaliser == "constant":
            own["tokens_per_answer"] = 9
        if self.correction:
            own |= {name: bound for name, bound in BOUNDS.items() if self.correction == "mask" or "high" in name}
        return own if self.kl is None else {**own, "kl": self.kl, "kl_weight": 0.3}


def possible_rows():
    """Yields rows that are drawn of all that the recipe accepts."""
    factors = (
        ("one", "fsdp-2", "fsdp-4", "hsdp-2x2", "tp-2", "pp-2", "pp-2-fsdp-2"),
        [*PLANS],
        *([*CLIPS], ("tokens", "answers", "constant", "prompts"), (None, None, "k1", "k2", "k2", "k3")),
        *(("file", "start"), (None, "truncate", "mask")),
        ("mean_std", "mean", "leave_one_out", "given", "teacher"),
        *(("untied", "lora"), ("model", "file")),
    )
    draw = random.Random(0)
    for _ in range(4000):
        row = Row(*map(draw.choice, factors))
        refused = [
            row.correction and row.old == "file",
            row.plan == "spanning" and (row.kind == "sequence" or "fsdp" not in row.layout),
            row.plan == "output apart" and row.layout not in ("fsdp-2", "fsdp-4", "hsdp-2x2"),
            row.layout == "tp-2" and row.model == "lora",
            row.advantage == "teacher" and row.reference == "model" and row.model == "lora",  # which is the student
            row.reference == "file" and not row.needs_reference,
        ]
        if not any(refused):
            yield row


def items_of(row):
    """Returns pairs of values, and what the loss of a row is without a KL, or with that by default."""
    return pairs_of(row) | ({(row.kind, row.normaliser, row.kl)} if row.kl in (None, "k2") else set())


ONE = Row("one", "packed", "clipped", "tokens")
FAST = [
    ONE,
    Row("one", "padded", "sequence", "answers", "k3", reference="file"),
    Row("one", "cut", "cispo", "constant", None, "start", "truncate", "mean"),
    Row("one", "packed", "reinforce", "prompts", "k1", advantage="leave_one_out", model="lora"),
    Row("one", "cut", "clipped", "prompts", "k2", "start", epochs=2, reference="cached"),
    Row("fsdp-2", "packed", "clipped", "answers", "k2", "start", "mask"),
    Row("fsdp-2", "packed", "clipped", "tokens", dual=1.2),
    Row("fsdp-2", "padded", "sequence", "tokens", advantage="given"),
    Row("fsdp-2", "spanning", "cispo", "prompts", "k2", model="lora"),
    Row("fsdp-2", "cut", "reinforce", "constant", advantage="teacher"),
    Row("pp-2", "packed", "clipped", "constant", "k2", "start", reference="cached"),
]
ROWS = covering_array(FAST, list(possible_rows()), items_of)


def groups_of(row):
    """Returns the groups of a training; a ratio of answers needs whole ones."""
    groups = policies.make_groups()
    return policies.of_whole_answers(groups) if row.kind == "sequence" else groups


def case_of(row, weights_folder, folder):
    """Returns arguments of :func:`run_row`."""
    path = folder / f"{row.advantage}_{row.has_given_reference}_{row.kind}.jsonl"
    given = {"advantage": row.advantage == "given", "ref_logprobs": row.has_given_reference}
    policies.write(path, groups_of(row), [key for key, is_given in given.items() if not is_given])
    changes = {
        "model": MODELS[row.model],
        "dataset": {
            "_component_": "recipe_utils.policy.rollout_dataset",
            "path": str(path),
            "advantage": row.advantage,
        },
        "loss": {"_component_": "recipe_utils.policy.PolicyLoss", "tokens_per_chunk": 7, **row.loss},
        "optimizer": {"_component_": "tiny.RecordingSGD", "lr": RATE},
        "global_batch_size": policies.PER_STEP,
        "gradient_accumulation_steps": ...,
        "shuffle": False,
        "epochs": row.epochs,
        "reference": "cached" if row.reference == "cached" else "live",
        **LAYOUTS[row.layout][1],
        **PLANS[row.plan],
    }
    config = writing_to(folder / "out", tiny_config(weights_folder, **changes))
    if row.model == "lora":
        config = with_adapters(config, folder)
    elif row.needs_reference and not row.has_given_reference:
        (file,) = config["checkpointer"]["checkpoint_files"]
        config["ref_checkpointer"] = {**config["checkpointer"], "checkpoint_files": [f"ref_{file}"]}
    return config, POLICY, False


@cache
def expected_steps(row):
    """Returns metrics and gradients of each update step, answer by answer."""
    groups, steps = groups_of(row), []
    with tiny.float64_throughout():
        if row.model == "lora":
            model, reference = tiny.adapted_model(MODELS["lora"]).double(), tiny.merged_model(MODELS["lora"])
        else:
            model, reference = (tiny.tiny_model(tiny.DEEP_UNTIED_MODEL, seed).double() for seed in (0, 1))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
        for _ in range(row.epochs):
            start, old = deepcopy(model), None
            for begin in range(0, len(groups), policies.PER_STEP):
                models = model, old, None if row.has_given_reference else reference
                step = groups[begin : begin + policies.PER_STEP]
                steps.append(metrics_and_gradients(policies.policy_gradient, models, step, row.loss, row.advantage))
                optimizer.step()
                old = start
    return steps


def expected_of(row):
    """Returns :func:`expected_steps`, once for all layouts."""
    return expected_steps(row._replace(layout="one", plan="packed"))


@on_ranks(FAST, ROWS)
def test_gradients_and_metrics_are_those_of_single_answers(rows, weights_folder, tmp_path):
    if TorchVersion(torch.__version__) < "2.13":  # no pipeline stages
        rows = [row for row in rows if not row.layout.startswith("pp")]
    cases = [case_of(row, weights_folder, tmp_path) for row in rows]
    ranks = run_distributed(run_rows, rows[0].world_size, cases, timeout_seconds=600)
    for row, *of_ranks in zip(rows, *ranks, strict=True):
        assert_steps(of_ranks, expected_of(row))
        assert row.plan != "spanning" or 2 in set().union(*(num_ranks for _, _, num_ranks, _ in of_ranks))
        if row.old == "start":
            first = next(metrics for metrics in of_ranks[0][1] if "loss" in metrics)
            assert first["ratio_max"] == 1


def test_an_unchanged_policy_has_the_ratio_1_in_all_update_steps(weights_folder, tmp_path):
    """Log-probabilities of the round's start are those of the loss, bit for bit, also in float32."""
    for row in (
        Row("one", "packed", "clipped", "tokens", None, "start"),
        Row("one", "padded", "sequence", "tokens", None, "start"),
    ):
        config, recipe, _ = case_of(row, weights_folder, tmp_path)
        logged = run_recipe({**config, "optimizer": {**config["optimizer"], "lr": 0.0}}, recipe)
        assert [metrics["ratio_max"] for metrics in logged if "loss" in metrics] == [1.0] * 3


def test_a_validation_leaves_the_largest_ratio_of_update_steps(weights_folder, tmp_path):
    config, recipe, _ = case_of(FAST[0], weights_folder, tmp_path)
    groups = policies.make_groups()
    for row in groups[0]:
        row["logprobs"] = [-20.0] * len(row["logprobs"])
    policies.write(tmp_path / "val.jsonl", groups)
    val = {"dataset_val": {**config["dataset"], "path": str(tmp_path / "val.jsonl")}, "run_val_every_n_steps": 1}
    found = [[m["ratio_max"] for m in run_recipe({**config, **more}, recipe) if "loss" in m] for more in ({}, val)]
    assert found[0] == found[1]


def own_groups(temperature=1.0):
    """Returns groups whose log-probabilities are the policy's own."""
    model = tiny.tiny_model(tiny.DEEP_UNTIED_MODEL).double()
    groups = [[{k: v for k, v in row.items() if k != "mask"} for row in rows] for rows in policies.make_groups(4)]
    for row in (row for rows in groups for row in rows):
        with torch.no_grad(), tiny.float64_throughout():
            row["logprobs"] = policies.log_probs_of(model, {**row, "temperature": temperature})[0].tolist()
    return groups


def test_ratios_far_from_one_are_bounded_and_named(weights_folder, tmp_path):
    """The better answer's gradient is that of any ratio beyond the clip; a file of the policy's own has no warning."""

    def trained(groups, **changes):
        policies.write(tmp_path / "mean_std_False_clipped.jsonl", groups)
        with keep_messages(logging.WARNING) as messages:
            logged = run_recipe({**config, "dtype": "fp64", **changes}, recipe)
        return next(m for m in logged if "loss" in m), [m for m in messages if "log-prob" in m]

    config, recipe, _ = case_of(ONE, weights_folder, tmp_path)
    assert trained(own_groups())[1] == []
    norms, rewards = [], [row["reward"] for row in own_groups()[0]]
    best = rewards.index(max(rewards))
    for log_prob in (-30.0, -120.0, -1e4):
        groups = own_groups()
        row = groups[0][best]
        row["logprobs"][-1] = log_prob
        metrics, (warning,) = trained(groups)
        norms.append(metrics["grad_norm"])
        assert metrics["ratio_max"] == pytest.approx(math.exp(20))
        token = len(row["prompt_ids"] + row["completion_ids"]) - 1
        place = f"line {best + 1} of {tmp_path}/mean_std_False_clipped.jsonl: token {token}"
        assert warning.startswith(f"{place} (id {row['completion_ids'][-1]}) has the log-probability -")
        assert f", and {log_prob:.4g} in the file; its ratio, e^" in warning
    assert norms == pytest.approx(norms[:1] * 3, rel=1e-12)
    sharper = own_groups(temperature=0.3)
    (warning,) = trained(sharper)[1]
    assert re.search("the mean ratio is .* instead of 1, .* write the temperature that they were sampled at", warning)
    assert trained([[{**row, "temperature": 0.3} for row in rows] for rows in sharper])[1] == []


@pytest.mark.parametrize(
    ("loss", "data", "text"),
    [
        ({"old": "start", "correction": "mask"}, {}, "loss.correction=mask: the dataset has no logprobs"),
        ({}, {"advantage": "teacher"}, "dataset.advantage=teacher: the teacher is the model that training starts from"),
        ({"kind": "sequence"}, {}, "its answer has 2 parts, and loss.kind=sequence needs all of them"),
    ],
)
def test_what_has_no_effect_on_a_file_is_refused(loss, data, text, weights_folder, tmp_path):
    config, recipe, _ = case_of(ONE, weights_folder, tmp_path)
    leave_out = ("ref_logprobs", "advantage", *["logprobs"] * ("correction" in loss))
    policies.write(tmp_path / "mean_std_False_clipped.jsonl", policies.make_groups(), leave_out)
    loss, data = ({**config[key], **own} for key, own in (("loss", loss), ("dataset", data)))
    loss = {key: value for key, value in loss.items() if not (loss["kind"] == "sequence" and "clip" in key)}
    with pytest.raises((ConfigError, SampleError), match=re.escape(text)):
        run_recipe({**config, "loss": loss, "dataset": data}, recipe)


# ---- Wrong recipes -------------------------------------------------------------------------------


def a_mean_of_token_means(patches):
    patches.setattr(UpdateStep, "scale", lambda self, _: 1 / len(self.microbatches))
    sums = Whole.sums
    patches.setattr(Whole, "sums", lambda self, m: sums(self, m) / max(m.counts["answer_tokens"], 1))


def the_tokens_of_the_file(patches):
    total = sum(sum(map(sum, map(policies.mask_of, rows))) for rows in policies.make_groups())
    patches.setattr(UpdateStep, "scale", lambda self, _: self.dp_degree / total)


def a_scale_of_one_rank(patches):
    patches.setattr(UpdateStep, "scale", lambda self, name: 1 / self.totals[name])


def a_dropped_microbatch(patches):
    names = recipe_class(POLICY).update.__globals__
    ahead = names["to_device_ahead"]

    def without_first(microbatches, device):
        first, *others = microbatches
        return ahead(others or [first], device)

    patches.setitem(names, "to_device_ahead", without_first)


def a_padded_width_for_the_most_tokens(patches):
    forward = PolicyLoss.forward

    def by_width(self, output, hidden, *args):
        self._factor = 1 / hidden.size(1)
        return forward(self, output, hidden, *args)

    patches.setattr(PolicyLoss, "forward", by_width)


def a_kl_by_token(patches):
    """As if the KL had not the normaliser's weight."""
    terms_of = PolicyLoss._terms

    def unscaled(self, log_probs, given):
        terms, metrics = terms_of(self, log_probs, given)
        kl = (log_probs - given.reference) ** 2 / 2
        return terms + self.kl_weight * kl * (1 / given.weights.clamp(min=1e-9) - 1), metrics

    patches.setattr(PolicyLoss, "_terms", unscaled)


def log_probs_moved_by_one(patches):
    prepare = TextReader.prepare

    def moved(self, *args):
        sample = prepare(self, *args)
        columns = {n: np.roll(c, 1) if n == "logprobs" else c for n, c in sample.columns.items()}
        return sample._replace(columns=columns)

    patches.setattr(TextReader, "prepare", moved)


def equal_groups_left_out(patches):
    standing_for = rollouts._standing_for
    patches.setattr(rollouts, "_standing_for", lambda *args: {**standing_for(*args), "answer_tokens": 0.0})


def a_deviation_of_the_population(patches):
    patches.setitem(rollouts.OF_REWARDS, "mean_std", lambda r: (r - r.mean()) / (r.std() + 1e-6))


def no_temperature(patches):
    patches.setattr(policy_losses, "temperatures_of", lambda targets: None)


def the_policy_of_each_update_step(patches):
    """As if each update step were a round."""
    patches.setattr(RoundStart, "before", lambda self, step: setattr(self, "_is_at_start", True))


def a_group_counted_by_each_of_its_ranks(patches):
    cut = collator.share_of_row
    patches.setattr(
        collator,
        "share_of_row",
        lambda row, share, *args: replace(
            cut(row, share, *args), counts=cut(row, share._replace(first=0), *args).counts
        ),
    )


def metrics_by_microbatch(patches):
    """As if clip fractions and other metrics were means over microbatches of their means."""
    scale, sums = UpdateStep.scale, Whole.sums
    patches.setattr(
        UpdateStep, "scale", lambda self, n: 1 / len(self.microbatches) if n == "measured" else scale(self, n)
    )

    def of_microbatch(self, m):
        loss, *others = sums(self, m)
        return torch.stack([loss, *(each / max(m.counts["measured"], 1) for each in others)])

    patches.setattr(Whole, "sums", of_microbatch)


@pytest.mark.parametrize(
    ("mutate", "row"),
    [
        (a_mean_of_token_means, ONE),
        (the_tokens_of_the_file, ONE),
        (a_scale_of_one_rank, ONE._replace(layout="fsdp-2")),
        (a_dropped_microbatch, ONE),
        (a_padded_width_for_the_most_tokens, Row("one", "padded", "clipped", "constant")),
        (a_kl_by_token, Row("one", "packed", "clipped", "answers", "k2")),
        (log_probs_moved_by_one, ONE),
        (equal_groups_left_out, ONE),
        (a_deviation_of_the_population, ONE),
        (no_temperature, ONE),
        (the_policy_of_each_update_step, Row("one", "cut", "clipped", "prompts", "k2", "start")),
        (a_group_counted_by_each_of_its_ranks, Row("fsdp-2", "spanning", "clipped", "tokens")),
    ],
)
def test_wrong_recipes_are_noticed(mutate, row, weights_folder, tmp_path):
    cases = [case_of(row, weights_folder, tmp_path)]
    ranks = run_distributed(run_rows, row.world_size, cases, mutate)
    assert_steps([of_row for (of_row,) in ranks], expected_of(row), mutate)


def test_clip_fractions_by_microbatch_are_noticed(weights_folder, tmp_path):
    """Their gradients are right."""
    (of_rank,) = run_distributed(run_rows, 1, [case_of(ONE, weights_folder, tmp_path)], metrics_by_microbatch)
    ((gradients, logged, *_),) = of_rank
    differences = []
    for found, metrics, (expected, exact) in zip(gradients, logged, expected_of(ONE), strict=True):
        assert error(found, exact) < TOLERANCE
        differences.append(abs(metrics["clipped_low"] - expected["clipped_low"]))
    assert max(differences) > 0.01
