"""A background thread prepares items ahead: in order, bounded, and gone when it is closed."""

import itertools
import threading
import time
import traceback
import weakref

import pytest

from recipe_utils.data.loader.prefetch import Prefetched


def prefetched(items, depth):
    return Prefetched(iter(items), depth, threading.Event())


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 9])
@pytest.mark.parametrize("num_items", [0, 7])
def test_items_come_in_order_once(num_items, depth):
    with prefetched(range(num_items), depth) as items:
        assert [list(items), list(items)] == [list(range(num_items)), []]


@pytest.mark.parametrize("depth", [0, 2])
def test_an_exception_comes_in_its_turn_with_the_traceback_of_where_it_was_raised(depth):
    def fail_deep_inside():
        raise LookupError("no such page")

    def items_until_failure():
        yield 0
        yield 1
        fail_deep_inside()

    seen = []
    with (
        pytest.raises(LookupError, match="no such page") as raised,
        prefetched(items_until_failure(), depth) as items,
    ):
        seen.extend(items)  # what came before the exception stays
    assert seen == [0, 1]
    text = "".join(traceback.format_exception(raised.value))
    assert "in fail_deep_inside" in text
    assert "in items_until_failure" in text
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_items_wait_and_one_is_in_the_making(depth):
    made = []

    def items_made():
        for i in itertools.count():
            made.append(i)
            yield i

    with prefetched(items_made(), depth) as items:
        assert wait_until(lambda: len(made) == depth + 1)
        taken = iter(items)
        for num_taken in (1, 2, 3):
            next(taken)
            assert wait_until(lambda n=num_taken: len(made) == n + depth + 1)
            time.sleep(0.1)  # a chance to run too far ahead
            assert len(made) == num_taken + depth + 1


def test_depth_0_makes_an_item_when_it_is_asked_for():
    made = []
    with prefetched((made.append(i) for i in range(3)), 0) as items:
        assert not made
        next(iter(items))
        assert made == [0]


@pytest.mark.parametrize("num_taken", [0, 2])
def test_closing_early_leaves_no_thread_and_ends_the_items(num_taken):
    ended = []

    def endless():
        try:
            yield from itertools.count()
        finally:
            ended.append(True)

    with prefetched(endless(), 2) as items:
        assert wait_until(prefetch_threads)
        for _ in itertools.islice(items, num_taken):
            pass
    assert not prefetch_threads()
    assert ended == [True]


def test_closing_does_not_wait_for_what_never_comes():
    closed = threading.Event()

    def waits_for_another_rank():
        yield 0
        closed.wait()

    with Prefetched(waits_for_another_rank(), 2, closed) as items:
        assert next(iter(items)) == 0
    assert not prefetch_threads()


def test_closing_lets_go_of_what_was_prepared():
    class Item:
        pass

    made = []

    def items_made():
        while True:
            item = Item()
            made.append(weakref.ref(item))
            yield item

    items = prefetched(items_made(), 2)
    assert wait_until(lambda: len(made) == 3)
    items.close()
    assert [ref for ref in made if ref() is not None] == []
    del items  # until here


def test_the_time_waited_for_an_item_is_reported():
    asked = threading.Event()

    def one_item_after_it_is_asked_for():
        asked.wait(10)
        time.sleep(0.05)
        yield 0

    with prefetched(one_item_after_it_is_asked_for(), 1) as items:
        asked.set()
        next(iter(items))
        assert items.wait_seconds > 0
