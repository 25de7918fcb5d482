"""Log-probabilities of targets and of answers, and their gradients, one chunk of logits at a time."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from output_layers import D, LogitsWatch, V, make_output, make_targets, parameters_of
from recipe_runs import DPO, run_compiled_recipe, run_recipe
from torch._dynamo.testing import CompileCounter

from recipe_utils.data.loader.microbatch import Pairs, Targets
from recipe_utils.loss.log_probs import LinearLogProbs, num_targets_of_answers, sums_of_answers

KINDS = ["linear", "tied", "bias"]


def plain_log_probs(logits, targets):
    picked = logits.flatten(0, 1)[targets.positions]
    labels = targets.labels.flatten()[targets.positions]
    return F.log_softmax(picked, dim=-1).gather(1, labels.unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 4, 7, 21, 1000])
def test_values_and_gradients_are_those_of_all_logits(kind, chunk, hidden_and_targets):
    hidden, targets = hidden_and_targets
    output = make_output(kind)
    inputs = [hidden, *parameters_of(output)]
    loss = LinearLogProbs(tokens_per_chunk=chunk, num_output_chunks=chunk)
    ours, expected = loss(output, hidden, targets), plain_log_probs(output(hidden), targets)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    # Of one's own for each token: a pair's loss weighs its tokens as it sees fit.
    weights = torch.randn(len(ours))
    gradients = (torch.autograd.grad(each @ weights, inputs) for each in (ours, expected))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_never_more_than_one_chunk_of_logits_exists(kind):
    num_chunks, rows = 8, 5
    labels = torch.randint(V, (2, num_chunks * rows))
    labels[1] = tiny.IGNORE
    hidden, output = torch.randn(2, num_chunks * rows, D, requires_grad=True), make_output(kind)
    loss = LinearLogProbs(tokens_per_chunk=rows, num_output_chunks=num_chunks)
    with LogitsWatch() as watch:
        loss(output, hidden, make_targets(labels)).sum().backward()
    assert watch.most_rows == rows
    assert watch.most_alive < 4 * rows


@pytest.mark.parametrize("chunk", [4, 1000])
def test_a_second_backward_gives_the_same(chunk, hidden_and_targets):
    hidden, targets = hidden_and_targets
    log_probs = LinearLogProbs(chunk)(make_output("linear"), hidden, targets)
    first, second = (
        torch.autograd.grad(log_probs.sum(), hidden, retain_graph=True)[0] for _ in range(2)
    )
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def found_by(loss, output, hidden, targets):
    """Log-probabilities, and gradients where each token has a weight of its own."""
    log_probs = loss(output, hidden, targets)
    weights = torch.arange(len(log_probs), dtype=log_probs.dtype) - 3
    return log_probs, *torch.autograd.grad(log_probs @ weights, [hidden, *parameters_of(output)])


def test_compiled_chunks_give_the_same_and_are_compiled_once_for_all_lengths():
    """Forward and backward. Fewer than two rows, for which the compiler specializes, run eagerly."""
    torch._dynamo.reset()  # other variants of the same functions count for its limit
    counter = CompileCounter()
    eager, compiled = (LinearLogProbs(tokens_per_chunk=16) for _ in range(2))
    compiled.compile_chunks(counter)
    output = make_output("linear")
    for num_targets in (3, 16, 17, 33, 40, 1, 5, 0, 100, 64):
        hidden = torch.randn(1, 100, D, requires_grad=True)
        targets = Targets(torch.randint(V, (1, 100)), torch.arange(num_targets))
        expected = found_by(eager, output, hidden, targets)
        assert all(map(torch.equal, found_by(compiled, output, hidden, targets), expected))
        with torch.no_grad():
            assert torch.equal(compiled(output, hidden, targets), expected[0])
    assert counter.frame_count == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_what_the_compiler_fuses_gives_the_same(dtype):
    """By the default compiler, in-place operations included."""
    eager, compiled = (LinearLogProbs(tokens_per_chunk=16) for _ in range(2))
    compiled.compile_chunks("inductor")
    output = torch.nn.Linear(D, 300, bias=False, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for num_targets in (40, 23):
        hidden = torch.randn(1, 50, D, dtype=dtype, requires_grad=True)
        targets = Targets(torch.randint(300, (1, 50)), torch.arange(num_targets))
        found = (found_by(loss, output, hidden, targets) for loss in (compiled, eager))
        torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_a_compiled_training_has_the_curve_of_an_eager_one(tiny_dpo_config):
    config = tiny_dpo_config(max_steps_per_epoch=2, microbatching="packed")
    eager, compiled = run_recipe(config, DPO), run_compiled_recipe(config, DPO)
    for mine, other in zip(compiled, eager, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_without_targets_every_gradient_is_zero(kind):
    hidden, output = torch.randn(1, 3, D, requires_grad=True), make_output(kind)
    log_probs = LinearLogProbs()(output, hidden, make_targets(torch.full((1, 3), tiny.IGNORE)))
    assert log_probs.shape == (0,)
    log_probs.sum().backward()
    for parameter in (hidden, *parameters_of(output)):
        assert parameter.grad.abs().max() == 0


@pytest.mark.parametrize("kind", ["linear", "bias"])
def test_low_precision_gives_fp32(kind, hidden_and_targets):
    hidden, targets = hidden_and_targets
    output = make_output(kind).bfloat16()
    log_probs = LinearLogProbs()(output, hidden.bfloat16(), targets)
    assert log_probs.dtype == torch.float32
    expected = plain_log_probs(output(hidden.bfloat16()).float(), targets)
    torch.testing.assert_close(log_probs, expected, rtol=1e-2, atol=2e-2)


def test_a_backward_in_two_parts_is_refused(hidden_and_targets):
    hidden, targets = hidden_and_targets
    with pytest.raises(ValueError, match="no backward in parts"):
        LinearLogProbs()(make_output("linear"), hidden, targets, backward_in_parts=True)


def test_targets_that_both_answers_share_count_for_both():
    lengths = [[2, 1, 3], [0, 2, 1], [4, 0, 1]]
    pairs = Pairs(torch.tensor(lengths).flatten(), ("a", "b", "c"))
    of_tokens = torch.randn(14, requires_grad=True)
    chosen, rejected = sums_of_answers(of_tokens, pairs)
    parts = iter(of_tokens.split([n for of_pair in lengths for n in of_pair]))
    for i in range(3):
        shared, first, second = next(parts), next(parts), next(parts)
        for answer, own in ((chosen, first), (rejected, second)):
            assert answer[i].item() == pytest.approx((shared.sum() + own.sum()).item(), abs=1e-12)
    assert num_targets_of_answers(pairs).tolist() == [[3, 2, 4], [5, 1, 5]]
    chosen.sum().backward(retain_graph=True)
    rejected.sum().backward()
    assert of_tokens.grad.tolist() == [2, 2, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 1]


def test_sums_of_many_small_numbers_lose_nothing():
    pairs = Pairs(torch.tensor([0, 100_000, 1]), ("a",))
    sums = sums_of_answers(torch.full((100_001,), -0.1, dtype=torch.float32), pairs)
    assert sums[0, 0].item() == pytest.approx(-0.1 * 100_000, rel=1e-7)


def test_without_pairs_the_sums_are_empty_with_a_graph():
    pairs = Pairs(torch.zeros(0, dtype=torch.long), ())
    sums = sums_of_answers(torch.zeros(0, requires_grad=True), pairs)
    assert sums.shape == (2, 0)
    assert sums.requires_grad
