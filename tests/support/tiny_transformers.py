"""Tiny models of transformers in folders, and gradients of one sample at a time."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from decoder_types import tiny_config_of
from recipe_runs import SFT, run_recipe_recording_gradients
from torch import nn
from torchtune.training import set_default_dtype
from transformers import AutoModelForCausalLM

from recipe_utils.checkpoint import transformers as checkpoint
from recipe_utils.model.transformers.probe import DoublePrecision


def save_tiny(folder, model_type, seed=0, **changes):
    """Saves a folder of transformers with weights of order 1; returns the keys of a config that trains it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config_of(model_type, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    return keys_of_folder(folder)


def keys_of_folder(folder):
    """Returns the keys of a config that train the model of a folder."""
    checkpointer = {
        "_component_": "recipe_utils.checkpoint.transformers.FolderCheckpointer",
        "checkpoint_dir": str(folder),
        "output_dir": str(folder),
    }
    model = {"_component_": "recipe_utils.model.transformers.causal_lm", "path": str(folder)}
    return {"model": model, "checkpointer": checkpointer}


class Plain(nn.Module):
    """The model of a folder as transformers computes it, buffers in float64, too."""

    def __init__(self, folder):
        super().__init__()
        options = {"dtype": torch.float64, "experts_implementation": "eager"}
        saved = AutoModelForCausalLM.from_pretrained(folder, **options)
        with set_default_dtype(torch.float64), DoublePrecision():
            self.model = AutoModelForCausalLM.from_config(saved.config)
        self.model.load_state_dict(saved.state_dict())

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


def gradients_in_float64(config, recipe=SFT):
    """Returns the gradients of each update step.

    Recomputed layers do not see the mode, so they compute in fp32 what models cast to it.
    """
    recomputes = config.get("enable_activation_checkpointing") or "ac_mode" in config
    with pytest.MonkeyPatch.context() as patches:
        for module, name in ((torch, "load"), (checkpoint, "load_file")):
            patches.setattr(module, name, partial(call_without_modes, getattr(module, name)))
        with nullcontext() if recomputes else DoublePrecision():
            return run_recipe_recording_gradients(config, recipe)


def call_without_modes(function, *args, **kwargs):
    with torch._C.DisableTorchFunction():
        return function(*args, **kwargs)
