"""A bounded queue filled by a background thread.

With a depth of 2 and update steps that take 10 ms to prepare and 100 ms to compute, the thread is two update steps
ahead from the third on, and the loop never waits.
"""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

from torch.profiler import record_function

T = TypeVar("T")

_END = object()


class Prefetched(Generic[T]):
    """Iterable of ``items``, which a background thread prepares ahead.

    It is a context manager; the thread ends with the ``with`` block or :meth:`close`. An exception
    of ``items`` is raised to the caller in its turn, with the traceback of the thread.

    Args:
        items: consumed in the background thread, which starts at once.
        depth: maximum number of items in the queue; one more is being prepared. 0 prepares items on
            demand in the calling thread.
        closed: set by :meth:`close`; ``items`` must check it in every wait that may not end.
    """

    def __init__(self, items: Iterator[T], depth: int, closed: threading.Event) -> None:
        self.wait_seconds = 0.0
        """Time that the last ``next`` waited [s]."""
        self._items = items
        self._queue: queue.Queue[object] = queue.Queue(maxsize=max(depth, 1))
        self._closed = closed
        self._thread: threading.Thread | None = None
        if depth > 0:
            self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while True:
            started = time.perf_counter()
            with record_function("wait for data"):
                item = next(self._items, _END) if self._thread is None else self._queue.get()
            self.wait_seconds = time.perf_counter() - started
            if item is _END or isinstance(item, BaseException):
                if self._thread is not None:
                    self._queue.put(item)  # for the next iteration; the thread has ended
                if isinstance(item, BaseException):
                    raise item
                return
            yield item  # type: ignore[misc]

    def _fill(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            self._put(_END)
        except BaseException as error:
            self._put(error)

    def _put(self, item: object) -> bool:
        """Waits until the queue has space; returns False if it was closed first."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.05)
            except queue.Full:
                continue
            return True
        return False

    def close(self) -> None:
        """Ends the thread, waits for it, and drops prepared items."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._queue = queue.Queue()
        self._queue.put(_END)
        if hasattr(self._items, "close"):
            self._items.close()

    def __enter__(self) -> "Prefetched[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
