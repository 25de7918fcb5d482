"""A background thread prepares items ahead: in order, bounded, and ended when it is closed."""

import itertools
import threading
import time
import traceback
import weakref

import pytest

from recipe_utils.update_steps.prefetch import Prefetched


def prefetched(items, depth):
    return Prefetched(iter(items), depth, threading.Event())


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize(("num_items", "depth"), [(0, 0), (7, 0), (0, 1), (7, 1), (7, 9)])
def test_items_come_in_order_once(num_items, depth):
    with prefetched(range(num_items), depth) as items:
        assert [list(items), list(items)] == [list(range(num_items)), []]


@pytest.mark.parametrize("depth", [0, 2])
def test_an_exception_comes_in_its_turn_with_its_traceback(depth):
    def items_until_failure():
        yield from (0, 1)
        raise LookupError("no such page")

    seen = []
    with pytest.raises(LookupError, match="no such page") as raised, prefetched(items_until_failure(), depth) as items:
        seen.extend(items)
    assert seen == [0, 1]
    assert "in items_until_failure" in "".join(traceback.format_exception(raised.value))
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_no_more_than_depth_items_wait_and_one_is_being_prepared(depth):
    made = []
    num_ahead = depth + 1 if depth else 0
    with prefetched((made.append(i) for i in itertools.count()), depth) as items:
        assert wait_until(lambda: len(made) == num_ahead)
        taken = iter(items)
        for num_taken in (1, 2, 3):
            next(taken)
            assert wait_until(lambda n=num_taken: len(made) == n + num_ahead)
            time.sleep(0.1)  # time to run too far ahead
            assert len(made) == num_taken + num_ahead


@pytest.mark.parametrize("num_taken", [0, 2])
def test_closing_early_ends_the_thread_and_drops_prepared_items(num_taken):
    class Item:
        pass

    made, ended = [], []

    def endless():
        try:
            while True:
                item = Item()
                made.append(weakref.ref(item))
                yield item
        finally:
            ended.append(True)

    items = prefetched(endless(), 2)
    assert wait_until(prefetch_threads)
    for _ in itertools.islice(items, num_taken):
        pass
    assert wait_until(lambda: len(made) == num_taken + 3)
    _ = None
    items.close()
    assert not prefetch_threads()
    assert ended == [True]
    assert [ref for ref in made if ref() is not None] == []


def test_closing_ends_a_wait_for_another_rank():
    closed = threading.Event()

    def waits_for_another_rank():
        yield 0
        closed.wait()

    with Prefetched(waits_for_another_rank(), 2, closed) as items:
        assert next(iter(items)) == 0
    assert not prefetch_threads()


def test_the_time_waited_for_an_item_is_reported():
    may_start = threading.Event()

    def one_slow_item():
        may_start.wait(10)
        time.sleep(0.05)
        yield 0

    with prefetched(one_slow_item(), 1) as items:
        may_start.set()
        next(iter(items))
        assert items.wait_seconds > 0
