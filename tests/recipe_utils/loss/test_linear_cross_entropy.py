"""LinearCrossEntropyLoss is the sum of cross-entropies over the targets, one chunk of logits at a time."""

import math

import pytest
import tiny
import torch
import torch.nn.functional as F
from output_layers import D, LogitsWatch, V, make_output, make_targets, parameters_of
from recipe_runs import run_compiled_recipe
from torch import nn
from torch._dynamo.testing import CompileCounter

from recipe_utils.data.loader.microbatch import Targets
from recipe_utils.loss.linear_cross_entropy import LinearCrossEntropyLoss


def plain_sum(logits, targets, **options):
    return F.cross_entropy(
        logits.flatten(0, 1), targets.labels.flatten(), reduction="sum", **options
    )


def assert_close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["linear", "tied", "bias"])
@pytest.mark.parametrize("chunk", [1, 4, 7, 21, 1000])
def test_value_and_gradients_are_those_of_the_plain_sum(kind, chunk, hidden_and_targets):
    hidden, targets = hidden_and_targets
    output = make_output(kind)
    inputs = [hidden, *parameters_of(output)]
    loss_fn = LinearCrossEntropyLoss(tokens_per_chunk=chunk, num_output_chunks=chunk)
    ours, expected = loss_fn(output, hidden, targets), plain_sum(output(hidden), targets)
    assert_close(ours, expected)
    # A factor, because what the recipe differentiates is the scaled loss.
    found = torch.autograd.grad(0.3 * ours, inputs)
    assert_close(found, torch.autograd.grad(0.3 * expected, inputs))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_a_frozen_side_gets_no_gradient_and_the_other_the_same(frozen, hidden_and_targets):
    hidden, targets = hidden_and_targets
    output = make_output("linear")
    hidden.requires_grad_(frozen == "weight")
    output.weight.requires_grad_(frozen == "hidden")
    ours = LinearCrossEntropyLoss(tokens_per_chunk=4)(output, hidden, targets)
    expected = plain_sum(output(hidden), targets)
    assert_close(ours, expected)
    if frozen != "both":
        trained = [hidden if frozen == "weight" else output.weight]
        assert_close(torch.autograd.grad(ours, trained), torch.autograd.grad(expected, trained))


@pytest.mark.parametrize("kind", ["linear", "bias"])
def test_low_precision_inputs_give_an_fp32_loss(kind, hidden_and_targets):
    hidden, targets = hidden_and_targets
    output = make_output(kind).bfloat16()
    low = hidden.detach().bfloat16().requires_grad_()
    loss = LinearCrossEntropyLoss(tokens_per_chunk=4)(output, low, targets)
    assert loss.dtype == torch.float32
    expected = plain_sum(output(low).float(), targets)
    # The same bf16 logits, so what is left is the rounding of an fp32 sum.
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    ours, plain = torch.autograd.grad(loss, low)[0], torch.autograd.grad(expected, low)[0]
    assert (ours - plain).abs().max() < 0.02 * plain.abs().max()


@pytest.mark.parametrize("kind", ["linear", "tied", "bias"])
def test_without_targets_the_loss_is_zero_and_so_is_every_gradient(kind):
    hidden, output = torch.randn(2, 5, D, requires_grad=True), make_output(kind)
    no_targets = make_targets(torch.full((2, 5), tiny.IGNORE))
    loss = LinearCrossEntropyLoss()(output, hidden, no_targets)
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, [hidden, *parameters_of(output)]):
        assert not gradient.any()


@pytest.mark.parametrize("kind", ["linear", "bias"])
def test_a_backward_in_two_parts_gives_each_part_its_gradient(kind, hidden_and_targets):
    """As zero-bubble schedules have it: for the hidden states now, for the weight later."""
    hidden, targets = hidden_and_targets
    output = make_output(kind)
    loss = LinearCrossEntropyLoss(tokens_per_chunk=4)(output, hidden, targets, True)
    of_parts = [
        torch.autograd.grad(0.3 * loss, inputs, retain_graph=True)
        for inputs in ([hidden], parameters_of(output))
    ]
    expected = 0.3 * plain_sum(output(hidden), targets)
    found = [gradient for of_part in of_parts for gradient in of_part]
    assert_close(found, torch.autograd.grad(expected, [hidden, *parameters_of(output)]))


@pytest.mark.parametrize("kind", ["linear", "tied", "bias"])
def test_never_more_than_one_chunk_of_logits_exists(kind):
    num_chunks, rows = 8, 5
    labels = torch.randint(V, (2, num_chunks * rows))
    labels[1] = tiny.IGNORE
    hidden, output = torch.randn(2, num_chunks * rows, D, requires_grad=True), make_output(kind)
    loss_fn = LinearCrossEntropyLoss(tokens_per_chunk=rows, num_output_chunks=num_chunks)
    with LogitsWatch() as watch:
        loss_fn(output, hidden, make_targets(labels)).backward()
    assert watch.most_rows == rows
    # Logits, their log-probabilities and a gradient of one chunk; two chunks would be 4 * rows.
    assert watch.most_alive < 4 * rows


def test_the_watch_sees_all_logits_of_a_plain_loss(hidden_and_targets):
    hidden, targets = hidden_and_targets
    output = make_output("linear")
    with LogitsWatch() as watch:
        plain_sum(output(hidden), targets)
    assert watch.most_rows == 33


def test_logits_that_overflow_on_ignored_positions_do_not_matter():
    hidden, output = torch.randn(1, 4, D), make_output("linear")
    labels = torch.tensor([[3, tiny.IGNORE, 7, tiny.IGNORE]])
    expected = plain_sum(output(hidden), make_targets(labels))
    hidden[0, 1] = math.inf
    assert_close(LinearCrossEntropyLoss()(output, hidden, make_targets(labels)), expected)


@pytest.mark.parametrize("name", ["tokens_per_chunk", "num_output_chunks"])
def test_a_loss_without_a_chunk_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        LinearCrossEntropyLoss(**{name: 0})


def test_validation_computes_no_gradient():
    """A loss under ``no_grad`` has no product that accumulates the gradient of the output weight."""
    output = nn.Linear(8, 11, bias=False)
    targets = Targets(torch.arange(6).view(1, 6), torch.arange(6))
    loss_fn = LinearCrossEntropyLoss(tokens_per_chunk=3)
    for grad_enabled, num_products in ((True, 2), (False, 0)):
        with torch.set_grad_enabled(grad_enabled), torch.profiler.profile() as profile:
            loss_fn(output, torch.randn(1, 6, 8), targets)
        assert sum(event.name == "aten::addmm_" for event in profile.events()) == num_products


@pytest.mark.parametrize("kind", ["linear", "bias"])
def test_compiled_chunks_give_the_same_and_are_compiled_once_for_all_lengths(kind):
    """With and without a gradient. Fewer than two rows, for which the compiler specializes, run eagerly."""
    torch._dynamo.reset()  # other variants of the same function count for its limit
    counter = CompileCounter()
    eager, compiled = (LinearCrossEntropyLoss(tokens_per_chunk=16) for _ in range(2))
    compiled.compile_chunks(counter)
    output = make_output(kind)
    for num_targets in (3, 16, 17, 33, 40, 1, 5, 0, 100, 64):
        hidden = torch.randn(1, 100, D, requires_grad=True)
        targets = Targets(torch.randint(V, (1, 100)), torch.arange(num_targets))
        inputs = [hidden, *parameters_of(output)]
        found, expected = (loss(output, hidden, targets) for loss in (compiled, eager))
        assert torch.equal(found, expected)
        gradients = (torch.autograd.grad(each, inputs) for each in (found, expected))
        assert all(map(torch.equal, *gradients))
        with torch.no_grad():
            assert torch.equal(compiled(output, hidden, targets), expected)
    assert counter.frame_count == 2


def test_compile_compiles_the_loss(tiny_config, monkeypatch):
    backends = []
    monkeypatch.setattr(
        LinearCrossEntropyLoss, "compile_chunks", lambda loss, backend: backends.append(backend)
    )
    data = {"_component_": "tiny.tiny_dataset", "num_samples": 4}
    run_compiled_recipe(tiny_config(max_steps_per_epoch=1, dataset=data))
    assert backends == ["aot_eager"]
