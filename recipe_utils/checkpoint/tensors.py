"""Tensors of a model and its optimizer by parameter name, independent of wrappers and parameter groups."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recipe_utils.files import CheckpointError, dtype_name
from recipe_utils.optim.optimizer import OptimizerInBackward, single_optimizers, trained_parameters, unwrapped
from recipe_utils.parallel.fsdp import local, reshard, sharded_as

AnyOptimizer = Optimizer | OptimizerInBackward

# Options that do not change the result of a step; the resumed run uses its own.
_IMPLEMENTATION_OPTIONS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
_BUILT = "as_built"
"""Option with the options of a group before training; see :func:`note_options`."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns trained parameters and persistent buffers by their names without wrappers.

    Runs with other wrappers (activation checkpointing, compile) find the same names. Shared weights
    occur once. Frozen weights are always loaded by the checkpointer and are not included.
    """
    tensors: dict[str, Tensor] = dict(parameters_by_name(model))
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[unwrapped(f"{prefix}.{name}" if prefix else name)] = buffer
    return {name: tensor.detach() for name, tensor in tensors.items()}


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of :func:`model_tensors` themselves, not detached."""
    reshard(model)
    return {unwrapped(name): parameter for name, parameter in trained_parameters(model).items()}


def note_options(optimizer: AnyOptimizer, **more: Any) -> None:
    """Keeps the present options of each group, and ``more``, for a comparison when training resumes."""
    for _, group in _groups(optimizer):
        options = {k: v for k, v in group.items() if k not in {*_IMPLEMENTATION_OPTIONS, _BUILT}}
        group[_BUILT] = deepcopy({**options, **more})  # schedules set a tensor in place


def optimizer_contents(model: nn.Module, optimizer: AnyOptimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns an optimizer's state by parameter name. Initializes nothing and takes no step.

    It is ``PARAMETER.KEY`` -> tensor; and a description for JSON: ``state``, parameter -> key -> None for a tensor and
    ``[value]`` for a plain value, and ``groups``, each with ``names`` and ``options``. Raises ValueError with the name of
    a state or an option that cannot be saved.
    """
    names = {id(parameter): name for name, parameter in parameters_by_name(model).items()}
    tensors: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    groups = []
    for part, group in _groups(optimizer):
        where = f"optimizer={type(part).__name__}"
        options = {
            key: _plain(value, f"{where}: its option {key}")
            for key, value in group.items()
            if key not in _IMPLEMENTATION_OPTIONS
        }
        members = [names[id(parameter)] for parameter in group["params"]]
        groups.append({"names": members, "options": options})
        # Tensors go to safetensors, in parts of ranks; everything else into JSON, so that nothing is pickled.
        for name, parameter in zip(members, group["params"], strict=True):
            for key, value in part.state.get(parameter, {}).items():
                what = f"{where}: its state {key} of {name}"
                if isinstance(value, Tensor):
                    shard = local(value)
                    if is_traceable_wrapper_subclass(shard):
                        raise ValueError(f"{what} is a {type(shard).__name__}, which step checkpoints cannot hold")
                    dtype_name(shard.dtype)  # raises for one that safetensors does not support
                    tensors[f"{name}.{key}"] = value.detach()
                    state.setdefault(name, {})[key] = None
                else:
                    state.setdefault(name, {})[key] = [_plain(value, what)]
    return tensors, {"state": state, "groups": groups}


def merge_descriptions(descriptions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the descriptions by :func:`optimizer_contents` of all ranks, which have different stages.

    A rank may have groups that others have not.
    """
    state, groups = dict[str, Any](), dict[str, Any]()
    for description in descriptions:
        state |= description["state"]
        for group in description["groups"]:
            merged = groups.setdefault(repr(group["options"]), {**group, "names": []})
            merged["names"] = list(dict.fromkeys(merged["names"] + group["names"]))
    return {"state": state, "groups": list(groups.values())}


def _groups(optimizer: AnyOptimizer) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
    for part in single_optimizers(optimizer):
        for group in part.param_groups:
            yield part, group


def _plain(value: Any, what: str) -> Any:
    """Returns ``value`` as a round trip through JSON would."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item, what) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, what) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{what} is a {type(value).__name__}, which step checkpoints cannot hold")


def restore_optimizer(
    model: nn.Module,
    optimizer: AnyOptimizer,
    description: Mapping[str, Any],
    saved: Mapping[str, Tensor],
    names_of_other_stages: Collection[str] = (),
) -> dict[str, Tensor]:
    """Sets an optimizer's options and plain values from a checkpoint, and allocates its state tensors.

    Options that were built with another value than now, see :func:`note_options`, keep their current values.
    Nothing is changed if anything does not fit. The parameter groups may differ, as they do between
    an optimizer and :class:`recipe_utils.optim.optimizer.OptimizerInBackward`.

    Args:
        model: sharded or not.
        optimizer: optimizer of the same class as the saved one.
        description: second result of :func:`optimizer_contents`.
        saved: meta tensors like the saved ones, by the names of its first result.
        names_of_other_stages: parameters that other pipeline stages step.

    Returns:
        The new, still empty state tensors by the same names, sharded as the parameters.

    Raises:
        CheckpointError: parameters or options, named in the message, do not fit.
    """
    # Groups are compared by the names of their parameters: their number and order may have changed.
    names = {id(parameter): name for name, parameter in parameters_by_name(model).items()}
    options_of = {name: group["options"] for group in description["groups"] for name in group["names"]}
    current = {names[id(p)] for _, group in _groups(optimizer) for p in group["params"]}
    lacking = current - options_of.keys()
    superfluous = options_of.keys() - current - set(names_of_other_stages)
    if lacking or superfluous:
        raise CheckpointError(
            "optimizer: it steps other parameters than when it was saved; new: "
            f"{in_words(lacking)}; no longer: {in_words(superfluous)}"
        )

    # What will be set, so that an error leaves the optimizer as it was.
    tensors: dict[str, Tensor] = {}
    new_options, new_states = [], []
    for part, group in _groups(optimizer):
        members = [names[id(parameter)] for parameter in group["params"]]
        changed = set[str]().union(*(_changed(options_of[name], group) for name in members))
        unchanged = {name: {k: v for k, v in options_of[name].items() if k not in changed} for name in members}
        options = unchanged[members[0]] if members else {}
        differing = [name for name in members if unchanged[name] != options]
        ours = group.keys() - _IMPLEMENTATION_OPTIONS
        if differing:
            raise CheckpointError(
                f"optimizer: {members[0]} and {differing[0]} are in one group, but were saved with "
                f"{options} and {unchanged[differing[0]]}"
            )
        # Schedulers add initial_lr.
        if members and (ours ^ options_of[members[0]].keys()) - {"initial_lr", _BUILT}:
            raise CheckpointError(
                f"optimizer={type(part).__name__}: its options are {in_words(ours)}; it was saved with "
                f"{in_words(options_of[members[0]])}; set the same optimizer"
            )
        new_options.append((group, options))
        for name, parameter in zip(members, group["params"], strict=True):
            state = {}
            for key, value in description["state"].get(name, {}).items():
                if value is None:
                    state[key] = _zeros_like(saved[f"{name}.{key}"], key, name, parameter, group)
                    tensors[f"{name}.{key}"] = state[key]
                else:
                    state[key] = value[0]
            new_states.append((part, parameter, state))

    # Everything fits. A schedule or a fused step holds tensors of options, so these are filled in place.
    for group, options in new_options:
        for key, value in options.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
    for part, parameter, state in new_states:
        # load_state_dict would cast the state to the parameter's dtype.
        part.state.pop(parameter, None)
        if state:
            part.state[parameter] = state
    return tensors


def _changed(saved: Mapping[str, Any], group: Mapping[str, Any]) -> set[str]:
    """Returns the options of a group that keep their current values, because they were built with others."""
    then, now, changed = saved.get(_BUILT), group.get(_BUILT), set()
    if then is not None and now is not None:
        changed = {key for key in now if then.get(key) != _plain(now[key], key)}
    # Without a schedule, the checkpoint's rate would be that of the old schedule's last step.
    if {"lr", "lr_scheduler"} & changed:
        changed |= {"lr", "initial_lr"}
    return {*changed, _BUILT}


def _zeros_like(saved: Tensor, key: str, name: str, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """Returns zeros for a saved optimizer state, on the parameter's device and sharded as it is."""
    if key != "step" and saved.shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
    has_rows = saved.ndim == parameter.ndim > 1 and saved.shape[:-1] == parameter.shape[:-1]
    if isinstance(parameter, DTensor) and has_rows:
        # Values of whole rows: sharded as the parameter, whose last dimension never is.
        rows = local(parameter)
        zeros = torch.zeros(*rows.shape[:-1], saved.size(-1), dtype=saved.dtype, device=rows.device)
        if not any(placement.is_shard(parameter.ndim - 1) for placement in parameter.placements):
            return sharded_as(parameter, zeros)
    if isinstance(parameter, DTensor) and saved.numel() != 1:
        raise CheckpointError(
            f"optimizer: its state {key} of {name} has shape {tuple(saved.shape)}, the parameter "
            f"{tuple(parameter.shape)}; how the one is sharded does not follow from the other"
        )
    # Step counts are on the CPU, except in implementations that use them on the device.
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return torch.zeros(saved.shape, dtype=saved.dtype, device=parameter.device if on_device else "cpu")


def in_words(names: Iterable[str]) -> str:
    """Returns a list of some names."""
    listed = sorted(names)
    text = ", ".join(listed[:5]) or "none"
    return f"{text} and {len(listed) - 5} more" if len(listed) > 5 else text


def describe_mismatch(
    saved: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    names_of_other_stages: Collection[str] = (),
    compares_dtypes: bool = True,
) -> str:
    """Returns why a checkpoint's tensors cannot be loaded into a model; empty if they can.

    ``saved`` are those of the whole model, ``expected`` those of the model or of this rank's stages, and
    ``names_of_other_stages`` those of the other ranks' stages. Any may be on the meta device.
    """

    def differing(value: Callable[[Tensor], Any]) -> list[str]:
        pairs = {name: (value(saved[name]), value(expected[name])) for name in expected.keys() & saved.keys()}
        return [f"{name} {then} instead of {now}" for name, (then, now) in pairs.items() if then != now]

    differences = {
        "it lacks {}": expected.keys() - saved.keys(),
        "it has {}, which the model does not have": saved.keys() - expected.keys() - set(names_of_other_stages),
        "its shapes differ: {}": differing(lambda tensor: tuple(tensor.shape)),
        "its dtypes differ: {}": differing(lambda tensor: tensor.dtype) if compares_dtypes else [],
    }
    return "; ".join(text.format(in_words(names)) for text, names in differences.items() if names)
