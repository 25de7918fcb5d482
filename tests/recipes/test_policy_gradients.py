"""Update steps of rollouts are those of single answers, on any layout: gradients, metrics, and wrong recipes."""

import math
import random
from copy import deepcopy
from functools import cache
from typing import NamedTuple

import policies
import pytest
import tiny
import torch
from arrays import LAYOUTS, covering_array, pairs_of
from big_batch import metrics_and_gradients
from distributed_runs import run_distributed
from gradient_rows import assert_steps, on_ranks, run_rows, spanning
from recipe_runs import tiny_config, with_adapters, writing_to


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
    """Or ``file``: that of the KL, or of the advantage ``teacher``."""

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
            row.layout == "tp-2" and row.model == "lora",
            row.reference == "file" and not row.needs_reference,
        ]
        if not any(refused):
            yield row


def items_of(row):
    """Returns pairs of values, and what the loss of a row is without a KL, or with that by default."""
    return pairs_of(row) | ({(row.kind, row.normaliser, row.kl)} if row.kl in (None, "k2") else set())


FAST = [
    Row("one", "packed", "clipped", "tokens"),
    Row("fsdp-2", "packed", "clipped", "answers", "k2"),
]
ROWS = covering_array(FAST, list(possible_rows()), items_of)


def case_of(row, weights_folder, folder):
    """Returns arguments of :func:`run_row`."""
    path = folder / f"{row.advantage}_{row.has_given_reference}.jsonl"
    given = {"advantage": row.advantage == "given", "ref_logprobs": row.has_given_reference}
    policies.write(path, policies.make_groups(), [key for key, is_given in given.items() if not is_given])
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
        **LAYOUTS[row.layout][1],
        **PLANS[row.plan],
    }
    config = writing_to(folder / "out", tiny_config(weights_folder, **changes))
    if row.model == "lora":
        config = with_adapters(config, folder)
    elif row.needs_reference and not row.has_given_reference:
        (file,) = config["checkpointer"]["checkpoint_files"]
        config["ref_checkpointer"] = {**config["checkpointer"], "checkpoint_files": [f"ref_{file}"]}
    return config, "full_policy_update_step", False


@cache
def expected_steps(row):
    """Returns metrics and gradients of each update step, answer by answer."""
    groups, steps = policies.make_groups(), []
    with tiny.float64_throughout():
        if row.model == "lora":
            model, reference = tiny.adapted_model(MODELS["lora"]).double(), tiny.merged_model(MODELS["lora"])
        else:
            model, reference = (tiny.tiny_model(tiny.DEEP_UNTIED_MODEL, seed).double() for seed in (0, 1))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
        start, old = deepcopy(model), None
        for begin in range(0, len(groups), policies.PER_STEP):
            models = model, old, None if row.has_given_reference else reference
            step = groups[begin : begin + policies.PER_STEP]
            steps.append(metrics_and_gradients(policies.policy_gradient, models, step, row.loss, row.advantage))
            optimizer.step()
            old = start
    return steps


def assert_rows(rows, ranks, mutate=None):
    """Compares trainings with single answers; the largest ratio is logged in float32."""
    for row, *of_ranks in zip(rows, *ranks, strict=True):
        largest = [metrics["ratio_max"] for metrics in of_ranks[0][1] if "loss" in metrics]
        steps = expected_steps(row._replace(layout="one", plan="packed"))
        assert largest == pytest.approx([metrics["ratio_max"] for metrics, _ in steps], rel=1e-6), row
        steps = [({n: x for n, x in metrics.items() if n != "ratio_max"}, gradients) for metrics, gradients in steps]
        assert_steps(of_ranks, steps, mutate)
        if row.old == "start":
            assert largest[0] == 1, row


@on_ranks(FAST, ROWS)
def test_gradients_and_metrics_are_those_of_single_answers(rows, weights_folder, tmp_path):
    cases = [case_of(row, weights_folder, tmp_path) for row in rows]
    assert_rows(rows, run_distributed(run_rows, rows[0].world_size, cases, timeout_seconds=600))
