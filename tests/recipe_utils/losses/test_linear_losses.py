"""Losses that project targets in chunks have the values and gradients of all logits at once."""

import math

import pytest
import tiny
import torch
import torch.nn.functional as F
from output_layers import D, LogitsWatch, V, make_output, make_targets, parameters_of
from recipe_runs import DPO, run_compiled_recipe, run_recipe
from torch import nn
from torch._dynamo.testing import CompileCounter

from recipe_utils.losses.cross_entropy import LinearCrossEntropyLoss
from recipe_utils.losses.log_probs import LinearLogProbs
from recipe_utils.update_steps.step import Targets

pytestmark = pytest.mark.usefixtures("in_float64")


def plain_log_probs(output, hidden, targets):
    logits = output(hidden).flatten(0, 1)[targets.positions]
    labels = targets.labels.flatten()[targets.positions]
    log_probs = F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    return log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)


def plain_cross_entropy(output, hidden, targets):
    logits = output(hidden).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.labels.flatten(), reduction="sum")


@pytest.fixture
def hidden_and_targets():
    """Returns hidden states and targets of [3, 11] positions, 21 of them targets."""
    labels = torch.randint(V, (3, 11))
    labels.view(-1)[torch.randperm(33)[:12]] = tiny.IGNORE
    return torch.randn(3, 11, D, requires_grad=True), make_targets(labels)


PLAIN = {LinearCrossEntropyLoss: plain_cross_entropy, LinearLogProbs: plain_log_probs}
both_losses = pytest.mark.parametrize("make", PLAIN)
all_outputs = pytest.mark.parametrize("kind", ["linear", "tied", "bias"])


def values_and_gradients(loss, output, hidden, targets):
    """Returns values of a loss, and gradients with a different factor for each value."""
    values = loss(output, hidden, targets).view(-1)
    factors = torch.arange(len(values), dtype=values.dtype) - 3
    return values, *torch.autograd.grad(values @ factors, [hidden, *parameters_of(output)])


def assert_close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@both_losses
@all_outputs
@pytest.mark.parametrize("chunk", [1, 4, 7, 21, 1000])
def test_values_and_gradients_are_those_of_all_logits(make, kind, chunk, hidden_and_targets):
    loss, output = make(tokens_per_chunk=chunk, num_output_chunks=chunk), make_output(kind)
    assert_close(
        values_and_gradients(loss, output, *hidden_and_targets),
        values_and_gradients(PLAIN[make], output, *hidden_and_targets),
    )


@both_losses
@pytest.mark.parametrize("kind", ["linear", "bias"])
def test_low_precision_inputs_give_fp32(make, kind, hidden_and_targets):
    hidden, targets = hidden_and_targets
    output, low = make_output(kind).bfloat16(), hidden.detach().bfloat16().requires_grad_()
    found, expected = (
        values_and_gradients(loss, output, low, targets) for loss in (make(tokens_per_chunk=4), PLAIN[make])
    )
    assert found[0].dtype == torch.float32
    # The same bf16 logits, so what is left is the rounding of an fp32 sum.
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    assert (found[1] - expected[1]).abs().max() < 0.02 * expected[1].abs().max()


@both_losses
def test_many_chunks_round_the_gradient_of_a_bf16_weight_little_more_than_one(make):
    hidden = torch.randn(1, 2048, D).bfloat16().requires_grad_()
    output, targets = make_output("linear").bfloat16(), make_targets(torch.randint(V, (1, 2048)))

    def gradient(output, hidden, num_chunks):
        loss = make(tokens_per_chunk=2048 // num_chunks)
        (found,) = torch.autograd.grad(loss(output, hidden, targets).sum(), output.weight)
        return found.double()

    in_one, in_32 = (gradient(output, hidden, num_chunks) for num_chunks in (1, 32))
    exact = gradient(output.double(), hidden.detach().double(), 1)
    # 1.3 to 1.5 times; 3.1 to 3.9 times if all chunks are summed in bf16.
    assert (in_32 - exact).norm() < 1.8 * (in_one - exact).norm()


@both_losses
@all_outputs
def test_without_targets_every_gradient_is_zero(make, kind):
    hidden, output = torch.randn(2, 5, D, requires_grad=True), make_output(kind)
    no_targets = make_targets(torch.full((2, 5), tiny.IGNORE))
    values, *gradients = values_and_gradients(make(), output, hidden, no_targets)
    assert not values.any()
    assert not any(gradient.any() for gradient in gradients)


@both_losses
@all_outputs
def test_never_more_than_one_chunk_of_logits_exists(make, kind):
    num_chunks, rows = 8, 5
    labels = torch.randint(V, (2, num_chunks * rows))
    labels[1] = tiny.IGNORE
    hidden, output = torch.randn(2, num_chunks * rows, D, requires_grad=True), make_output(kind)
    loss = make(tokens_per_chunk=rows, num_output_chunks=num_chunks)
    with LogitsWatch() as watch:
        loss(output, hidden, make_targets(labels)).sum().backward()
    assert watch.most_rows == rows
    # Logits, their log-probabilities and a gradient of one chunk; two chunks would be 4 * rows.
    assert watch.most_alive < 4 * rows


def test_the_watch_sees_all_logits_of_a_plain_loss(hidden_and_targets):
    with LogitsWatch() as watch:
        plain_cross_entropy(make_output("linear"), *hidden_and_targets)
    assert watch.most_rows == 33


@both_losses
def test_logits_that_overflow_on_ignored_positions_do_not_matter(make):
    hidden, output = torch.randn(1, 4, D), make_output("linear")
    targets = make_targets(torch.tensor([[3, tiny.IGNORE, 7, tiny.IGNORE]]))
    expected = PLAIN[make](output, hidden, targets)
    hidden[0, 1] = math.inf
    assert_close(make()(output, hidden, targets), expected)


@pytest.mark.parametrize(
    ("make", "kind", "num_datasets"),
    [
        (LinearCrossEntropyLoss, "linear", 0),
        (LinearCrossEntropyLoss, "linear", 2),
        (LinearCrossEntropyLoss, "bias", 0),
        (LinearLogProbs, "linear", 0),
    ],
)
def test_compiled_chunks_give_the_same_and_are_compiled_once_for_all_lengths(make, kind, num_datasets):
    """Two functions are compiled. Fewer than two rows, for which the compiler specializes, run eagerly."""
    torch._dynamo.reset()  # other variants of the same functions count for its limit
    counter = CompileCounter()
    eager, compiled = (make(tokens_per_chunk=16) for _ in range(2))
    compiled.compile_chunks(counter)
    output = make_output(kind)
    for num_targets in (3, 16, 17, 33, 40, 1, 5, 0, 100, 64):
        hidden = torch.randn(1, 100, D, requires_grad=True)
        targets = Targets(torch.randint(V, (1, 100)), torch.arange(num_targets))
        if num_datasets:
            indices, weights = targets.positions % num_datasets, torch.rand(num_datasets).double()
            targets = targets._replace(samples=indices)
            eager.weights = compiled.weights = weights
        found, expected = (values_and_gradients(loss, output, hidden, targets) for loss in (compiled, eager))
        assert all(map(torch.equal, found, expected))
        with torch.no_grad():
            assert torch.equal(compiled(output, hidden, targets).view(-1), expected[0])
    assert counter.frame_count == 2


# ---- Cross-entropy ------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_a_frozen_side_gets_no_gradient_and_the_other_the_same(frozen, hidden_and_targets):
    hidden, targets = hidden_and_targets
    output = make_output("linear")
    hidden.requires_grad_(frozen == "weight")
    output.weight.requires_grad_(frozen == "hidden")
    ours = LinearCrossEntropyLoss(tokens_per_chunk=4)(output, hidden, targets)
    expected = plain_cross_entropy(output, hidden, targets)
    assert_close(ours, expected)
    if frozen != "both":
        trained = [hidden if frozen == "weight" else output.weight]
        assert_close(torch.autograd.grad(ours, trained), torch.autograd.grad(expected, trained))


@pytest.mark.parametrize("kind", ["linear", "bias"])
def test_a_backward_in_two_parts_gives_each_part_its_gradient(kind, hidden_and_targets):
    """Zero-bubble schedules run it for the hidden states first, for the weight later."""
    hidden, targets = hidden_and_targets
    output = make_output(kind)
    loss = LinearCrossEntropyLoss(tokens_per_chunk=4)(output, hidden, targets, True)
    inputs = [hidden, *parameters_of(output)]
    of_hidden = torch.autograd.grad(0.3 * loss, inputs[:1], retain_graph=True)
    of_weight = torch.autograd.grad(0.3 * loss, inputs[1:], retain_graph=True)
    expected = 0.3 * plain_cross_entropy(output, hidden, targets)
    assert_close((*of_hidden, *of_weight), torch.autograd.grad(expected, inputs))


def test_validation_computes_no_gradient():
    output = nn.Linear(8, 11, bias=False)
    targets = Targets(torch.arange(6).view(1, 6), torch.arange(6))
    for grad_enabled, num_products in ((True, 2), (False, 0)):
        with torch.set_grad_enabled(grad_enabled), torch.profiler.profile() as profile:
            LinearCrossEntropyLoss(tokens_per_chunk=3)(output, torch.randn(1, 6, 8), targets)
        # Products that accumulate the weight's gradient, one for each chunk.
        assert sum(event.name == "aten::addmm_" for event in profile.events()) == num_products


def test_compile_compiles_the_loss(tiny_config, monkeypatch):
    backends = []
    monkeypatch.setattr(LinearCrossEntropyLoss, "compile_chunks", lambda loss, backend: backends.append(backend))
    data = {"_component_": "tiny.tiny_dataset", "num_samples": 4}
    with torch.compiler.set_stance("force_eager"):  # the layers
        run_compiled_recipe(tiny_config(max_steps_per_epoch=1, dataset=data))
    assert backends == ["aot_eager"]


# ---- Log-probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [4, 1000])
def test_a_second_backward_gives_the_same(chunk, hidden_and_targets):
    hidden, targets = hidden_and_targets
    log_probs = LinearLogProbs(chunk)(make_output("linear"), hidden, targets)
    first, second = (torch.autograd.grad(log_probs.sum(), hidden, retain_graph=True) for _ in range(2))
    assert_close(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_the_default_compiler_gives_the_same(dtype):
    eager, compiled = (LinearLogProbs(tokens_per_chunk=16) for _ in range(2))
    compiled.compile_chunks("inductor")
    output = nn.Linear(D, 300, bias=False, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for num_targets in (40, 23):
        hidden = torch.randn(1, 50, D, dtype=dtype, requires_grad=True)
        targets = Targets(torch.randint(300, (1, 50)), torch.arange(num_targets))
        found = (values_and_gradients(loss, output, hidden, targets) for loss in (compiled, eager))
        torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_a_compiled_training_has_the_curve_of_an_eager_one(tiny_dpo_config):
    config = tiny_dpo_config(max_steps_per_epoch=2, microbatching="packed")
    eager, compiled = run_recipe(config, DPO), run_compiled_recipe(config, DPO)
    for mine, other in zip(compiled, eager, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_a_backward_in_two_parts_of_log_probabilities_is_refused(hidden_and_targets):
    with pytest.raises(ValueError, match="no backward in parts"):
        LinearLogProbs()(make_output("linear"), *hidden_and_targets, backward_in_parts=True)
