"""What the update-step recipes call.

One folder per floor: ``data`` makes update steps, ``model``, ``loss`` and ``optim`` are what a step goes
through, ``parallel`` is the ranks, ``checkpoint`` the disk, ``run`` the notebook of a training. Settings
stand beside the code that takes them (:mod:`recipe_utils.settings`).

This file imports nothing: PyTorch's start-up calls :mod:`recipe_utils.tune.registry` wherever torchtune
is imported.
"""

__version__ = "0.4.3"


def check_version(written_for: str, recipe: str) -> None:
    """Refuses to run a recipe that was written for another interface of this package.

    Args:
        written_for: ``major.minor``.
        recipe: its name, for the error.

    Raises:
        RuntimeError: this package is another one.
    """
    if __version__.rsplit(".", 1)[0] != written_for:
        raise RuntimeError(
            f"{recipe} was written for recipe_utils {written_for}, this is {__version__}; CHANGELOG.md "
            f"says what changed, and `tune cp {recipe} NEW.py` gives a copy of today's"
        )
