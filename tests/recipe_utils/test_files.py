"""Tensor files are what the safetensors library reads, and no write leaves a torn file."""

import multiprocessing
import resource

import pytest
import torch
from safetensors.torch import load_file

from recipe_utils.files import (
    CheckpointError,
    TensorFile,
    dtype_name,
    write_atomically,
    write_tensors,
)

TENSORS = {
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "odd": torch.arange(5, dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "bf16": torch.randn(3, 5).bfloat16(),
    "transposed": torch.randn(4, 6, dtype=torch.float64).t(),
    "part": torch.arange(60).reshape(6, 10)[2:5, 1:9:2],
}


def test_the_safetensors_library_reads_back_what_was_written(tmp_path):
    facts = write_tensors(tmp_path / "t.safetensors", TENSORS)
    read = load_file(tmp_path / "t.safetensors")
    assert facts.num_bytes == (tmp_path / "t.safetensors").stat().st_size
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_parts_of_tensors_are_read(tmp_path):
    write_tensors(tmp_path / "t.safetensors", TENSORS)
    file = TensorFile(tmp_path / "t.safetensors")
    assert set(file.names()) == TENSORS.keys()
    slices = (slice(1, 4), slice(2, 3))
    assert torch.equal(file.read("transposed", slices), TENSORS["transposed"][slices])
    assert file.read("scalar").item() == 3.5
    for read in (file.read, file.layout):
        with pytest.raises(CheckpointError, match=r"t\.safetensors.*nowhere"):
            read("nowhere")


def test_dtypes_and_shapes_are_told_without_reading(tmp_path):
    write_tensors(tmp_path / "t.safetensors", TENSORS)
    file = TensorFile(tmp_path / "t.safetensors")
    for name, tensor in TENSORS.items():
        assert file.layout(name) == (tensor.dtype, tuple(tensor.shape))


def test_a_dtype_that_safetensors_lacks_is_named():
    with pytest.raises(CheckpointError, match="complex64"):
        dtype_name(torch.complex64)


def write_beyond_the_limit(path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
    for write in (
        lambda: write_atomically(path, b"x" * 2000),
        lambda: write_tensors(path.with_name("t.safetensors"), TENSORS | {"a": torch.zeros(2000)}),
    ):
        with pytest.raises(OSError, match=f"File too large: '{path.parent}"):
            write()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x.json"
    write_atomically(path, b"old")
    process = multiprocessing.get_context("forkserver").Process(
        target=write_beyond_the_limit, args=(path,)
    )
    process.start()
    process.join()
    assert process.exitcode == 0
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
