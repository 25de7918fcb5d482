"""Optimizers, including one that steps inside the backward."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import torch
from omegaconf import DictConfig
from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchtune import training
from torchtune.training.memory import OptimizerInBackwardWrapper

from recipe_utils.parallel.settings import RankSettings
from recipe_utils.settings.components import MadeWith, component_at, taken_by
from recipe_utils.settings.keys import STRICT, Count, Positive
from recipe_utils.settings.problems import ConfigError, Problem, naming
from recipe_utils.torchtune_names import instantiate, log_rank_zero
from recipe_utils.update_steps.settings import DataSettings

_ADAMW_8BIT = "recipe_utils.optim.AdamW8bit"
_FASTER = (".lora_b.weight", ".magnitude")
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
_STAGE = re.compile(r"(^|(?<=\.))stage_\d+\.")  # also inside names: a teacher beside its student


# torchtune accepts the string, too.
_INFINITE_AS_FLOAT = BeforeValidator(lambda value: math.inf if value == "inf" else value)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerSettings:
    """Optimizer, learning-rate schedule, clipping, non-finite gradients."""

    optimizer: Annotated[dict[str, Any], MadeWith(num_positional=1)]
    """A ``torch.optim``-style optimizer. ``fused: True`` skips non-finite gradients without a device synchronization."""
    lr_scheduler: Annotated[dict[str, Any], MadeWith(1, ("last_epoch", "num_training_steps"))] | None = None
    """Learning-rate schedule, stepped once per optimizer step; null keeps the rate constant."""
    loraplus_lr_ratio: Positive | None = None
    """LoRA+: learning rate of LoRA's B and DoRA's magnitudes over that of A; null is 1."""
    weight_decay_of_vectors: bool | None = None
    """Weight decay also of tensors with fewer than two dimensions (norms, biases). Default: True for text, else
    False."""
    clip_grad_norm: Annotated[Positive, _INFINITE_AS_FLOAT] | None = None
    """Maximum norm of all gradients together; null or inf only measures it."""
    optimizer_in_bwd: bool = False
    """Steps each parameter within the backward. Needs one microbatch per update step and no clipping."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action on a NaN or infinite gradient. Such a step never changes the weights."""
    max_nonfinite_steps: Count = 10
    """Maximum consecutive steps that ``on_nonfinite: skip`` skips."""

    def groups(self, parameters: Mapping[str, nn.Parameter]) -> list[Any]:
        """Returns an optimizer's first argument: parameters, or groups with options of their own."""
        ratio, decays_vectors = self.loraplus_lr_ratio, self.weight_decay_of_vectors is not False
        if ratio is None and decays_vectors:
            return list(parameters.values())
        groups: dict[tuple[bool, bool], dict[str, Any]] = {}
        for name, p in parameters.items():
            key = ratio is not None and name.endswith(_FASTER), not decays_vectors and p.dim() < 2
            options = {"lr": self.optimizer["lr"] * ratio} if ratio is not None and key[0] else {}
            options |= {"weight_decay": 0.0} if key[1] else {}
            groups.setdefault(key, {"params": [], **options})["params"].append(p)
        return [groups[key] for key in sorted(groups)]

    def problems(self) -> Iterator[Problem]:
        """Yields problems between the keys."""
        if self.loraplus_lr_ratio is not None and "lr" not in self.optimizer:
            yield Problem("loraplus_lr_ratio", "it multiplies optimizer.lr; set that, too", self.loraplus_lr_ratio)
        if self.optimizer_in_bwd and takes_names(self.optimizer):
            text = f"{self.optimizer['_component_']} needs all parameters at once; set it to False"
            yield Problem("optimizer_in_bwd", text, True)


def optimizer_on_ranks(settings: OptimizerSettings, data: DataSettings, ranks: RankSettings) -> Iterator[Problem]:
    """Yields what ranks and microbatches do not support."""
    for key, optimizer in _components(settings.optimizer).items() if ranks.tensor_parallel_dim > 1 else ():
        if optimizer.get("_component_") == _ADAMW_8BIT:
            text = "its blocks are of whole rows; set torch.optim.AdamW, or tensor_parallel_dim=1"
            yield Problem(f"{key}._component_", text, _ADAMW_8BIT)
        if optimizer.get("fused"):
            yield Problem(f"{key}.fused", "tensor parallelism needs it False", True)
    if not settings.optimizer_in_bwd:
        return
    if ranks.pipeline_parallel_dim > 1:
        stages = f"pipeline_parallel_dim={ranks.pipeline_parallel_dim}"
        yield Problem("optimizer_in_bwd", f"{stages} has several microbatches; set it to False", True)
    steps = 1
    if ranks.dims_or_none is not None:
        with suppress(ValueError):  # a problem of the data's keys
            steps = data.num_accumulated(ranks.dims_or_none.dp_degree)
    # These keys need the gradients of all parameters, or of several microbatches, at once.
    every, has_steps = "every backward updates the weights", data.gradient_accumulation_steps is not None
    total = None if has_steps or steps == 1 else data.global_batch_size
    # Other keys may need these values, as max_tokens_per_microbatch a plan by tokens.
    needed = ("microbatching", "global_batch_size", "gradient_accumulation_steps" if data.global_batch_size else "")
    for key, value, allowed, text in (
        ("clip_grad_norm", settings.clip_grad_norm, None, "the gradients never exist all at once"),
        ("loraplus_lr_ratio", settings.loraplus_lr_ratio, None, "there is one learning rate"),
        ("microbatching", data.microbatching, "in_order", f"{every}, and steps may have several"),
        ("gradient_accumulation_steps", steps if has_steps else 1, 1, every),
        ("global_batch_size", total, None, f"{every}, {steps} times"),
    ):
        if value != allowed:
            instead = "" if key in needed else f"{key} to {'null' if allowed is None else allowed}, or "
            yield Problem(key, f"with optimizer_in_bwd=True {text}; set {instead}optimizer_in_bwd to False", value)


class OptimizerInBackward(OptimizerInBackwardWrapper):
    """Steps each parameter within the backward, by its own optimizer, and frees its gradient.

    An update step must have one microbatch. Gradients cannot be clipped or checked.
    """

    def __init__(self, model: nn.Module, make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]) -> None:
        trained = trained_parameters(model)
        optimizers = {parameter: make_optimizer([parameter]) for parameter in trained.values()}
        super().__init__({name: optimizers[p] for name, p in trained.items()})
        training.register_optim_in_bwd_hooks(model=model, optim_dict=optimizers)
        self.step = self.zero_grad = lambda *_, **__: None  # the backward does both

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [group for optimizer in self.optim_map.values() for group in optimizer.param_groups]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are not frozen, by their names within all wrappers."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def unwrapped(name: str) -> str:
    """Returns a parameter's name without wrappers and pipeline stage."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return _STAGE.sub("", name)


def inner_optimizers(optimizer: Any) -> list[Optimizer]:
    """Returns the optimizers among an optimizer's attributes, also in lists and mappings."""
    values: list[Any] = []
    for value in vars(optimizer).values():
        value = list(value.values()) if isinstance(value, Mapping) else value
        values += value if isinstance(value, list | tuple) else [value]
    return [value for value in values if isinstance(value, Optimizer)]


def _components(optimizer: Mapping[Any, Any]) -> dict[str, Mapping[Any, Any]]:
    """Returns the component of an optimizer, and those that are its arguments, by key."""
    inner = {f"optimizer.{key}": value for key, value in optimizer.items() if isinstance(value, Mapping)}
    return {"optimizer": optimizer, **inner}


def takes_names(optimizer: Mapping[Any, Any]) -> bool:
    """Returns True for the component of an optimizer that gets parameters with their names."""
    with suppress(ValueError):  # reported elsewhere
        return getattr(component_at(str(optimizer.get("_component_"))), "takes_names", False)
    return False


def make_optimizer(cfg: DictConfig, groups: list[Any], parameters: Mapping[str, nn.Parameter]) -> Optimizer:
    """Builds an optimizer; a wrapper and its inner optimizers share one state, which is saved.

    One with an attribute ``takes_names`` gets parameter groups of (name, parameter), as PyTorch's optimizers take them.
    """
    if takes_names(cfg):
        names = {id(parameter): unwrapped(name) for name, parameter in parameters.items()}
        groups = groups if isinstance(next(iter(groups), 0), dict) else [{"params": groups}]
        groups = [{**group, "params": [(names[id(p)], p) for p in group["params"]]} for group in groups]
    optimizer: Optimizer = instantiate(cfg, groups)
    for inner in inner_optimizers(optimizer):
        optimizer.state.update(inner.state)
        inner.state = optimizer.state
    return optimizer


def build_optimizer(
    cfg: DictConfig,
    model: nn.Module,
    settings: OptimizerSettings,
    groups: Callable[[Mapping[str, nn.Parameter]], list[Any]] | None = None,
) -> Optimizer | OptimizerInBackward:
    """Builds an optimizer of the trained parameters of a model that is wrapped and on its device.

    ``groups`` maps parameters by name to the optimizer's first argument; None: those of the settings.
    """
    groups = groups or settings.groups
    if settings.optimizer_in_bwd:
        one_group = lambda ps: groups(dict(zip("p", ps, strict=True)))  # noqa: E731
        return OptimizerInBackward(model, lambda ps: make_optimizer(cfg, one_group(ps), {}))
    parameters = trained_parameters(model)
    return make_optimizer(cfg, groups(parameters), parameters)


def check_optimizer(
    cfg: DictConfig, cfg_schedule: DictConfig | None, settings: OptimizerSettings, model: nn.Module
) -> None:
    """Builds an optimizer and a schedule, and makes a step, to refuse them before weights are read.

    ``model`` is changed; it has the trained parameters in small, see :func:`.small_model`.
    """
    for key, component in _components(cfg).items():
        if not math.isfinite(component.get("lr") or 0):
            raise ValueError(f"{key}.lr={component['lr']}: it must be finite")
        if component.get("maximize"):
            raise ValueError(f"{key}.maximize=True: it would raise the loss; take it out")
    if cfg_schedule is not None and (num := cfg_schedule.get("num_warmup_steps", 0)) < 0:
        raise ConfigError(Problem("lr_scheduler.num_warmup_steps", "it must be at least 0", num))
    ratio, names = settings.loraplus_lr_ratio, trained_parameters(model)
    if ratio is not None and not any(name.endswith(_FASTER) for name in names):
        raise ConfigError(f"loraplus_lr_ratio={ratio}: the model has no LoRA; leave it out")
    optimizers = single_optimizers(build_optimizer(cfg, model, settings))
    optimizer = optimizers[0]
    with naming("lr_scheduler"):
        schedule = make_schedule(cfg_schedule, optimizer, num_training_steps=1)
    takes_steps = cfg_schedule is None or taken_by(cfg_schedule, {"num_training_steps": 1})
    if not takes_steps and not isinstance(schedule, LambdaLR):  # StepLR, built by a resume at its step, omits that
        text = "its rates depend on those before, so a resume would change them; set a get_*_schedule_* of transformers"
        raise ConfigError(Problem("lr_scheduler._component_", text, type(schedule).__name__))
    inner = [group for each in inner_optimizers(optimizer) for group in each.param_groups]
    if schedule is not None and {*map(id, inner)} - {*map(id, optimizer.param_groups)}:
        text = "its inner optimizers have groups of their own, whose rates lr_scheduler does not set"
        raise ValueError(f"optimizer._component_={type(optimizer).__name__}: {text}; let them share their groups")
    # Some need more than gradients (a closure, a mode), and some fused steps know no DTensor. Layers are alike.
    for parameter in {re.sub(r"\d+", "", name): p for name, p in names.items()}.values():
        parameter.grad = torch.ones_like(parameter)
    try:
        with naming("optimizer"):
            for each in optimizers:
                each.step()
    except ConfigError as error:
        instead = "take fused out, or set" if any(c.get("fused") for c in _components(cfg).values()) else "set"
        text = f"a step on parameters as the training has them fails; {instead} torch.optim.AdamW"
        raise ConfigError(Problem("optimizer", f"{text} ({error.problems[0].text})")) from error


def make_schedule(cfg: DictConfig | None, optimizer: Optimizer, num_training_steps: int, last_epoch: int = -1) -> Any:
    """Builds a schedule with those of the two numbers that it takes; None if ``cfg`` is None."""
    numbers = {"num_training_steps": num_training_steps, "last_epoch": last_epoch}
    return instantiate(cfg, optimizer, **taken_by(cfg or {}, numbers))


def single_optimizers(optimizer: Optimizer | OptimizerInBackward) -> list[Optimizer]:
    """Returns the optimizers of all parameters if each has its own, else ``[optimizer]``."""
    if isinstance(optimizer, OptimizerInBackward):
        return list(optimizer.optim_map.values())
    return [optimizer]


def build_lr_scheduler(
    cfg: DictConfig | None, optimizer: Optimizer | OptimizerInBackward, num_steps: int, global_step: int
) -> Any:
    """Builds a learning-rate schedule over update steps; None if ``cfg`` is None (constant rate).

    ``num_steps`` are those of the whole training, ``global_step`` of them are completed.
    """
    num_warmup_steps = 0 if cfg is None else cfg.get("num_warmup_steps", 0)
    if num_warmup_steps >= num_steps:
        text = f"lr_scheduler.num_warmup_steps={num_warmup_steps}: the training has only {num_steps} update steps"
        log_rank_zero(text, logging.WARNING)
    if global_step > 0:  # the resumed training may have had no schedule
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
    scheduler = make_schedule(cfg, single_optimizers(optimizer)[0], num_steps, global_step - 1)
    if scheduler is not None and isinstance(optimizer, OptimizerInBackward):
        optimizer.set_lr_scheduler(scheduler)  # the other optimizers follow the first
        for group in optimizer.param_groups:
            group["lr"] = scheduler.get_last_lr()[0]
    return scheduler
