"""Entry point that PyTorch calls at the end of ``import torch``; registers the recipes with ``tune``.

Installations, editable ones included, have this file in site-packages only, as
``torchtune_update_step_registration``: ``import torch`` fails if an entry point cannot be imported
or raises, and a checkout may have been moved. So the module does not import the project at its top,
and it raises no exception.
"""

import logging
import os
import sys
from pathlib import Path

_IS_OURS = "TORCHTUNE_UPDATE_STEP_RUN"
"""Environment variable of a ``tune run`` of this project's recipes; its ranks inherit it."""


def register() -> None:
    """Calls :func:`recipe_utils.tune.registry.register` during the import of torchtune.

    ``tune`` reports an error in one line and continues with torchtune's recipes. Other programs,
    which may only import torch, print nothing.
    """
    if "torchtune" in sys.modules:
        try:
            from recipe_utils.tune.registry import register as register_recipes

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
    if _IS_OURS in os.environ or is_listing:
        # torchao warns about kernels for another torch, which no recipe here uses.
        logging.getLogger("torchao").addFilter(
            lambda record: "Skipping import of cpp extensions" not in record.getMessage()
        )
