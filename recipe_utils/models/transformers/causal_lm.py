"""Builds a decoder from a local folder of transformers."""

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from recipe_utils.checkpoint.export import WEIGHTS
from recipe_utils.checkpoint.transformers import auto_class_of, check_folder
from recipe_utils.files import write_atomically
from recipe_utils.models.transformers.decoder import Decoder, build, parts_for_images, reached_by_text
from recipe_utils.models.transformers.image_check import cached_image_check, error_beside_images, processor_of
from recipe_utils.models.transformers.packing_check import cached_packing_check, error_on_device
from recipe_utils.settings.components import DEFAULTS_OF_MODELS
from recipe_utils.torchtune_names import log_once

Part = Literal["text", "projector", "tower"]
"""Part of a model of images: what text passes through, what images pass through, and what is between."""


def causal_lm(
    path: str,
    attention: str | None = None,
    config: dict[str, Any] | None = None,
    images: bool = False,
    trains: list[Part] | None = None,
) -> Decoder:
    """Returns the decoder that a folder's ``config.json`` describes, without its weights.

    It is checked to compute packed rows, see :mod:`recipe_utils.models.transformers.packing_check`. A recipe
    without ``microbatching`` packs if that is exact, and pads otherwise.

    Args:
        path: local folder in the format of transformers; never a name on the hub.
        attention: ``sdpa`` or ``eager``, for padded rows and for documents one by one; null is ``sdpa``
            where the model supports it. ``packed_attention`` selects the kernel of packed rows.
        config: architecture to train from fresh weights: the content of ``config.json``, which is
            written to the folder. ``checkpointer.seed`` seeds the weights.
        images: takes images beside text; rows are then compared with images, too, see
            :mod:`recipe_utils.models.transformers.image_check`.
        trains: parts that are trained with ``images``; null: ``[text, projector]``. What no image reaches never is.

    Raises:
        ValueError: there is no ``config.json``, it is of no causal language model, or its model
            cannot be trained exactly.
    """
    if trains is not None and (not images or not trains or {*trains} - {*get_args(Part)}):
        names = ", ".join(get_args(Part))
        raise ValueError(f"model.trains={trains}: it lists parts of a model with images=True, of {names}; correct it")
    default: list[Part] = ["text", "projector"] if images else ["text"]
    return decoder_of(path, attention, config, images=images, trains=trains or default)


def decoder_of(
    path: str,
    attention: str | None,
    config: dict[str, Any] | None,
    adapt: Callable[[PreTrainedModel], None] | None = None,
    images: bool = False,
    trains: Sequence[Part] = ("text",),
) -> Decoder:
    """Returns what :func:`causal_lm` does; ``adapt`` replaces linear layers by linear layers."""
    if config is not None:
        _write_config(Path(path), config)
    described = config_of(path, images)
    if attention not in (None, "sdpa", "eager"):
        raise ValueError(
            f"model.attention={attention}: it must be sdpa or eager; packed_attention selects kernels of packed rows"
        )
    model = build(described, attention)
    if images and any(hasattr(module, "get_image_tokens") for module in model.modules()):
        raise ValueError(
            f"model.images=True: {type(model).__name__} makes tokens of images, through which no gradient passes; set "
            "model.images=False to train it on texts"
        )
    processor = processor_of(path) if images else None  # before the checks, which take longer
    reached, parts = reached_by_text(model), parts_for_images(model)
    of_text = [parameter for parameter in model.parameters() if id(parameter) in reached]
    for name, parameters in {"text": of_text, **parts}.items():
        for parameter in parameters:
            parameter.requires_grad_(name in trains)
    if adapt is not None:
        adapt(model)
    check = cached_packing_check(described, attention)
    if processor is not None:
        check = cached_image_check(described, attention, check, processor)
        for name, parameter in model.named_parameters():
            if name in check.unreached:
                parameter.requires_grad_(False)
    log_once(f"{path}: {check}")
    dtype = torch.get_default_dtype()
    error_on = partial(error_on_device, described, attention, check, dtype)
    if images:
        error_on = partial(error_beside_images, described, attention, check, path, dtype)
    decoder = Decoder(model, check, path, error_on)
    if decoder.max_seq_len < (getattr(described.get_text_config(), "max_position_embeddings", 0) or 0):
        log_once(
            f"{path}: samples have at most {decoder.max_seq_len} tokens; beyond, the frequencies of its RoPE "
            "would depend on the longest sample of a microbatch"
        )
    return decoder


def best_plan(path: str, attention: Any = None, config: Any = None, images: bool = False, **_: Any) -> str:
    """Returns the ``microbatching`` of a recipe that sets none, for arguments of :func:`causal_lm` and adapters'."""
    with torch.device("meta"):
        pads = causal_lm(path, attention, config, images).check.problem
        return "least_padding" if pads else "packed"


DEFAULTS_OF_MODELS[causal_lm] = {"microbatching": best_plan}


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes ``config.json``. Raises ValueError if the folder has weights or the type is unknown."""
    if folder.is_dir() and any(path.name.endswith(WEIGHTS) for path in folder.iterdir()):
        raise ValueError(f"model.config: {folder} has weights and a config.json; remove this key")
    arguments = dict(config)
    model_type = arguments.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"model.config.model_type={model_type}: transformers {transformers.__version__} does not have it"
        )
    make = CONFIG_MAPPING[model_type]
    known = {*make.__dataclass_fields__, *make.attribute_map}
    for name in arguments:
        if name not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "take it out"
            raise ValueError(f"model.config.{name}: {make.__name__} has no such argument; {hint}")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.json", make(**arguments).to_json_string(use_diff=False))


def config_of(path: str, images: bool = False) -> Any:
    """Returns the config of a folder, of its text alone if it is of a text model, too, and ``images`` is False.

    Raises ValueError if it is of no causal language model, or not of images and text.
    """
    if not Path(path, "config.json").is_file():
        hint = "set it to a folder of transformers"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
            hint += f", such as that of `tune download {path} --output-dir /models/{Path(path).name}`"
        raise ValueError(f"model.path={path}: no config.json; {hint}")
    check_folder(Path(path), f"model.path={path}")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    auto_class = auto_class_of(config, images)
    known = auto_class._model_mapping
    if type(config) not in known:
        kind = "model of images and text" if images else "causal language model"
        raise ValueError(f"model.path={path}: transformers has no {kind} for model_type={config.model_type}")
    takes = inspect.signature(known[type(config)].forward).parameters.values()
    needed = [each.name for each in takes if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if needed := [name for name in needed if name not in ("self", "input_ids")]:
        raise ValueError(
            f"model.path={path}: model_type={config.model_type} needs {' and '.join(needed)} in each forward, also for texts; "
            "set it to another model"
        )
    # PaliGemma has no encoder, but attends both ways in images and texts before an answer.
    is_encoder = auto_class is AutoModelForImageTextToText and config.is_encoder_decoder
    if is_encoder or config.model_type == "paligemma":
        raise ValueError(
            f"model.path={path}: model_type={config.model_type} attends both ways in its inputs, and only decoders are "
            "trained; set it to another model"
        )
    if images and getattr(config.get_text_config(), "cross_attention_layers", None):
        raise ValueError(
            f"model.images=True: text of model_type={config.model_type} attends to the images of all samples of a row; train "
            "it on texts, or set model to torchtune's llama3_2_vision_11b"
        )
    if not images and known[type(config)].config_class is type(config.get_text_config()):
        config = config.get_text_config()  # as AutoModelForCausalLM does for models of several kinds of data
    if getattr(config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            "model: output_router_logits=True: the router's loss is no sum over tokens; set it to false in "
            f"{path}/config.json"
        )
    return config
