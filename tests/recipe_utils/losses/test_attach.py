"""A model's forward returns sums over the targets; the first has the gradients of the plain sum."""

from functools import partial

import pytest
import tiny
import torch
import torch.nn.functional as F
from output_layers import make_targets
from torch import nn
from torchtune.modules.loss import CEWithChunkedOutputLoss

from recipe_utils.losses.attach import SummedLoss, attach_loss
from recipe_utils.losses.cross_entropy import LinearCrossEntropyLoss
from recipe_utils.update_steps.step import Targets

pytestmark = pytest.mark.usefixtures("in_float64")

SIZES = {"tied": tiny.MODEL, "untied": tiny.UNTIED_MODEL}
STOCK_LOSSES = {
    "chunked": CEWithChunkedOutputLoss,
    "mean": partial(nn.CrossEntropyLoss, reduction="mean"),
    "sum": partial(nn.CrossEntropyLoss, reduction="sum"),
    "smoothed": partial(nn.CrossEntropyLoss, label_smoothing=0.1),
}


def no_targets(b, s):
    return make_targets(torch.full((b, s), tiny.IGNORE))


def plain_sum(logits, targets, **options):
    return F.cross_entropy(logits.flatten(0, 1), targets.labels.flatten(), reduction="sum", **options)


def assert_close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


LOSSES_AND_SIZES = [
    ("linear", "tied"), ("linear", "untied"), ("chunked", "tied"), ("chunked", "untied"),
    ("mean", "tied"), ("sum", "untied"), ("smoothed", "tied"),
]  # fmt: skip


@pytest.mark.parametrize(("loss_name", "sizes"), LOSSES_AND_SIZES)
def test_a_models_loss_and_gradients_are_those_of_the_plain_sum(sizes, loss_name):
    samples = tiny.make_samples(6, num_without_targets=1)
    longest = 43  # no multiple of the number of output chunks
    tokens = torch.zeros(6, longest, dtype=torch.long)
    labels = torch.full((6, longest), tiny.IGNORE)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample["tokens"])] = torch.tensor(sample["tokens"])
        labels[row, : len(sample["labels"]) - 1] = torch.tensor(sample["labels"][1:])
    targets = make_targets(labels)

    model = tiny.tiny_model(SIZES[sizes])
    options = {"label_smoothing": 0.1} if loss_name == "smoothed" else {}
    expected = plain_sum(model(tokens), targets, **options)
    gradients = torch.autograd.grad(expected, list(model.parameters()))

    make_loss = STOCK_LOSSES.get(loss_name, partial(LinearCrossEntropyLoss, tokens_per_chunk=9))
    attach_loss(model, make_loss())
    sums = model(tokens, targets=targets)
    assert sums.shape == (1,)
    sums[0].backward()
    assert_close(sums[0], expected)
    assert_close(tuple(p.grad for p in model.parameters()), gradients)


@pytest.mark.parametrize(("loss_name", "sizes"), [*LOSSES_AND_SIZES, ("linear", "bias"), ("chunked", "bias")])
def test_a_microbatch_without_targets_gives_every_parameter_a_zero_gradient(sizes, loss_name):
    model = tiny.tiny_model(SIZES.get(sizes, tiny.UNTIED_MODEL))
    if sizes == "bias":
        model.output = nn.Linear(tiny.MODEL["embed_dim"], tiny.VOCAB_SIZE)
    attach_loss(model, STOCK_LOSSES.get(loss_name, LinearCrossEntropyLoss)())
    sums = model(torch.randint(tiny.VOCAB_SIZE, (2, 9)), targets=no_targets(2, 9))
    sums.backward()
    assert sums.tolist() == [0]
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()  # NaN would count as non-zero


@pytest.mark.parametrize(("loss_name", "sizes"), LOSSES_AND_SIZES)
def test_a_model_called_without_targets_returns_logits(sizes, loss_name):
    model, tokens = tiny.tiny_model(SIZES[sizes]), torch.randint(tiny.VOCAB_SIZE, (2, 11))
    expected = model(tokens)
    attach_loss(model, STOCK_LOSSES.get(loss_name, LinearCrossEntropyLoss)())
    model(tokens, targets=no_targets(2, 11))  # must not linger
    logits = model(tokens)
    logits = torch.cat(logits, dim=1) if isinstance(logits, list) else logits
    assert_close(logits, expected)


def test_a_forward_that_failed_leaves_no_targets_behind():
    model, tokens = tiny.tiny_model(), torch.randint(tiny.VOCAB_SIZE, (1, 7))
    expected = model(tokens)
    attach_loss(model, LinearCrossEntropyLoss())
    with pytest.raises(IndexError):
        model(tokens + tiny.VOCAB_SIZE, targets=no_targets(1, 7))
    assert_close(model(tokens), expected)


def test_a_loss_of_hidden_states_is_refused_on_a_model_that_is_no_decoder():
    with pytest.raises(ValueError, match="needs a torchtune TransformerDecoder, Linear is none"):
        attach_loss(nn.Linear(2, 2), LinearCrossEntropyLoss())


class ThreeSums:
    """Cross-entropy, a product with the teacher's outputs, and the number of correct predictions."""

    takes_hidden_states = True

    def __call__(self, output, hidden, targets, backward_in_parts):
        self.backward_in_parts = backward_in_parts
        logits = output(hidden).flatten(0, 1)[targets.positions]
        labels = targets.labels.flatten()[targets.positions]
        return torch.stack(
            [
                F.cross_entropy(logits, labels, reduction="sum"),
                (logits * targets.outputs["teacher"]).sum(),
                (logits.argmax(-1) == labels).sum(),
            ]
        )


@pytest.mark.parametrize("in_parts", [False, True])
def test_only_the_first_of_several_sums_has_a_gradient(in_parts):
    model, loss_fn = tiny.tiny_model(), ThreeSums()
    tokens = torch.randint(tiny.VOCAB_SIZE, (2, 9))
    labels = torch.randint(tiny.VOCAB_SIZE, (2, 9))
    labels[1, 4:] = tiny.IGNORE
    targets = make_targets(labels)
    targets = targets._replace(outputs={"teacher": torch.randn(len(targets.positions), tiny.VOCAB_SIZE)})
    expected = loss_fn(torch.nn.Identity(), model(tokens), targets, in_parts)
    gradients = torch.autograd.grad(expected[0], list(model.parameters()))
    attach_loss(model, loss_fn, in_parts)
    sums = model(tokens, targets=targets)
    assert loss_fn.backward_in_parts is in_parts
    assert_close(sums.detach(), expected.detach())
    sums[0].backward()
    assert_close(tuple(p.grad for p in model.parameters()), gradients)


# ---- Stock losses, means over the labels that they do not ignore ------------------------------------


@pytest.mark.parametrize("loss_name", STOCK_LOSSES)
def test_a_stock_loss_keeps_its_own_ignore_index(loss_name):
    logits, labels = torch.randn(2, 6, 53), torch.randint(1, 53, (2, 6))
    labels[0, 3] = 0
    summed = SummedLoss(STOCK_LOSSES[loss_name](ignore_index=0))
    assert summed.ignore_index == 0
    targets = Targets(labels, (labels.flatten() != 0).nonzero().squeeze(1))
    options = {"label_smoothing": 0.1} if loss_name == "smoothed" else {}
    expected = plain_sum(logits, targets, ignore_index=0, **options)
    given = list(logits.chunk(8, dim=1)) if loss_name == "chunked" else logits
    assert_close(summed(given, targets), expected)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (nn.CrossEntropyLoss(weight=torch.ones(3)), "loss.weight"),
        (nn.CrossEntropyLoss(reduction="none"), "loss.reduction=none"),
    ],
)
def test_a_loss_without_a_mean_over_targets_is_refused(loss_fn, message):
    with pytest.raises(ValueError, match=message):
        SummedLoss(loss_fn)
