import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """For models this small, threads only get into each other's way."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
