"""Loading of step checkpoints: training resumes after an update step, on any number of ranks.

:mod:`recipe_utils.checkpoint.save` saves them, :mod:`recipe_utils.checkpoint.folder` defines their files.

Example: ``step_40`` of 2 ranks resumes on 3. It has five files beside ``complete.json``, of which the ranks check the
bytes of 2, 2 and 1. Then each reads the rows of its shards from one or both ``rank_0000*.safetensors``, as
:mod:`.layout` shows, and update step 41 has the samples that it would have had, over 3 ranks. Random states are of a
rank, and are not restored.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from recipe_utils.checkpoint.folder import check_checksums, check_whole, read_as, read_marker
from recipe_utils.checkpoint.layout import rank_file, read_index, read_tensors
from recipe_utils.checkpoint.tensors import (
    AnyOptimizer,
    OptimizerDescription,
    describe_mismatch,
    in_words,
    misfits_of_optimizer,
    model_tensors,
    restore_optimizer,
)
from recipe_utils.files import CheckpointError, TensorFile
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.random_state import set_random_state

MODEL, OPTIMIZER, PART, RANDOM = "model.", "optimizer.", "part.", "random."
"""Prefixes of the names of tensors in a checkpoint."""

_Counted = Annotated[int, Field(ge=0)]
_P = ParamSpec("_P")
_T = TypeVar("_T")


class DamagedError(CheckpointError):
    """A checkpoint is corrupt; an older one may be complete."""


@dataclass
class TrainingState:
    """Progress and identity of a training, without tensors. All values are JSON values."""

    recipe: str
    """Name of the recipe; other recipes cannot resume from the checkpoint."""
    global_step: _Counted
    """Completed update steps."""
    epoch: _Counted
    samples_consumed: _Counted
    """Samples of the epoch consumed so far, over all ranks."""
    seed: _Counted
    data_fingerprint: dict[str, Any] = field(default_factory=dict)
    """Values that must be equal for update steps to contain the same samples."""
    config: dict[str, Any] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    """Fingerprints of weights that are neither trained nor saved. The name is a key of ``state.json``."""
    run_id: str = ""
    """Id of the run that started the training; kept on resume."""
    num_seen: dict[str, _Counted] = field(default_factory=dict)
    """Data of all completed update steps by unit, such as target ``tokens``: ``num_tokens_seen`` in the file."""
    num_samples_skipped: _Counted = 0
    """Bad samples that all update steps have skipped, over all ranks."""
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """States of the parts of a training by name, without their tensors."""

    def content(self) -> dict[str, Any]:
        """Returns the content of the file, where ``num_seen`` is one key for each unit."""
        content = asdict(self)
        return content | {f"num_{unit}_seen": number for unit, number in content.pop("num_seen").items()}

    @model_validator(mode="before")
    @classmethod
    def _from_content(cls, content: Any) -> Any:
        if not isinstance(content, dict):  # damaged, which pydantic reports
            return content
        seen = {match[1]: content[name] for name in content if (match := re.fullmatch("num_(.+)_seen", name))}
        return {**content, "num_seen": seen}


TEACHER = "teacher_checkpointer"
"""Key of a teacher in :attr:`TrainingState.frozen`."""


def load(
    path: Path,
    model: nn.Module,
    optimizer: AnyOptimizer,
    now: TrainingState,
    *,
    other_data: bool = False,
    other_model: bool = False,
    part_tensors: Mapping[str, Tensor] = {},
    group: dist.ProcessGroup | None = None,
) -> TrainingState:
    """Loads a checkpoint in place; each rank reads its part. Collective.

    The number of ranks and the sharding may differ from those at the save. All bytes are checked
    first, each rank a share of the files. On the same number of ranks the random number generators
    are restored, too. Returns the saved training state.

    Args:
        path: path of a complete checkpoint.
        model: materialized model, sharded or not, or the pipeline stages of each rank.
        optimizer: optimizer of the same class as the saved one; its state is replaced. Options that are built
            otherwise than then override the checkpoint.
        now: initial state of this training. Its recipe, fingerprints and ``model`` in the config must equal the saved
            ones.
        other_data: True to accept another ``data_fingerprint``.
        other_model: True to accept another ``model`` whose trained and frozen parameters fit.
        part_tensors: tensors of parts of the training as ``PART.NAME``; those that the checkpoint has are read.
        group: a CPU (gloo) group of all ranks.

    Raises:
        DamagedError: the checkpoint is incomplete, of another recipe or unreadable; names the file.
            Raised on all ranks, before anything is loaded.
        CheckpointError: it does not fit the model, optimizer or data; names everything that differs, with both
            values. Raised on all ranks, before anything is loaded, unless the content of a file
            contradicts its checksum and ``tensors.json``.
    """
    rank, world_size = 0, 1
    if dist.is_initialized():
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)

    # No content is used before every rank has checked its share of the bytes.
    read, errors = _attempt(_read, path, now.recipe, rank, world_size)
    trained = model_tensors(model)
    names = _agree(errors, group, (list(trained), list(part_tensors)))
    assert read is not None
    num_ranks_then, state, description, index = read
    trained_on_any_rank = {name for trained_names, _ in names for name in trained_names}
    parts_on_any_rank = {name for _, part_names in names for name in part_names}

    # Nothing is changed before the content fits on all ranks: a run that fails here is as it was.
    saved, saved_state = _like(MODEL, index), _like(OPTIMIZER, index)
    saved_part_tensors = {n: tensor for n, tensor in part_tensors.items() if n.partition(".")[0] in state.parts}
    other_stages = trained_on_any_rank - trained.keys()
    misfits = [*_misfits_of_parameters(path, state, now, saved, trained, other_stages)]
    problems = [*([] if other_data else _misfits_of_data(path, state, now)), *misfits]
    problems += _misfits_of_frozen_weights(path, state, now, trained_on_any_rank | saved.keys())
    if not other_model:
        problems += _misfits_of_model_config(path, state, now)
    if not misfits:  # states have the names and shapes of parameters, whose differences they would repeat
        problems += _misfits_of_parts(path, state, _like(PART, index), saved_part_tensors, parts_on_any_rank)
        problems += misfits_of_optimizer(model, optimizer, description, saved_state, other_stages)
    _agree([CheckpointError(problem) for problem in problems], group)

    # The optimizer's state is allocated as it was saved, then everything is filled in place from the files.
    states = restore_optimizer(model, optimizer, description, saved_state)
    targets = {MODEL + name: tensor for name, tensor in trained.items()}
    targets |= {OPTIMIZER + name: tensor for name, tensor in states.items()}
    targets |= {PART + name: tensor for name, tensor in saved_part_tensors.items()}
    # A random state belongs to one rank, so another number of ranks has none to resume with.
    random_file = path / rank_file(rank) if num_ranks_then == world_size else None
    _agree(_attempt(_fill, path, index, targets, random_file)[1], group)
    return state


def _read(
    path: Path, recipe: str, rank: int, world_size: int
) -> tuple[int, TrainingState, OptimizerDescription, Metadata]:
    """Returns the number of ranks of a complete checkpoint, and its content without the values of tensors.

    Compares the checksums of this rank's share of the files first.
    """
    problem = check_whole(path, recipe=recipe)
    if problem is None:
        marker = read_marker(path)
        problem = check_checksums(path, dict(sorted(marker.files.items())[rank::world_size]))
    if problem is not None:
        raise DamagedError(f"resume_from_checkpoint: {path} cannot be used: {problem}")
    state = read_as(TrainingState, path / "state.json")
    description = read_as(OptimizerDescription, path / "optimizer.json")
    index = read_index(read_as(dict[str, Any], path / "tensors.json"), marker.files)
    return marker.world_size, state, description, index


def _like(prefix: str, index: Metadata) -> dict[str, Tensor]:
    """Returns the saved tensors whose names start with ``prefix``, without it, on the meta device."""
    return {
        name.removeprefix(prefix): torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
        for name, saved in index.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(saved, TensorStorageMetadata)
    }


# ---- What differs -----------------------------------------------------------------------------------


def differences(before: Mapping[str, Any], now: Mapping[str, Any], unset: Any = None) -> dict[str, tuple[Any, Any]]:
    """Returns both values of each key that differs, dotted within mappings; ``unset`` for a missing one.

    Values are compared as JSON holds them: a tuple equals a list.
    """
    then, current = (dict(_flat(json.loads(json.dumps(dict(values))))) for values in (before, now))
    pairs = {key: (then.get(key, unset), current.get(key, unset)) for key in sorted(then.keys() | current.keys())}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and (value or not key):
        for name, part in value.items():
            yield from _flat(part, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _texts(changed: Mapping[str, tuple[Any, Any]], prefix: str = "") -> list[str]:
    return [f"{prefix}{key}={now}: the checkpoint was saved with {before}" for key, (before, now) in changed.items()]


def _misfits_of_data(path: Path, state: TrainingState, now: TrainingState) -> Iterator[str]:
    """Yields why update steps would contain other samples than at the save."""
    if problems := "; ".join(_texts(differences(state.data_fingerprint, now.data_fingerprint))):
        cause = "; the file, tokenizer, chat template or max_seq_len has changed" if "hash" in problems else ""
        yield f"{problems} ({path}){cause}; set what it was saved with, or resume_with_other_data=True"


def _misfits_of_parameters(
    path: Path,
    state: TrainingState,
    now: TrainingState,
    saved: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    other_stages: set[str],
) -> Iterator[str]:
    """Yields parameters that are not both then and now trained or frozen, or have other shapes or dtypes."""
    thawed, newly_frozen = (other_stages | trained.keys()) & state.frozen.keys(), now.frozen.keys() & saved.keys()
    if thawed or newly_frozen:
        yield (
            f"model: trained now, frozen in {path}: {in_words(thawed)} ({len(thawed)}); frozen now, trained "
            f"then: {in_words(newly_frozen)} ({len(newly_frozen)}); set it as then"
        )
    elif problem := describe_mismatch(saved, trained, other_stages):
        yield f"model: {path} does not fit it: {problem}; set model, dtype and weights_dtype as then"


def _misfits_of_frozen_weights(
    path: Path, state: TrainingState, now: TrainingState, trained: set[str]
) -> Iterator[str]:
    """Yields that frozen weights have other fingerprints, except parameters that are ``trained`` then or now."""
    changed = {key: both for key, both in differences(state.frozen, now.frozen).items() if key not in trained}
    if TEACHER not in state.frozen or TEACHER not in now.frozen:  # kd_ratio=0 loads none
        changed = {key: both for key, both in changed.items() if not key.startswith(TEACHER)}
    if state.frozen and (texts := _texts(changed)):
        key = next((key for key in ("ref_checkpointer", TEACHER) if texts[0].startswith(key)), "checkpointer")
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        yield (
            f"{key}: {path} was trained with other frozen weights: {texts[0]}{more}; set model and {key} to "
            "those that it was trained with"
        )


def _misfits_of_model_config(path: Path, state: TrainingState, now: TrainingState) -> Iterator[str]:
    """Yields how ``model`` of both configs differs, if both have one."""
    before, current = (cfg.get("model") or {} for cfg in (state.config, now.config))
    if before and current and (changed := differences(before, current)):
        text = "; ".join(_texts(changed, "model."))
        yield f"{text} ({path}); set it as then, or resume_with_other_model=True"


def _misfits_of_parts(
    path: Path,
    state: TrainingState,
    saved: Mapping[str, Tensor],
    saved_part_tensors: Mapping[str, Tensor],
    parts_on_any_rank: set[str],
) -> Iterator[str]:
    """Yields other tensors of parts of the training; a part may be new, or no longer be there."""
    names = {name.partition(".")[0] for name in parts_on_any_rank} & state.parts.keys()
    saved = {name: like for name, like in saved.items() if name.partition(".")[0] in names}
    if problem := describe_mismatch(saved, saved_part_tensors, parts_on_any_rank - saved_part_tensors.keys()):
        yield f"parts: {path} does not fit those of the training: {problem}; set them as then"


# ---- Tensors and agreement --------------------------------------------------------------------------


def _fill(path: Path, index: Metadata, targets: Mapping[str, Tensor], random_file: Path | None) -> None:
    """Reads tensors in place, and restores the random number generators from ``random_file``."""
    read_tensors(path, index, targets)
    if random_file is not None:
        file = TensorFile(random_file)
        names = [name for name in file.names() if name.startswith(RANDOM)]
        try:
            set_random_state({name.removeprefix(RANDOM): file.read(name) for name in names})
        except ValueError as error:
            raise CheckpointError(f"{random_file}: {error}") from error


def _attempt(
    function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> tuple[_T | None, list[CheckpointError]]:
    """Returns the result of ``function``, or its CheckpointError, which the other ranks must receive."""
    try:
        return function(*args, **kwargs), []
    except CheckpointError as error:
        return None, [error]


def _agree(errors: Sequence[CheckpointError], group: dist.ProcessGroup | None, mine: Any = None) -> list[Any]:
    """Returns ``mine`` of all ranks. Raises the errors of any rank as one on all, only DamagedError if there is one."""
    gathered = gather_objects((errors, mine), group)
    raised = [(rank, error) for rank, (errors_of_rank, _) in enumerate(gathered) for error in errors_of_rank]
    kind = DamagedError if any(isinstance(error, DamagedError) for _, error in raised) else CheckpointError
    ranks_of: dict[str, list[int]] = {}
    for rank, error in raised:
        if isinstance(error, kind):
            ranks_of.setdefault(str(error), []).append(rank)
    texts = [f"rank {ranks[0]}: " * (len(ranks) < len(gathered)) + text for text, ranks in ranks_of.items()]
    if len(texts) > 1:
        raise kind(f"{len(texts)} problems with the checkpoint:" + "".join(f"\n  - {text}" for text in texts))
    if texts:
        raise kind(texts[0])
    return [value for _, value in gathered]
