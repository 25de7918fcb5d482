"""Checkpoints that are folders in the format of transformers."""

import json
import re
import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchtune import training
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import (
    disable_progress_bar,
    get_verbosity,
    set_verbosity,
    set_verbosity_error,
)

from recipe_utils.checkpoint.peft import read_peft_of_transformers, write_peft_of_transformers

_PREFIX = "model."
"""Prefix of parameter names in :class:`recipe_utils.model.transformers.decoder.Decoder`."""
disable_progress_bar()
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Suffixes of weight files."""


class FolderCheckpointer:
    """Reads a folder of transformers, and writes exports in the same format.

    An export has the folder's tokenizer and generation files; ``AutoModelForCausalLM`` loads it.

    Args:
        checkpoint_dir: local folder with ``config.json`` and ``*.safetensors``.
        output_dir: where exports go.
        seed: seed of fresh weights, for a folder without any.
        adapter_checkpoint: adapters to start from: an ``adapter_model.safetensors`` of PEFT, absolute or
            below ``output_dir``.
        recipe_checkpoint: not supported; training resumes from this project's checkpoints.

    Raises:
        ValueError: there are no weights and no ``seed``, weights and a ``seed``, or an export would
            replace the folder.
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
        self._adapters = Path(output_dir, adapter_checkpoint) if adapter_checkpoint else None
        key = f"checkpointer.checkpoint_dir={checkpoint_dir}"
        if self._checkpoint_dir.exists() and not self._checkpoint_dir.is_dir():
            raise ValueError(f"{key}: it is no folder; set it to a folder of transformers")
        found = sorted(
            path.name for path in self._checkpoint_dir.glob("*") if path.name.endswith(WEIGHTS)
        )
        if (self._checkpoint_dir / "adapter_config.json").exists():
            raise ValueError(
                f"{key}: transformers would apply its adapter_config.json to the weights. Remove the adapter's "
                "files if they are merged; otherwise set it to the base model's folder and "
                "checkpointer.adapter_checkpoint to the adapters"
            )
        if seed is None and not any(name.endswith(".safetensors") for name in found):
            remedy = "set another folder, or checkpointer.seed for fresh weights"
            if found:
                remedy = (
                    f"convert {found[0]}: from_pretrained(...).save_pretrained(...) writes them"
                )
            raise ValueError(f"{key}: it has no *.safetensors; {remedy}")
        if seed is not None and found:
            raise ValueError(
                f"checkpointer.seed={seed}: {checkpoint_dir} has weights ({found[0]}); remove this key"
            )
        is_export = re.fullmatch(r"epoch_\d+|export_step_\d+|best", self._checkpoint_dir.name)
        if is_export and self._checkpoint_dir.resolve().parent == self._output_dir.resolve():
            raise ValueError(f"{key}: an export would replace it; set another output_dir")

    def load_checkpoint(self) -> dict[str, Any]:
        """Returns full weights and given adapters on the CPU, by the names of ``Decoder``.

        Files with the model's own names are mapped into memory, so a rank reads only its shards.
        Others, such as experts in separate tensors, are converted by transformers, whole on every
        rank. Raises ValueError if weights are missing, unexpected or of another shape, or if
        adapters cannot be read.
        """
        weights = self._mapped_weights() or self._converted_weights()
        loaded: dict[str, Any] = {training.MODEL_KEY: _with_prefix(weights)}
        if self._adapters is not None:
            adapters, described = read_peft_of_transformers(self._adapters)
            loaded |= {
                training.ADAPTER_KEY: _with_prefix(adapters),
                training.ADAPTER_CONFIG: described,
            }
        return loaded

    def _mapped_weights(self) -> dict[str, Tensor] | None:
        """Returns the weights of the files; None if the model has others."""
        found: dict[str, Tensor] = {}
        for path in self._files():
            try:
                found |= load_file(path)
            except Exception as error:  # safetensors has a class of its own
                if path.read_bytes()[:20] == b"version https://git-":
                    text = f"it is a pointer of Git LFS; run `git lfs pull` in {path.parent}"
                    raise ValueError(f"{path}: {text}") from None
                raise ValueError(f"{path}: it cannot be read ({error})") from error
        with torch.device("meta"):
            names = names_of_weights(_new_model(self._checkpoint_dir))
        is_whole = names.keys() <= found.keys() <= {*names, *chain(*names.values())}
        if not is_whole or not all(found[name].is_floating_point() for name in names):
            return None
        for name, others in names.items():
            for other in others:
                if other in found and not torch.equal(found[other], found[name]):
                    raise ValueError(
                        f"{other} and {name} differ, and config.json ties them; set tie_word_embeddings to false there"
                    )
        return {name: found[name] for name in names}

    def _files(self) -> list[Path]:
        """Returns the files that ``from_pretrained`` reads: those of the index, or the one without."""
        index = self._checkpoint_dir / "model.safetensors.index.json"
        names = {"model.safetensors"}
        if not (self._checkpoint_dir / "model.safetensors").is_file() and index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
        return [path for name in sorted(names) if (path := self._checkpoint_dir / name).is_file()]

    def _converted_weights(self) -> dict[str, Tensor]:
        """Returns weights that transformers reads or, without files, initializes."""
        folder = self._checkpoint_dir
        if any(folder.glob("*.safetensors")):
            verbosity = get_verbosity()
            set_verbosity_error()  # hides a table with the advice to ignore missing keys
            try:
                model, info = AutoModelForCausalLM.from_pretrained(
                    folder, local_files_only=True, dtype="auto", output_loading_info=True
                )
            finally:
                set_verbosity(verbosity)
            if any(info.values()):
                what = "; ".join(
                    f"{key.replace('_', ' ')}: {', '.join(sorted(map(str, found))[:5])}"
                    for key, found in info.items()
                    if found
                )
                raise ValueError(f"{folder} does not fit its config.json: {what}")
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed)
                model = _new_model(folder)
        weights = model.state_dict()
        return {name: weights[name] for name in names_of_weights(model)}

    def save_checkpoint(
        self, state_dict: Mapping[str, Any], epoch: int, adapter_only: bool = False
    ) -> None:
        """Writes a model, its adapters or both to ``epoch_{epoch}`` in the output folder."""
        folder = self._output_dir / f"epoch_{epoch}"
        folder.mkdir(parents=True)
        for path in self._checkpoint_dir.iterdir():
            if path.is_file() and not path.name.endswith(WEIGHTS):
                shutil.copy(path, folder)
        if training.ADAPTER_KEY in state_dict:
            adapters = _without_prefix(state_dict[training.ADAPTER_KEY])
            described = state_dict[training.ADAPTER_CONFIG]
            write_peft_of_transformers(folder, self._checkpoint_dir, adapters, described)
        if adapter_only:
            return
        weights = _without_prefix(state_dict[training.MODEL_KEY])
        config = AutoConfig.from_pretrained(self._checkpoint_dir, local_files_only=True)
        if hasattr(config, "quantization_config"):  # of what was read, and dequantized
            del config.quantization_config
        (config.dtype,) = {
            tensor.dtype for tensor in weights.values() if tensor.is_floating_point()
        }
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder, state_dict=weights)


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


def _new_model(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return AutoModelForCausalLM.from_config(config)
