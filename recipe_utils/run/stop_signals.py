"""Asks a training to stop when the system or the user wants the process to end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def set_on_signals(event: threading.Event) -> Iterator[None]:
    """Sets ``event`` at the first SIGTERM or SIGINT of the block; a second one acts as it would outside.

    To be called in the main thread, where alone Python lets signals be handled.
    """
    outside = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in outside.items():
            signal.signal(number, handler)

    def request(_: int, __: Any) -> None:
        event.set()
        restore()

    for number in outside:
        signal.signal(number, request)
    try:
        yield
    finally:
        restore()
