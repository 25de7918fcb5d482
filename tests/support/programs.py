"""Starts recipes as users do: as separate programs, or in this process, which saves their imports."""

import contextlib
import inspect
import io
import logging
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from recipe_utils.cli.registry import recipe_path
from recipe_utils.torchtune_names import LOGGERS

TUNE = str(Path(sys.executable).with_name("tune"))
Popen = subprocess.Popen


def tune(*arguments, cwd=None):
    """Runs ``tune`` with these arguments; returns output and exit code."""
    return subprocess.run(
        [TUNE, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


def recipe_file(recipe):
    """Returns the path of a recipe of this project by its name, or of another's."""
    return recipe if recipe.endswith(".py") else str(recipe_path(recipe))


def tune_run_here(recipe, *arguments, cwd="."):
    """Runs ``tune run RECIPE --config ...`` in this process, without a launcher; returns exit code and output."""
    path = recipe_file(recipe)
    known = set(sys.modules)
    screen = io.StringIO()
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir(cwd)
        patches.setattr(sys, "argv", [path, "--config", *map(str, arguments)])
        patches.setattr(sys, "path", [*sys.path, os.getcwd()])
        for logger in LOGGERS:
            patches.setattr(logger, "handlers", [logging.StreamHandler(screen)])
            patches.setattr(logger, "filters", [])
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
            try:
                runpy.run_path(path, run_name="__main__")
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
                code = 1
    # They would take the recipe's file for that of `__main__`, and pydantic finds no docstrings there.
    inspect.modulesbyfile.clear()
    inspect._filesbymodname.clear()
    for name in set(sys.modules) - known:  # modules of the test's folder
        if cwd != "." and str(cwd) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
    return code, screen.getvalue()


def become_program(argv, output):
    """Makes a child of the fork server the leader of a process group with this command line and output."""
    os.setsid()
    with open(output, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    multiprocessing.set_start_method(None, force=True)  # undoes that of the child itself
    sys.argv = argv


def lines_on(screen):
    """Returns the lines on the screen that are not empty; each state of a progress bar is a line."""
    return [line for line in screen.replace("\r", "\n").splitlines() if line.strip()]


def children_of(pid):
    """Processes that another has started."""
    command = ["ps", "--ppid", str(pid), "-o", "pid="]
    return [int(child) for child in subprocess.run(command, capture_output=True, check=False).stdout.split()]
