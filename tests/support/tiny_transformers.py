"""Tiny models of transformers in folders, and gradients of one sample at a time."""

import json
from contextlib import contextmanager
from functools import partial, wraps

import pytest
import tiny
import torch
import torch.nn.functional as F
from decoder_types import tiny_config_of
from recipe_runs import SFT, run_recipe_recording_gradients
from safetensors.torch import load_file, save_file
from torch import nn
from torchtune.training import set_default_dtype
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from recipe_utils.checkpoint import transformers as checkpoint
from recipe_utils.files import TensorFile
from recipe_utils.models.transformers.packing_check import DoublePrecision


def save_tiny(folder, model_type, seed=0, **changes):
    """Saves a folder of transformers with weights of order 1; returns the keys of a config that trains it."""
    return save_weights(folder, tiny_config_of(model_type, **changes), seed)


def save_weights(folder, config, seed=0):
    """Does the same of a config."""
    torch.manual_seed(seed)
    takes_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model = (AutoModelForImageTextToText if takes_images else AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    return keys_of_folder(folder)


FILES = {
    "generation_config.json": '{"eos_token_id": [2, 0],\n "do_sample": false, "temperature": 0.6, "top_k": "many"}',
    "additional_chat_templates/tool_use.jinja": "{{ messages }}", "onnx/config.json": "{}",
    "prophetnet.tokenizer": "b", "tokenizer.model.v3": "a", "LICENSE": "free", "README.md": "# read", "own_parser.py": "1",
}  # fmt: skip
"""Files of a folder beside its weights; transformers neither loads nor saves the first without complaint."""
OLD_WEIGHTS = (
    "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "model.gguf", "original/params.json", ".cache/state.json",
    "training_args.bin", "epoch_7/config.json", "pytorch_model.bin.index.json",
    "saved_model.pb", "model.engine", "model.ckpt.data-00000-of-00001", "model.ckpt.index", "checklist.chk",
)  # fmt: skip


def save_published(folder, model_type, extra=(), **changes):
    """Saves a folder as transformers 4 wrote it: in bf16, in two files, RoPE at the top of ``config.json``.

    Scores of experts are in fp32; ``extra`` names tensors that no model loads. :data:`FILES` and
    :data:`OLD_WEIGHTS` are beside it. Returns the keys of a config that trains it.
    """
    keys = save_tiny(folder, model_type)
    path, weights = folder / "config.json", load_file(folder / "model.safetensors")
    weights |= {name: torch.randn(3) for name in extra}
    for name, weight in weights.items():
        in_fp32 = name in extra or "e_score" in name
        weights[name] = torch.randn_like(weight) if in_fp32 else weight.bfloat16()
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {f"model-{i}.safetensors": names[i::2] for i in range(2)}
    for file, part in parts.items():
        save_file({n: weights[n] for n in part}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: file for file, part in parts.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    described = json.loads(path.read_text())
    old = {key: described.pop(key, None) for key in ("dtype", "rope_parameters")}
    described |= {"torch_dtype": "bfloat16"} | ({"rope_theta": 1e6} if old["rope_parameters"] else {})
    path.write_text(json.dumps(described | changes, indent=4) + "\n")
    for name in (*FILES, *OLD_WEIGHTS):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(FILES.get(name, "old"))
    return keys


def tensors_of(folder):
    """Returns the tensors of all files of a folder, by name."""
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def keys_of_folder(folder):
    """Returns the keys of a config that train the model of a folder."""
    checkpointer = {
        "_component_": "recipe_utils.checkpoint.FolderCheckpointer",
        "checkpoint_dir": str(folder),
        "output_dir": str(folder),
    }
    model = {"_component_": "recipe_utils.models.causal_lm", "path": str(folder)}
    return {"model": model, "checkpointer": checkpointer}


def load(folder, **options):
    """Returns the model of a folder, for text alone where transformers has one."""
    return checkpoint.auto_class_of(AutoConfig.from_pretrained(folder)).from_pretrained(folder, **options)


class Plain(nn.Module):
    """The model of a folder as transformers computes it, buffers in float64, too."""

    def __init__(self, folder):
        super().__init__()
        options = {"dtype": torch.float64, "experts_implementation": "eager"}
        saved = load(folder, **options)
        with set_default_dtype(torch.float64), DoublePrecision():
            self.model = checkpoint.auto_class_of(saved.config).from_config(saved.config)
        self.model.load_state_dict(saved.state_dict())

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


@contextmanager
def float64_throughout():
    """Computes in float64 what models cast to fp32: in norms, softmax and RoPE.

    Files are read as they are. Recomputed layers do not see a mode, so their functions are patched.
    """

    def casting(function, *args, **kwargs):
        args = (torch.float64 if value is torch.float32 else value for value in args)
        return function(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()})

    to, softmax = torch.Tensor.to, F.softmax
    with tiny.float64_throughout(), pytest.MonkeyPatch.context() as patches:
        for owner, name in ((torch, "load"), (checkpoint, "load_file"), (TensorFile, "read")):
            patches.setattr(owner, name, without_modes(getattr(owner, name)))
        patches.setattr(torch.Tensor, "to", lambda *args, **kwargs: casting(to, *args, **kwargs))
        patches.setattr(F, "softmax", partial(casting, softmax))
        with DoublePrecision():
            yield


def gradients_in_float64(config, recipe=SFT):
    """Returns the gradients of each update step."""
    with float64_throughout():
        return run_recipe_recording_gradients(config, recipe)


def without_modes(function):
    """Returns a function, or a method, that modes such as DoublePrecision do not change."""

    @wraps(function)
    def called(*args, **kwargs):
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return called
