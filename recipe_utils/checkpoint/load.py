"""Step checkpoints: all that a training needs to go on from an update step, on any number of ranks.

:mod:`recipe_utils.checkpoint.save` saves them, :mod:`recipe_utils.checkpoint.folder` says what is on
the disk. Here is what is in them besides tensors, and how they are loaded.
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
"""What the names of tensors in a checkpoint begin with."""


class DamagedError(CheckpointError):
    """A checkpoint that is not what was written; an older one may be whole."""


@dataclass
class TrainingState:
    """Where a training is, but for tensors. Plain values throughout, as JSON knows them."""

    recipe: str
    """Name of the recipe; another one does not resume from it."""
    global_step: int
    """Update steps done."""
    epoch: int
    samples_consumed: int
    """Of the epoch, over all ranks."""
    seed: int
    data_fingerprint: dict[str, Any] = field(default_factory=dict)
    """What must be equal for the same samples to be in the same update steps."""
    config: dict[str, Any] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    """Weights that are not trained and so not saved -> what they are known by."""
    run_id: str = ""
    """Of the run that began it; a resumed training goes on with it."""
    num_tokens_seen: int = 0
    """Target tokens of all update steps that are done."""
    num_images_seen: int = 0
    """Images of them, where images are counted."""
    best_val_loss: float | None = None
    """Of the run so far."""


TEACHER = "teacher_checkpointer"
"""What a teacher is called in :attr:`TrainingState.frozen`."""


def read_state(path: Path) -> TrainingState:
    """Reads what a checkpoint knows but for tensors.

    Raises:
        CheckpointError: it cannot be read; names the file.
    """
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
    """What differs between two fingerprints, each as ``key=now: was then``; empty if nothing does."""
    saved, current = json.loads(json.dumps(saved)), json.loads(json.dumps(current))
    return [
        f"{key}={current.get(key)}: the checkpoint was saved with {saved.get(key)}"
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key) != current.get(key)
    ]


def changed_options(saved: Mapping[str, Any], current: Mapping[str, Any]) -> set[str]:
    """Arguments of the optimizer that two configs give other values; none if one has no optimizer."""
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
    """Loads a checkpoint, all ranks together, each its part.

    The number of ranks and how they shard may differ from when it was saved. Every byte is checked
    first, each rank a share of the files. On as many ranks as then, the random number generators
    go on, too.

    Args:
        path: of a whole checkpoint.
        model: materialised, sharded or not, or the pipeline stages of each rank; loaded into in place.
        optimizer: of the kind that was saved; its state is replaced.
        recipe: as saved.
        data_fingerprint: compared with the saved one; None takes any.
        frozen: what :class:`TrainingState` calls so, compared with the saved one.
        config: of this training. Its ``model`` must be that of the checkpoint's, if it has one; arguments of
            its ``optimizer`` that are others than then win over what was saved.
        group: a CPU (gloo) group of all ranks.

    Returns:
        What was saved besides.

    Raises:
        DamagedError: on all ranks; it is torn, foreign or unreadable. Names the file. Nothing has been
            loaded.
        CheckpointError: on all ranks; it does not fit model, optimizer or data. Names what differs
            with both values. Nothing has been loaded, unless a file turned out to hold something else
            than its checksum and ``tensors.json`` say.
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
        if TEACHER not in now or TEACHER not in then:  # not asked: kd_ratio=0
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

    # Nothing in it is to be believed before every rank is done with its share of the bytes.
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
    """Calls ``function``; a CheckpointError on one rank is raised on all, in the same class."""
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
