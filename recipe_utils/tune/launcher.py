"""Lets ``tune run --nproc_per_node`` wait for what this project's recipes do when they are asked to stop.

torchrun, which ``tune run`` starts ranks with, answers a signal by ending its ranks within 30 seconds and
reports a failure, even if all of them have saved and ended as they should.
"""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType

from torch.distributed.elastic.multiprocessing import PContext, RunProcsResult, SignalException

CONFIG_ERROR_EXIT_CODE = 2
"""Of every rank, and of the launcher, where the config cannot work."""


def wait_for_ranks() -> None:
    """Changes how this process, as a launcher, takes its first SIGTERM or SIGINT, and config errors.

    It goes to the ranks and the launcher waits for them, however long they save; if all end with exit
    code 0, so does the launcher. If one does not, the launcher ends as torchrun does at a signal, and
    never restarts them. A second signal acts as the first would have without this.

    Ranks that leave because the config cannot work are not restarted either, and the launcher adds no
    traceback to what rank 0 has said.
    """
    torch_start, torch_wait = PContext.start, PContext.wait
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
            # The ranks that have not left yet were ended with a signal.
            exit_codes = {failure.exitcode for failure in result.failures.values()}
            if exit_codes - {-signal.SIGTERM, -signal.SIGKILL} == {CONFIG_ERROR_EXIT_CODE}:
                raise SystemExit(CONFIG_ERROR_EXIT_CODE)
        return result

    PContext.start = start  # type: ignore[method-assign, assignment]
    PContext.wait = wait  # type: ignore[method-assign, assignment]
