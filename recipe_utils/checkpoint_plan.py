"""Which rank writes which part of which tensor, and which parts a rank with other shards reads.

torch.distributed.checkpoint decides both. The files are ours: its own ones are pickled.
"""

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from recipe_utils.tensor_file import CheckpointError, TensorFile, dtype_name, dtype_of


def rank_file(rank: int) -> str:
    """Name of the file with a rank's part of the tensors."""
    return f"rank_{rank:05d}.safetensors"


class Stage(StorageWriter):
    """Takes the part of the tensors that this rank is to write, as torch.distributed.checkpoint plans it.

    The planning needs all ranks and the live tensors, the writing neither. So this collects, and
    who has called ``torch.distributed.checkpoint.save`` writes when it suits.

    Args:
        temporary: the checkpoint's folder; the coordinator makes it anew.
        rank: of this process.
        copies: where copies of the tensors go, by name, kept from one save for the next; None to
            collect the live tensors.
    """

    def __init__(self, temporary: Path, rank: int, copies: dict[str, Tensor] | None) -> None:
        super().__init__()
        self._temporary = temporary
        self._rank = rank
        self._copies = copies
        self.tensors: dict[str, Tensor] = {}
        """Of this rank, on the CPU if they are copies; complete once the save has returned."""
        self.index: dict[str, Any] = {}
        """What ``tensors.json`` says; on the coordinator."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Does nothing: there is one for each save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: all is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leaves the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the folder, on the coordinator, before any rank gets its plan."""
        self._temporary.mkdir(parents=True)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Collects this rank's tensors."""
        results = []
        for item in plan.items:
            local = planner.resolve_data(item)
            assert isinstance(local, Tensor)  # there are no other things in our state dicts
            name = item.index.fqn
            assert name not in self.tensors, f"rank {self._rank} has two parts of {name}"
            self.tensors[name] = local if self._copies is None else self._copy(name, local)
            results.append(WriteResult(item.index, local.nbytes, rank_file(self._rank)))
        if any(tensor.is_pinned() for tensor in self.tensors.values()):
            torch.cuda.current_stream().synchronize()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _copy(self, name: str, local: Tensor) -> Tensor:
        assert self._copies is not None
        copy = self._copies.get(name)
        if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
            copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._copies[name] = copy
        return copy.copy_(local, non_blocking=local.is_cuda)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Notes what is where, on the coordinator."""
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            dtype = dtype_name(tensor.properties.dtype)
            self.index[name] = {"dtype": dtype, "shape": list(tensor.size), "parts": []}
        for result in (result for rank in results for result in rank):
            tensor = metadata.state_dict_metadata[result.index.fqn]
            assert isinstance(tensor, TensorStorageMetadata)
            (chunk,) = (c for c in tensor.chunks if c.offsets == result.index.offset)
            self.index[result.index.fqn]["parts"].append(
                {
                    "file": result.storage_data,
                    "offset": list(chunk.offsets),
                    "shape": list(chunk.sizes),
                }
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Not used."""
        return True


def read_index(index: Mapping[str, Any], files: Iterable[str]) -> Metadata:
    """The metadata of torch.distributed.checkpoint from what ``tensors.json`` says.

    Args:
        index: from the file.
        files: names of the checkpoint's files; nothing else is ever opened.

    Raises:
        CheckpointError: it says something that :class:`Stage` does not.
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


class Unstage(StorageReader):
    """Reads the parts of tensors that torch.distributed.checkpoint asks for.

    Args:
        path: of the checkpoint.
        metadata: of :func:`read_index`.
    """

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__()
        self._path = path
        self._metadata = metadata

    def reset(self, checkpoint_id: Any = None) -> None:
        """Does nothing: there is one for each load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What was given."""
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing: all is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leaves the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leaves the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies the parts into their tensors, file by file."""
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
        """Not used."""
        return True


def describe_failures(error: CheckpointException) -> str:
    """Which ranks failed in torch.distributed.checkpoint, and why.

    Raises:
        KeyboardInterrupt: that was the failure; it gets wrapped like any other.
    """
    for cause, _ in error.failures.values():
        if isinstance(cause, KeyboardInterrupt):
            raise cause from error
    return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
