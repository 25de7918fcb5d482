"""Update steps of rollouts are those of single answers, on any layout: gradients, metrics, and wrong recipes."""

import math

import policies
import pytest
import torch


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
