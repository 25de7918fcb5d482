"""Entry point that PyTorch calls at the end of ``import torch``; registers the recipes with ``tune``.

Installations, editable ones included, have this file in site-packages only, as ``torchtune_update_step_registration``:
``import torch`` fails if an entry point cannot be imported or raises, and a checkout may have been moved. So the module
does not import the project at its top, and it raises no exception.
"""

import logging
import os
import sys
import warnings
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import NoReturn

_IS_OURS = "TORCHTUNE_UPDATE_STEP_RUN"
"""Environment variable of a ``tune run`` of this project's recipes; its ranks inherit it."""
_NOISE = ("Failed to load ", "Skipping import of cpp extensions", " is an Enum subclass and is now")
"""Parts of messages at the import of torchao 0.17, about kernels that no recipe here uses."""


class _NamesForTorchtune(MetaPathFinder):
    """Finds no module; adds the names that torchtune 0.6.1 imports from torchao, and 0.16 removed."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "torchtune.training.quantization":
            import torchao.quantization as quantization

            for name in ("int4_weight_only", "int8_dynamic_activation_int4_weight"):
                if not hasattr(quantization, name):
                    setattr(quantization, name, partial(_refuse, name))


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    raise NotImplementedError(
        f"torchao.quantization.{name}: torchao 0.16 removed it, so torchtune's quantizers cannot convert a model; "
        "call torchao.quantization.quantize_ with Int4WeightOnlyConfig or another config of torchao"
    )


def register() -> None:
    """Calls :func:`recipe_utils.cli.registry.register` during the import of torchtune.

    ``tune`` reports an error in one line and continues with torchtune's recipes. Other programs,
    which may only import torch, print nothing.
    """
    sys.meta_path.insert(0, _NamesForTorchtune())
    is_module_of_ours = "recipe_utils" in sys.modules  # python -m
    if "torchtune" in sys.modules:
        try:
            from recipe_utils.cli.registry import register as register_recipes

            if register_recipes():
                os.environ[_IS_OURS] = "1"
        except Exception as error:
            if Path(sys.argv[0]).name == "tune":
                sys.stderr.write(
                    "torchtune-update-step: `tune` does not list its recipes "
                    f"({type(error).__name__}: {error}). If the checkout was moved, run "
                    "`pip install -e .` in it; to remove it, `pip uninstall torchtune-update-step`\n"
                )
    is_listing = Path(sys.argv[0]).name == "tune" and sys.argv[1:2] != ["run"]
    if _IS_OURS in os.environ or is_listing or is_module_of_ours:
        warnings.filterwarnings("ignore", "Deprecation: TorchAODType")  # of QAT
        for logger in ("torchao", "torch.utils._pytree"):
            logging.getLogger(logger).addFilter(lambda record: not any(part in record.getMessage() for part in _NOISE))
