"""Saves step checkpoints, synchronously or in the background of the next update steps.

A failed save does not stop training: all ranks get its error, and the last complete checkpoint stays.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from recipe_utils.checkpoint.folder import Marker, publish_checkpoint, remove_leftovers, remove_older
from recipe_utils.checkpoint.layout import SaveLayout, copy_to_cpu, layout_of, plan_save, rank_file
from recipe_utils.checkpoint.load import MODEL, OPTIMIZER, PART, RANDOM, TrainingState
from recipe_utils.checkpoint.tensors import AnyOptimizer, merge_descriptions, model_tensors, optimizer_contents
from recipe_utils.files import FileFacts, write_atomically, write_tensors
from recipe_utils.parallel.fsdp import local
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.random_state import get_random_state


@dataclass(frozen=True)
class SaveOutcome:
    """Result of a save; the same on all ranks."""

    global_step: int
    path: Path | None
    """Path of the complete checkpoint; None if the save failed."""
    error: str | None = None
    """Error of a failed save; names the rank and the file."""
    warning: str | None = None
    """Error of removing older checkpoints."""


class CheckpointWriter:
    """Writer of step checkpoints.

    All methods are collective and must be called from the training thread. Construction removes
    partially written checkpoints of killed runs from ``folder``.

    Args:
        folder: folder for the checkpoints, shared by all ranks. Nothing outside of it is changed.
        keep_last_n: number of complete checkpoints to keep, at least 1; None keeps all.
        group: a CPU (gloo) group of all ranks, used for nothing else. Its timeout bounds the time
            between the fastest and the slowest rank's writes.
        asynchronous: :meth:`save` returns once the tensors are copied to the CPU, and a thread
            writes them. The copies stay allocated for the next save.
    """

    def __init__(
        self,
        folder: Path | str,
        keep_last_n: int | None = None,
        group: dist.ProcessGroup | None = None,
        asynchronous: bool = False,
    ) -> None:
        self._folder = Path(folder)
        self._keep_last_n = keep_last_n
        self._group = group
        self._rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._layout: SaveLayout | None = None
        self._layout_here: list[Any] = []
        self._names_are_alike = True
        self._copies: dict[str, Tensor] | None = {} if asynchronous else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._in_flight: Future[SaveOutcome] | None = None
        if self._rank == 0:
            remove_leftovers(self._folder)

    def save(
        self, model: nn.Module, optimizer: AnyOptimizer, state: TrainingState, part_tensors: Mapping[str, Tensor] = {}
    ) -> SaveOutcome | None:
        """Saves a checkpoint as ``step_N``, after waiting for a save in flight.

        Does not change the model or the optimizer, whose state may still be empty, and draws no
        random numbers. The model is sharded, or the same on all ranks, or the pipeline stages of
        each rank; so are ``part_tensors``, the tensors of parts of the training. Returns the result of this
        save; if asynchronous, the result of the previous save if it was in flight, else None. Raises ValueError if the
        model, the optimizer or ``state`` contains something that cannot be saved.
        """
        finished = self.wait()
        tensors = {MODEL + name: tensor for name, tensor in model_tensors(model).items()}
        optimizer_tensors, description = optimizer_contents(model, optimizer)
        tensors |= {OPTIMIZER + name: tensor for name, tensor in optimizer_tensors.items()}
        tensors |= {PART + name: tensor for name, tensor in part_tensors.items()}
        try:
            documents = {"state.json": json.dumps(state.content(), indent=1).encode()}
        except TypeError as error:
            raise ValueError(f"state: a checkpoint cannot hold it ({error})") from error
        random = {RANDOM + name: tensor for name, tensor in get_random_state().items()}

        final = self._folder / f"step_{state.global_step}"
        temporary = final.with_suffix(".tmp")
        if self._rank == 0:  # a failed save may have left it
            shutil.rmtree(temporary, ignore_errors=True)
        layout = self._agree_on_layout(tensors)  # no rank writes before rank 0 is here
        if not self._names_are_alike:
            description = merge_descriptions(gather_objects(description, self._group))
        mine = {name: local(tensors[name]) for name in layout.names}
        problem = None
        if self._copies is not None:
            mine, problem = self._attempt(copy_to_cpu, mine, self._copies)

        def write() -> SaveOutcome:
            if self._rank == 0:
                documents["optimizer.json"] = json.dumps(asdict(description)).encode()
                documents["tensors.json"] = json.dumps(layout.index).encode()
            return self._write(final, (mine or {}) | random, documents, state, problem)

        if self._thread is None:
            return write()
        self._in_flight = self._thread.submit(write)
        return finished

    def wait(self) -> SaveOutcome | None:
        """Waits for the save in flight and returns its result; None if there was none."""
        if self._in_flight is None:
            return None
        outcome = self._in_flight.result()
        self._in_flight = None
        return outcome

    def close(self) -> SaveOutcome | None:
        """Waits as :meth:`wait`, ends the thread and frees the copies. Call it before destroying the process group."""
        outcome = self.wait()
        if self._thread is not None:
            self._thread.shutdown()
            self._copies = {}
        return outcome

    def _agree_on_layout(self, tensors: Mapping[str, Tensor]) -> SaveLayout:
        """Returns the last layout if it is still valid on all ranks, since planning is slow."""
        layout_here = layout_of(tensors)
        if not all(gather_objects(layout_here == self._layout_here, self._group)):
            self._layout = plan_save(tensors, self._rank, self._group)
            self._layout_here = layout_here
            names = gather_objects(sorted(tensors), self._group)
            self._names_are_alike = all(names_of_rank == names[0] for names_of_rank in names)
        assert self._layout is not None
        return self._layout

    def _write(
        self,
        final: Path,
        tensors: Mapping[str, Tensor],
        documents: Mapping[str, bytes],
        state: TrainingState,
        problem: str | None,
    ) -> SaveOutcome:
        """Writes this rank's files and publishes the checkpoint once every rank has written."""
        step = state.global_step
        temporary = final.with_suffix(".tmp")
        try:
            files, error = None, problem
            if problem is None:
                files, error = self._attempt(self._write_files, temporary, tensors, documents)
            reports = gather_objects((files, error), self._group)
            errors = [f"rank {rank}: {e}" for rank, (_, e) in enumerate(reports) if e]
            warning = None
            if not errors and self._rank == 0:
                all_files = {name: facts for files_of_rank, _ in reports for name, facts in files_of_rank.items()}
                marker = Marker(state.recipe, step, len(reports), all_files)
                _, error = self._attempt(publish_checkpoint, temporary, final, marker)
                if error:
                    errors = [f"rank 0: {error}"]
                elif self._keep_last_n is not None:
                    _, warning = self._attempt(remove_older, self._folder, step, self._keep_last_n, state.recipe)
            if errors and self._rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            errors, warning = gather_objects((errors, warning), self._group)[0]
        except RuntimeError as lost:  # a rank is gone; the next start removes the leftovers
            return SaveOutcome(step, None, error=f"the ranks could not agree: {lost}")
        if errors:
            return SaveOutcome(step, None, error="; ".join(errors))
        return SaveOutcome(step, final, warning=warning)

    def _write_files(
        self, temporary: Path, tensors: Mapping[str, Tensor], documents: Mapping[str, bytes]
    ) -> dict[str, FileFacts]:
        temporary.mkdir(parents=True, exist_ok=True)
        files = {rank_file(self._rank): write_tensors(temporary / rank_file(self._rank), tensors)}
        if self._rank == 0:
            for name, content in documents.items():
                files[name] = write_atomically(temporary / name, content)
        return files

    def _attempt(self, write: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
        """Returns the result of ``write``, or its error, which the other ranks must receive."""
        try:
            return write(*arguments), None
        except Exception as error:
            return None, str(error) or type(error).__name__
