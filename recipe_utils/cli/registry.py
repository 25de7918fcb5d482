"""Registration of recipes for ``tune ls``, ``tune cp``, ``tune validate`` and ``tune run``.

torchtune 0.6.1 keeps its recipes in a module-level list without an interface to extend it. PyTorch
calls the entry points of the group ``torch.backends`` at the end of ``import torch``, which
``tune`` runs before it reads the list. Only this module uses a private name of torchtune's command
line. It is imported with torch (:mod:`recipe_utils.cli.registration`), so it must be light.
"""

import difflib
import re
import signal
import sys
from pathlib import Path

from recipe_utils import end_at_sigint
from recipe_utils.cli.exit_codes import USER_SIGNALS

# A wheel contains recipes/ and configs/ in the package; a checkout has links to them.
ROOT = Path(__file__).resolve().parents[1]

SAME_FILE = {
    "lora_finetune_update_step": "full_finetune_update_step",
    "lora_dpo_update_step": "full_dpo_update_step",
    "full_policy_update_step": "policy_update_step",
    "lora_policy_update_step": "policy_update_step",
}
"""Recipe name -> name of its file; that of all others is ``recipes/NAME.py``."""


def _recipes() -> dict[str, list[str]]:
    """Returns the configs of each recipe: a config's header contains its ``tune run`` command.

    Those that run without a download come first.
    """
    files = {path.stem for path in ROOT.glob("recipes/*.py")}
    names = {*SAME_FILE, *(file for file in files if f"full_{file}" not in SAME_FILE)}
    configs: dict[str, list[str]] = {name: [] for name in sorted(names)}
    paths = ROOT.glob("configs/*/*.yaml")
    for path in sorted(paths, key=lambda path: (not path.name.startswith(("5M", "digits")), path)):
        config = f"{path.parent.name}/{path.stem}"
        command = re.search(rf"^# .*tune run .*?(\w+) --config {config}$", path.read_text("utf-8"), re.M)
        recipe = command[1] if command else ""
        # Configs of torchtune's own recipes, such as `generate`, are listed with fine-tuning.
        configs[recipe if recipe in names else "full_finetune_update_step"].append(config)
    return configs


RECIPES = _recipes()
"""Recipe name -> names of its configs (``configs/NAME.yaml``)."""

TRAINING_RECIPES = (
    "full_finetune_update_step",
    "full_dpo_update_step",
    "policy_update_step",
    "knowledge_distillation_update_step",
    "dinov3_update_step",
)
"""Recipes that train, each with a file and a page of its own."""


def register() -> bool:
    """Adds :data:`RECIPES` to torchtune's registry. Returns True for ``tune run`` of one of them.

    For such a run, or that of a copy, it also patches the launcher. Suggests names similar to an
    unknown one of ``tune run``. ``tune validate`` only accepts paths, so the name of a config in
    ``sys.argv`` is replaced by its path. torchtune runs a file as a module of the current folder, so
    a copy elsewhere (``/home/me/my_recipe.py``, ``../my_recipe.py``) is added to its registry.
    """
    from torchtune._recipe_registry import _ALL_RECIPES, Config, Recipe

    for name, configs in RECIPES.items():
        _ALL_RECIPES.append(
            Recipe(
                name=name,
                file_path=str(recipe_path(name)),
                configs=[Config(name=each, file_path=str(config_path(each))) for each in configs],
                # The benchmark starts the processes of its baselines itself.
                supports_distributed=name != "benchmark_tokens_per_second",
            )
        )

    if Path(sys.argv[0]).name != "tune":
        return False
    command, *arguments = sys.argv[1:] or [""]
    known = {config for configs in RECIPES.values() for config in configs}
    if command == "validate" and len(arguments) == 1 and arguments[0] in known:
        sys.argv[2] = str(config_path(arguments[0]))
    all_names = {each.name for recipe in _ALL_RECIPES for each in (recipe, *recipe.configs)}
    for argument in arguments if command == "run" else ():
        similar = difflib.get_close_matches(argument, {*RECIPES, *known}, n=1, cutoff=0.9)
        if similar and argument not in all_names and not Path(argument).exists():
            sys.stderr.write(f"{argument}: unknown; did you mean {similar[0]}?\n")
    ours = next((argument for argument in arguments if command == "run" and _is_ours(argument)), None)
    if ours is not None:
        if ours.startswith(("/", ".")):
            _ALL_RECIPES.append(Recipe(ours, str(Path(ours).resolve()), configs=[], supports_distributed=True))
        signal.pthread_sigmask(signal.SIG_BLOCK, USER_SIGNALS)
        end_at_sigint()
        sys.stderr.write("Importing PyTorch, torchtune and the recipe ...\n")  # takes 5 to 10 s
        from recipe_utils.cli.launcher import wait_for_ranks

        wait_for_ranks()
    return ours is not None


def _is_ours(argument: str) -> bool:
    """Returns True if an argument of ``tune run`` is a recipe of this project or a file that imports it."""
    if argument in RECIPES:
        return True
    path = Path(argument)
    return path.suffix == ".py" and path.is_file() and "recipe_utils" in path.read_text("utf-8", "ignore")


def recipe_path(name: str) -> Path:
    """Returns the path of a recipe; any other name is a path itself."""
    path = ROOT / "recipes" / f"{SAME_FILE.get(name, name)}.py"
    return path if path.is_file() else Path(name)


def config_path(name: str) -> Path:
    """Returns the path of a config, such as ``llama3_2/5M_full_update_step``; any other name is a path itself."""
    path = ROOT / "configs" / f"{name}.yaml"
    return path if path.is_file() else Path(name)
