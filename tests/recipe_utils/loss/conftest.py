import pytest
import tiny
import torch


@pytest.fixture(autouse=True)
def in_float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    with tiny.float64_throughout():
        yield
    torch.set_default_dtype(torch.float32)
