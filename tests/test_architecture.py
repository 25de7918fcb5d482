"""Imports go in one direction, folders stay small, and every imported package is declared."""

import ast
import re
import sys
import tomllib
from collections import Counter
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions
from inspect import Parameter, signature
from itertools import chain
from pathlib import Path
from types import FunctionType, ModuleType

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "recipe_utils"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if not {"recipes", "configs"} & set(path.relative_to(PACKAGE).parts)
}
LAYERS = (
    ("benchmark", "plot", "show_data"),
    ("forecast",),
    ("check_gradient",),
    ("dinov3",),
    ("distillation",),
    ("preference",),
    ("policy",),
    ("reference",),
    ("training",),
    ("models",),
    ("losses",),
    ("checkpoint",),
    ("optim", "examples"),
    ("data",),
    ("text",),
    ("update_steps",),
    ("plans",),
    ("parallel",),
    ("settings",),
    ("cli",),
    ("files",),
    ("compiler", "model_kinds", "torchtune_names"),
)
"""Layers from top to bottom. A package imports packages of lower layers only."""
OBJECTIVES = {"preference", "policy", "distillation", "dinov3"}
COMMANDS = {"benchmark", "check_gradient", "forecast", "plot", "show_data"}
MAX_FILES = 10


def package_of(module):
    return [*module.split("."), ""][1]


@cache
def imports_of(module):
    """Returns the modules of the project that a module imports: at its top, in functions, or for type checkers alone.

    A name of a package counts as an import of the module that its stub takes it from.
    """
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            stub = PACKAGE.parent.joinpath(*node.module.split("."), "__init__.pyi")
            exports = ast.parse(stub.read_text()).body if stub.is_file() else ()
            names = {alias.name for alias in node.names}
            found |= {each.module for each in exports if names & {alias.name for alias in getattr(each, "names", ())}}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    paths = {name if name in MODULES else f"{name}.__init__" for name in found}
    return sorted(paths & MODULES.keys() - {module, "recipe_utils.__init__"})


def test_imports_go_to_lower_layers_only():
    layer_of = {package: i for i, layer in enumerate(LAYERS) for package in layer}
    assert {package_of(module) for module in MODULES} - {"__init__"} == set(layer_of)
    for module in MODULES:
        here = package_of(module)
        for other in imports_of(module) if here != "__init__" else ():
            there = package_of(other)
            assert here == there or layer_of[there] > layer_of[here], f"{module}: {other}"


def test_only_recipes_and_commands_import_an_objective():
    for module in MODULES:
        here = package_of(module)
        there = {package_of(other) for other in imports_of(module)} & OBJECTIVES - {here}
        assert not there or here in COMMANDS, module


def test_formats_of_models_know_no_step_checkpoints():
    step_checkpoints = {f"recipe_utils.checkpoint.{name}" for name in ("folder", "layout", "load", "save", "tensors")}
    for name in ("export", "own_modules", "peft", "transformers"):
        assert not step_checkpoints & set(imports_of(f"recipe_utils.checkpoint.{name}")), name


def test_a_run_knows_no_text_and_a_loss_no_dataset():
    for package, others in {"training": {"text"}, "losses": {"data", "text", "plans", "parallel"}}.items():
        for module in MODULES:
            there = {package_of(other) for other in imports_of(module)}
            assert package_of(module) != package or not there & others, module


def test_no_module_is_named_like_its_package():
    for package, module in (name.split(".")[-2:] for name in MODULES if "." in name):
        assert module != package.removesuffix("s"), f"{package}/{module}.py"


def test_modules_have_no_import_cycles():
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path, module])
        if module in done:
            return
        path.append(module)
        for other in imports_of(module):
            visit(other)
        done.add(path.pop())

    for module in MODULES:
        visit(module)


def test_every_imported_distribution_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    declared = {re.match(r"[\w-]+", each)[0].lower().replace("_", "-") for each in required}
    distributions = packages_distributions()
    for path in [*MODULES.values(), *(ROOT / "recipes").glob("*.py")]:
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.split(".")[0])
        for name in names - sys.stdlib_module_names - {"recipe_utils"}:
            found = {each.lower().replace("_", "-") for each in distributions.get(name, declared)}
            assert found & declared, f"{path}: {name} of {found}"


def test_a_folder_has_at_most_ten_files():
    sizes = Counter(path.parent for path in MODULES.values() if not path.name.startswith("__"))
    too_many = {str(folder): size for folder, size in sizes.items() if size > MAX_FILES}
    assert not too_many


def test_no_package_is_named_like_the_output_of_a_tool():
    """pytest, build backends and .gitignore files leave such folders out."""
    folders = {part for path in MODULES.values() for part in path.relative_to(ROOT).parts[:-1]}
    assert not folders & {"build", "dist", "env", "venv", "node_modules", "out", "target"}


def test_every_test_file_is_collected(pytestconfig):
    is_ignored = pytestconfig.hook.pytest_ignore_collect
    for file in (ROOT / "tests").rglob("test_*.py"):
        for path in (file, *file.parents[: len(file.relative_to(ROOT).parts) - 1]):
            assert not is_ignored(collection_path=path, config=pytestconfig), file


def test_the_core_is_small():
    core = ("step", "order", "loader")
    num_lines = sum(len((PACKAGE / "update_steps" / f"{name}.py").read_text().splitlines()) for name in core)
    assert num_lines <= 370


def test_a_recipe_is_read_at_a_glance():
    """It has at most 150 lines (190 of images, with two models), of which imports are 20 and ``setup`` 30."""
    for path in (ROOT / "recipes").glob("*_update_step.py"):
        tree = ast.parse(path.read_text())
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        setups = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "setup"]
        num_imports, num_setup = (sum(n.end_lineno - n.lineno + 1 for n in nodes) for nodes in (imports, setups))
        assert num_imports <= 20, path
        assert num_setup <= 30, path
        assert len(path.read_text().splitlines()) <= (190 if path.stem.startswith("dinov3") else 150), path


def test_a_model_and_its_pipeline_are_one_value():
    for module, path in MODULES.items():
        assert not re.search(r"pipeline: \w*(Pipeline|OverStages) \| None", path.read_text()), module


def test_few_files_import_torchtune():
    """They do for its models, formats, data and command line; other names are in torchtune_names.py."""
    paths = [*MODULES.values(), *(ROOT / "recipes").glob("*.py")]
    assert sum(bool(re.search(r"^\s*(from|import) torchtune\b", path.read_text(), re.M)) for path in paths) <= 45


def test_what_packages_export_exists_has_a_type_and_is_no_module():
    """A module of the same name would hide it once it is imported; a type that is no class is written out."""
    stubs = {path.with_suffix(".py") for path in PACKAGE.rglob("__init__.pyi")}
    assert stubs == {path for path in MODULES.values() if "exported(__file__)" in path.read_text()}
    for module, path in MODULES.items():
        package = import_module(module.removesuffix(".__init__")) if path in stubs else None
        for name in dir(package) if package is not None else ():
            exports = getattr(package, name)
            assert not isinstance(exports, ModuleType), f"{module}: {name}"
            if isinstance(exports, FunctionType):
                *parameters, returned = [*signature(exports).parameters.values(), signature(exports).return_annotation]
                assert Parameter.empty not in [returned, *(each.annotation for each in parameters)], f"{module}: {name}"


def test_loaders_settings_steps_recipes_and_logs_have_types():
    """Where an import would run upward, the type is a small Protocol beside its user."""
    seams, untyped = {"loader", "settings", "step", "recipe", "log"}, []
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                untyped += [
                    f"{module}.{node.name}({parameter.arg})"
                    for parameter in parameters
                    if parameter.arg in seams and getattr(parameter.annotation, "id", "") == "Any"
                ]
    assert not untyped
