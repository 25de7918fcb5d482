"""Each loss equals its paper's formula; one that a recipe could not sum over pairs is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchtune.rlhf.loss import DPOLoss, RSOLoss

from recipe_utils.preference.pair_losses import (
    METRICS,
    IPOLoss,
    NormalizedDPOLoss,
    ORPOLoss,
    PreferenceLoss,
    RobustDPOLoss,
    SimPOLoss,
    make_preference_loss,
    sums_of_sequences,
)
from recipe_utils.update_steps.step import Targets

pytestmark = pytest.mark.usefixtures("in_float64")

OURS = [IPOLoss, RobustDPOLoss, NormalizedDPOLoss, SimPOLoss, ORPOLoss]


@pytest.fixture
def log_probs():
    """Returns log-probabilities of 7 pairs: policy's chosen and rejected, then the reference's."""
    return -30 * torch.rand(4, 7)


@pytest.mark.parametrize("make", OURS)
def test_exchanged_sides_exchange_the_rewards_which_have_no_graph(make, log_probs):
    chosen, rejected, ref_chosen, ref_rejected = log_probs.requires_grad_()
    losses, *rewards = make()(chosen, rejected, ref_chosen, ref_rejected)
    _, *exchanged = make()(rejected, chosen, ref_rejected, ref_chosen)
    assert losses.requires_grad
    assert not any(reward.requires_grad for reward in rewards)
    assert all(map(torch.equal, rewards, reversed(exchanged)))


def test_ipo_is_least_where_the_log_ratio_is_its_target(log_probs):
    chosen, rejected, ref_chosen, ref_rejected = log_probs
    at_target = rejected - ref_rejected + ref_chosen + 1 / (2 * 0.25)
    losses, *_ = IPOLoss(tau=0.25)(at_target, rejected, ref_chosen, ref_rejected)
    assert losses.abs().max() < 1e-20
    losses, *_ = IPOLoss(tau=0.25)(chosen, rejected, ref_chosen, ref_rejected)
    ratio = chosen - rejected - ref_chosen + ref_rejected
    torch.testing.assert_close(losses, (ratio - 2) ** 2)


def test_the_robust_loss_is_that_of_right_labels_in_the_mean(log_probs):
    chosen, rejected, ref_chosen, ref_rejected = log_probs
    noise = 0.2
    loss = RobustDPOLoss(beta=0.3, label_smoothing=noise)
    as_labeled, *_ = loss(chosen, rejected, ref_chosen, ref_rejected)
    exchanged, *_ = loss(rejected, chosen, ref_rejected, ref_chosen)
    of_right_labels, *_ = DPOLoss(beta=0.3)(chosen, rejected, ref_chosen, ref_rejected)
    mean = (1 - noise) * as_labeled + noise * exchanged
    torch.testing.assert_close(mean, of_right_labels, rtol=1e-12, atol=1e-12)


def test_length_normalized_dpo_is_dpo_of_its_inputs(log_probs):
    ours = NormalizedDPOLoss(5.0, label_smoothing=0.3)(*log_probs)
    torch.testing.assert_close(ours, DPOLoss(5.0, 0.3)(*log_probs), rtol=1e-12, atol=1e-12)
    assert NormalizedDPOLoss.normalizes_length


def test_simpo_asks_for_a_margin_and_no_reference(log_probs):
    chosen, rejected, *_ = log_probs
    losses, r_chosen, r_rejected = SimPOLoss(beta=2.0, gamma=1.5)(chosen, rejected, None, None)
    torch.testing.assert_close(losses, -F.logsigmoid(2 * chosen - 2 * rejected - 1.5))
    torch.testing.assert_close(r_chosen - r_rejected, 2 * (chosen - rejected))
    assert SimPOLoss.normalizes_length
    assert not SimPOLoss.needs_reference


def test_orpo_has_a_finite_gradient_at_an_answer_that_is_certain():
    chosen, rejected = torch.tensor([[0.0, -2.0], [-2.0, 0.0]]).requires_grad_()
    losses, *_ = ORPOLoss()(chosen, rejected, None, None)
    (gradient,) = torch.autograd.grad(losses.sum(), rejected)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


def mean(*log_probs):
    losses, *rewards = DPOLoss()(*log_probs)
    return losses.mean(), *rewards


def in_order_of_scores(chosen, rejected, ref_chosen, ref_rejected):
    """Computes TRL's ``aot``, which compares the pairs of a batch in the order of their scores."""
    delta = (chosen - ref_chosen).sort().values - (rejected - ref_rejected).sort().values
    return -F.logsigmoid(delta), chosen, rejected


def centered(*log_probs):
    losses, chosen, rejected = DPOLoss()(*log_probs)
    return losses, chosen - chosen.mean(), rejected


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (nn.CrossEntropyLoss, "CrossEntropyLoss does not take log-probabilities of pairs"),
        (lambda: mean, "a mean over the pairs must be left to the recipe"),
        (lambda: in_order_of_scores, "of a pair depend on the other pairs of its batch"),
        (lambda: centered, "of a pair depend on the other pairs of its batch"),
        (lambda: RobustDPOLoss(label_smoothing=0.5), "loss.label_smoothing=0.5"),
        (lambda: SimPOLoss(beta=-1.0), "SimPOLoss teaches the rejected answers"),
        (lambda: RSOLoss(gamma=0), "RSOLoss teaches nothing"),
    ],
)
def test_a_loss_that_cannot_be_summed_over_pairs_or_prefers_no_answer_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make_preference_loss(make)


def test_without_a_reference_attached_the_loss_module_returns_log_probabilities():
    """If one is attached, it returns their sums by the loss's definition, in fp64."""
    torch.manual_seed(0)
    output = nn.Linear(4, 9, bias=False, dtype=torch.float64)
    hidden = torch.randn(2, 5, 4, dtype=torch.float64)
    labels = torch.tensor([[1, 2, 3, -100, -100], [4, 5, -100, -100, -100]])
    positions = (labels.flatten() != -100).nonzero().squeeze(1)
    owners = torch.tensor([[0] * 5, [1] * 5])
    values = {"common_tokens": torch.zeros(2, dtype=torch.int64)}
    targets = Targets(labels, positions, owners, samples=torch.zeros(2), of_samples=values)
    loss = PreferenceLoss(DPOLoss(beta=0.3), tokens_per_chunk=2)
    log_probs = F.log_softmax(output(hidden), -1).flatten(0, 1)[positions]
    of_labels = log_probs.gather(1, labels.flatten()[positions, None]).squeeze(1)
    expected = torch.stack([of_labels[:3].sum(), of_labels[3:].sum()])
    found = loss(output, hidden, targets)
    torch.testing.assert_close(found, expected)
    reference = torch.tensor([-9.0, -5.0], dtype=torch.float64)
    sums = loss(output, hidden, targets._replace(outputs={"reference": reference}))
    chosen, rejected = 0.3 * (expected - reference)
    by_name = dict(zip(METRICS, sums.tolist(), strict=True))
    assert by_name["preference_loss"] == pytest.approx(-F.logsigmoid(chosen - rejected).item())
    assert by_name["rewards/margins"] == pytest.approx((chosen - rejected).item())
    assert by_name["sft_loss"] == pytest.approx(-expected[0].item())
    assert by_name["rewards/accuracies"] == float(chosen > rejected)


def test_sums_of_many_small_numbers_lose_nothing():
    owners, none = torch.tensor([[0] * 100_000 + [1]]), torch.zeros(2, dtype=torch.int64)
    targets = Targets(owners, torch.arange(100_001), owners, of_samples={"common_tokens": none})
    sums, _ = sums_of_sequences(torch.full((100_001,), -0.1, dtype=torch.float32), targets)
    assert sums[0].sum().item() == pytest.approx(-0.1 * 100_000, rel=1e-7)  # -0.1 in fp32 is 1.5e-8 off
