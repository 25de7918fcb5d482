"""Assignment of tensor parts to ranks for writing, and to shards for reading.

torch.distributed.checkpoint plans both. The files are not in its format, which is pickled.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from recipe_utils.files import CheckpointError, TensorFile, dtype_name, dtype_of


def rank_file(rank: int) -> str:
    """Returns the name of the file with a rank's part of the tensors."""
    return f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class SaveLayout:
    """Assignment of tensors to ranks."""

    names: list[str]
    """Tensors of which this rank writes a part."""
    index: dict[str, Any]
    """Content of ``tensors.json`` on rank 0; empty on the others."""


def plan_save(
    tensors: Mapping[str, Tensor], rank: int, group: dist.ProcessGroup | None
) -> SaveLayout:
    """Assigns every part of every tensor to one rank, balanced over the ranks. Collective.

    Takes a good part of a second for a thousand tensors, and more on many ranks. The result stays
    valid while :func:`layout_of` is unchanged on all ranks.

    ``tensors`` are sharded, or the same on all ranks; ``group`` is a CPU (gloo) group of all ranks.
    Raises ValueError on all ranks if a tensor cannot be saved.
    """
    planned = _Planned(rank)
    try:
        save(
            dict(tensors),
            storage_writer=planned,
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )
    except CheckpointException as error:
        raise ValueError(f"checkpoint: {describe_failures(error)}") from error
    return SaveLayout(planned.names, planned.index)


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
            copies[name] = copy = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        copy.copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()
    return {name: copies[name] for name in tensors}


class _Planned(StorageWriter):
    """Records the parts that torch.distributed.checkpoint would have this rank write; writes nothing."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.names: list[str] = []
        self.index: dict[str, Any] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.names = [item.index.fqn for item in plan.items]
        assert len(set(self.names)) == len(self.names), f"rank {self._rank} has two parts of one"
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(i.index, 0, rank_file(self._rank)) for i in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Builds the index. Called on rank 0."""
        parts = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            dtype = dtype_name(tensor.properties.dtype)
            self.index[name] = {"dtype": dtype, "shape": list(tensor.size), "parts": []}
            parts.update({(name, chunk.offsets): chunk.sizes for chunk in tensor.chunks})
        for result in (result for rank in results for result in rank):
            offset = result.index.offset
            assert offset is not None
            self.index[result.index.fqn]["parts"].append(
                {
                    "file": result.storage_data,
                    "offset": list(offset),
                    "shape": list(parts[result.index.fqn, offset]),
                }
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


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
                spans = zip(part["offset"], part["shape"], tensor["shape"], strict=True)
                if any(offset < 0 or size < 0 or offset + size > of for offset, size, of in spans):
                    raise ValueError(f"a part of {name} lies outside of it")
                if part["file"] not in known:
                    raise ValueError(f"{part['file']} is no file of the checkpoint")
                storage[MetadataIndex(name, chunk.offsets)] = part["file"]
            shape = torch.Size(tensor["shape"])
            if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
                raise ValueError(f"the parts of {name} do not make up {tuple(shape)}")
            properties = TensorProperties(dtype=dtype_of(tensor["dtype"]))
            metadata[name] = TensorStorageMetadata(properties, shape, chunks)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"tensors.json: it does not list tensors ({error!r})") from error
    return Metadata(metadata, storage_data=storage)


def read_tensors(
    path: Path, metadata: Metadata, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Reads a checkpoint into tensors; each rank reads what its shards need. Collective.

    ``tensors`` have the saved shapes and dtypes and may be sharded in any way; ``group`` is a CPU
    (gloo) group of all ranks. Raises CheckpointError on all ranks if a file, named in the message,
    does not match the index.
    """
    try:
        load(
            dict(tensors),
            storage_reader=_Reader(path, metadata),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )
    except CheckpointException as error:
        raise CheckpointError(describe_failures(error)) from error


class _Reader(StorageReader):
    """Reads the parts of tensors that torch.distributed.checkpoint requests."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__()
        self._path = path
        self._metadata = metadata

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self._metadata.storage_data[item.storage_index], []).append(item)
        for file_name, items in sorted(by_file.items()):
            file = TensorFile(self._path / file_name)
            for item in items:
                slices = tuple(
                    slice(offset, offset + length)
                    for offset, length in zip(item.storage_offsets, item.lengths, strict=True)
                )
                part = file.read(item.storage_index.fqn, slices)
                target = planner.resolve_tensor(item).detach()
                if part.shape != target.shape or part.dtype != target.dtype:
                    raise CheckpointError(
                        f"{self._path / file_name}: {item.storage_index.fqn} has {part.dtype} "
                        f"{tuple(part.shape)} where tensors.json says {target.dtype} "
                        f"{tuple(target.shape)}"
                    )
                target.copy_(part)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def describe_failures(error: CheckpointException) -> str:
    """Returns the ranks that failed in torch.distributed.checkpoint, with their errors.

    Raises KeyboardInterrupt if one of them is a wrapped KeyboardInterrupt.
    """
    for cause, _ in error.failures.values():
        if isinstance(cause, KeyboardInterrupt):
            raise cause from error
    return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
