"""Requests to stop a training, and booleans that all ranks agree on while the device computes.

Rank 1 of 2 gets SIGTERM in update step 7, and by rank 0's clock a checkpoint is due: the ranks pass (False, True) and
(True, False) to :func:`all_reduce_any`, and after update step 7 both get (True, True).
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from recipe_utils.cli.registry import USER_SIGNALS


class Stop(threading.Event):
    """Request to save a checkpoint and to stop after the update step in progress, by :meth:`set` or a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.is_agreed = False
        """True once all ranks stop after the same update step."""
        self._signals = ExitStack()

    def listen(self) -> None:
        """Sets the event on signals until :meth:`close`; see :func:`set_on_signals`."""
        self._signals.enter_context(set_on_signals(self))

    def close(self) -> None:
        """Restores the handlers of signals."""
        self._signals.close()


@contextmanager
def set_on_signals(event: threading.Event) -> Iterator[None]:
    """Sets ``event`` at the first SIGTERM or SIGINT in the block, and at any of :data:`USER_SIGNALS`.

    Restores the handlers after the block, and those of SIGTERM and SIGINT at the first of the two. The others may
    come more than once: from the scheduler and from the launcher.
    """
    first_only = signal.SIGTERM, signal.SIGINT
    # None is a handler in C, such as faulthandler's.
    outside = {n: signal.getsignal(n) or signal.SIG_DFL for n in (*first_only, *USER_SIGNALS)}

    def request(number: int, _: Any) -> None:
        event.set()
        for each in first_only if number in first_only else ():
            signal.signal(each, outside[each])

    for number in outside:
        signal.signal(number, request)
    blocked_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, USER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
        for number, handler in outside.items():
            signal.signal(number, handler)


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
