"""Conversion of vision transformers to and from the format of transformers' ``DINOv3ViTModel``.

transformers itself is not needed. Shapes: d width of the model, R registers, c channels, p patch size.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from recipe_utils.checkpoint.tensors import describe_mismatch
from recipe_utils.files import write_tensors
from recipe_utils.torchtune_names import MODEL_KEY, instantiate

HEADS = "heads.safetensors"
"""File with the weights of heads, by their names in this package; transformers ignores it."""

_CLS, _MASK = "tok_embeddings.cls_token", "tok_embeddings.mask_token"
_REGISTERS, _PATCHES = "tok_embeddings.register_tokens", "tok_embeddings.patches.weight"
_HF_REGISTERS = "embeddings.register_tokens"
_HF_NAMES = {
    _CLS: "embeddings.cls_token",
    _MASK: "embeddings.mask_token",
    _REGISTERS: _HF_REGISTERS,
    "tok_embeddings.patches": "embeddings.patch_embeddings",
    "norm": "norm",
    "layers.{}.sa_norm": "layer.{}.norm1",
    "layers.{}.attn.q_proj": "layer.{}.attention.q_proj",
    "layers.{}.attn.k_proj": "layer.{}.attention.k_proj",
    "layers.{}.attn.v_proj": "layer.{}.attention.v_proj",
    "layers.{}.attn.output_proj": "layer.{}.attention.o_proj",
    "layers.{}.sa_scale.scale": "layer.{}.layer_scale1.lambda1",
    "layers.{}.mlp_norm": "layer.{}.norm2",
    "layers.{}.mlp.w2": "layer.{}.mlp.down_proj",
    "layers.{}.mlp_scale.scale": "layer.{}.layer_scale2.lambda1",
}
"""Parameter, or module with weight and bias -> its name in DINOv3ViTModel; ``{}`` is the layer."""
_HF_NAMES_OF_MLP = {
    False: {"layers.{}.mlp.w1": "layer.{}.mlp.up_proj"},
    True: {"layers.{}.mlp.w1": "layer.{}.mlp.gate_proj", "layers.{}.mlp.w3": "layer.{}.mlp.up_proj"},
}
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
_FIXED = {"query_bias": True, "key_bias": False, "value_bias": True, "proj_bias": True, "mlp_bias": True}
"""Key of ``config.json`` -> required value, which is transformers' default."""
_PREPROCESSOR = {
    "image_processor_type": "DINOv3ViTImageProcessorFast",
    "do_resize": True,
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": False,
}
"""``preprocessor_config.json`` of published models, without size and normalization."""


def dinov3_tune_to_hf(weights: Mapping[str, Tensor], num_channels: int = 3) -> dict[str, Tensor]:
    """Converts full (unsharded) weights without heads to DINOv3ViTModel's names and shapes.

    Raises ValueError if a name is not one of a backbone's.
    """
    is_gated = any(name.endswith(".w3.weight") for name in weights)
    names = _HF_NAMES | _HF_NAMES_OF_MLP[is_gated]
    # Tokens are [1, n, d] there, and the embedding of patches is a convolution.
    converted = {}
    for name, weight in weights.items():
        if name in (_CLS, _MASK):
            weight = weight[None, None]
        elif name == _REGISTERS:
            weight = weight[None]
        elif name == _PATCHES:
            side = math.isqrt(weight.size(1) // num_channels)
            weight = weight.unflatten(1, (num_channels, side, side))
        converted[_renamed(name, names)] = weight
    # Without registers transformers has the parameter all the same, with no rows.
    if _HF_REGISTERS not in converted and _CLS in weights:
        cls_token = weights[_CLS]
        converted[_HF_REGISTERS] = cls_token.new_zeros(1, 0, len(cls_token))
    return converted


def dinov3_hf_to_tune(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts the weights of a DINOv3ViTModel to the names and shapes of ``dinov3_vit``.

    Accepts the names of any version of transformers. Raises ValueError for all other names.
    """
    is_gated = any(name.endswith(".mlp.gate_proj.weight") for name in weights)
    names = {theirs: ours for ours, theirs in (_HF_NAMES | _HF_NAMES_OF_MLP[is_gated]).items()}
    converted = {}
    for name, weight in weights.items():
        our_name = _renamed(name.removeprefix("model."), names)
        if our_name in (_CLS, _MASK):
            weight = weight.flatten()
        elif our_name == _REGISTERS:
            weight = weight[0]
        elif our_name == _PATCHES:
            weight = weight.flatten(1)
        converted[our_name] = weight
    if _REGISTERS in converted and len(converted[_REGISTERS]) == 0:
        del converted[_REGISTERS]
    return converted


def _renamed(name: str, names: Mapping[str, str]) -> str:
    layer = re.match(r"layers?\.(\d+)\.", name)
    number = layer[1] if layer else ""
    generic = name.replace(f".{number}.", ".{}.", 1) if layer else name
    module, _, kind = generic.rpartition(".")
    if generic in names:
        return names[generic].format(number)
    if module in names and kind in ("weight", "bias"):
        return f"{names[module].format(number)}.{kind}"
    raise ValueError(f"{name}: it is no weight of a DINOv3 vision transformer")


def dinov3_hf_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of ``config.json``, without image size and precision.

    ``arguments`` are all those of ``dinov3_vit``, which a model has as attribute ``arguments``.
    """
    return {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        **{key: arguments[argument] for key, (argument, _) in _ARGUMENTS.items()},
        **_FIXED,
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

    Has the interface of torchtune's checkpointers. Set ``model: ${model}`` to use the config's model.

    Args:
        checkpoint_dir: folder to load, such as a download of facebook/dinov3-vits16-pretrain-lvd1689m; None loads no
            weights, and the recipe initializes them.
        output_dir: folder for exported models.
        model: component of the model, ``recipe_utils.dinov3.dinov3_vit``
            or one of its sizes.
        checkpoint_files: files in ``checkpoint_dir``; None finds them.
        image_size: size to which users' images are resized [pixels]; None is that of
            ``checkpoint_dir``, otherwise 224.
        image_mean: mean of each channel in [0, 1], which the images' transform subtracts; None is that of
            ``checkpoint_dir``, otherwise ImageNet's for three channels and no normalization for others.
        image_std: standard deviation of each channel; None as for ``image_mean``.

    Raises ValueError if the folder is invalid or of another model, or the model is not a ``dinov3_vit``.
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
    ) -> None:
        if (image_mean is None) != (image_std is None):
            raise ValueError(f"checkpointer.image_mean={image_mean}: image_std={image_std}; set both, or neither")
        with torch.device("meta"):
            made = instantiate(OmegaConf.create(dict(model)))
        arguments = getattr(made, "arguments", {})
        if "layer_scale_init" not in arguments:
            raise ValueError(
                f"checkpointer.model={model.get('_component_')}: it makes a {type(made).__name__}; set it to "
                "${model}, with a model of recipe_utils.dinov3.backbone"
            )
        num_channels = arguments["num_channels"]
        self._num_channels: int = num_channels
        self._expected = made.state_dict()
        self._output_dir = Path(output_dir)
        self._checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._files: list[Path] = []
        published: dict[str, Any] = {}
        preprocessor: dict[str, Any] = {}
        if self._checkpoint_dir is not None:
            published = _read(self._checkpoint_dir / "config.json")
            _check_config(published, arguments, self._checkpoint_dir)
            self._files = _files_of(self._checkpoint_dir, checkpoint_files)
            if (path := self._checkpoint_dir / "preprocessor_config.json").is_file():
                preprocessor = _read(path)
        # What a user's transform must do is exported, too: as the folder says, or as the arguments do.
        size = image_size or published.get("image_size", 224)
        self._config = {**published, **dinov3_hf_config(arguments), "image_size": size}
        if not preprocessor:
            preprocessor, image_size = dict(_PREPROCESSOR), size
            if num_channels == 3 and image_mean is None:
                image_mean, image_std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
        if image_size is not None:
            preprocessor["size"] = {"height": image_size, "width": image_size}
        if image_mean is not None and image_std is not None:
            given = {"image_mean": list(image_mean), "image_std": list(image_std)}
            preprocessor |= {"do_normalize": True, **given}
        self._preprocessor = preprocessor

    def load_checkpoint(self) -> dict[str, Any]:
        """Returns ``{"model": weights}``: full, on the CPU, in the files' precision, with heads if there are any.

        Without a ``checkpoint_dir`` the weights are empty. Raises ValueError if a file cannot be
        read, or its weights are of another model.
        """
        if self._checkpoint_dir is None:
            return {MODEL_KEY: {}}
        published: dict[str, Tensor] = {}
        for path in self._files:
            published |= _read(path)
        backbone = dinov3_hf_to_tune(published)
        self._check(backbone)
        heads = self._checkpoint_dir / HEADS
        return {MODEL_KEY: backbone | (_read(heads) if heads.is_file() else {})}

    def save_checkpoint(self, state_dict: Mapping[str, Any], epoch: int) -> None:
        """Writes full weights ``{"model": weights}`` to the folder ``epoch_N`` of ``output_dir``.

        Names of heads start with ``output.``. Raises ValueError if the weights are of another model.
        """
        weights: Mapping[str, Tensor] = state_dict[MODEL_KEY]
        heads = {name: weight for name, weight in weights.items() if name.startswith("output.")}
        backbone = {name: weight for name, weight in weights.items() if name not in heads}
        self._check(backbone)
        folder = self._output_dir / f"epoch_{epoch}"
        folder.mkdir(parents=True, exist_ok=True)
        described = {key: value for key, value in self._config.items() if key != "torch_dtype"}
        described["dtype"] = str(backbone["norm.weight"].dtype).removeprefix("torch.")
        write_tensors(folder / "model.safetensors", dinov3_tune_to_hf(backbone, self._num_channels))
        if heads:
            write_tensors(folder / HEADS, heads)
        (folder / "config.json").write_text(json.dumps(described, indent=2))
        (folder / "preprocessor_config.json").write_text(json.dumps(self._preprocessor, indent=2))

    def _check(self, backbone: Mapping[str, Tensor]) -> None:
        problem = describe_mismatch(backbone, self._expected, compares_dtypes=False)
        if problem:
            raise ValueError(
                f"checkpointer.checkpoint_dir: its weights do not fit the model: {problem}; model and "
                "checkpointer must be of one kind and size"
            )


def check_normalization(checkpointer: Any, transform: Any) -> None:
    """Raises ValueError if exports of a :class:`DINOv3Checkpointer` describe another mean or std than the transform's."""
    described = getattr(checkpointer, "_preprocessor", {})
    for name in ("mean", "std"):
        exported, trained = described.get(f"image_{name}"), list(getattr(transform, name, ()))
        if described and trained and exported != trained:
            raise ValueError(
                f"checkpointer.image_{name}={exported}: exports would contradict transform.{name}={trained}; set "
                f"it to ${{transform.{name}}}, or transform.{name} to that of the checkpoint"
            )


def _check_config(published: Mapping[str, Any], arguments: Mapping[str, Any], folder: Path) -> None:
    if published.get("model_type") != "dinov3_vit":
        raise ValueError(
            f"checkpointer.checkpoint_dir={folder}: its model_type is {published.get('model_type')}, not dinov3_vit; "
            "set it to a folder of transformers' DINOv3ViTModel"
        )
    for key, (argument, default) in _ARGUMENTS.items():
        theirs = published.get(key, default)
        if theirs != arguments[argument]:
            raise ValueError(
                f"model.{argument}={arguments[argument]}: {folder / 'config.json'} has {key} {theirs}; set "
                f"model.{argument}={theirs}"
            )
    # Options of transformers that dinov3_vit does not have.
    fixed = {**_FIXED, "hidden_act": _activation(arguments["use_gated_mlp"])}
    defaults = {**_FIXED, "hidden_act": "gelu"}
    for key, ours in fixed.items():
        theirs = published.get(key, defaults[key])
        if theirs != ours:
            raise ValueError(
                f"checkpointer.checkpoint_dir={folder}: its {key} is {theirs}, the model here has "
                f"{ours} only; set checkpoint_dir to another model"
            )


def _files_of(folder: Path, names: Sequence[str] | None) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if names is None and index.is_file():
        names = sorted(set(_read(index)["weight_map"].values()))
    paths = [folder / name for name in names or ["model.safetensors"]]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"checkpointer.checkpoint_dir={folder}: it has no {missing[0]}")
    return paths


def _read(path: Path) -> dict[str, Any]:
    """Reads a file of tensors, or of JSON."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return dict(json.loads(path.read_text()))
    except Exception as error:  # safetensors raises its own classes
        raise ValueError(
            f"checkpointer.checkpoint_dir={path.parent}: its {path.name} cannot be read ({error})"
        ) from error
