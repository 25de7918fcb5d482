"""Weights of modules that a recipe adds to a model, for which a checkpointer's format has no names.

A reward model has a value head beside the decoder. In ``setup`` of its recipe:

    meta_model = build("model", build_on_meta, ...)
    meta_model.value_head = nn.Linear(32, 1, device="meta")
    self.checkpointer = with_own_modules(checkpointer, meta_model, ["value_head"], run.seed)

``value_head.weight`` [1, 32] then is drawn from the seed, or read from an exported folder that has it; FSDP2 shards
it, checkpoints contain it, and exports have it in ``own_modules/weights.safetensors`` beside the decoder's files.
"""

import copy
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from recipe_utils.files import write_tensors
from recipe_utils.torchtune_names import ADAPTER_KEY, MODEL_KEY

FOLDER = "own_modules"
"""Subfolder of an exported folder, so that nothing takes its file for one of the decoder."""
_FILE = "weights.safetensors"


def fresh_weights(name: str, module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Returns full initial weights of a module on the meta device by their names in the model, in fp32 on the CPU.

    Each is what PyTorch's ``reset_parameters`` draws, and depends on ``seed`` and ``name`` only, not on the layout.
    Raises ValueError for a module with parameters that has no ``reset_parameters``.
    """
    fresh = copy.deepcopy(module).to_empty(device="cpu").to(torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed ^ zlib.crc32(name.encode()))
        for part in fresh.modules():
            if (reset := getattr(part, "reset_parameters", None)) is not None:
                reset()
            elif any(True for _ in part.parameters(recurse=False)):
                raise ValueError(f"model: a {type(part).__name__} of {name} has no reset_parameters(); give it one")
    return {f"{name}.{key}": weight for key, weight in fresh.state_dict().items()}


def with_own_modules(checkpointer: Any, meta_model: nn.Module, names: Iterable[str], seed: int) -> Any:
    """Returns a copy of a checkpointer that also loads and saves the modules called ``names`` of ``meta_model``.

    They have the weights of ``own_modules`` in the checkpointer's folder, or else fresh ones of ``seed``.
    """
    initial: dict[str, Tensor] = {}
    for name in names:
        initial |= fresh_weights(name, meta_model.get_submodule(name), seed)

    # A subclass, because exports check for torchtune's classes; made here, because any of them may be configured.
    class WithOwnModules(type(checkpointer)):  # type: ignore[misc]
        def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            loaded: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
            path = Path(self._checkpoint_dir, FOLDER, _FILE)
            exported = load_file(path) if path.is_file() else {}
            return {**loaded, MODEL_KEY: {**loaded[MODEL_KEY], **initial, **exported}}

        def save_checkpoint(self, state_dict: dict[str, Any], epoch: int, **kwargs: Any) -> None:
            contents = {key: copy.copy(content) for key, content in state_dict.items()}
            weights: dict[str, Tensor] = {}
            for key in {MODEL_KEY, ADAPTER_KEY} & contents.keys():
                weights |= {name: contents[key].pop(name) for name in initial if name in contents[key]}
            super().save_checkpoint(contents, epoch=epoch, **kwargs)
            folder = Path(self._output_dir, f"epoch_{epoch}", FOLDER)
            folder.mkdir()
            write_tensors(folder / _FILE, weights)

    extended = copy.copy(checkpointer)
    extended.__class__ = WithOwnModules
    return extended
