"""Imports for the fork server, which each rank would otherwise repeat."""

import contextlib
import gc
import inspect

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import recipe_runs

# Which file each module is of: the launcher asks for it, and looks through all of them the first time.
inspect.stack()
with contextlib.suppress(Exception):  # a recipe that does not load is for the tests to report
    recipe_runs.recipe_class()
    import tiny_transformers  # noqa: F401

# What is here stays; a rank's garbage collector would write to all of it, and so make the rank copy it.
gc.collect()
gc.freeze()
