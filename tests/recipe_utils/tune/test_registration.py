"""No `import torch` fails for this project, whatever has become of its checkout, and `tune` says what has."""

import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
AS_ANY_PROGRAM_THEN_AS_TUNE = """
import types
sys.modules["torchtune"] = types.ModuleType("torchtune")  # the real one takes seconds to import
sys.argv = ["/venv/bin/program"]
import torch
sys.stderr.write("then as tune: ")
sys.argv = ["/venv/bin/tune", "ls"]
torch._import_device_backends()
"""


@pytest.fixture
def installed(tmp_path):
    """What an editable install has in site-packages, but for the line that leads to the checkout."""
    folder = tmp_path / "installed"
    metadata = folder / "torchtune_update_step-0.0.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: torchtune-update-step\nVersion: 0.0.0\n")
    ((group, points),) = PROJECT["project"]["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source, name in wheel["force-include"].items():
        (folder / name).write_text((ROOT / source).read_text())
    return folder


def run(program, *folders):
    """Runs a program that finds modules in ``folders``, and torch; not what is installed here as editable."""
    path = [*map(str, folders), sysconfig.get_path("purelib")]
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path += {path}\n{program}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_importing_torch_alone_imports_nothing_of_a_checkout(installed):
    program = "import torch; print([m for m in sys.modules if m.startswith(('recipe_utils', 'torchtune'))])"
    done = run(program, installed, ROOT)
    assert done.stdout.strip() == "['torchtune_update_step_registration']", done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("checkout", "said"),
    [
        ("moved", "ModuleNotFoundError: No module named 'recipe_utils'"),
        ("half written", "ZeroDivisionError: division by zero"),
        ("whole", "ModuleNotFoundError: No module named 'torchtune._recipe_registry'"),
    ],
)
def test_whatever_cannot_be_imported_torch_can_and_tune_says_the_rest_in_one_line(
    checkout, said, installed, tmp_path
):
    half = tmp_path / "half_written"
    (half / "recipe_utils").mkdir(parents=True)
    (half / "recipe_utils" / "__init__.py").write_text("1 / 0\n")
    folder = {"moved": tmp_path / "gone", "half written": half, "whole": ROOT}[checkout]
    done = run(AS_ANY_PROGRAM_THEN_AS_TUNE, installed, folder)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"then as tune: torchtune-update-step: `tune` cannot know its recipes ({said}"
    )
    assert "`pip install -e .`" in line
    assert "`pip uninstall torchtune-update-step`" in line
