"""Arguments of the policy loss that have no effect or no meaning are refused; chunks and compilation change nothing."""

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from recipe_utils.policy import PolicyLoss
from recipe_utils.policy.policy_losses import TemperedLogProbs
from recipe_utils.settings.describe import settings_of
from recipe_utils.settings.problems import ConfigError
from recipe_utils.settings.read import read_settings
from recipe_utils.update_steps.objective import declared_by
from recipe_utils.update_steps.step import Targets

NUM, VOCAB, WIDTH = 23, 50, 16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kind": "grpo"}, "loss.kind=grpo: unknown; set it to one of clipped, sequence, cispo, reinforce"),
        ({"kind": "clip_cov"}, "loss.kind=clip_cov: it selects tokens by their rank among others, so the gradient"),
        ({"kind": "gae"}, "loss.kind=gae: it needs a critic"),
        ({"normaliser": "sequences"}, "loss.normaliser=sequences: unknown; set it to one of tokens, answers, constant, prompts"),
        ({"normaliser": "constant"}, "loss.tokens_per_answer=None: it is the L of normaliser=constant"),
        ({"tokens_per_answer": 9}, "loss.tokens_per_answer=9: it is the L of normaliser=constant"),
        ({"kl": "k4"}, "loss.kl=k4: unknown; set it to one of k1, k2, k3"),
        ({"kl_weight": -1.0}, "loss.kl_weight=-1.0: it must be at least 0"),
        ({"correction": "mask"}, "loss.correction=mask: it has no effect on old=file"),
        ({"old": "start", "correction_high": 2}, "loss.correction_high=2: it has no effect on correction=None; take it out"),
        ({"kind": "cispo", "clip_low": 0.2}, "loss.clip_low=0.2: it has no effect on kind=cispo; take it out"),
        ({"clip_high": -0.2}, "loss.clip_high=-0.2: it must be at least 0"),
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


def test_the_first_update_has_a_ratio_of_exactly_one(given):
    output, hidden, targets = given
    for kind in ("clipped", "sequence", "cispo"):
        loss_fn = PolicyLoss(kind, old="start")
        sums = dict(zip(loss_fn.sums, loss_fn(output, hidden, targets).tolist(), strict=True))
        assert loss_fn.largest_ratio == 1.0
        assert sums["ratio"] == NUM
        assert sums["clipped_high"] == 0


@pytest.mark.parametrize(("column", "name"), [("ref_logprobs", "reference"), ("logprobs", "old")])
def test_log_probabilities_of_the_file_count_before_those_of_a_model(column, name, given):
    output, hidden, targets = given
    loss_fn, known, numbers = PolicyLoss(kl_weight=0.3), torch.arange(NUM) % 2 == 0, targets.values[column]
    values = {**targets.values, column: torch.where(known, numbers, torch.nan)}
    both = targets._replace(values=values, outputs={name: torch.where(known, 9.0, numbers)})
    torch.testing.assert_close(loss_fn(output, hidden, both), loss_fn(output, hidden, targets), rtol=0, atol=0)


def test_log_probabilities_are_those_of_logits_over_temperatures(given):
    output, hidden, targets = given
    expected = (output(hidden[0]) / targets.values["temperatures"][:, None]).log_softmax(-1)
    picked = expected.gather(1, targets.labels[0][:, None])[:, 0]
    for loss_fn in (TemperedLogProbs(5), PolicyLoss(tokens_per_chunk=5)):
        with loss_fn.returning_log_probs() if isinstance(loss_fn, PolicyLoss) else torch.no_grad():
            torch.testing.assert_close(loss_fn(output, hidden, targets), picked.detach(), rtol=1e-12, atol=1e-12)
    sums = dict(zip(PolicyLoss().sums, PolicyLoss()(output, hidden, targets).tolist(), strict=True))
    assert sums["entropy"] == pytest.approx(-(expected.exp() * expected).sum().item())
