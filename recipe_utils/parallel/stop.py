"""Requests to stop a training, and booleans that all ranks agree on while the device computes.

Rank 1 of 2 gets SIGTERM in update step 7, and by rank 0's clock a checkpoint is due: the ranks pass (False, True) and
(True, False) to :func:`all_reduce_any`, and after update step 7 both get (True, True).
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from recipe_utils.cli.exit_codes import USER_SIGNALS

_FIRST_ONLY = signal.SIGTERM, signal.SIGINT


class Stop(threading.Event):
    """Request to save a checkpoint and to stop after the update step in progress, by :meth:`set` or a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.is_agreed = False
        """True once all ranks stop after the same update step."""
        self._handlers_before: dict[signal.Signals, Any] = {}
        self._blocked_before: set[Any] = set()

    def listen(self) -> None:
        """Sets the event at a signal until :meth:`close`: SIGTERM, SIGINT, SIGHUP and :data:`USER_SIGNALS`. Once.

        The first of SIGTERM and SIGINT restores the handlers of both. The others may come more than once: from the
        scheduler or terminal, and from the launcher. SIGHUP stays ignored where it is, as ``nohup`` does.
        """
        if self._handlers_before:
            return
        hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        numbers = (*_FIRST_ONLY, *USER_SIGNALS, *hangup)
        # None is a handler in C, such as faulthandler's.
        self._handlers_before = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}
        for number in numbers:
            signal.signal(number, self._request)
        self._blocked_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, USER_SIGNALS)

    def _request(self, number: int, _: Any) -> None:
        self.set()
        for first in _FIRST_ONLY if number in _FIRST_ONLY else ():
            signal.signal(first, self._handlers_before[first])

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Lets no second signal end the process in the block, or until :meth:`close` if all ranks stop after it."""
        numbers = _FIRST_ONLY if self._handlers_before else ()
        handlers = [signal.signal(number, lambda *_: self.set()) for number in numbers]
        yield
        for number, handler in zip(numbers, handlers, strict=True) if not self.is_agreed else ():
            signal.signal(number, handler)

    def close(self) -> None:
        """Restores the handlers of signals."""
        if self._handlers_before:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked_before)
        while self._handlers_before:
            signal.signal(*self._handlers_before.popitem())


def all_reduce_any(mine: Sequence[bool], group: dist.ProcessGroup) -> Callable[[], list[bool]]:
    """Starts an all-reduce of booleans [n].

    The function that it returns waits for it, and returns [n]: True where any rank passed True.
    """
    if dist.get_world_size(group) == 1:
        return lambda: list(mine)
    flags = torch.tensor(mine, dtype=torch.uint8)
    work = dist.all_reduce(flags, dist.ReduceOp.MAX, group, async_op=True)
    assert work is not None

    def wait() -> list[bool]:
        work.wait()
        return [bool(flag) for flag in flags.tolist()]

    return wait
