"""A bounded queue filled by a background thread."""

import queue
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

_END = object()


class Prefetched(Generic[T]):
    """Iterates over ``items`` while a background thread prepares the next ones.

    Use it as a context manager, or call :meth:`close`: the thread ends with the ``with`` block,
    however that is left. An exception raised by ``items`` is raised to the caller in its turn, with
    the traceback of the thread.

    Args:
        items: consumed in the background thread, which starts at once.
        depth: how many items may wait in the queue; one more is in the making. 0 prepares each item
            in the calling thread when it is asked for.
        closed: set by :meth:`close`; share it with ``items`` where these can wait for long.
    """

    def __init__(self, items: Iterator[T], depth: int, closed: threading.Event) -> None:
        self.wait_seconds = 0.0
        """How long the last ``next`` waited for its item."""
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
            item = next(self._items, _END) if self._thread is None else self._queue.get()
            self.wait_seconds = time.perf_counter() - started
            if item is _END or isinstance(item, _Raised):
                if self._thread is not None:
                    self._queue.put(item)  # for whoever iterates again; the thread puts no more
                if isinstance(item, _Raised):
                    raise item.error
                return
            yield item  # type: ignore[misc]

    def _fill(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            self._put(_END)
        except BaseException as error:
            self._put(_Raised(error))

    def _put(self, item: object) -> bool:
        """Waits for room in the queue; False when the queue was closed meanwhile."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.05)
            except queue.Full:
                continue
            return True
        return False

    def close(self) -> None:
        """Ends the thread and drops what was prepared; returns once the thread is gone.

        Waits for the item in the making, so ``items`` must look at ``closed`` while it waits for
        anything that may not come.
        """
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._queue = queue.Queue()  # lets go of what was prepared
        self._queue.put(_END)
        if hasattr(self._items, "close"):
            self._items.close()

    def __enter__(self) -> "Prefetched[T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error
