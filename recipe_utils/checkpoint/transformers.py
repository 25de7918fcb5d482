"""Checkpoints that are folders in the format of transformers."""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from recipe_utils.checkpoint.export import WEIGHTS, copy_files
from recipe_utils.checkpoint.peft import read_peft_of_transformers, write_peft_of_transformers
from recipe_utils.files import TensorFile, write_atomically, write_tensors
from recipe_utils.torchtune_names import ADAPTER_CONFIG, ADAPTER_KEY, MODEL_KEY, log_once

_PREFIX = "model."
"""Prefix of parameter names in :class:`recipe_utils.models.transformers.decoder.Decoder`."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DEQUANTIZED = ("fp8", "mxfp4")
"""Quantizations whose weights are dequantized when they are read."""
_LAYER = re.compile(r"\blayers\.(\d+)\.(\w+)")
_SCALES = re.compile("_(blocks|scales?|scale_inv)$")
disable_progress_bar()


class FolderCheckpointer:
    """Reads a folder of transformers, and writes exports in the same format.

    An export is a copy of the folder with other weights: under the same names, in the same files.
    What training did not change keeps its bytes: other files, ``config.json`` but for the dtype,
    and tensors, also those that transformers does not load.

    Args:
        checkpoint_dir: local folder with ``config.json`` and ``*.safetensors``.
        output_dir: folder of exports.
        seed: seed of fresh weights, for a folder without any.
        adapter_checkpoint: adapters to start from: an ``adapter_model.safetensors`` of PEFT, absolute or
            below ``output_dir``.
        recipe_checkpoint: not supported; training resumes from this project's checkpoints.

    Raises:
        ValueError: there are no weights and no ``seed``, weights and a ``seed``, an export would
            replace the folder, or :func:`check_folder` refuses it.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        output_dir: str,
        seed: int | None = None,
        adapter_checkpoint: str | None = None,
        recipe_checkpoint: str | None = None,
    ) -> None:
        self._checkpoint_dir = Path(checkpoint_dir)
        self._output_dir = Path(output_dir)
        self._seed = seed
        self._conversions: list[Any] | None = None
        self._adapters = Path(output_dir, adapter_checkpoint) if adapter_checkpoint else None
        # A wrong folder is refused before the model is built, which takes longer.
        key = f"checkpointer.checkpoint_dir={checkpoint_dir}"
        if self._checkpoint_dir.exists() and not self._checkpoint_dir.is_dir():
            raise ValueError(f"{key}: it is no folder; set it to a folder of transformers")
        check_folder(self._checkpoint_dir, key)
        weights = sorted(path.name for path in self._checkpoint_dir.glob("*") if path.name.endswith(WEIGHTS))
        if (self._checkpoint_dir / "adapter_config.json").exists():
            raise ValueError(
                f"{key}: transformers would apply its adapter_config.json to the weights. Remove the adapter's "
                "files if they are merged; otherwise set it to the base model's folder and "
                "checkpointer.adapter_checkpoint to the adapters"
            )
        if seed is None and not any(name.endswith(".safetensors") for name in weights):
            remedy = "set another folder, or checkpointer.seed for fresh weights"
            if weights:
                remedy = f"convert {weights[0]}: from_pretrained(...).save_pretrained(...) writes them"
            raise ValueError(f"{key}: it has no *.safetensors; {remedy}")
        if seed is not None and weights:
            raise ValueError(f"checkpointer.seed={seed}: {checkpoint_dir} has weights ({weights[0]}); remove this key")
        # An export replaces a folder of its name, which must not be the one that training starts from.
        is_export = re.fullmatch(r"epoch_\d+|export_step_\d+|best", self._checkpoint_dir.name)
        if is_export and self._checkpoint_dir.resolve().parent == self._output_dir.resolve():
            raise ValueError(f"{key}: an export would replace it; set another output_dir")

    def load_checkpoint(self, images: bool = False) -> dict[str, Any]:
        """Returns full weights and given adapters on the CPU, by the names of ``Decoder``; of the whole model for ``images``.

        Files with the model's own names are mapped into memory, so a rank reads only its shards. Others, such as
        experts in separate tensors, are converted by transformers, whole on every rank. Raises ValueError if weights
        are missing, unexpected or of another shape, or if adapters cannot be read.
        """
        loaded: dict[str, Any] = {
            MODEL_KEY: _with_prefix(self._mapped_weights(images) or self._converted_weights(images))
        }
        if self._adapters is not None:
            adapters, described = read_peft_of_transformers(self._adapters)
            loaded |= {ADAPTER_KEY: _with_prefix(adapters), ADAPTER_CONFIG: described}
        return loaded

    def _mapped_weights(self, images: bool) -> dict[str, Tensor] | None:
        """Returns the weights of the files; None if the model has others."""
        weights: dict[str, Tensor] = {}
        for path in self._files():
            try:
                weights |= load_file(path)
            except Exception as error:  # safetensors has a class of its own
                if path.read_bytes()[:20] == b"version https://git-":
                    raise ValueError(
                        f"{path}: it is a pointer of Git LFS; run `git lfs pull` in {path.parent}"
                    ) from None
                raise ValueError(f"{path}: it cannot be read ({error})") from error
        with torch.device("meta"):
            names = names_of_weights(_new_model(self._checkpoint_dir, images))
        is_whole = names.keys() <= weights.keys() <= {*names, *chain(*names.values())}
        if not is_whole or not all(weights[name].is_floating_point() for name in names):
            return None
        for name, others in names.items():
            for other in others:
                if other in weights and not torch.equal(weights[other], weights[name]):
                    raise ValueError(
                        f"{other} and {name} differ, and config.json ties them; set tie_word_embeddings to false there"
                    )
        return {name: weights[name] for name in names}

    def _files(self) -> list[Path]:
        """Returns the files that ``from_pretrained`` reads: those of the index, or the one without."""
        index = self._checkpoint_dir / _INDEX
        names = {_SINGLE}
        if not (self._checkpoint_dir / _SINGLE).is_file() and index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
        return [path for name in sorted(names) if (path := self._checkpoint_dir / name).is_file()]

    def _converted_weights(self, images: bool) -> dict[str, Tensor]:
        """Returns weights that transformers reads or, without files, initializes."""
        folder = self._checkpoint_dir
        if any(folder.glob("*.safetensors")):
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            for part in (config, config.get_text_config()):  # also on machines that compute with quantized weights
                if quantization := getattr(part, "quantization_config", None):
                    part.quantization_config = {**quantization, "dequantize": True}
            options = {"config": config, "local_files_only": True, "dtype": "auto"}
            verbosity = get_verbosity()
            set_verbosity_error()  # hides a table with the advice to ignore missing keys
            try:
                model, info = auto_class_of(config, images).from_pretrained(folder, output_loading_info=True, **options)
            finally:
                set_verbosity(verbosity)
            info["unexpected_keys"] -= self._carried(model, info["unexpected_keys"])
            if any(info.values()):
                differences = {
                    key.replace("_", " "): sorted(map(str, names))[:5] for key, names in info.items() if names
                }
                text = "; ".join(f"{key}: {', '.join(names)}" for key, names in differences.items())
                raise ValueError(f"{folder} does not fit its config.json: {text}")
            self._conversions = getattr(model, "_weight_conversions", None)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed)
                model = _new_model(folder, images)
        weights = model.state_dict()
        return {name: weights[name] for name in names_of_weights(model)}

    def _carried(self, model: Any, names: set[str]) -> set[str]:
        """Returns those of the names of unexpected weights that exports keep, as they keep what transformers ignores.

        They are beside the language model in the files of a larger model, or of layers behind the last one that
        predict further tokens. Those have modules of their own; others show that ``num_hidden_layers`` is wrong.
        """
        in_files = {name for path in self._files() for name in TensorFile(path).names()}
        prefix = f"{model.base_model_prefix}."
        if any(prefix + name in in_files for name in model.state_dict()):
            return {name for name in in_files & names if not name.startswith(prefix)}
        if not any("layers" in pattern for pattern in model._keys_to_ignore_on_load_unexpected or ()):
            return set()
        known = {part for name in model.state_dict() for match in _LAYER.findall(name) for part in match}
        found = {name: match for name in names for match in _LAYER.findall(name)}
        further = {index for index, module in found.values() if module not in known} - known
        return {name for name, (index, _) in found.items() if index in further}

    def save_checkpoint(self, state_dict: Mapping[str, Any], epoch: int, adapter_only: bool = False) -> None:
        """Writes a model, its adapters or both to ``epoch_{epoch}`` in the output folder."""
        folder = self._output_dir / f"epoch_{epoch}"
        folder.mkdir(parents=True)
        copy_files(self._checkpoint_dir, folder, skipped="original")
        if ADAPTER_KEY in state_dict:
            adapters = _without_prefix(state_dict[ADAPTER_KEY])
            write_peft_of_transformers(folder, self._checkpoint_dir, adapters, state_dict[ADAPTER_CONFIG])
        if adapter_only:
            return
        files = [TensorFile(path) for path in self._files()]
        base = {name: file for file in files for name in file.names()}
        weights = self._named_as(base, _without_prefix(state_dict[MODEL_KEY]))
        dtype = None
        for name, weight in weights.items():
            # What training did not change keeps its precision, such as an e_score_correction_bias in fp32.
            if name in base and _is_rounded(exact := base[name].read(name), weight):
                weights[name] = exact
            elif weight.is_floating_point():
                dtype = weight.dtype
        is_quantized = _edit_config(folder / "config.json", dtype)
        others = base.keys() - weights.keys()  # transformers does not load them
        if weights.keys() <= base.keys() and not is_quantized:
            weights |= {name: base[name].read(name) for name in others}
        elif lost := [n for n in sorted(others) if _SCALES.sub("", n) not in weights]:
            text = f"does not load {len(lost)} of its {len(base)} tensors, and exports lack them: {', '.join(lost[:5])}"
            log_once(f"{self._checkpoint_dir}: transformers {text}", logging.WARNING)
        contents: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, weight in weights.items():
            origin = base.get(name) or base.get(f"{name}_blocks") or next(iter(files), None)
            contents[origin.path.name if origin else _SINGLE][name] = weight
        for file, tensors in contents.items():
            write_tensors(folder / file, tensors)
        if contents.keys() != {_SINGLE}:
            index = json.loads((self._checkpoint_dir / _INDEX).read_text())
            index.setdefault("metadata", {})["total_size"] = sum(w.nbytes for w in weights.values())
            index["weight_map"] = {name: file for file in contents for name in contents[file]}
            write_atomically(folder / _INDEX, json.dumps(index, indent=2))

    def _named_as(self, base: Collection[str], weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns weights by their names in the files, ``base``, with ties; without files by published names."""
        with torch.device("meta"):
            model = _new_model(self._checkpoint_dir)
            if not weights.keys() <= model.state_dict().keys():
                model = _new_model(self._checkpoint_dir, images=True)
        is_converted = not weights.keys() <= set(base)
        for first, others in names_of_weights(model).items() if base else ():
            weights |= dict.fromkeys(others, weights[first])
        if is_converted:
            if self._conversions is not None:
                model._weight_conversions = self._conversions
            weights = revert_weight_conversion(model, weights)
        named: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
        for name, weight in weights.items():
            # Without an output layer, files have no prefix; in those of a larger model, all names have one.
            spellings = name, name.removeprefix(prefix := f"{model.base_model_prefix}."), prefix + name
            named[id(weight)][next((n for n in spellings if n in base), name)] = weight
        kept: dict[str, Tensor] = {}
        for tied in named.values():  # all names in the files, or one
            kept |= {n: w for n, w in tied.items() if n in base} or dict([tied.popitem()])
        return kept


def check_folder(folder: Path, key: str) -> None:
    """Raises ValueError, beginning with ``key``, for code in a folder, and weights that cannot be dequantized."""
    try:
        described = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return  # reported by those who need it
    for part in (described, described.get("text_config") or {}):
        quantization = part.get("quantization_config")
        if quantization and (method := quantization.get("quant_method", "bitsandbytes")) not in _DEQUANTIZED:
            raise ValueError(
                f"{key}: its weights are quantized ({method}), and only {' and '.join(_DEQUANTIZED)} are dequantized; "
                "set model.path and checkpointer.checkpoint_dir to a folder of the weights before quantization"
            )
    model_type = described.get("model_type")
    if "AutoConfig" in (described.get("auto_map") or {}) and model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{key}: model_type={model_type} needs code in the folder (auto_map), which is never executed; set it to "
            "a folder with a model_type of transformers"
        )


def _edit_config(path: Path, dtype: torch.dtype | None) -> bool:
    """Sets the dtype of ``config.json`` under its own keys, and removes a quantization; returns True if there was one."""
    text = path.read_text()
    described = json.loads(text)
    is_quantized = False
    for part in (described, described.get("text_config") or {}):
        is_quantized |= bool(part.get("quantization_config") and part.pop("quantization_config"))
        for key in {"dtype", "torch_dtype"} & part.keys() if dtype else ():
            part[key] = str(dtype).removeprefix("torch.")
    if described != json.loads(text):
        indent = re.match(r"\{\s*\n([ \t]+)", text)
        edited = json.dumps(described, indent=indent and indent[1], ensure_ascii=text.isascii())
        path.write_text(edited + text[len(text.rstrip()) :])
    return is_quantized


def _is_rounded(exact: Tensor, weight: Tensor) -> bool:
    """Returns True if ``weight`` is ``exact``, maybe rounded by the precision of a training or an export."""
    precisions = weight.dtype, torch.bfloat16, torch.float16
    exact, weight = exact.flatten(), weight.flatten()
    return exact.itemsize > 1 and all(
        any(torch.equal(exact[:n].to(precision).to(weight.dtype), weight[:n]) for precision in precisions)
        for n in (1000, None)  # the first ones differ almost always
    )


def _with_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_PREFIX + name: tensor for name, tensor in tensors.items()}


def _without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def names_of_weights(model: nn.Module) -> dict[str, list[str]]:
    """Returns the name of each weight in the state dict, and the other names of a tied one."""
    names: dict[str, list[str]] = {}
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (known := first.setdefault(id(tensor), name)) == name:
            names[name] = []
        else:
            names[known].append(name)
    return names


def auto_class_of(config: PreTrainedConfig, images: bool = False) -> Any:
    """Returns the auto class that builds the model of a folder: that of causal language models where it has one.

    Qwen3.5 and others have a model of text alone, with other names of weights than that of ``images`` and text. mllama's
    causal language model has a config that no auto class takes, so it is a model of images and text.
    """
    known, text = MODEL_FOR_CAUSAL_LM_MAPPING, type(config.get_text_config())
    is_known = type(config) in known and (known[type(config)].config_class is not text or text in known)
    return AutoModelForCausalLM if is_known and not images else AutoModelForImageTextToText


def _new_model(folder: Path, images: bool = False) -> Any:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return auto_class_of(config, images).from_config(config)
