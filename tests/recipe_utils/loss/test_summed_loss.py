"""A stock loss, a mean over the labels that it does not ignore, becomes their sum."""

from functools import partial

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn
from torchtune.modules.loss import CEWithChunkedOutputLoss

from recipe_utils.data.loader.microbatch import Targets
from recipe_utils.loss.attach_loss import SummedLoss

V = 53
STOCK_LOSSES = {
    "chunked": CEWithChunkedOutputLoss,
    "mean": partial(nn.CrossEntropyLoss, reduction="mean"),
    "sum": partial(nn.CrossEntropyLoss, reduction="sum"),
    "smoothed": partial(nn.CrossEntropyLoss, label_smoothing=0.1),
}


@pytest.mark.parametrize("loss_name", STOCK_LOSSES)
def test_a_stock_loss_has_its_own_index_to_ignore(loss_name):
    logits, labels = torch.randn(2, 6, V), torch.randint(1, V, (2, 6))
    labels[0, 3] = 0
    summed = SummedLoss(STOCK_LOSSES[loss_name](ignore_index=0))
    assert summed.ignore_index == 0
    targets = Targets(labels, (labels.flatten() != 0).nonzero().squeeze(1))
    options = {"label_smoothing": 0.1} if loss_name == "smoothed" else {}
    expected = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=0, **options
    )
    as_called = list(logits.chunk(8, dim=1)) if loss_name == "chunked" else logits
    torch.testing.assert_close(summed(as_called, targets), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss_name", STOCK_LOSSES)
def test_without_targets_the_sum_is_zero_with_a_graph_through_the_logits(loss_name):
    logits = torch.randn(2, 6, V, requires_grad=True)
    labels = torch.full((2, 6), tiny.IGNORE)
    as_called = list(logits.chunk(8, dim=1)) if loss_name == "chunked" else logits
    summed = SummedLoss(STOCK_LOSSES[loss_name]())
    loss = summed(as_called, Targets(labels, torch.empty(0, dtype=torch.long)))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (nn.CrossEntropyLoss(weight=torch.ones(V)), "loss.weight"),
        (nn.CrossEntropyLoss(reduction="none"), "loss.reduction=none"),
    ],
)
def test_a_loss_that_would_be_wrong_is_refused(loss_fn, message):
    with pytest.raises(ValueError, match=message):
        SummedLoss(loss_fn)
