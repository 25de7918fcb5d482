"""Entry point that PyTorch calls at the end of ``import torch``; registers the recipes with ``tune``.

Installations, editable ones included, copy this file to site-packages as
``torchtune_update_step_registration``, because ``import torch`` fails if an entry point cannot be
imported or raises, and a checkout may have been moved. So the module does not import the project at
its top, and it raises no exception.
"""

import logging
import os
import sys
from pathlib import Path

OURS = "TORCHTUNE_UPDATE_STEP_RUN"
"""Environment variable of a ``tune run`` of this project's recipes; its ranks inherit it."""


def register() -> None:
    """Calls :func:`recipe_utils.tune.registry.register` during the import of torchtune.

    ``tune`` reports an error in one line and continues with torchtune's recipes. Other programs,
    which may only import torch, print nothing.
    """
    if OURS in os.environ:
        be_quiet_about_kernels()
    if "torchtune" not in sys.modules:
        return
    try:
        from recipe_utils.tune.registry import register as register_recipes

        register_recipes()
    except Exception as error:
        if Path(sys.argv[0]).name == "tune":
            sys.stderr.write(
                f"torchtune-update-step: `tune` cannot know its recipes ({type(error).__name__}: {error}). Where its "
                "checkout was moved, run `pip install -e .` in it; to be rid of it, `pip uninstall torchtune-update-step`\n"
            )


def be_quiet_about_kernels() -> None:
    """Filters torchao's warning at import about kernels for another torch; no recipe uses them."""
    logging.getLogger("torchao").addFilter(
        lambda record: "Skipping import of cpp extensions" not in record.getMessage()
    )
