"""Command line of a recipe: config, exit codes and final error message."""

import atexit
import copy
import faulthandler
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune import config
from yaml import YAMLError

from recipe_utils.checkpoint.export import ExportError
from recipe_utils.checkpoint.folder import find_newest_whole
from recipe_utils.cli.advice import how_to_resume
from recipe_utils.cli.exit_codes import CONFIG_ERROR_EXIT_CODE, LAUNCHER_PID, REPORTED_EXIT_CODE, USER_SIGNALS
from recipe_utils.files import CheckpointError
from recipe_utils.optim.nonfinite import NonfiniteError
from recipe_utils.parallel.process_group import end_with_parent, loss_of_rank, print_final_error, world_size_from_env
from recipe_utils.settings.problems import ConfigError
from recipe_utils.training.log import set_up_screen
from recipe_utils.training.parts.budget import RowsDoNotFitError
from recipe_utils.update_steps.collectives import OtherRankFailedError
from recipe_utils.update_steps.samples import SampleError
from recipe_utils.update_steps.workers import WorkerDiedError

USER_ERRORS = (ExportError, NonfiniteError, SampleError, WorkerDiedError)
"""Training errors that are reported without a traceback."""
_OF_A_LIST = re.compile(r"[^=~]+?\.\d+(\.[^=]+)?=")
"""Override of an entry of a list, such as ``dataset.0.weight=0.4``."""
_COMPONENT = re.compile(r"([^=~.]+)=\s*[{\[].*_component_")
"""Override of a component, or a list of them, such as ``dataset={_component_: my.data, path: x}``."""


def entry_point(recipe_main: Callable[[DictConfig], Any]) -> Callable[[], Any]:
    """Wraps the ``main`` of a recipe; replaces torchtune's ``config.parse``.

    The command line is torchtune's; ``~KEY`` also removes components, ``dataset.0.weight=0.4`` sets a
    key of an entry of a list, and ``dataset={_component_: my.data, path: x}`` a component. One rank prints user errors
    once, last and without a traceback; each rank that lost another one prints a line. The exit code is 2 for errors in
    the config or a checkpoint, so that the launcher does not retry; otherwise 1 or 3.
    """

    @wraps(recipe_main)
    def main() -> Any:
        removed = [word[1:].split("=")[0] for word in sys.argv[1:] if word.startswith("~")]
        overrides = _not_of_torchtune(sys.argv[1:])
        sys.argv[1:] = [w for w in sys.argv[1:] if not w.startswith("~") and w not in overrides]
        has_started, text, lost = False, None, None
        # User components must be importable before torchtune adds the working directory.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())

        def start(cfg: DictConfig) -> Any:
            nonlocal has_started, lost
            cfg = with_overrides(cfg, overrides, removed)
            has_started = True
            try:
                return recipe_main(cfg)
            except RowsDoNotFitError as error:
                # On its own rank: rank 0 ends because it has lost this one.
                print(f"{error}; {_next_start(cfg)}", file=sys.stderr, flush=True)  # noqa: T201
                sys.exit(_exit_code())
            except Exception as error:
                # It may be the cause of a ConfigError, whose exit code would end the training.
                if (reason := loss_of_rank(error)) is None:
                    raise
                # On each rank: the one that prints for all may be the one that is gone.
                rank = f"rank {os.environ.get('RANK')}"
                lost = f"{rank}: another rank is gone ({reason}); {_next_start(cfg)}"
                raise OtherRankFailedError(reason) from error

        start.__doc__ = recipe_main.__doc__
        set_up_screen()
        if not faulthandler.is_enabled():  # pytest's prints elsewhere
            faulthandler.enable(2)  # a rank that crashes prints the stacks of its threads
        signal.pthread_sigmask(signal.SIG_BLOCK, USER_SIGNALS)  # until Stop.listen
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # If the launcher was killed during the imports, the parent is another process. Plain torchrun sets no variable.
            end_with_parent(int(os.environ.get(LAUNCHER_PID, os.getppid())))
        try:
            config.parse(start)()
        except SystemExit as end:
            _exit(end.code)
        except OtherRankFailedError:
            exit_code = _exit_code()
        except (ConfigError, CheckpointError) as error:
            text, exit_code = str(error), CONFIG_ERROR_EXIT_CODE
        except USER_ERRORS as error:
            # Notes contain the location in the user's dataset.
            notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
            text, exit_code = f"{notes}error: {error}", _exit_code()
        except (ValueError, OSError, YAMLError, OmegaConfBaseException) as error:
            if has_started:
                raise
            text = str(ConfigError(f"command line or YAML: {error}"))
            if "key=value, got" in text and text.count("=") > 2:
                text += "; set a value with = in the YAML file"
            exit_code = CONFIG_ERROR_EXIT_CODE
        _exit(print_final_error(text, exit_code, lost))

    return main


def _exit(code: str | int | None) -> NoReturn:
    """Exits as ``sys.exit``, and a rank of the launcher without Python's finalization.

    It would end a thread of gloo that still frees a tensor, at which C++ aborts the process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and not isinstance(code, str):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)


def _not_of_torchtune(words: Sequence[str]) -> list[str]:
    """Returns the overrides that torchtune's parser cannot merge, and all others of the same components."""
    components = {match[1] for word in words if (match := _COMPONENT.match(word))}
    names = [re.split(r"[.=]", word)[0] for word in words]
    return [word for name, word in zip(names, words, strict=True) if name in components or _OF_A_LIST.match(word)]


def with_overrides(cfg: DictConfig, words: Sequence[str], removed: Sequence[str] = ()) -> DictConfig:
    """Returns a copy of a config with overrides applied in order that torchtune's parser cannot merge.

    ``KEY={...}`` replaces a component, ``KEY.INDEX.KEY=value`` sets a value in a list. Also takes out the paths
    ``removed``. Raises ConfigError if the config has no such entry or key.
    """
    changed = copy.deepcopy(cfg)
    problems = []
    for word in words:
        path, _, value = word.partition("=")
        # OmegaConf would add entries beyond the end of a list, and mappings where there is no list.
        in_list = re.match(r"(.+?)\.(\d+)(?=\.|$)", path)
        key, index = in_list.groups() if in_list else (path, 0)
        entries = OmegaConf.select(changed, key) if in_list else None
        if isinstance(entries, ListConfig) and int(index) >= len(entries):
            problems.append(f"{word}: {key} has {len(entries)} entries, from {key}.0")
        elif in_list and not isinstance(entries, ListConfig | DictConfig):
            problems.append(f"{word}: {key} is no list in the config; set {key} there")
        else:
            value = OmegaConf.from_dotlist([f"value={value}"]).value
            OmegaConf.update(changed, path, value, merge=False, force_add=True)
    for path in removed:
        parent, _, key = path.rpartition(".")
        mapping = OmegaConf.select(changed, parent) if parent else changed
        if isinstance(mapping, DictConfig) and key in mapping:
            del mapping[key]
        else:
            problems.append(f"~{path}: the config has no such key to remove")
    if problems:
        raise ConfigError(*problems)
    return changed


def _next_start(cfg: DictConfig) -> str:
    """Returns whether the launcher starts the ranks again, and from where."""
    newest = find_newest_whole(Path(cfg.output_dir))[0]
    resumes = cfg.get("resume_from_checkpoint", False)
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    restarts, allowed = (int(os.environ.get(name, 0)) for name in names)
    if restarts >= allowed:
        return how_to_resume(newest.name, resumes) if newest else "no restart is left; start again from scratch"
    if newest is not None and not resumes:
        return f"the launcher starts again from scratch; resume_from_checkpoint=auto would use {newest.name}"
    return f"the launcher starts again from {newest.name if newest else 'scratch'}"


def _exit_code() -> int:
    # Marks the error as printed for the launcher, which still restarts the job if configured.
    return REPORTED_EXIT_CODE if world_size_from_env() > 1 else 1
