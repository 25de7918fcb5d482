"""CUDA's meter reads PyTorch's allocator, whose functions are replaced here."""

from types import SimpleNamespace

import pytest
import torch

from recipe_utils.data.meter import CudaMeter, Measured

GIB = 2**30


@pytest.fixture
def stats(monkeypatch):
    """PyTorch's statistics, which a test changes between the start and the end of an update step."""
    found = {
        "active_bytes.all.current": 20 * GIB, "active_bytes.all.peak": 99 * GIB,
        "reserved_bytes.all.current": 50 * GIB, "num_alloc_retries": 3,
    }  # fmt: skip
    for name, function in {
        "memory_stats": lambda device: dict(found),
        "reset_peak_memory_stats": lambda device: found.update({"active_bytes.all.peak": 0}),
        "mem_get_info": lambda device: (25 * GIB, 80 * GIB),
        "get_device_properties": lambda device: SimpleNamespace(total_memory=80 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return found


def test_the_limit_leaves_out_what_others_hold(stats):
    meter = CudaMeter(torch.device("cuda:0"))
    assert meter.total_bytes == 80 * GIB
    meter.start()
    stats["active_bytes.all.peak"] = 48 * GIB
    assert meter.stop() == Measured(20 * GIB, 48 * GIB, int(0.9 * 75 * GIB), has_retried=False)


def test_a_retry_of_the_allocator_counts_in_its_update_step_only(stats):
    meter = CudaMeter(torch.device("cuda:0"))
    found = []
    for num_retries in (4, 4):
        meter.start()
        stats["num_alloc_retries"] = num_retries
        found.append(meter.stop().has_retried)
    assert found == [True, False]
