"""Loading of step checkpoints: training resumes after an update step, on any number of ranks.

:mod:`recipe_utils.checkpoint.save` saves them, :mod:`recipe_utils.checkpoint.folder` defines their
files.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from recipe_utils.checkpoint.folder import (
    Marker,
    check_checksums,
    check_whole,
    read_as,
    read_json,
    read_marker,
)
from recipe_utils.checkpoint.layout import rank_file, read_index, read_tensors
from recipe_utils.checkpoint.tensors import (
    AnyOptimizer,
    describe_mismatch,
    model_tensors,
    restore_optimizer,
)
from recipe_utils.data.mixture import changed_weights
from recipe_utils.files import CheckpointError, TensorFile
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.random_state import set_random_state

MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "random."
"""Prefixes of the names of tensors in a checkpoint."""

_Counted = Annotated[int, Field(ge=0)]


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
    best_val_loss: float | None = None
    """Lowest validation loss so far."""


TEACHER = "teacher_checkpointer"
"""Key of a teacher in :attr:`TrainingState.frozen`."""


def fingerprint_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Returns differences between two fingerprints as ``key=current: ... saved``; empty if there are none."""
    saved, current = json.loads(json.dumps(saved)), json.loads(json.dumps(current))
    return [
        f"{key}={current.get(key)}: the checkpoint was saved with {saved.get(key)}"
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key) != current.get(key)
    ]


def changed_options(saved: Mapping[str, Any], current: Mapping[str, Any]) -> set[str]:
    """Returns the optimizer arguments that differ between two configs; none if one has no optimizer."""
    then, now = saved.get("optimizer"), current.get("optimizer")
    if not then or not now:
        return set()
    changed = {key for key in then.keys() | now.keys() if then.get(key) != now.get(key)}
    # Without a schedule, the checkpoint's rate would be that of the old schedule's last step.
    if any(saved.get(k) != current.get(k) for k in ("loraplus_lr_ratio", "lr_scheduler")):
        changed.add("lr")
    return changed


def changed_keys(
    saved: Mapping[str, Any], current: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Returns saved and current value of each config key that differs, dotted within components.

    Paths below ``output_dir``, which may have been moved, are the same.
    """
    then, now = (_flat(config, "", str(config.get("output_dir"))) for config in (saved, current))
    unset = "its default"
    return {
        key: (then.get(key, unset), now.get(key, unset))
        for key in sorted(then.keys() | now.keys())
        if then.get(key, unset) != now.get(key, unset)
    }


def _flat(value: Any, key: str, output_dir: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for name, part in value.items():
            found |= _flat(part, f"{key}.{name}" if key else str(name), output_dir)
        return found
    is_below = isinstance(value, str) and value.startswith(f"{output_dir}/")
    return {key: value.replace(output_dir, "${output_dir}", 1) if is_below else value}


def load(
    path: Path,
    model: nn.Module,
    optimizer: AnyOptimizer,
    *,
    recipe: str,
    data_fingerprint: Mapping[str, Any] | None = None,
    frozen: Mapping[str, str] = {},
    config: Mapping[str, Any] = {},
    group: dist.ProcessGroup | None = None,
) -> TrainingState:
    """Loads a checkpoint in place; each rank reads its part. Collective.

    The number of ranks and the sharding may differ from those at the save. All bytes are checked
    first, each rank a share of the files. On the same number of ranks the random number generators
    are restored, too. Returns the saved training state.

    Args:
        path: path of a complete checkpoint.
        model: materialised model, sharded or not, or the pipeline stages of each rank.
        optimizer: optimizer of the same class as the saved one; its state is replaced.
        recipe: name of the recipe, which must be the saved one.
        data_fingerprint: compared with the saved one; None accepts any.
        frozen: see :attr:`TrainingState.frozen`; compared with the saved one.
        config: config of this training. Its ``model`` must equal the saved one, if there is one;
            arguments of its ``optimizer`` that differ from the saved config's override the
            checkpoint.
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

    tensors = model_tensors(model)
    names_of_other_stages = set().union(*gather_objects(list(tensors), group)) - tensors.keys()

    def check_bytes() -> Marker:
        problem = check_whole(path, recipe=recipe)
        if problem is None:
            marker = read_marker(path)
            problem = check_checksums(path, sorted(marker.files)[rank::world_size])
        if problem is not None:
            raise DamagedError(f"resume_from_checkpoint: {path} cannot be used: {problem}")
        return marker

    def check_fit() -> tuple[TrainingState, Metadata]:
        state = read_as(TrainingState, path / "state.json")
        of_data = (state.data_fingerprint, data_fingerprint or {})
        differences = changed_weights(*of_data, state.epoch, state.samples_consumed)
        others = ({k: v for k, v in each.items() if k != "weights"} for each in of_data)
        differences += fingerprint_differences(*others)
        if data_fingerprint is not None and differences:
            raise CheckpointError(
                "; ".join(differences) + f" ({path}); set what it was saved with, or "
                "resume_with_other_data=True"
            )
        _check_frozen(state.frozen, frozen, path)
        metadata = read_index(read_json(path / "tensors.json"), marker.files)
        problem = describe_mismatch(_like(MODEL, metadata), tensors, names_of_other_stages)
        if problem:
            raise CheckpointError(
                f"model: {path} does not fit it: {problem}; set model, dtype and weights_dtype as then"
            )
        then, now = state.config.get("model"), config.get("model")
        if then and now and (differences := fingerprint_differences(then, now)):
            raise CheckpointError(
                "; ".join(f"model.{text}" for text in differences)
                + f" ({path}); set it as then, or "
                "resume_with_other_model=True"
            )
        return state, metadata

    def restore() -> dict[str, Tensor]:
        try:
            return restore_optimizer(
                model,
                optimizer,
                read_json(path / "optimizer.json"),
                _like(OPTIMIZER, metadata),
                names_of_other_stages,
                changed_options(state.config, config),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path / 'optimizer.json'}: it does not describe an optimizer ({error!r})"
            ) from error

    def read() -> None:
        read_tensors(path, metadata, targets)
        if marker.world_size == world_size:
            _load_random_state(path / rank_file(rank))

    # No content is used before every rank has checked its share of the bytes.
    marker = _on_all_ranks(check_bytes, group)
    state, metadata = _on_all_ranks(check_fit, group)
    states = _on_all_ranks(restore, group)
    targets = {MODEL + name: tensor for name, tensor in tensors.items()}
    targets |= {OPTIMIZER + name: tensor for name, tensor in states.items()}
    _on_all_ranks(read, group)
    return state


def _check_frozen(saved: Mapping[str, str], current: Mapping[str, str], path: Path) -> None:
    """Raises CheckpointError if frozen weights differ from those at the save."""
    if TEACHER not in saved or TEACHER not in current:  # kd_ratio=0 loads no teacher
        saved, current = (
            {key: value for key, value in each.items() if not key.startswith(TEACHER)}
            for each in (saved, current)
        )
    # Checkpoints of version 0.4.3 have no fingerprint of a frozen model's config.json.
    new = {f"{key}.config.json" for key in ("ref_checkpointer", TEACHER)} - saved.keys()
    current = {key: value for key, value in current.items() if key not in new}
    differences = fingerprint_differences(saved, current) if saved else []
    if differences:
        named = (key for key in ("ref_checkpointer", TEACHER) if differences[0].startswith(key))
        key = next(named, "checkpointer")
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise CheckpointError(
            f"{key}: {path} was trained with other frozen weights: {differences[0]}{more}; set model and "
            f"{key} to those that it was trained with"
        )


def _like(prefix: str, metadata: Metadata) -> dict[str, Tensor]:
    """Returns the saved tensors whose names start with ``prefix``, without it, on the meta device."""
    return {
        name.removeprefix(prefix): torch.empty(
            saved.size, dtype=saved.properties.dtype, device="meta"
        )
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


def _on_all_ranks(function: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Calls ``function``; a CheckpointError on one rank is raised on all, with the same class."""
    result, mine = None, None
    try:
        result = function()
    except CheckpointError as error:
        mine = error
    reports = gather_objects(None if mine is None else (type(mine), str(mine)), group)
    if mine is not None:
        raise mine
    for rank, report in enumerate(reports):
        if report is not None:
            error_class, text = report
            raise error_class(f"rank {rank}: {text}")
    return result
