"""Signal handling of ``tune run --nproc_per_node`` for this project's recipes.

torchrun cannot be configured to do it: it also sends a signal to DataLoader workers, kills the ranks after
``--shutdown-timeout`` (30 seconds), and exits with code 1 even if all ranks saved a checkpoint and exited with code 0.
"""

import logging
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.elastic.agent.server.api as agent_api
import torch.distributed.elastic.multiprocessing.api as multiprocessing_api
from torch.distributed.elastic.multiprocessing import PContext, RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api
from torchtune.config._parse import TuneRecipeArgumentParser
from torchtune.config._utils import _merge_yaml_and_cli_args

from recipe_utils.cli.advice import how_to_resume
from recipe_utils.cli.exit_codes import CONFIG_ERROR_EXIT_CODE, LAUNCHER_PID, REPORTED_EXIT_CODE, USER_SIGNALS

_SAVED = re.compile(r"step_\d+")
_REPORTED = re.compile(
    rf"Sending process|Received |failed \(exitcode: ({-signal.SIGINT}|{CONFIG_ERROR_EXIT_CODE}|{REPORTED_EXIT_CODE})\)"
)
"""Start of torchrun's messages about signals, and errors that ranks reported."""


def wait_for_ranks() -> None:
    """Patches torchrun's handling of signals and of reported errors in this process.

    The first two of SIGTERM and SIGINT, and any SIGHUP (unless ``nohup`` ignores it), SIGUSR1 or SIGUSR2, are forwarded
    to the ranks, and the launcher waits for them without a timeout. If all exit with code 0, so does the launcher; else
    it exits with a shell's code of the signal, without a restart. A third SIGTERM or SIGINT has torchrun's effect.

    Config errors are not restarted. The launcher prints nothing about errors that ranks reported.
    """
    torch_start, torch_wait, torch_launch = PContext.start, PContext.wait, api.launch_agent
    torch_handler = multiprocessing_api._terminate_process_handler
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    forwarded = (signal.SIGTERM, signal.SIGINT, *hangup, *USER_SIGNALS)
    waited_for: PContext | None = None
    received: list[signal.Signals] = []
    early: list[int] = []

    def raise_if_received() -> None:
        if received:
            raise SignalException(f"Not all ranks exited with code 0 after {received[0].name}", signal.SIGTERM)

    def forward(number: int, _: FrameType | None) -> None:
        assert waited_for is not None
        received.append(signal.Signals(number))
        # The second ends ranks that do not save.
        if sum(each in (signal.SIGTERM, signal.SIGINT) for each in received) > 2:
            raise_if_received()
        # Not to the process group: it contains DataLoader workers, which are still needed.
        for pid in waited_for.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def keep(number: int, frame: FrameType | None) -> None:
        # The ranks run already, but torchrun has no list of them yet: it would raise here, exit, and leave them running.
        if number not in forwarded:
            torch_handler(number, frame)
        early.append(number)

    def start(ranks: PContext) -> None:
        os.environ[LAUNCHER_PID] = str(os.getpid())
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # ranks inherit it, see recipe_utils.end_at_sigint
        torch_start(ranks)

    def wait(ranks: PContext, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        nonlocal waited_for
        if ranks is not waited_for:
            raise_if_received()  # this is a restart
            waited_for = ranks
            # A start installs torchrun's handlers, which end ranks that still import.
            for number in forwarded:
                signal.signal(number, forward)
            while early:
                forward(early.pop(0), None)
        # Pending ones are forwarded here. Otherwise they are blocked, as the ranks of a restart must inherit.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*USER_SIGNALS, signal.SIGINT])
        signal.pthread_sigmask(signal.SIG_BLOCK, USER_SIGNALS)
        result = torch_wait(ranks, timeout, period)
        if result is not None and result.is_failed():
            raise_if_received()
            if _exit_codes(result.failures) == {CONFIG_ERROR_EXIT_CODE}:
                raise SystemExit(CONFIG_ERROR_EXIT_CODE)
        return result

    def launch(config: api.LaunchConfig, *args: Any, **kwargs: Any) -> Any:
        if not hangup:
            config.signals_to_handle = config.signals_to_handle.replace("SIGHUP,", "")
        try:
            return torch_launch(config, *args, **kwargs)
        except ChildFailedError as error:
            codes = _exit_codes(error.failures)
            if not codes:  # torchrun has ended the others, which therefore cannot report it
                rank, first = min(error.failures.items(), key=lambda item: item[1].timestamp)
                name = signal.Signals(-first.exitcode).name
                text = f"rank {rank} was ended by {name}"
                text += " (is the memory full?)" if name == "SIGKILL" else ""
                sys.stderr.write(f"{text}{_advice([*map(str, args[-1])])}\n")
            if codes <= {REPORTED_EXIT_CODE}:
                raise SystemExit(1) from None
            raise
        except SignalException as error:
            sys.stderr.write(f"{error}\n")
            raise SystemExit(128 + (received[0] if received else error.sigval)) from None  # a shell's code of a signal

    for name in (multiprocessing_api.__name__, agent_api.__name__):
        logging.getLogger(name).addFilter(lambda record: not _REPORTED.match(record.getMessage()))
    api.launch_agent = launch
    multiprocessing_api._terminate_process_handler = keep  # type: ignore[assignment]
    PContext.start, PContext.wait = start, wait  # type: ignore[method-assign, assignment]


def _advice(arguments: Sequence[str]) -> str:
    """Returns how the command of the ranks continues from its newest checkpoint; empty without one."""
    with suppress(Exception):  # any: the loss of a rank is reported, whatever the config is
        given = [argument for argument in arguments[arguments.index("--config") :] if argument[:1] != "~"]
        cfg = _merge_yaml_and_cli_args(*TuneRecipeArgumentParser().parse_known_args(given))
        saved = [path for path in Path(cfg.output_dir).iterdir() if _SAVED.fullmatch(path.name)]
        newest = max(saved, key=lambda path: int(path.name.removeprefix("step_"))).name
        return f"; {how_to_resume(newest, cfg.get('resume_from_checkpoint', False))}"
    return ""


def _exit_codes(failures: Mapping[int, ProcessFailure]) -> set[int]:
    """Returns the exit codes of ranks that the launcher did not kill."""
    killed = {-signal.SIGTERM, -signal.SIGKILL}
    return {failure.exitcode for failure in failures.values()} - killed
