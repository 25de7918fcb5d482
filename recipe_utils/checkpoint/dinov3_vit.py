"""Conversion of vision transformers to and from the format of transformers' ``DINOv3ViTModel``.

transformers itself is not needed. Shapes: d width of the model, R registers, c channels, p patch
size.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchtune import config, training

HEADS = "heads.safetensors"
"""File with the weights of heads, by their names in this package; transformers ignores it."""

_CLS, _MASK = "tok_embeddings.cls_token", "tok_embeddings.mask_token"
_REGISTERS, _PATCHES = "tok_embeddings.register_tokens", "tok_embeddings.patches.weight"
_HF_REGISTERS = "embeddings.register_tokens"
_HF_NAMES = {
    _CLS: "embeddings.cls_token",
    _MASK: "embeddings.mask_token",
    _REGISTERS: _HF_REGISTERS,
    _PATCHES: "embeddings.patch_embeddings.weight",
    "tok_embeddings.patches.bias": "embeddings.patch_embeddings.bias",
    "norm.weight": "norm.weight",
    "norm.bias": "norm.bias",
}
_HF_NAMES_IN_LAYER = {
    "sa_norm": "norm1",
    "attn.q_proj": "attention.q_proj",
    "attn.k_proj": "attention.k_proj",
    "attn.v_proj": "attention.v_proj",
    "attn.output_proj": "attention.o_proj",
    "sa_scale.scale": "layer_scale1.lambda1",
    "mlp_norm": "norm2",
    "mlp_scale.scale": "layer_scale2.lambda1",
}
_HF_NAMES_IN_MLP = {False: {"w1": "up_proj", "w2": "down_proj"}}
_HF_NAMES_IN_MLP[True] = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Keys: True for a gated MLP."""

_ARGUMENTS = {
    "patch_size": ("patch_size", 16),
    "hidden_size": ("embed_dim", 384),
    "num_hidden_layers": ("num_layers", 12),
    "num_attention_heads": ("num_heads", 6),
    "intermediate_size": ("intermediate_dim", 1536),
    "num_channels": ("num_channels", 3),
    "num_register_tokens": ("num_registers", 0),
    "use_gated_mlp": ("use_gated_mlp", False),
    "rope_theta": ("rope_base", 100.0),
    "layer_norm_eps": ("norm_eps", 1e-5),
}
"""Key of ``config.json`` -> argument of ``dinov3_vit``, and transformers' default for the key."""
_FIXED: dict[str, tuple[Any, Any]] = {
    "query_bias": (True, True),
    "key_bias": (False, False),
    "value_bias": (True, True),
    "proj_bias": (True, True),
    "mlp_bias": (True, True),
}
"""Key of ``config.json`` -> required value, and transformers' default for the key."""
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def dinov3_tune_to_hf(weights: Mapping[str, Tensor], num_channels: int = 3) -> dict[str, Tensor]:
    """Converts full (unsharded) weights without heads to DINOv3ViTModel's names and shapes.

    Raises ValueError if a name is not one of a backbone's.
    """
    is_gated = any(name.endswith(".w3.weight") for name in weights)
    in_layer = _HF_NAMES_IN_LAYER | {
        f"mlp.{ours}": f"mlp.{theirs}" for ours, theirs in _HF_NAMES_IN_MLP[is_gated].items()
    }
    converted = {}
    for name, weight in weights.items():
        their_name = _renamed(name, _HF_NAMES, r"layers\.(\d+)\.", "layer.", in_layer)
        if name in (_CLS, _MASK):
            weight = weight[None, None]
        elif name == _REGISTERS:
            weight = weight[None]
        elif name == _PATCHES:
            side = math.isqrt(weight.size(1) // num_channels)
            weight = weight.unflatten(1, (num_channels, side, side))
        converted[their_name] = weight
    if _HF_REGISTERS not in converted and _CLS in weights:
        cls_token = weights[_CLS]
        converted[_HF_REGISTERS] = cls_token.new_zeros(1, 0, len(cls_token))
    return converted


def dinov3_hf_to_tune(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts the weights of a DINOv3ViTModel to the names and shapes of ``dinov3_vit``.

    Accepts the names of any version of transformers. Raises ValueError for all other names.
    """
    is_gated = any(name.endswith(".mlp.gate_proj.weight") for name in weights)
    in_layer = {theirs: ours for ours, theirs in _HF_NAMES_IN_LAYER.items()} | {
        f"mlp.{theirs}": f"mlp.{ours}" for ours, theirs in _HF_NAMES_IN_MLP[is_gated].items()
    }
    elsewhere = {theirs: ours for ours, theirs in _HF_NAMES.items()}
    converted = {}
    for name, weight in weights.items():
        our_name = _renamed(name, elsewhere, r"(?:model\.)?layer\.(\d+)\.", "layers.", in_layer)
        if our_name in (_CLS, _MASK):
            weight = weight.flatten()
        elif our_name == _REGISTERS:
            weight = weight[0]
            if len(weight) == 0:
                continue
        elif our_name == _PATCHES:
            weight = weight.flatten(1)
        converted[our_name] = weight
    return converted


def _renamed(
    name: str,
    elsewhere: Mapping[str, str],
    layer: str,
    layer_there: str,
    in_layer: Mapping[str, str],
) -> str:
    if name in elsewhere:
        return elsewhere[name]
    found = re.match(layer, name)
    if found is not None:
        rest = name[found.end() :]
        module, _, kind = rest.rpartition(".")
        prefix = f"{layer_there}{found[1]}."
        if rest in in_layer:
            return prefix + in_layer[rest]
        if module in in_layer:
            return f"{prefix}{in_layer[module]}.{kind}"
    raise ValueError(f"{name}: it is no weight of a DINOv3 vision transformer")


def dinov3_hf_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of ``config.json``, without image size and precision.

    ``arguments`` are all those of ``dinov3_vit``, which a model has as attribute ``arguments``.
    """
    return {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        **{key: arguments[argument] for key, (argument, _) in _ARGUMENTS.items()},
        **{key: value for key, (value, _) in _FIXED.items()},
        "hidden_act": _activation(arguments["use_gated_mlp"]),
        "layerscale_value": arguments["layer_scale_init"],
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "drop_path_rate": 0.0,
    }


def _activation(is_gated: bool) -> str:
    return "silu" if is_gated else "gelu"


class DINOv3Checkpointer:
    """Reads and writes a backbone as a folder of transformers' ``DINOv3ViTModel``, with its heads in a file beside it.

    Has the interface of torchtune's checkpointers. Set ``model: ${model}`` to use the config's
    model.

    Args:
        checkpoint_dir: folder to load, such as a download of
            facebook/dinov3-vits16-pretrain-lvd1689m; None loads no weights, and the recipe
            initializes them.
        output_dir: folder for exported models.
        model: component of the model, ``recipe_utils.model.vision.vision_transformer.dinov3_vit``
            or one of its sizes.
        checkpoint_files: files in ``checkpoint_dir``; None finds them.
        image_size: size to which users' images are resized [pixels]; None is that of
            ``checkpoint_dir``, otherwise 224.
        image_mean: mean of each channel in [0, 1], which the images' transform subtracts; None is
            that of ``checkpoint_dir``, otherwise ImageNet's for three channels and no normalisation
            for others.
        image_std: standard deviation of each channel; None as for ``image_mean``.
        should_load_recipe_state: must be False; torchtune's own recipes have no state of such
            models.

    Raises ValueError if the folder is invalid or of another model, or the model is not a
    ``dinov3_vit``.
    """

    def __init__(
        self,
        checkpoint_dir: str | None,
        output_dir: str,
        model: Mapping[str, Any],
        checkpoint_files: Sequence[str] | None = None,
        image_size: int | None = None,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        should_load_recipe_state: bool = False,
    ) -> None:
        if should_load_recipe_state:
            raise ValueError(
                "checkpointer.should_load_recipe_state=True: torchtune's recipes save no state of vision "
                "transformers; set it to False"
            )
        if (image_mean is None) != (image_std is None):
            raise ValueError(
                f"checkpointer.image_mean={image_mean}: image_std={image_std}; set both, or neither"
            )
        with torch.device("meta"):
            made = config.instantiate(OmegaConf.create(dict(model)))
        arguments = getattr(made, "arguments", {})
        if "layer_scale_init" not in arguments:
            raise ValueError(
                f"checkpointer.model={model.get('_component_')}: it makes a {type(made).__name__}; set it to "
                "${model}, with a model of recipe_utils.model.vision.vision_transformer"
            )
        num_channels = arguments["num_channels"]
        for name, values in (("image_mean", image_mean), ("image_std", image_std)):
            if values is not None and len(values) != num_channels:
                raise ValueError(
                    f"checkpointer.{name}={list(values)}: these are {len(values)} channels, the model has "
                    f"num_channels={num_channels}"
                )
        self._num_channels: int = num_channels
        self._shapes = {name: tuple(weight.shape) for name, weight in made.state_dict().items()}
        self._output_dir = Path(output_dir)
        self._checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._files: list[Path] = []
        found: dict[str, Any] = {}
        preprocessor: dict[str, Any] = {}
        if self._checkpoint_dir is not None:
            found = _read_json(self._checkpoint_dir / "config.json")
            _check_config(found, arguments, self._checkpoint_dir)
            self._files = _files_of(self._checkpoint_dir, checkpoint_files)
            if (path := self._checkpoint_dir / "preprocessor_config.json").is_file():
                preprocessor = _read_json(path)
        size = image_size or found.get("image_size", 224)
        self._config = {**found, **dinov3_hf_config(arguments), "image_size": size}
        self._preprocessor = {
            **(preprocessor or _preprocessor(num_channels, size)),
            **({} if image_size is None else {"size": {"height": size, "width": size}}),
            **_normalisation(image_mean, image_std),
        }

    def load_checkpoint(self) -> dict[str, Any]:
        """Returns ``{"model": weights}``: full, on the CPU, in the files' precision, with heads if there are any.

        Without a ``checkpoint_dir`` the weights are empty. Raises ValueError if a file cannot be
        read, or its weights are of another model.
        """
        if self._checkpoint_dir is None:
            return {training.MODEL_KEY: {}}
        backbone: dict[str, Tensor] = {}
        for path in self._files:
            backbone |= dinov3_hf_to_tune(_read_weights(path))
        _check_weights(backbone, self._shapes)
        heads = self._checkpoint_dir / HEADS
        return {
            training.MODEL_KEY: {**backbone, **(_read_weights(heads) if heads.is_file() else {})}
        }

    def save_checkpoint(
        self,
        state_dict: Mapping[str, Any],
        epoch: int,
        intermediate_checkpoint: bool = False,
        adapter_only: bool = False,
    ) -> None:
        """Writes full weights ``{"model": weights}`` to the folder ``epoch_N`` of ``output_dir``.

        Names of heads start with ``output.``. Raises ValueError if one of the last two arguments is
        True, or if the weights are of another model.
        """
        if intermediate_checkpoint or adapter_only:
            raise ValueError("a vision transformer's checkpointer saves whole models only")
        weights: Mapping[str, Tensor] = state_dict[training.MODEL_KEY]
        heads = {name: weight for name, weight in weights.items() if name.startswith("output.")}
        backbone = {name: weight for name, weight in weights.items() if name not in heads}
        _check_weights(backbone, self._shapes)
        folder = self._output_dir / f"epoch_{epoch}"
        folder.mkdir(parents=True, exist_ok=True)
        dtype = str(backbone["norm.weight"].dtype).removeprefix("torch.")
        described = {
            name: value for name, value in self._config.items() if name != "torch_dtype"
        } | {"dtype": dtype}
        _write_weights(
            folder / "model.safetensors", dinov3_tune_to_hf(backbone, self._num_channels)
        )
        if heads:
            _write_weights(folder / HEADS, heads)
        (folder / "config.json").write_text(json.dumps(described, indent=2))
        (folder / "preprocessor_config.json").write_text(json.dumps(self._preprocessor, indent=2))


def _check_weights(weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    for what, names in (
        ("lack", shapes.keys() - found.keys()),
        ("have what the model has not:", found.keys() - shapes.keys()),
        ("have another shape:", {n for n in found.keys() & shapes.keys() if found[n] != shapes[n]}),
    ):
        if names:
            name = min(names)
            sizes = [str(each[name]) for each in (found, shapes) if name in each]
            raise ValueError(
                f"checkpointer.checkpoint_dir: its weights {what} {name} {' instead of '.join(sizes)} "
                f"({len(names)} in all); model and checkpointer must be of one kind and size"
            )


def _check_config(found: Mapping[str, Any], arguments: Mapping[str, Any], folder: Path) -> None:
    if found.get("model_type") != "dinov3_vit":
        raise ValueError(
            f"checkpointer.checkpoint_dir={folder}: its model_type is {found.get('model_type')}, not dinov3_vit; "
            "set it to a folder of transformers' DINOv3ViTModel"
        )
    for key, (argument, default) in _ARGUMENTS.items():
        theirs = found.get(key, default)
        if theirs != arguments[argument]:
            raise ValueError(
                f"model.{argument}={arguments[argument]}: {folder / 'config.json'} has {key} {theirs}; set "
                f"model.{argument}={theirs}"
            )
    fixed = {**_FIXED, "hidden_act": (_activation(arguments["use_gated_mlp"]), "gelu")}
    for key, (ours, default) in fixed.items():
        if found.get(key, default) != ours:
            raise ValueError(
                f"checkpointer.checkpoint_dir={folder}: its {key} is {found.get(key, default)}, the model here has "
                f"{ours} only; set checkpoint_dir to another model"
            )


def _files_of(folder: Path, names: Sequence[str] | None) -> list[Path]:
    if names is None:
        index = folder / "model.safetensors.index.json"
        names = (
            sorted(set(_read_json(index)["weight_map"].values()))
            if index.is_file()
            else ["model.safetensors"]
        )
    paths = [folder / name for name in names]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"checkpointer.checkpoint_dir={folder}: it has no {missing[0]}")
    return paths


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"checkpointer.checkpoint_dir={path.parent}: its {path.name} cannot be read ({error})"
        ) from error
    return dict(found)


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # safetensors raises its own classes
        raise ValueError(
            f"checkpointer.checkpoint_dir={path.parent}: its {path.name} cannot be read ({error})"
        ) from error


def _write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        path,
        {"format": "pt"},  # transformers requires it
    )


def _preprocessor(num_channels: int, size: int) -> dict[str, Any]:
    """Returns the ``preprocessor_config.json`` of published models."""
    by_imagenet = _normalisation(_IMAGENET_MEAN, _IMAGENET_STD)
    return {
        "image_processor_type": "DINOv3ViTImageProcessorFast",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        **(by_imagenet if num_channels == 3 else {"do_normalize": False}),
    }


def _normalisation(
    mean: Sequence[float] | None, std: Sequence[float] | None
) -> dict[str, bool | list[float]]:
    if mean is None or std is None:
        return {}
    return {"do_normalize": True, "image_mean": list(mean), "image_std": list(std)}
