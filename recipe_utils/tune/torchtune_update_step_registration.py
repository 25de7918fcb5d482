"""What PyTorch calls at the end of every ``import torch``, so that ``tune`` knows this project's recipes.

An installation has this file in site-packages as ``torchtune_update_step_registration``, an editable one,
too: PyTorch's import fails with an entry point that cannot be imported or that raises, and a checkout may
have been moved since. So it imports nothing of the project at its top, and no exception leaves it.
"""

import logging
import os
import sys
from pathlib import Path

OURS = "TORCHTUNE_UPDATE_STEP_RUN"
"""In the environment of a ``tune run`` of this project's recipes, and so of its ranks."""


def register() -> None:
    """Calls :func:`recipe_utils.tune.registry.register` where torchtune is being imported.

    What goes wrong is said in one line by ``tune``, which goes on with torchtune's own recipes. Elsewhere
    nothing is said: programs of this environment may want no more than ``import torch``.
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
    """Leaves out torchao's line at its import: that its kernels, which no recipe here uses, are for another torch."""
    logging.getLogger("torchao").addFilter(
        lambda record: "Skipping import of cpp extensions" not in record.getMessage()
    )
