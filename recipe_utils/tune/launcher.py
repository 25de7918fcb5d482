"""Lets ``tune run --nproc_per_node`` wait for what this project's recipes do when they are asked to stop.

torchrun, which ``tune run`` starts ranks with, answers a signal by ending its ranks within 30 seconds and
reports a failure, even if all of them have saved and ended as they should.
"""

import logging
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

import torch.distributed.elastic.multiprocessing.api as multiprocessing_api
from torch.distributed.elastic.multiprocessing import PContext, RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

CONFIG_ERROR_EXIT_CODE = 2
"""Of every rank, and of the launcher, where the config cannot work."""
REPORTED_EXIT_CODE = 3
"""Of a rank that has told what is wrong, or left to another to do so."""
_ENDED_BY_LAUNCHER = {-signal.SIGTERM, -signal.SIGKILL}


def wait_for_ranks() -> None:
    """Changes how this process, as a launcher, takes its first SIGTERM or SIGINT, and config errors.

    It goes to the ranks and the launcher waits for them, however long they save; if all end with exit
    code 0, so does the launcher. If one does not, the launcher ends as torchrun does at a signal, and
    never restarts them. A second signal acts as the first would have without this.

    Ranks that leave because the config cannot work are not restarted either. Neither to this nor to anything
    else that a rank has told does the launcher add a word of its own.
    """
    torch_start, torch_wait, torch_launch = PContext.start, PContext.wait, api.launch_agent
    received: list[signal.Signals] = []

    def raise_if_received() -> None:
        if received:
            name = received[0].name
            raise SignalException(f"The ranks did not all end well after {name}", received[0])

    def start(ranks: PContext) -> None:
        raise_if_received()  # this is a restart
        torch_start(ranks)
        if threading.current_thread() is not threading.main_thread():
            return
        torch_handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

        def pass_on(number: int, _: FrameType | None) -> None:
            received.append(signal.Signals(number))
            for each, handler in torch_handlers.items():
                signal.signal(each, handler)
            # Only to the ranks: their DataLoader workers, in the same group, are still needed.
            for pid in ranks.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        for number in torch_handlers:
            signal.signal(number, pass_on)

    def wait(ranks: PContext, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        result = torch_wait(ranks, timeout, period)
        if result is not None and result.is_failed():
            raise_if_received()
            if _exit_codes(result.failures) == {CONFIG_ERROR_EXIT_CODE}:
                raise SystemExit(CONFIG_ERROR_EXIT_CODE)
        return result

    def launch(*args: Any, **kwargs: Any) -> Any:
        try:
            return torch_launch(*args, **kwargs)
        except ChildFailedError as error:
            if _exit_codes(error.failures) == {REPORTED_EXIT_CODE}:
                raise SystemExit(1) from None
            raise

    api.launch_agent = launch
    logging.getLogger(multiprocessing_api.__name__).addFilter(_says_more_than_ranks_have)
    PContext.start = start  # type: ignore[method-assign, assignment]
    PContext.wait = wait  # type: ignore[method-assign, assignment]


def _exit_codes(failures: Mapping[int, ProcessFailure]) -> set[int]:
    """Of the ranks that left by themselves; the launcher then ends the others with a signal."""
    return {failure.exitcode for failure in failures.values()} - _ENDED_BY_LAUNCHER


def _says_more_than_ranks_have(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    has_told = any(
        f"(exitcode: {code})" in text for code in (CONFIG_ERROR_EXIT_CODE, REPORTED_EXIT_CODE)
    )
    return not has_told and not text.startswith("Sending process")
