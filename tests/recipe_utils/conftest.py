import sys
from pathlib import Path

import pytest
import torch

# The fork server imports the test modules, whose functions it is handed. At the end of the path: the
# checkout's recipes/ must not hide torchtune's package of that name.
sys.path.append(str(Path(__file__).parents[2]))


@pytest.fixture(autouse=True)
def one_thread():
    """For models this small, threads only get into each other's way."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
