import pytest
import tiny
import torch
from output_layers import D, V, make_targets


@pytest.fixture(autouse=True)
def in_float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    with tiny.float64_throughout():
        yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def hidden_and_targets():
    """Returns hidden states and targets of [3, 11] positions, 21 of them targets."""
    labels = torch.randint(V, (3, 11))
    labels.view(-1)[torch.randperm(33)[:12]] = tiny.IGNORE
    return torch.randn(3, 11, D, requires_grad=True), make_targets(labels)
