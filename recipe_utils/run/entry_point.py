"""How a recipe starts from the command line, and how it ends where the user can mend what is wrong."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune import config
from yaml import YAMLError

from recipe_utils.checkpoint.export import ExportError
from recipe_utils.data.loader.collectives import OtherRankFailedError
from recipe_utils.data.loader.samples import SampleError
from recipe_utils.data.loader.workers import WorkerDiedError
from recipe_utils.files import CheckpointError
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.parallel.process_group import tell_last, world_size_from_env
from recipe_utils.run.screen import set_up_screen
from recipe_utils.settings.settings import ConfigError
from recipe_utils.tune.launcher import CONFIG_ERROR_EXIT_CODE, TOLD_EXIT_CODE

MENDABLE = (ExportError, NonfiniteError, SampleError, WorkerDiedError)
"""Errors of a training that say all that there is to say; any other keeps its traceback."""


def entry_point(recipe_main: Callable[[DictConfig], Any]) -> Callable[[], Any]:
    """Makes a recipe's ``main`` of a function that takes a config; in place of torchtune's ``config.parse``.

    The command line is torchtune's, and ``~KEY`` takes components out, too. What the user can mend ends
    without a traceback, in one text that comes last: exit code 2 where the config or a checkpoint cannot work
    (the launcher does not try again), otherwise 1. Under a launcher one rank tells it.

    Args:
        recipe_main: takes the config, with the command line's changes.
    """

    @wraps(recipe_main)
    def main() -> Any:
        taken_out = [word[1:].split("=")[0] for word in sys.argv[1:] if word.startswith("~")]
        sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith("~")]
        has_started = False
        # Components of the user's own, as torchtune finds them; ranks of a launcher are checked before it does.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())

        def start(cfg: DictConfig) -> Any:
            nonlocal has_started
            has_started = True
            return recipe_main(without(cfg, taken_out))

        start.__doc__ = recipe_main.__doc__
        set_up_screen()
        try:
            return config.parse(start)()
        except OtherRankFailedError:
            tell_last(None)
            sys.exit(_exit_code())
        except (ConfigError, CheckpointError) as error:
            tell_last(str(error))
            sys.exit(CONFIG_ERROR_EXIT_CODE)
        except MENDABLE as error:
            # A dataset of the user's own may have failed: then where it did comes first.
            text = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
            tell_last(f"{text}error: {error}")
            sys.exit(_exit_code())
        except (ValueError, OSError, YAMLError, OmegaConfBaseException) as error:
            if has_started:
                raise
            tell_last(str(ConfigError(f"command line or YAML: {error}")))
            sys.exit(CONFIG_ERROR_EXIT_CODE)

    return main


def without(cfg: DictConfig, paths: Sequence[str]) -> DictConfig:
    """A config without some of its keys, components or not.

    Args:
        cfg: is left as it is.
        paths: of keys, such as ``lr_scheduler`` or ``model.rope_base``.

    Raises:
        recipe_utils.settings.settings.ConfigError: a key that is not there.
    """
    found = OmegaConf.to_container(cfg, resolve=False)
    problems = []
    for path in paths:
        *above, key = path.split(".")
        at: Any = found
        for each in above:
            at = at.get(each) if isinstance(at, dict) else None
        if isinstance(at, dict) and key in at:
            del at[key]
        else:
            problems.append(f"~{path}: the config has no such key to take out")
    if problems:
        raise ConfigError(*problems)
    left = OmegaConf.create(found)
    assert isinstance(left, DictConfig)
    return left


def _exit_code() -> int:
    """The launcher is told that nothing needs to be added, and tries again if it is asked to."""
    return TOLD_EXIT_CODE if world_size_from_env() > 1 else 1
