"""Recipe files and configs of commands that train nothing."""

import argparse
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe_utils.tune.registry import RECIPES, config_path, recipe_path

OF_OUTPUT = (
    "metric_logger", "profiler", "resume_from_checkpoint", "resume_with_other_data", "resume_with_other_model",
    "run_val_every_n_steps", "dataset_val", "batch_size_val", "keep_best_checkpoint", "sample_prompts",
    "sample_every_n_steps", "sample_max_new_tokens", "enable_async_checkpointing",
)  # fmt: skip
"""Keys without influence on an update step."""


def redirected(cfg: DictConfig, folder: Path) -> dict[str, Any]:
    """Returns a config, not resolved, whose output goes to ``folder``.

    Paths below ``output_dir`` that exist are read where they are.
    """
    old = str(cfg.output_dir)

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            own = {key: moved(each) for key, each in value.items()}
            return own | dict.fromkeys(own.keys() & {"output_dir"}, str(folder))
        if isinstance(value, list):
            return [moved(each) for each in value]
        start, slash, rest = str(value).partition("/")
        if start != "${output_dir}":
            start, slash, rest = str(value).partition(f"{old}/")
        if start not in ("", "${output_dir}") or not slash:
            return value
        return str(Path(old if Path(old, rest).exists() else folder, rest))

    raw: dict[str, Any] = moved(OmegaConf.to_container(cfg, resolve=False))
    return raw


def parser_of(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the arguments ``recipe`` and ``--config``."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="registered name or path")
    parser.add_argument("--config", required=True, help="registered name or path")
    return parser


def paths_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> tuple[str, str]:
    """Returns the paths of a recipe and a config; ends with an error if there is no such recipe."""
    recipe = recipe_path(given.recipe)
    if not recipe.is_file():
        parser.error(f"{recipe}: no recipe of this name or path; there are {', '.join(RECIPES)}")
    return str(recipe), str(config_path(given.config))
