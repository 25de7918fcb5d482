"""Assignment of tensor parts to ranks for writing, and to shards for reading.

torch.distributed.checkpoint plans both. The files are not in its format, which is pickled.

Example: a weight [8, 4] sharded over two ranks, and a norm [4] that both have. Each rank writes its rows to
``rank_00000.safetensors`` and ``rank_00001.safetensors``, and one of them the norm. ``tensors.json`` contains where:

    "weight": {"shape": [8, 4], "parts": [{"file": "rank_00000.safetensors", "offset": [0, 0], "shape": [4, 4]}, ...]}

On three ranks, with 3, 3 and 2 rows, the second one needs rows 3 to 5: it reads one row from the first file and two
from the second.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from recipe_utils.files import CheckpointError, TensorFile, dtype_name, dtype_of
from recipe_utils.parallel.process_group import gather_objects


def rank_file(rank: int) -> str:
    """Returns the name of the file with a rank's part of the tensors."""
    return f"rank_{rank:05d}.safetensors"


# ---- Writing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveLayout:
    """Assignment of tensors to ranks."""

    names: list[str]
    """Tensors of which this rank writes a part."""
    index: dict[str, Any]
    """Content of ``tensors.json``."""


def plan_save(tensors: Mapping[str, Tensor], rank: int, group: dist.ProcessGroup | None) -> SaveLayout:
    """Assigns every part of every tensor to one rank, balanced over the ranks. Collective.

    Takes a good part of a second for a thousand tensors, and more on many ranks. The result stays
    valid while :func:`layout_of` is unchanged on all ranks.

    ``tensors`` are sharded, or the same on all ranks; ``group`` is a CPU (gloo) group of all ranks.
    Raises ValueError on all ranks if a tensor cannot be saved.
    """
    # Replicated tensors are assigned to the rank with the least bytes so far; each rank computes the plan of all.
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    plans, metadata = planner.create_global_plan(gather_objects(planner.create_local_plan(), group))

    # The same plan in JSON: the parts of each tensor, with the files that contain them.
    index: dict[str, Any] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        index[name] = {"dtype": dtype_name(tensor.properties.dtype), "shape": list(tensor.size), "parts": []}
    for writer, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            part = {"offset": list(chunk.offsets), "shape": list(chunk.sizes)}
            index[item.index.fqn]["parts"].append({"file": rank_file(writer), **part})
    names = [item.index.fqn for item in plans[rank].items]
    assert len(set(names)) == len(names), f"rank {rank} has two parts of one tensor"
    return SaveLayout(names, index)


def layout_of(tensors: Mapping[str, Tensor]) -> list[Any]:
    """Returns all inputs of :func:`plan_save` on this rank, to check if an earlier result is still valid."""
    return [
        (name, tensor.shape, tensor.dtype, isinstance(tensor, DTensor) and tensor.placements)
        for name, tensor in tensors.items()
    ]


def copy_to_cpu(tensors: Mapping[str, Tensor], copies: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors to the CPU, so that the next update step does not change them.

    ``copies`` are reused from call to call, and allocated (pinned for CUDA tensors) if needed.
    """
    for name, tensor in tensors.items():
        copy = copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copies[name] = copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copy.copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()
    return {name: copies[name] for name in tensors}


# ---- Reading ------------------------------------------------------------------------------------


def read_index(index: Mapping[str, Any], files: Iterable[str]) -> Metadata:
    """Builds the metadata of torch.distributed.checkpoint from the content of ``tensors.json``.

    ``files`` are the names of the checkpoint's files; no other file is ever opened. Raises
    CheckpointError if :func:`plan_save` could not have made the content.
    """
    metadata: dict[str, Any] = {}
    storage: dict[MetadataIndex, str] = {}
    known = frozenset(files)
    try:
        for name, tensor in index.items():
            chunks = []
            for part in tensor["parts"]:
                chunk = ChunkStorageMetadata(torch.Size(part["offset"]), torch.Size(part["shape"]))
                chunks.append(chunk)
                # A damaged or foreign index must not read outside of a tensor or of the folder.
                spans = zip(part["offset"], part["shape"], tensor["shape"], strict=True)
                if any(offset < 0 or size < 0 or offset + size > of for offset, size, of in spans):
                    raise ValueError(f"a part of {name} lies outside of it")
                if part["file"] not in known:
                    raise ValueError(f"{part['file']} is no file of the checkpoint")
                storage[MetadataIndex(name, chunk.offsets)] = part["file"]
            shape = torch.Size(tensor["shape"])
            if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
                raise ValueError(f"the parts of {name} do not make up {tuple(shape)}")
            metadata[name] = TensorStorageMetadata(TensorProperties(dtype=dtype_of(tensor["dtype"])), shape, chunks)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"tensors.json: it does not list tensors ({error!r})") from error
    return Metadata(metadata, storage_data=storage)


def read_tensors(path: Path, metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
    """Reads a checkpoint into tensors; each rank reads what its shards need.

    ``tensors`` have the saved shapes and dtypes and may be sharded in any way. Raises
    CheckpointError if a file, named in the message, does not match the index.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), metadata)
    # By file, so that each is opened once.
    by_file: dict[str, list[Any]] = {}
    for item in planner.create_local_plan().items:
        by_file.setdefault(metadata.storage_data[item.storage_index], []).append(item)
    for file_name, items in sorted(by_file.items()):
        file = TensorFile(path / file_name)
        for item in items:
            slices = tuple(
                slice(offset, offset + length)
                for offset, length in zip(item.storage_offsets, item.lengths, strict=True)
            )
            part = file.read(item.storage_index.fqn, slices)
            target = planner.resolve_tensor(item).detach()
            if part.shape != target.shape or part.dtype != target.dtype:
                raise CheckpointError(
                    f"{path / file_name}: {item.storage_index.fqn} has {part.dtype} "
                    f"{tuple(part.shape)} instead of {target.dtype} {tuple(target.shape)} as in "
                    "tensors.json"
                )
            target.copy_(part)
