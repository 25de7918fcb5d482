"""Arguments of the policy loss that have no effect or no meaning are refused; chunks and compilation change nothing."""

import math
from contextlib import nullcontext
from itertools import product

import policies
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from recipe_utils.losses import LinearLogProbs
from recipe_utils.policy import PolicyLoss
from recipe_utils.policy.policy_losses import Seen
from recipe_utils.settings.describe import settings_of
from recipe_utils.settings.problems import ConfigError
from recipe_utils.settings.read import read_settings
from recipe_utils.update_steps.objective import declared_by
from recipe_utils.update_steps.step import Targets

NUM, VOCAB, WIDTH = 23, 50, 16
MASKS = {"old": "start", "correction": "mask"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kind": "grpo"}, "loss.kind=grpo: unknown; set it to one of clipped, sequence, cispo, reinforce"),
        ({"kind": "clip_cov"}, "loss.kind=clip_cov: it selects tokens by their rank among others, so the gradient"),
        ({"kind": "gae"}, "loss.kind=gae: it needs a critic"),
        ({"normaliser": "sequences"}, "loss.normaliser=sequences: unknown; set it to one of tokens, answers, constant, prompts"),
        ({"normaliser": "constant"}, "loss.tokens_per_answer=None: it is the L of normaliser=constant"),
        ({"tokens_per_answer": 9}, "loss.tokens_per_answer=9: it is the L of normaliser=constant"),
        ({"kl": "k4"}, "loss.kl=k4: unknown; set it to one of null, k1, k2, k3"),
        ({"kl": "k3"}, "loss.kl=k3: it has no effect with kl_weight=0; set kl_weight above 0, or take kl out"),
        ({"kl_weight": -1.0}, "loss.kl_weight=-1.0: it must be a number of at least 0"),
        ({"kl_weight": math.nan}, "loss.kl_weight=nan: it must be a number of at least 0"),
        ({"kl_weight": math.inf}, "loss.kl_weight=inf: it must be a number of at least 0"),
        ({"normaliser": "constant", "tokens_per_answer": math.nan}, "loss.tokens_per_answer=nan: it must be at least 1"),
        ({"correction": "mask"}, "loss.correction=mask: it has no effect on old=file"),
        ({"old": "start", "correction_high": 2}, "loss.correction_high=2: it has no effect on correction=None; take it out"),
        ({"kind": "cispo", "clip_low": 0.2}, "loss.clip_low=0.2: it has no effect on kind=cispo; take it out"),
        ({"clip_high": -0.2}, "loss.clip_high=-0.2: it must be at least 0"),
        ({"clip_low": math.nan}, "loss.clip_low=nan: it must be at least 0"),
        ({"clip_dual": 1.0}, "loss.clip_dual=1.0: the ratio begins at 1; set it above 1, such as 3"),
        ({"clip_dual": math.nan}, "loss.clip_dual=nan: the ratio begins at 1; set it above 1, such as 3"),
        ({"kind": "cispo", "clip_dual": 3.0}, "loss.clip_dual=3.0: it has no effect on kind=cispo; take it out"),
        ({**MASKS, "correction_low": 3.0, "correction_high": 2.0}, "loss.correction_low=3.0, correction_high=2.0: tokens that"),
        ({**MASKS, "correction_low": 1.5}, "loss.correction_low=1.5, correction_high=5.0: tokens that the sampler gives"),
        ({"old": "start", "correction": "truncate", "correction_high": 0.0}, "correction_high=0.0: tokens that the sampler"),
    ],
)  # fmt: skip
def test_arguments_without_an_effect_are_refused(arguments, text):
    with pytest.raises(ValueError, match="loss") as error:
        PolicyLoss(**arguments)
    assert text in str(error.value)


def test_what_would_depend_on_the_layout_is_refused_before_weights_load(tiny_config):
    config = tiny_config(microbatching="packed", max_tokens_per_microbatch=64, max_ranks_per_row=2)
    for key, text in (
        ("top_entropy_quantile", "loss.top_entropy_quantile: it selects tokens by their rank among others"),
        ("vf_coef", "loss.vf_coef: there is no critic; take it out"),
        ("tokens_per_chunk", "loss.kind=sequence: a rank of a shared row has no whole answers"),
    ):
        own = {"loss": {"_component_": "recipe_utils.policy.PolicyLoss", "kind": "sequence", key: 3}}
        with pytest.raises(ConfigError) as error:
            read_settings(OmegaConf.create(config | own), settings_of("full_policy_update_step"))
        assert text in str(error.value)


def test_a_dataset_must_have_what_the_normaliser_weighs():
    required = {n: [c for c, d in declared_by(PolicyLoss(normaliser=n)).columns.items() if d is None] for n in ("tokens", "answers", "prompts")}  # fmt: skip
    assert required == {
        "tokens": ["advantages"],
        "answers": ["advantages", "answers"],
        "prompts": ["advantages", "groups"],
    }


@pytest.fixture
def given(in_float64):
    """Returns an output layer, hidden states and targets of four sequences."""
    labels = torch.randint(VOCAB, (1, NUM))
    columns = {
        "advantages": torch.randn(NUM), "logprobs": -4 + torch.randn(NUM), "ref_logprobs": -4 + torch.randn(NUM),
        "temperatures": 0.5 + torch.rand(NUM), "answers": torch.rand(NUM), "answer_tokens": torch.ones(NUM),
        "measured": torch.ones(NUM), "groups": torch.rand(NUM), "teacher": torch.zeros(NUM),
    }  # fmt: skip
    owners = torch.arange(NUM)[None] * 4 // NUM
    targets = Targets(labels, torch.arange(NUM), owners, samples=torch.arange(4), values=columns)
    return nn.Linear(WIDTH, VOCAB, bias=False), torch.randn(1, NUM, WIDTH, requires_grad=True), targets


def sums_and_gradients(loss_fn, output, hidden, targets):
    output.weight.grad = hidden.grad = None
    sums = loss_fn(output, hidden, targets)
    sums[0].backward()
    return sums.detach(), hidden.grad.clone(), output.weight.grad.clone()


KINDS = ("clipped", "sequence", "cispo", "reinforce")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["one chunk", "an output layer with a bias", "compiled"])
def test_chunks_a_module_and_compilation_change_nothing(kind, how, given):
    output, hidden, targets = given
    arguments = {"kind": kind, "normaliser": "answers", "kl_weight": 0.3}
    expected = sums_and_gradients(PolicyLoss(**arguments, tokens_per_chunk=NUM), output, hidden, targets)
    loss_fn = PolicyLoss(**arguments, tokens_per_chunk=5)
    if how == "an output layer with a bias":
        other = nn.Linear(WIDTH, VOCAB)
        other.weight, other.bias = output.weight, nn.Parameter(torch.zeros(VOCAB))
        output = other
    if how == "compiled":
        loss_fn.compile_chunks("aot_eager")
    for found, value in zip(sums_and_gradients(loss_fn, output, hidden, targets), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("column", "name"), [("ref_logprobs", "reference"), ("logprobs", "old")])
def test_log_probabilities_of_the_file_count_before_those_of_a_model(column, name, given):
    output, hidden, targets = given
    loss_fn, known, numbers = PolicyLoss(kl_weight=0.3), torch.arange(NUM) % 2 == 0, targets.values[column]
    values = {**targets.values, column: torch.where(known, numbers, torch.nan)}
    both = targets._replace(values=values, outputs={name: torch.where(known, 9.0, numbers)})
    torch.testing.assert_close(loss_fn(output, hidden, both), loss_fn(output, hidden, targets), rtol=0, atol=0)


FAR = (0.0, 3.0, 15.0, 30.0, 90.0, 120.0, 1e4)
"""How far below the policy's a sampler's, or a reference's, log-probability is."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "changes",
    [
        *({"kind": kind} for kind in KINDS),
        {"clip_dual": 3.0},
        {**MASKS},
        *({"kl": k, "kl_weight": 0.1} for k in ("k1", "k2", "k3")),
    ],
)
def test_log_probabilities_far_off_give_the_formula_s_gradient_up_to_e20_and_a_finite_one_beyond(changes, dtype, given):
    output, hidden, targets = given
    low, high = {"sequence": (3e-4, 4e-4), "cispo": (None, 0.2), "reinforce": (None, None)}.get(changes.get("kind"), (0.2, 0.2))  # fmt: skip
    bounds = {"correction_low": 0.5, "correction_high": 5.0} if "correction" in changes else {}
    loss = {**policies.LOSS, "kind": "clipped", "clip_low": low, "clip_high": high, **bounds, **changes}

    def log_probs():
        return output(hidden[0]).log_softmax(-1).gather(1, targets.labels[0][:, None])[:, 0]

    def formula(columns):
        now = log_probs()
        old = now.detach() if loss["old"] == "start" else columns["logprobs"]
        values = columns["advantages"], now, old, columns["logprobs"], columns["ref_logprobs"]
        of_sequences = ([each[targets.owners[0] == k] for each in values] for k in range(4))
        terms = [policies.terms_of(None, *of_sequence, loss)[0].sum() for of_sequence in of_sequences]
        return torch.autograd.grad(sum(terms), [hidden, output.weight])

    now = log_probs().detach()
    for sign, far in product((1.0, -1.0), FAR):
        ones = dict.fromkeys(("temperatures", "measured"), torch.ones(NUM))
        columns = {**targets.values, **ones, "advantages": sign * targets.values["advantages"].abs()}
        columns["logprobs"] = columns["logprobs"].index_fill(0, torch.tensor([5]), now[5].item() - far)
        # k3 takes the other direction.
        columns["ref_logprobs"] = columns["ref_logprobs"].index_fill(0, torch.tensor([7]), now[7].item() + far)
        loss_fn = PolicyLoss(**changes, tokens_per_chunk=7)
        arguments = output.to(dtype), hidden.detach().to(dtype).requires_grad_(), targets._replace(values=columns)
        sums, *found = sums_and_gradients(loss_fn, *arguments)
        output.double()
        assert all(each.isfinite().all() for each in (sums, *found))
        seen = Seen(*loss_fn.take_seen(hidden.device).tolist())
        if far > 20:  # nothing else is as far
            assert seen.label == targets.labels[0, 5]
            assert seen.difference == pytest.approx(far, rel=1e-5)
        elif dtype == torch.float64:
            # fp64 rounds terms of up to e^15, 3e6, by 1e-16 of them: in the order of 1e-10 where they cancel.
            for mine, plain in zip(found, formula(columns), strict=True):
                torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-10)


def test_log_probabilities_are_those_of_logits_over_temperatures(given):
    output, hidden, targets = given
    expected = (output(hidden[0]) / targets.values["temperatures"][:, None]).log_softmax(-1)
    picked = expected.gather(1, targets.labels[0][:, None])[:, 0]
    for loss_fn in (LinearLogProbs(5), PolicyLoss(tokens_per_chunk=5)):
        with loss_fn.returning_log_probs() if isinstance(loss_fn, PolicyLoss) else nullcontext():
            torch.testing.assert_close(loss_fn(output, hidden, targets), picked, rtol=1e-12, atol=1e-12)
    weighted = [
        torch.autograd.grad(each @ targets.values["advantages"], [hidden, output.weight], retain_graph=True)
        for each in (LinearLogProbs(5)(output, hidden, targets), picked)
    ]
    torch.testing.assert_close(*weighted, rtol=1e-12, atol=1e-12)
    sums = dict(zip(PolicyLoss().sums, PolicyLoss()(output, hidden, targets).tolist(), strict=True))
    assert sums["entropy"] == pytest.approx(-(expected.exp() * expected).sum().item())
