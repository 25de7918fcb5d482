"""The safetensors library reads tensor files, and no failed write leaves a part of a file."""

import resource
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from distributed_runs import fork_context
from safetensors.torch import load_file

from recipe_utils.files import CheckpointError, TensorFile, dtype_name, write_atomically, write_tensors

TENSORS = {
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "odd": torch.arange(5, dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "bf16": torch.randn(3, 5).bfloat16(),
    "transposed": torch.randn(4, 6, dtype=torch.float64).t(),
    "part": torch.arange(60).reshape(6, 10)[2:5, 1:9:2],
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "t.safetensors"


def test_the_safetensors_library_reads_written_tensors(path):
    facts = write_tensors(path, TENSORS)
    read = load_file(path)
    assert facts.num_bytes == path.stat().st_size
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_parts_of_tensors_are_read(path):
    write_tensors(path, TENSORS)
    file = TensorFile(path)
    assert set(file.names()) == TENSORS.keys()
    slices = (slice(1, 4), slice(2, 3))
    assert torch.equal(file.read("transposed", slices), TENSORS["transposed"][slices])
    assert file.read("scalar").item() == 3.5
    with pytest.raises(CheckpointError, match=r"t\.safetensors.*nowhere"):
        file.read("nowhere")


def test_several_may_write_the_same_file_at_the_same_time(path):
    contents = ["a" * 10_000, "b" * 20_000] * 50
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(partial(write_atomically, path), contents))
    assert path.read_text() in contents
    assert list(path.parent.iterdir()) == [path]


def test_a_dtype_without_a_name_in_safetensors_is_reported():
    with pytest.raises(CheckpointError, match="complex64"):
        dtype_name(torch.complex64)


def write_beyond_the_limit(path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
    with pytest.raises(OSError, match=f"File too large: '{path}"):
        write_atomically(path, b"x" * 2000)
    with pytest.raises(OSError, match=f"File too large: '{path}"):
        write_tensors(path, {"a": torch.zeros(2000)})


def test_a_failed_write_leaves_the_old_file_and_no_other(path):
    write_atomically(path, b"old")
    process = fork_context.Process(target=write_beyond_the_limit, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]
