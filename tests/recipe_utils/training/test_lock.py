"""One run at a time writes to an output folder; a killed one does not lock others out."""

import os
import signal
import time

import pytest
from distributed_runs import fork_context

from recipe_utils.training.lock import HOLDER_FILE, LOCK_FILE, FolderLock, LockedError


def hold(folder, has_it, forks):
    lock = FolderLock(folder)
    if forks and os.fork() == 0:
        time.sleep(60)
    has_it.set()
    time.sleep(60)
    lock.release()


@pytest.fixture
def held_by_another(tmp_path):
    processes = []

    def start(forks=False):
        has_it = fork_context.Event()
        process = fork_context.Process(target=hold, args=(tmp_path, has_it, forks))
        process.start()
        processes.append(process)
        assert has_it.wait(60)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_the_holder_is_named(held_by_another, tmp_path):
    process = held_by_another()
    with pytest.raises(LockedError, match=rf"process {process.pid} on .*, since 20\d\d-"):
        FolderLock(tmp_path)
    with pytest.raises(LockedError):  # the failed attempt did not release it
        FolderLock(tmp_path)


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "its child lives on"])
def test_the_lock_of_a_killed_holder_is_free(forks, held_by_another, tmp_path):
    process = held_by_another(forks)
    children = os.popen(f"ps --ppid {process.pid} -o pid=").read().split()
    assert len(children) == forks
    process.kill()
    process.join()
    try:
        FolderLock(tmp_path).release()
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)


def test_files_without_a_holder_do_not_count_and_a_released_lock_leaves_none(tmp_path):
    (tmp_path / LOCK_FILE).touch()
    (tmp_path / HOLDER_FILE).write_text("process 1 on elsewhere, since 1970")
    for _ in range(2):
        lock = FolderLock(tmp_path)
        assert (tmp_path / LOCK_FILE).exists()
        lock.release()
        assert not list(tmp_path.iterdir())
