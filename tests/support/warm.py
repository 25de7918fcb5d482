"""Imported by the fork server: what ranks would otherwise import one by one, each anew."""

import contextlib

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import recipe_runs

with contextlib.suppress(Exception):  # a recipe that does not load is for the tests to report
    recipe_runs.recipe_class()
