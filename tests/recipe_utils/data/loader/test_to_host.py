"""Numbers come back as they were when they were sent, and are read as often as one likes."""

import pytest
import torch

from recipe_utils.data.loader.to_host import Late, LateNumber, ToHost

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_what_becomes_of_a_tensor_changes_nothing_of_what_is_read(dtype, device):
    numbers = torch.arange(4, device=device).to(dtype).requires_grad_(dtype.is_floating_point)
    on_the_way = ToHost(numbers)
    with torch.no_grad():
        numbers.zero_()
    for _ in range(2):
        read = on_the_way.read()
        assert read.device.type == "cpu"
        assert (read.dtype, read.tolist(), read.requires_grad) == (dtype, [0, 1, 2, 3], False)


@pytest.mark.parametrize("device", DEVICES)
def test_a_number_is_read_as_python_s_own(device):
    for number in (0.1, 3):
        late = LateNumber(
            torch.tensor([number], dtype=torch.float64 if number < 1 else None).to(device)
        )
        assert isinstance(late, Late)
        assert late.read() == number
        assert type(late.read()) is type(number)
