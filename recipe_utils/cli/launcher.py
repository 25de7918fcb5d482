"""Signal handling of ``tune run --nproc_per_node`` for this project's recipes.

After a signal, torchrun kills its ranks within 30 seconds and reports a failure, even if all of
them saved a checkpoint and exited with code 0.
"""

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.elastic.multiprocessing.api as multiprocessing_api
from torch.distributed.elastic.multiprocessing import PContext, RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api
from torchtune.config._parse import TuneRecipeArgumentParser
from torchtune.config._utils import _merge_yaml_and_cli_args

from recipe_utils.cli.registry import USER_SIGNALS

_SAVED = re.compile(r"step_\d+")
CONFIG_ERROR_EXIT_CODE = 2
"""Exit code of all ranks and the launcher after a config error."""
REPORTED_EXIT_CODE = 3
"""Exit code of a rank whose error has been reported, by itself or by another rank."""


def wait_for_ranks() -> None:
    """Patches torchrun's handling of signals and of reported errors in this process.

    The first two of SIGTERM and SIGINT, and any SIGHUP (unless ``nohup`` ignores it), SIGUSR1 or SIGUSR2, are forwarded
    to the ranks, and the launcher waits for them without a timeout. If all exit with code 0, so does the launcher; else
    it exits as torchrun does after a signal, without a restart. A third SIGTERM or SIGINT has torchrun's effect.

    Config errors are not restarted. The launcher prints nothing about errors that ranks reported.
    """
    torch_start, torch_wait, torch_launch = PContext.start, PContext.wait, api.launch_agent
    received: list[signal.Signals] = []

    def raise_if_received() -> None:
        if received:
            raise SignalException(f"Not all ranks exited with code 0 after {received[0].name}", received[0])

    def start(ranks: PContext) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, USER_SIGNALS)  # the ranks inherit it
        raise_if_received()  # this is a restart
        hangup = signal.getsignal(signal.SIGHUP)
        torch_start(ranks)
        if threading.current_thread() is not threading.main_thread():
            return
        torch_handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

        def forward(number: int, _: FrameType | None) -> None:
            received.append(signal.Signals(number))
            # The second ends ranks that do not save.
            for first in torch_handlers if sum(each in torch_handlers for each in received) > 1 else ():
                signal.signal(first, torch_handlers[first])
            # Not to the process group: it contains DataLoader workers, which are still needed.
            for pid in ranks.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        for number in (*torch_handlers, *USER_SIGNALS):
            signal.signal(number, forward)
        signal.signal(signal.SIGHUP, hangup if hangup is signal.SIG_IGN else forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, USER_SIGNALS)

    def wait(ranks: PContext, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        result = torch_wait(ranks, timeout, period)
        if result is not None and result.is_failed():
            raise_if_received()
            if _exit_codes(result.failures) == {CONFIG_ERROR_EXIT_CODE}:
                raise SystemExit(CONFIG_ERROR_EXIT_CODE)
        return result

    def launch(config: api.LaunchConfig, *args: Any, **kwargs: Any) -> Any:
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

    def is_not_reported(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        reported = (f"(exitcode: {n})" for n in (CONFIG_ERROR_EXIT_CODE, REPORTED_EXIT_CODE))
        return not text.startswith("Sending process") and not any(each in text for each in reported)

    api.launch_agent = launch
    logging.getLogger(multiprocessing_api.__name__).addFilter(is_not_reported)
    PContext.start = start  # type: ignore[method-assign, assignment]
    PContext.wait = wait  # type: ignore[method-assign, assignment]


def _advice(arguments: Sequence[str]) -> str:
    """Returns how the command of the ranks continues from its newest checkpoint; empty without one."""
    with suppress(Exception):  # any: the loss of a rank is reported, whatever the config is
        given = [argument for argument in arguments[arguments.index("--config") :] if argument[:1] != "~"]
        cfg = _merge_yaml_and_cli_args(*TuneRecipeArgumentParser().parse_known_args(given))
        saved = [path for path in Path(cfg.output_dir).iterdir() if _SAVED.fullmatch(path.name)]
        newest = max(saved, key=lambda path: int(path.name.removeprefix("step_"))).name
        if cfg.get("resume_from_checkpoint"):
            return f"; the same command continues from {newest}"
        return f"; set resume_from_checkpoint=True to continue from {newest}"
    return ""


def _exit_codes(failures: Mapping[int, ProcessFailure]) -> set[int]:
    """Returns the exit codes of ranks that the launcher did not kill."""
    killed = {-signal.SIGTERM, -signal.SIGKILL}
    return {failure.exitcode for failure in failures.values()} - killed
