"""`import torch` never fails because of this project; `tune` reports what is wrong with its checkout."""

import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IN_EACH_CHECKOUT = """
import types
sys.modules["torchtune"] = types.ModuleType("torchtune")  # the real one takes seconds to import
import torch
for folder in {folders}:
    sys.path.insert(0, folder)
    for program in ("program", "tune"):
        sys.argv = [f"/venv/bin/{{program}}", "ls"]
        sys.stderr.write(f"{{program}}: ")
        for name in [name for name in sys.modules if name.startswith("recipe_utils")]:
            del sys.modules[name]
        torch._import_device_backends()
    sys.path.remove(folder)
"""


@pytest.fixture
def installed(tmp_path):
    """Files of an editable install in site-packages, without the path to the checkout."""
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
    """Runs a program with modules of ``folders`` and torch, without this environment's editable installs."""
    path = [*map(str, folders), sysconfig.get_path("purelib")]
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path += {path}\n{program}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_importing_torch_alone_imports_nothing_of_a_checkout(installed):
    names = ("recipe_utils", "torchtune", "torchao", "transformers")
    done = run(f"import torch; print([m for m in sys.modules if m.startswith({names})])", installed, ROOT)
    assert done.stdout.strip() == "['torchtune_update_step_registration']", done.stderr
    assert done.stderr == ""


@pytest.mark.slow
def test_torchtune_is_imported_with_the_names_that_its_torchao_lacks(installed):
    """Without ``tune``; a name that torchao has is kept."""
    program = """
import torchao.quantization as quantization
quantization.int4_weight_only = "kept"
from torchtune.training.quantization import Int8DynActInt4WeightQuantizer, int4_weight_only
print(int4_weight_only)
Int8DynActInt4WeightQuantizer().quantize(None)
"""
    done = run(program, installed)
    assert done.stdout == "kept\n"
    error = done.stderr.splitlines()[-1]
    assert error.startswith("NotImplementedError: torchao.quantization.int8_dynamic_activation_")
    assert "call torchao.quantization.quantize_ with" in error


def test_torch_is_imported_with_a_broken_checkout_and_tune_reports_it_in_one_line(installed, tmp_path):
    half_written = tmp_path / "half_written"
    (half_written / "recipe_utils").mkdir(parents=True)
    (half_written / "recipe_utils" / "__init__.py").write_text("1 / 0\n")
    reasons = {
        tmp_path / "moved": "ModuleNotFoundError: No module named 'recipe_utils'",
        half_written: "ZeroDivisionError: division by zero",
        ROOT: "ModuleNotFoundError: No module named 'torchtune._recipe_registry'",
    }
    done = run(IN_EACH_CHECKOUT.format(folders=[*map(str, reasons)]), installed)
    assert done.returncode == 0, done.stderr
    for line, reason in zip(done.stderr.splitlines(), reasons.values(), strict=True):
        start = "program: tune: torchtune-update-step: `tune` does not list its recipes"
        assert line.startswith(f"{start} ({reason}")
        assert "`pip install -e .`" in line
        assert "`pip uninstall torchtune-update-step`" in line
