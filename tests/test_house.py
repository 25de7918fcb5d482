"""The house stays one that a newcomer finds the way in: floors, recipes and what holds them together."""

import ast
import inspect
import re
import sys
import tomllib
from collections import defaultdict
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from recipe_runs import recipe_class

from recipe_utils.run.run import Run
from recipe_utils.settings import key_table, settings_of
from recipe_utils.tune.registry import RECIPES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "recipe_utils"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if not {"recipes", "configs"} & set(path.relative_to(PACKAGE).parts)
}
TRAINING_RECIPES = sorted((ROOT / "recipes").glob("*_update_step.py"))

FLOORS = (
    ("benchmark",),
    ("run",),
    ("model",),
    ("loss",),
    ("checkpoint",),
    ("optim",),
    ("data",),
    ("parallel",),
    ("settings", "components", "files", "tune", "embedded"),
)
"""From the top; an import goes down, or stays in its folder. On the ground nothing stands on another but
settings on components, and what the command line of settings looks up in tune."""
MAX_ARGUMENTS = 8
MAX_RECIPE_LINES = defaultdict(lambda: 300)
MAX_RECIPE_LINES["full_dpo_update_step"] = 350  # a second model, eight metrics
MAX_RECIPE_LINES["knowledge_distillation_update_step"] = 350  # a second model, five metrics
MAX_RECIPE_LINES["dinov3_update_step"] = 380  # a second model, nearest neighbours, schedules


def room_of(module):
    return [*module.split("."), ""][1]


def imports_of(module):
    """The project's modules that one imports, and whether at its top."""
    found = {}
    tree = ast.parse(MODULES[module].read_text())
    top = set(
        ast.walk(
            ast.Module([n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))], [])
        )
    )
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            name = name if name in MODULES else f"{name}.__init__"
            if name in MODULES and name != "recipe_utils.__init__" and name != module:
                found[name] = found.get(name, False) or node in top
    return found


def test_every_folder_has_its_floor():
    rooms = {room_of(module) for module in MODULES} - {"__init__"}
    assert rooms == {room for floor in FLOORS for room in floor}


@pytest.mark.parametrize("module", MODULES)
def test_no_import_goes_up(module):
    floor_of = {room: i for i, floor in enumerate(FLOORS) for room in floor}
    here = room_of(module)
    for other, is_at_top in imports_of(module).items():
        there = room_of(other)
        if here == there or "__init__" in (here, there):
            continue
        allowed = floor_of[there] > floor_of[here]
        allowed |= (here, there) == ("settings", "components")
        allowed |= (here, there, is_at_top) == ("settings", "tune", False)
        assert allowed, f"{module} imports {other}"


def test_no_modules_import_each_other_in_a_circle():
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path, module])
        if module in done:
            return
        path.append(module)
        for other, is_at_top in imports_of(module).items():
            if is_at_top:
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
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names:
                if name == "recipe_utils" or name not in distributions:  # an extra that is not here
                    continue
                found = {each.lower().replace("_", "-") for each in distributions[name]}
                assert found & declared, f"{path}: {name} of {found}"


def functions_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def test_functions_with_many_arguments_say_why():
    for path in [*MODULES.values(), *(ROOT / "recipes").glob("*.py")]:
        lines = path.read_text().splitlines()
        for function in functions_of(path):
            arguments = function.args
            names = [
                a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            ]
            if len(set(names) - {"self", "cls"}) > MAX_ARGUMENTS:
                signature = "\n".join(lines[function.lineno - 2 : function.body[0].lineno])
                assert "#" in signature, f"{path.name}: {function.name} has {len(names)} arguments"


def test_the_run_is_called_and_never_calls():
    """It takes no function, neither the model nor the optimizer stays with it."""
    for name, method in inspect.getmembers(Run, inspect.isfunction):
        for parameter in inspect.signature(method).parameters.values():
            assert "Callable" not in str(parameter.annotation), f"{name}: {parameter}"
    source = inspect.getsource(Run)
    assert not re.search(r"self\._?(model|optimizer)\s*=", source)


@pytest.mark.parametrize("path", TRAINING_RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read_in_ten_minutes(path):
    assert len(path.read_text().splitlines()) <= MAX_RECIPE_LINES[path.stem]


@pytest.mark.parametrize("path", TRAINING_RECIPES, ids=lambda path: path.stem)
def test_in_a_recipe_the_config_is_only_read_as_a_whole_or_to_make_components(path):
    """Keys have their type, default and meaning in a room; ``cfg.KEY`` is for what is made of it."""
    tree = ast.parse(path.read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    makers = {"config.instantiate", "load_dataset", "load_pairs", "load_images"}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            continue
        if node.value.id != "cfg":
            continue
        call = node
        while not isinstance(call, ast.Call) or ast.unparse(call.func) == "cfg.get":
            call = parents[call]
        called = {ast.unparse(call.func), *(ast.unparse(argument) for argument in call.args[:1])}
        assert called & makers, f"{path.name}:{node.lineno}: {ast.unparse(call)}"


def tail_of_update(path):
    """From the last backward to the end of the update: clip, admit, step, zero."""
    (update,) = [function for function in functions_of(path) if function.name == "update"]
    text = ast.unparse(update)
    return text[text.index("grad_norm =") :]


def order_of_train(path):
    """What ``train`` calls, in the order of the text."""
    (train,) = [function for function in functions_of(path) if function.name == "train"]
    calls = [node for node in ast.walk(train) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    names = [ast.unparse(call.func) for call in calls]
    return [
        name for name in names if name.startswith(("run.", "self.")) or name == "NonfiniteError"
    ]


SFT = ROOT / "recipes" / "full_finetune_update_step.py"
DIFFERENCES = defaultdict(dict)
"""Recipe -> ``tail`` or ``order`` -> what makes the first recipe's of its own, each with a reason beside it."""


def without_stages(tail):
    """It has no pipeline, and logs a vector of metrics."""
    return tail.replace("self.pipeline)", "pipeline=None)").replace(
        "return (loss,", "return (metrics,"
    )


def of_pairs(order):
    """Metrics have names, which one function gives them; what the reference has said is kept with checkpoints."""
    names = ["self.named" if name == "mean_over_ranks" else name for name in order]
    names.insert(names.index("run.log") + 1, "self.named")
    names.insert(names.index("run.should_save") + 1, "self.reference.share")
    return names


def of_a_vector(tail):
    """It logs a vector of metrics."""
    return tail.replace("return (loss,", "return (metrics,")


def of_a_teacher(order):
    """Metrics have names, which one function gives them; the teacher's time is one of them."""
    names = list(order)
    names.insert(names.index("run.log") + 1, "self.named")
    names.insert(names.index("run.throughput"), "self.teacher.read_seconds")
    return names


def of_a_moving_average(tail):
    """Each head is clipped by itself, the teacher follows, who looks at the norm itself; metrics are a vector."""
    tail = tail.replace(
        "clip_grad_norm_(self.model, self", "clip_grad_norm_by_part_(self.model, PARTS, self"
    )
    step = "        self.optimizer.step()\n"
    follow = (
        "    momentum = schedules.momentum_at(run.global_step, self.num_steps)\n"
        "    self.teacher.follow(momentum, grad_norm, run.global_step + 1)\n"
    )
    tail = tail.replace(step, step + follow)
    return tail.replace(
        "return (loss,", "return (torch.cat([metrics, num_used.to(metrics.dtype).view(1)]),"
    )


def of_images(order):
    """Schedules are logged; there is no ``val_loss`` that could be best, and no text that could be said."""
    names = list(order)
    names.insert(names.index("self.nonfinite.read_and_restart"), "self.settings.schedules.at")
    first = names.index("self.validate") + 1
    last = names.index("run.log_answers")
    assert names[first : last + 1] == ["run.export", "run.should_sample", "run.log_answers"]
    return names[:first] + names[last + 1 :]


DIFFERENCES["dinov3_update_step"] = {"tail": of_a_moving_average, "order": of_images}
DIFFERENCES["knowledge_distillation_update_step"] = {"tail": of_a_vector, "order": of_a_teacher}
DIFFERENCES["full_dpo_update_step"] = {"tail": without_stages, "order": of_pairs}


def test_clip_admit_step_and_zero_are_the_same_text_in_all_recipes():
    first = tail_of_update(SFT)
    lines = (
        "clip_grad_norm_(",
        "self.nonfinite.admits(grad_norm)",
        "self.optimizer.step()",
        "zero_grad(",
    )
    places = [first.index(line) for line in lines]
    assert places == sorted(places)
    for path in TRAINING_RECIPES:
        own = DIFFERENCES[path.stem].get("tail", str)(first)
        assert tail_of_update(path) == own, path.name


def test_the_order_of_things_is_the_same_in_all_recipes():
    first = order_of_train(SFT)
    landmarks = [
        "self.update", "self.lr_scheduler.step", "run.advance", "run.log", "run.profiler.step",
        "run.log_validation", "run.save_and_stop", "run.should_export", "run.should_save",
        "run.finish_epoch",
    ]  # fmt: skip
    places = [first.index(name) for name in landmarks]
    assert places == sorted(places)
    for path in TRAINING_RECIPES:
        own = DIFFERENCES[path.stem].get("order", list)(first)
        assert order_of_train(path) == own, path.name


def test_nothing_in_the_house_calls_a_recipe_back_but_prepare():
    """Of what a recipe hands out, one function is its own; the others are components' makers."""
    for path in TRAINING_RECIPES:
        (setup,) = [f for f in functions_of(path) if f.name == "setup"]
        own = [node.name for node in ast.walk(setup) if isinstance(node, ast.FunctionDef)]
        assert own == ["setup", "prepare"]
    assert recipe_class().__name__ == "FullFinetuneRecipe"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_readme_s_tables_of_keys_are_the_command_s_output(recipe):
    """The first recipe's whole, and of others the rows that it has not."""
    lines = (ROOT / "recipes" / "README.md").read_text().splitlines()
    table = key_table(settings_of(recipe)).splitlines()
    missing = [row for row in table if row not in lines]
    assert not missing
    if recipe == SFT.stem:
        start = lines.index(table[0])
        assert lines[start : start + len(table)] == table


def test_the_readme_is_short_and_every_room_is_on_its_map():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 200
    for floor in FLOORS:
        for room in floor:
            assert re.search(rf"\b{room}(/|\.py)", readme), room


def test_the_top_level_holds_what_the_project_was_ordered_with():
    import subprocess

    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("no git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == {
        "CHANGELOG.md", "LICENSE", "README.md", "configs", "pyproject.toml", "recipe_utils", "recipes", "tests",
    }  # fmt: skip
