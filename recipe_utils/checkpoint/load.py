"""Loading of step checkpoints: training resumes after an update step, on any number of ranks.

:mod:`recipe_utils.checkpoint.save` saves them, :mod:`recipe_utils.checkpoint.folder` defines their files.

Example: ``step_40`` of 2 ranks resumes on 3. It has five files beside ``complete.json``, of which the ranks check the
bytes of 2, 2 and 1. Then each reads the rows of its shards from one or both ``rank_0000*.safetensors``, as
:mod:`.layout` shows, and update step 41 has the samples that it would have had, over 3 ranks. Random states are of a
rank, and are not restored.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from recipe_utils.checkpoint.folder import Marker, check_checksums, check_whole, read_as, read_marker
from recipe_utils.checkpoint.layout import rank_file, read_index, read_tensors
from recipe_utils.checkpoint.tensors import AnyOptimizer, describe_mismatch, in_words, model_tensors, restore_optimizer
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
    """Weights that are neither trained nor saved -> their fingerprint."""
    run_id: str = ""
    """Id of the run that started the training; kept on resume."""
    num_tokens_seen: _Counted = 0
    """Target tokens of all completed update steps."""
    num_images_seen: _Counted = 0
    """Images of all completed update steps, in recipes that count them."""
    num_samples_skipped: _Counted = 0
    """Bad samples that all update steps have skipped, over all ranks."""
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """States of the parts of a training by name, without their tensors."""


def read_state(path: Path) -> TrainingState:
    """Returns the state of a checkpoint; raises CheckpointError as read_as."""
    return read_as(TrainingState, path / "state.json")


TEACHER = "teacher_checkpointer"
"""Key of a teacher in :attr:`TrainingState.frozen`."""


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


def load(
    path: Path,
    model: nn.Module,
    optimizer: AnyOptimizer,
    *,
    recipe: str,
    data_fingerprint: Mapping[str, Any] | None = None,
    frozen: Mapping[str, str] = {},
    config: Mapping[str, Any] = {},
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
        optimizer: optimizer of the same class as the saved one; its state is replaced.
        recipe: name of the recipe, which must be the saved one.
        data_fingerprint: compared with the saved one; None accepts any.
        frozen: see :attr:`TrainingState.frozen`; compared with the saved one.
        config: config of this training. Its ``model`` must equal the saved one, if there is one.
            Options of ``optimizer`` that are built otherwise than then override the checkpoint.
        other_model: True to accept another ``model`` whose trained and frozen parameters fit.
        part_tensors: tensors of parts of the training as ``PART.NAME``; those that the checkpoint has are read.
        group: a CPU (gloo) group of all ranks.

    Raises:
        DamagedError: the checkpoint is incomplete, of another recipe or unreadable; names the file.
            Raised on all ranks, before anything is loaded.
        CheckpointError: it does not fit the model, optimizer or data; names what differs, with both
            values. Raised on all ranks, before anything is loaded, unless the content of a file
            contradicts its checksum and ``tensors.json``.
    """
    rank, world_size = 0, 1
    if dist.is_initialized():
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    trained = model_tensors(model)
    trained_on_any_rank = set[str]().union(*gather_objects(list(trained), group))
    names_of_other_stages = trained_on_any_rank - trained.keys()

    # No content is used before every rank has checked its share of the bytes, and nothing is changed
    # before the content fits on all ranks: a run that fails here is as it was.
    marker = _on_all_ranks(group, _check_bytes, path, recipe, rank, world_size)
    state = _on_all_ranks(group, read_state, path)
    metadata = _on_all_ranks(group, lambda: read_index(read_as(dict[str, Any], path / "tensors.json"), marker.files))
    _on_all_ranks(group, _check_data, path, state, data_fingerprint)
    _on_all_ranks(group, _check_parameters, path, state, _like(MODEL, metadata), trained, trained_on_any_rank, frozen)
    if not other_model:
        _on_all_ranks(group, _check_model_config, path, state, config)
    # A part may be new, or no longer be there; one that is there must have the tensors that it had.
    parts_on_any_rank = set[str]().union(*gather_objects(list(part_tensors), group))
    saved_part_tensors = {
        name: tensor for name, tensor in part_tensors.items() if name.partition(".")[0] in state.parts
    }
    _on_all_ranks(group, _check_parts, path, state, _like(PART, metadata), saved_part_tensors, parts_on_any_rank)

    # The optimizer's state is made as it was saved, then both are filled in place from the files.
    states = _on_all_ranks(group, _make_state, path, metadata, model, optimizer, names_of_other_stages)
    targets = {MODEL + name: tensor for name, tensor in trained.items()}
    targets |= {OPTIMIZER + name: tensor for name, tensor in states.items()}
    targets |= {PART + name: tensor for name, tensor in saved_part_tensors.items()}
    _on_all_ranks(group, read_tensors, path, metadata, targets)

    # A random state belongs to one rank, so that another number of ranks has none to resume with.
    if marker.world_size == world_size:
        _on_all_ranks(group, _load_random_state, path / rank_file(rank))
    return state


def _check_bytes(path: Path, recipe: str, rank: int, world_size: int) -> Marker:
    """Returns the marker of a complete checkpoint after comparing the checksums of this rank's share of its files."""
    problem = check_whole(path, recipe=recipe)
    if problem is None:
        marker = read_marker(path)
        problem = check_checksums(path, sorted(marker.files)[rank::world_size])
    if problem is not None:
        raise DamagedError(f"resume_from_checkpoint: {path} cannot be used: {problem}")
    return marker


def _check_data(path: Path, state: TrainingState, data_fingerprint: Mapping[str, Any] | None) -> None:
    """Raises CheckpointError if update steps would contain other samples than at the save."""
    if data_fingerprint is None:
        return
    changed = differences(state.data_fingerprint, data_fingerprint)
    # Earlier checkpoints have no hashes of files, and of values besides tokens and labels.
    if problems := "; ".join(_texts({k: v for k, v in changed.items() if v[0] is not None or "content_hash" not in k})):
        cause = "; the file, tokenizer, chat template or max_seq_len has changed" if "hash" in problems else ""
        raise CheckpointError(f"{problems} ({path}){cause}; set what it was saved with, or resume_with_other_data=True")


def _check_parameters(
    path: Path,
    state: TrainingState,
    saved: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    trained_on_any_rank: set[str],
    frozen: Mapping[str, str],
) -> None:
    """Raises CheckpointError unless the same parameters are trained and frozen, with the same shapes and dtypes."""
    thawed, newly_frozen = trained_on_any_rank & state.frozen.keys(), frozen.keys() & saved.keys()
    if thawed or newly_frozen:
        raise CheckpointError(
            f"model: trained now, frozen in {path}: {in_words(thawed)} ({len(thawed)}); frozen now, trained "
            f"then: {in_words(newly_frozen)} ({len(newly_frozen)}); set it as then"
        )
    _check_frozen(state.frozen, frozen, path)
    problem = describe_mismatch(saved, trained, trained_on_any_rank - trained.keys())
    if problem:
        raise CheckpointError(f"model: {path} does not fit it: {problem}; set model, dtype and weights_dtype as then")


def _check_model_config(path: Path, state: TrainingState, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError if both configs have a ``model`` and these differ."""
    before, now = (cfg.get("model") or {} for cfg in (state.config, config))
    if before and now and (changed := differences(before, now)):
        text = "; ".join(_texts(changed, "model."))
        raise CheckpointError(f"{text} ({path}); set it as then, or resume_with_other_model=True")


def _check_parts(
    path: Path,
    state: TrainingState,
    saved: Mapping[str, Tensor],
    saved_part_tensors: Mapping[str, Tensor],
    parts_on_any_rank: set[str],
) -> None:
    """Raises CheckpointError unless parts of the training that have a saved state have the same tensors."""
    names = {name.partition(".")[0] for name in parts_on_any_rank} & state.parts.keys()
    saved = {name: like for name, like in saved.items() if name.partition(".")[0] in names}
    if problem := describe_mismatch(saved, saved_part_tensors, parts_on_any_rank - saved_part_tensors.keys()):
        raise CheckpointError(f"parts: {path} does not fit those of the training: {problem}; set them as then")


def _make_state(
    path: Path, metadata: Metadata, model: nn.Module, optimizer: AnyOptimizer, names_of_other_stages: set[str]
) -> dict[str, Tensor]:
    """Returns the tensors of the optimizer's state by name, made as the checkpoint describes them and not yet read."""
    try:
        description = read_as(dict[str, Any], path / "optimizer.json")
        saved = _like(OPTIMIZER, metadata)
        return restore_optimizer(model, optimizer, description, saved, names_of_other_stages)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / 'optimizer.json'}: it does not describe an optimizer ({error!r})") from error


def _check_frozen(saved: Mapping[str, str], current: Mapping[str, str], path: Path) -> None:
    """Raises CheckpointError if frozen weights differ from those at the save."""
    lacks_teacher = TEACHER not in saved or TEACHER not in current  # kd_ratio=0 loads none
    changed = {
        key: (before, now)
        for key, (before, now) in differences(saved, current).items()
        if not (lacks_teacher and key.startswith(TEACHER))
    }
    if saved and changed:
        text, *others = _texts(changed)
        key = next((key for key in ("ref_checkpointer", TEACHER) if text.startswith(key)), "checkpointer")
        more = f" (and {len(others)} more)" if others else ""
        raise CheckpointError(
            f"{key}: {path} was trained with other frozen weights: {text}{more}; set model and {key} to "
            "those that it was trained with"
        )


def _like(prefix: str, metadata: Metadata) -> dict[str, Tensor]:
    """Returns the saved tensors whose names start with ``prefix``, without it, on the meta device."""
    return {
        name.removeprefix(prefix): torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
        for name, saved in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(saved, TensorStorageMetadata)
    }


def _load_random_state(path: Path) -> None:
    file = TensorFile(path)
    names = [name for name in file.names() if name.startswith(RANDOM)]
    try:
        set_random_state({name.removeprefix(RANDOM): file.read(name) for name in names})
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _on_all_ranks(
    group: dist.ProcessGroup | None, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Calls ``function``; a CheckpointError on one rank is raised on all, with the same class."""
    try:
        result = function(*args, **kwargs)
    except CheckpointError as error:
        gather_objects((type(error), str(error)), group)
        raise
    for rank, report in enumerate(gather_objects(None, group)):
        if report is not None:
            raise report[0](f"rank {rank}: {report[1]}")
    return result
