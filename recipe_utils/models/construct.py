"""Builds a model on the meta device, and copies it to pipeline stages.

A decoder of 4 layers over 2 ranks, with ``pipeline_parallel_dim=2``:

    meta_model = build_on_meta(make_model, settings)          layers 0 to 3, no memory, equal on all ranks
    meta_model.layers[0].requires_grad_(False)                a recipe's own changes
    model = build_stages(meta_model, settings, ranks)         rank 0: embeddings, layers 0 and 1; rank 1: layers 2 and
                                                              3, norm, output layer and modules that were added
    attend_within_documents, attach_loss, parallelize         each stage; with the line before, runner.build_modules
    load_model(model, ...)                                    memory, and this rank's shards of the weights

Without a pipeline the model is one stage, a copy of ``meta_model``.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.models.adapters.lora import adapters_in_words, find_adapters, freeze_base
from recipe_utils.models.adapters.nf4 import drop_upcast_hooks, without_quantizing
from recipe_utils.models.adapters.qat import simulate_quantization
from recipe_utils.models.pipeline.schedule import PipelineSettings
from recipe_utils.models.pipeline.stages import Stages, cut_to_stage, layers_of_stages
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.transformers.interface import modules_for_images
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import ConfigError, Problem
from recipe_utils.torchtune_names import log_rank_zero, logger, set_default_dtype

_NOISES = {"router_jitter_noise", "input_jitter_noise", "jitter_noise"}
"""Attributes of modules that draw random numbers in training by this rate, besides any dropout."""


def build_on_meta(make_model: Callable[[], nn.Module], settings: ModelSettings) -> nn.Module:
    """Calls ``make_model`` without allocating or initializing weights; freezes all but the adapters, if any.

    Raises ConfigError if ``quantizer`` or ``custom_sharded_layers`` do not fit the model, ValueError if tables of
    positions are larger than this machine's memory.
    """
    # Parameters get their shape and precision, but no memory.
    default_dtype = set_default_dtype(settings.torch_dtype)
    with default_dtype, torch.device("meta"), without_quantizing():
        model = make_model()
        if settings.quantizer is not None:
            simulate_quantization(model, settings.quantizer)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Sines and cosines in fp32; on the meta device, scaled RoPE makes no table.
    ropes: list[Any] = [m for m in model.modules() if hasattr(m, "rope_init") and hasattr(m, "dim")]
    if (tables := sum(4 * rope.dim * getattr(rope, "max_seq_len", 0) for rope in ropes)) > memory:
        raise ValueError(
            f"its tables, of max_seq_len positions, take {tables / 2**30:.0f} GiB of the machine's "
            f"{memory / 2**30:.0f}; set a smaller max_seq_len"
        )
    last_names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for name in settings.custom_sharded_layers or ():
        if name.rpartition(".")[2] not in last_names:
            raise ConfigError(Problem("custom_sharded_layers", "the model has no such module; take it out", name))
        if name in modules_for_images(model):
            text = "ranks without images would not compute it, and wait for one another; take it out"
            raise ConfigError(Problem("custom_sharded_layers", text, name))
    drop_upcast_hooks(model)
    freeze_base(model)
    return model


def without_dropout(model: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """Returns a model whose dropout and noises of routers are 0, as its ``config``, the component ``model``, leaves them.

    Those of the folder, or of the model's builder, are logged once. Raises ConfigError for a key of ``config`` above 0.
    """
    reason = "each forward would draw other masks, so that ratios and margins are noise, even of unchanged weights"
    for key, rate in _rates_in(config):
        raise ConfigError(Problem(f"model.{key}", f"{reason}; set it to 0", rate))
    found = dict[str, float]()
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):  # models of transformers read some when they compute
            for name, rate in rates_of(owner).items():
                setattr(owner, name, 0.0)
                found["dropout" if name == "p" else name] = rate
    if found:
        given = ", ".join(f"{name}={rate}" for name, rate in found.items())
        log_rank_zero(f"model: {given} of the folder is 0 here: {reason}", logging.INFO)
    return model


def rates_of(module: Any) -> dict[str, float]:
    """Returns rates above 0 of dropout and of a router's noise among the attributes of a module, or of its config."""
    named = {name: value for name, value in getattr(module, "__dict__", {}).items() if _is_rate(name)}
    given = named | ({"p": module.p} if isinstance(module, _DropoutNd) else {})
    return {name: rate for name, rate in given.items() if isinstance(rate, float) and rate > 0}


def _is_rate(name: str) -> bool:
    """Returns True for the name of a rate of dropout, in any of its spellings, or of a router's noise.

    DINOv3's ``drop_path`` is none: its draws belong to a crop, so that they are the same in any layout.
    """
    return ("drop" in name and name != "drop_path") or name in _NOISES


def _rates_in(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """Yields keys and values of rates above 0, also in mappings."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _rates_in(value, f"{before}{name}.")
        elif _is_rate(str(name)) and isinstance(value, int | float) and value is not True and value > 0:
            yield f"{before}{name}", value


def build_stages(meta_model: nn.Module, pipeline: PipelineSettings, ranks: Ranks) -> nn.Module:
    """Returns this rank's modules on the meta device: a copy of the model, or :class:`.Stages` of copies.

    Stages have the layers that were frozen in ``meta_model`` and the modules that were added to it. Raises ValueError
    if the model cannot be cut.
    """
    if ranks.dims.pp == 1:
        return copy.deepcopy(meta_model)

    model: Any = meta_model
    num_stages = pipeline.num_stages(ranks.dims.pp)
    layers = layers_of_stages(meta_model, num_stages, pipeline.pipeline_parallel_split_points)
    for index, stage_layers in enumerate(layers):
        parts = [model.layers[i] for i in stage_layers]
        if stage_layers.stop == len(model.layers) and isinstance(model.output, nn.Module):  # not tied
            parts.append(model.output)
        if not any(p.requires_grad for part in parts for p in part.parameters()):
            raise ValueError(
                f"pipeline_parallel_dim: stage {index} of {num_stages} has nothing to train; set a smaller "
                "pipeline_parallel_dim, or train some weights of all layers"
            )
    stages = Stages(meta_model, num_stages)
    # Stages are dealt out in turns. Each is a copy, so that a frozen model can be cut from the same meta model.
    for index in range(ranks.pp_rank, num_stages, ranks.dims.pp):
        stages[f"stage_{index}"] = stage = copy.deepcopy(meta_model)
        cut_to_stage(stage, layers[index])
    if ranks.is_zero:
        logger.info(
            f"{pipeline.pipeline_parallel_schedule} over {ranks.dims.pp} ranks; layers of the stages: "
            + ", ".join(f"{stage_layers.start} to {stage_layers.stop - 1}" for stage_layers in layers)
        )
    return stages


def describe_model(meta_model: nn.Module, model: nn.Module, cfg: DictConfig, ranks: Ranks) -> str:
    """Returns a line with a model's name, parameters, precision and device. All ranks together.

    ``meta_model`` is whole, ``model`` may be sharded or this rank's stages; ``cfg`` is the recipe's.
    """
    name, adapters = cfg.model["_component_"].rpartition(".")[2], find_adapters(meta_model)
    num_all, trained_numels = sum(p.numel() for p in meta_model.parameters()), dict[str, int]()
    numels = {name: p.numel() for name, p in parameters_by_name(model).items()}
    for numels_of_rank in gather_objects(numels, ranks.cpu_group):  # which may have other stages
        trained_numels |= numels_of_rank
    num_trained, device = sum(trained_numels.values()), ranks.device
    trained = "all trained" if num_trained == num_all else f"{num_trained:,} of them trained"
    if adapters.modules:
        trained += f" (adapters of {adapters_in_words(meta_model, adapters)})"
    dtypes = [cfg.get("dtype") or "fp32"]
    if cfg.get("weights_dtype") not in (None, *dtypes):
        dtypes.append(f"trained weights in {cfg.weights_dtype}")
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        device_name = f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)"
    else:
        device_name = device.type
    parts = f"{num_all:,} parameters", trained, *dtypes, f"on {device_name}"
    compiles = "; compile=True: the first update steps also compile" if cfg.get("compile") else ""
    return f"Model: {cfg.model.get('path', name)}, {', '.join(parts)}{compiles}"
