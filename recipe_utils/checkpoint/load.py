"""Loading of step checkpoints: training resumes after an update step, on any number of ranks.

:mod:`recipe_utils.checkpoint.save` saves them, :mod:`recipe_utils.checkpoint.folder` defines their
files.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

from recipe_utils.checkpoint.folder import check_checksums, check_whole, read_json, read_marker
from recipe_utils.checkpoint.layout import rank_file, read_index, read_tensors
from recipe_utils.checkpoint.random_state import set_random_state
from recipe_utils.checkpoint.tensors import (
    AnyOptimizer,
    describe_mismatch,
    model_tensors,
    restore_optimizer,
)
from recipe_utils.files import CheckpointError, TensorFile
from recipe_utils.parallel.process_group import gather_objects

MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "random."
"""Prefixes of the names of tensors in a checkpoint."""


class DamagedError(CheckpointError):
    """A checkpoint is corrupt; an older one may be complete."""


@dataclass
class TrainingState:
    """Progress and identity of a training, without tensors. All values are JSON values."""

    recipe: str
    """Name of the recipe; other recipes cannot resume from the checkpoint."""
    global_step: int
    """Completed update steps."""
    epoch: int
    samples_consumed: int
    """Samples of the epoch consumed so far, over all ranks."""
    seed: int
    data_fingerprint: dict[str, Any] = field(default_factory=dict)
    """Values that must be equal for update steps to contain the same samples."""
    config: dict[str, Any] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    """Weights that are neither trained nor saved -> their fingerprint."""
    run_id: str = ""
    """Id of the run that started the training; kept on resume."""
    num_tokens_seen: int = 0
    """Target tokens of all completed update steps."""
    num_images_seen: int = 0
    """Images of all completed update steps, in recipes that count them."""
    best_val_loss: float | None = None
    """Lowest validation loss so far."""


TEACHER = "teacher_checkpointer"
"""Key of a teacher in :attr:`TrainingState.frozen`."""


def read_state(path: Path) -> TrainingState:
    """Reads the training state of a checkpoint. Raises CheckpointError with the file's name if it is invalid."""
    content = read_json(path / "state.json")
    names = {f.name for f in fields(TrainingState)}
    if content.keys() != names:
        raise CheckpointError(
            f"{path / 'state.json'}: it has {sorted(content)} instead of {sorted(names)}"
        )
    for name in (
        "global_step",
        "epoch",
        "samples_consumed",
        "seed",
        "num_tokens_seen",
        "num_images_seen",
    ):
        if type(content[name]) is not int or content[name] < 0:
            raise CheckpointError(
                f"{path / 'state.json'}: {name}={content[name]} is no number that a training counts"
            )
    return TrainingState(**content)


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
    if saved.get("loraplus_lr_ratio") != current.get("loraplus_lr_ratio"):
        changed.add("lr")
    return changed


def load(
    path: Path,
    model: nn.Module,
    optimizer: AnyOptimizer,
    *,
    recipe: str,
    data_fingerprint: Mapping[str, Any] | None = None,
    frozen: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> TrainingState:
    """Loads a checkpoint in place; each rank reads its part. Collective.

    The number of ranks and the sharding may differ from those at the save. All bytes are checked
    first, each rank a share of the files. On the same number of ranks the random number generators
    are restored, too.

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

    Returns:
        The saved training state.

    Raises:
        DamagedError: the checkpoint is incomplete, of another recipe or unreadable; names the file.
            Raised on all ranks, before anything is loaded.
        CheckpointError: it does not fit the model, optimizer or data; names what differs, with both
            values. Raised on all ranks, before anything is loaded, unless the content of a file
            contradicts its checksum and ``tensors.json``.
    """
    path = Path(path)
    rank, world_size = 0, 1
    if dist.is_initialized():
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)

    tensors = model_tensors(model)
    names_of_other_stages = set().union(*gather_objects(list(tensors), group)) - tensors.keys()

    def check_bytes() -> dict[str, Any]:
        problem = check_whole(path, recipe=recipe)
        if problem is None:
            marker = read_marker(path)
            problem = check_checksums(path, sorted(marker["files"])[rank::world_size])
        if problem is not None:
            raise DamagedError(f"resume_from_checkpoint: {path} cannot be used: {problem}")
        return marker

    def check_fit() -> tuple[TrainingState, Metadata]:
        state = read_state(path)
        differences = fingerprint_differences(state.data_fingerprint, data_fingerprint or {})
        if data_fingerprint is not None and differences:
            raise CheckpointError(
                "; ".join(differences) + f" ({path}); set what it was saved with, or "
                "resume_with_other_data=True"
            )

        now, then = dict(frozen or {}), dict(state.frozen)
        if TEACHER not in now or TEACHER not in then:  # kd_ratio=0 loads no teacher
            now.pop(TEACHER, None)
            then.pop(TEACHER, None)
        others = fingerprint_differences(then, now) if then else []
        if others:
            named = (key for key in ("ref_checkpointer", TEACHER) if others[0].startswith(key))
            key = next(named, "checkpointer")
            raise CheckpointError(
                f"{key}: {path} was trained beside other frozen weights: {others[0]} (and "
                f"{len(others) - 1} more); set model and {key} as then"
            )

        metadata = read_index(read_json(path / "tensors.json"), marker["files"])
        saved = _without(MODEL, metadata.state_dict_metadata)
        problem = describe_mismatch(saved, tensors, names_of_other_stages)
        if problem:
            raise CheckpointError(
                f"model: {path} does not fit it: {problem}; set model, dtype and weights_dtype as then"
            )
        saved_model, own_model = state.config.get("model"), (config or {}).get("model")
        if (
            saved_model
            and own_model
            and (others := fingerprint_differences(saved_model, own_model))
        ):
            raise CheckpointError(
                "; ".join(f"model.{text}" for text in others) + f" ({path}); set it as then, or "
                "resume_with_other_model=True"
            )
        return state, metadata

    def restore() -> dict[str, Tensor]:
        saved = _without(OPTIMIZER, metadata.state_dict_metadata)
        try:
            return restore_optimizer(
                model,
                optimizer,
                read_json(path / "optimizer.json"),
                saved,
                names_of_other_stages,
                changed_options(state.config, config or {}),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path / 'optimizer.json'}: it does not describe an optimizer ({error!r})"
            ) from error

    # No content is used before every rank has checked its share of the bytes.
    marker = _on_all_ranks(check_bytes, group)
    state, metadata = _on_all_ranks(check_fit, group)
    targets = {MODEL + name: tensor for name, tensor in tensors.items()}
    room = _on_all_ranks(restore, group)
    targets |= {OPTIMIZER + name: tensor for name, tensor in room.items()}
    read_tensors(path, metadata, targets, group)
    if marker["world_size"] == world_size:
        _on_all_ranks(partial(_load_random_state, path / rank_file(rank)), group)
    return state


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


def _without(prefix: str, names: Mapping[str, Any]) -> dict[str, Any]:
    return {k.removeprefix(prefix): value for k, value in names.items() if k.startswith(prefix)}
