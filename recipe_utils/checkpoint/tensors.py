"""Tensors of a model and its optimizer by parameter name, independent of wrappers and parameter groups."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recipe_utils.files import dtype_name
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
    for group in chain.from_iterable(part.param_groups for part in single_optimizers(optimizer)):
        options = {k: v for k, v in group.items() if k not in {*_IMPLEMENTATION_OPTIONS, _BUILT}}
        group[_BUILT] = deepcopy({**options, **more})  # schedules set a tensor in place


@dataclass
class GroupDescription:
    """Parameters and options of a group of an optimizer."""

    names: list[str]
    options: dict[str, Any]


@dataclass
class OptimizerDescription:
    """Content of ``optimizer.json``: everything of an optimizer's state that is not a tensor."""

    state: dict[str, dict[str, list[Any] | None]]
    """Parameter -> key -> None for a tensor, ``[value]`` for a plain value."""
    groups: list[GroupDescription]

    @property
    def options_of(self) -> dict[str, dict[str, Any]]:
        """Options by parameter."""
        return {name: group.options for group in self.groups for name in group.names}


def optimizer_contents(model: nn.Module, optimizer: AnyOptimizer) -> tuple[dict[str, Tensor], OptimizerDescription]:
    """Returns an optimizer's state as ``PARAMETER.KEY`` -> tensor, and its description.

    Initializes nothing and takes no step. Raises ValueError with the name of a state or an option that cannot be saved.
    """
    tensors: dict[str, Tensor] = {}
    state: dict[str, dict[str, list[Any] | None]] = {}
    groups = []
    for part, group, members in _groups(model, optimizer):
        where = f"optimizer={type(part).__name__}"
        options = {
            key: _plain(value, f"{where}: its option {key}")
            for key, value in group.items()
            if key not in _IMPLEMENTATION_OPTIONS
        }
        groups.append(GroupDescription([*members], options))
        # Tensors go to safetensors, in parts of ranks; everything else into JSON, so that nothing is pickled.
        for name, parameter in members.items():
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
    return tensors, OptimizerDescription(state, groups)


def merge_descriptions(descriptions: Sequence[OptimizerDescription]) -> OptimizerDescription:
    """Merges the descriptions by :func:`optimizer_contents` of all ranks, which have different stages.

    A rank may have groups that others have not.
    """
    merged, groups = OptimizerDescription({}, []), dict[str, GroupDescription]()
    for description in descriptions:
        merged.state |= description.state
        for group in description.groups:
            same = groups.setdefault(repr(group.options), GroupDescription([], group.options))
            same.names = list(dict.fromkeys(same.names + group.names))
    merged.groups += groups.values()
    return merged


def _groups(
    model: nn.Module, optimizer: AnyOptimizer
) -> Iterator[tuple[Optimizer, dict[str, Any], dict[str, nn.Parameter]]]:
    """Yields each group of an optimizer, and its parameters by name."""
    names = {id(parameter): name for name, parameter in parameters_by_name(model).items()}
    for part in single_optimizers(optimizer):
        for group in part.param_groups:
            yield part, group, {names[id(parameter)]: parameter for parameter in group["params"]}


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


def misfits_of_optimizer(
    model: nn.Module,
    optimizer: AnyOptimizer,
    description: OptimizerDescription,
    saved: Mapping[str, Tensor],
    names_of_other_stages: Collection[str] = (),
) -> Iterator[str]:
    """Yields why an optimizer cannot continue from a checkpoint: its parameters, their options, or its state.

    ``description`` and ``saved``, which may be meta tensors, are what :func:`optimizer_contents` returned at the save;
    ``names_of_other_stages`` are parameters that other pipeline stages step. Parameter groups may differ, as they do
    between an optimizer and :class:`recipe_utils.optim.optimizer.OptimizerInBackward`.
    """
    # Groups are compared by the names of their parameters: their number and order may have changed.
    options_of = description.options_of
    current = {name for *_, members in _groups(model, optimizer) for name in members}
    lacking = current - options_of.keys()
    superfluous = options_of.keys() - current - set(names_of_other_stages)
    if lacking or superfluous:
        yield (
            "optimizer: it steps other parameters than when it was saved; new: "
            f"{in_words(lacking)}; no longer: {in_words(superfluous)}"
        )
        return

    for part, group, members in _groups(model, optimizer):
        saved_options = [options_of[name] for name in members]
        # One group has one value of each option, so its parameters must continue with equal ones.
        continued = _continued(saved_options, group)
        for name, options in zip(members, continued, strict=True):
            if options != continued[0]:
                both = f"{continued[0]} and {options}"
                yield f"optimizer: {next(iter(members))} and {name} are in one group, but were saved with {both}"
                break
        ours = group.keys() - _IMPLEMENTATION_OPTIONS
        if members and (ours ^ saved_options[0].keys()) - {"initial_lr", _BUILT}:  # schedulers add initial_lr
            yield (
                f"optimizer={type(part).__name__}: its options are {in_words(ours)}; it was saved with "
                f"{in_words(saved_options[0])}; set the same optimizer"
            )
        # State is sharded as its parameter, so it must have the parameter's shape, whole rows of it, or one value.
        for name, parameter in members.items():
            for key, value in description.state.get(name, {}).items():
                what, like = f"optimizer: its state {key} of {name}", saved.get(f"{name}.{key}")
                if value is None and like is None:
                    yield f"{what} is missing in tensors.json"
                elif like is None or not isinstance(parameter, DTensor) or like.numel() == 1:
                    continue
                elif like.shape != parameter.shape and not _has_rows(like, parameter):
                    shapes = f"has shape {tuple(like.shape)}, the parameter {tuple(parameter.shape)}"
                    yield f"{what} {shapes}; how the one is sharded does not follow from the other"
                    return  # one of many


def restore_optimizer(
    model: nn.Module, optimizer: AnyOptimizer, description: OptimizerDescription, saved: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Sets an optimizer's options and plain values from a checkpoint that fits, and allocates its state tensors.

    Options that were built with another value than now, see :func:`note_options`, keep their current values. Arguments
    are those of :func:`misfits_of_optimizer`. Returns the new, still empty state tensors by the names of ``saved``,
    sharded as the parameters.
    """
    options_of = description.options_of
    tensors: dict[str, Tensor] = {}
    for part, group, members in _groups(model, optimizer):
        # A schedule or a fused step holds tensors of options, so these are filled in place.
        for options in _continued([options_of[name] for name in members], group)[:1]:  # equal for all
            for key, value in options.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value
        # Not by load_state_dict, which would cast the state to the parameter's dtype.
        for name, parameter in members.items():
            state: dict[str, Any] = {}
            for key, value in description.state.get(name, {}).items():
                if value is None:
                    state[key] = _zeros_like(saved[f"{name}.{key}"], key, parameter, group)
                    tensors[f"{name}.{key}"] = state[key]
                else:
                    state[key] = value[0]
            part.state.pop(parameter, None)
            if state:
                part.state[parameter] = state
    return tensors


def _continued(saved: Sequence[Mapping[str, Any]], group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns saved options of the parameters of a group, without those that were built with another value than now."""
    now, changed = group.get(_BUILT), {_BUILT}
    for then in (options.get(_BUILT) for options in saved):
        if then is not None and now is not None:
            changed |= {key for key in now if then.get(key) != _plain(now[key], key)}
    # Without a schedule, the checkpoint's rate would be that of the old schedule's last step.
    if {"lr", "lr_scheduler"} & changed:
        changed |= {"lr", "initial_lr"}
    return [{key: value for key, value in options.items() if key not in changed} for options in saved]


def _has_rows(saved: Tensor, parameter: DTensor) -> bool:
    """Returns True for values of whole rows: sharded as the parameter, unless that is within rows."""
    is_alike = saved.ndim == parameter.ndim > 1 and saved.shape[:-1] == parameter.shape[:-1]
    return is_alike and not any(placement.is_shard(parameter.ndim - 1) for placement in parameter.placements)


def _zeros_like(saved: Tensor, key: str, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """Returns zeros for a saved optimizer state, on the parameter's device and sharded as it is."""
    if key != "step" and saved.shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and _has_rows(saved, parameter):
        rows = local(parameter)
        zeros = torch.zeros(*rows.shape[:-1], saved.size(-1), dtype=saved.dtype, device=rows.device)
        return sharded_as(parameter, zeros)
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

    # Each kind of difference is one clause with some names, and no clause without any.
    differences = {
        "it lacks {}": expected.keys() - saved.keys(),
        "it has {}, which the model does not have": saved.keys() - expected.keys() - set(names_of_other_stages),
        "its shapes differ: {}": differing(lambda tensor: tuple(tensor.shape)),
        "its dtypes differ: {}": differing(lambda tensor: tensor.dtype) if compares_dtypes else [],
    }
    return "; ".join(text.format(in_words(names)) for text, names in differences.items() if names)
