"""One run at a time writes to an output folder, which all ranks share; a killed one does not lock others out."""

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import yaml
from distributed_runs import fork_context, run_distributed
from programs import lines_on, tune_run_here
from recipe_runs import SFT, run_recipe, slow

from recipe_utils.settings.problems import ConfigError
from recipe_utils.training import lock
from recipe_utils.training.lock import HOLDER_FILE, LOCK_FILE, FolderLock, LockedError


def hold(folder, has_it, forks):
    held = FolderLock(folder)
    if forks and os.fork() == 0:
        time.sleep(60)
    has_it.set()
    time.sleep(60)
    held.release()


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
        held = FolderLock(tmp_path)
        assert (tmp_path / LOCK_FILE).exists()
        held.release()
        assert not list(tmp_path.iterdir())


# ---- What a save needs is tried at the start ----------------------------------------------------------


def refused(operation, of_folders_only, number):
    """Returns a function of the operating system as a mount of a bucket has it."""
    function = getattr(os, operation)

    def call(source, *others, **given):
        if os.path.isdir(source) or not of_folders_only:
            raise OSError(number, os.strerror(number), str(source))
        return function(source, *others, **given)

    return call


@pytest.mark.parametrize(
    ("operation", "of_folders_only", "number"),
    [("rename", True, errno.EMFILE), ("rename", True, errno.ENOSYS), ("replace", False, errno.ENOSYS)],
    ids=["gcsfuse", "S3", "S3 files"],
)
def test_a_mount_that_cannot_rename_is_refused_at_the_start(
    operation, of_folders_only, number, tiny_config, tmp_path, monkeypatch
):
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(tiny_config(save_every_n_steps=1)))
    monkeypatch.setattr(os, operation, refused(operation, of_folders_only, number))
    code, screen = tune_run_here(SFT, "my.yaml", cwd=tmp_path)
    text = (
        f"  - output_dir={tmp_path}/out: a folder with a file cannot be made and renamed there ({os.strerror(number)})"
    )
    assert code == 2, screen
    assert lines_on(screen)[-1].startswith(text)
    assert not list((tmp_path / "out").iterdir())


def show(found, shown):
    """Lets a node see a new folder of another late, as NFS does; only what begins with ``start_``."""
    while not (paths := list(found.glob(f"start_{'?' * 32}.tmp"))):
        time.sleep(0.01)
    time.sleep(1)
    (shown / paths[0].name).symlink_to(paths[0])


def start_on_a_node(config, tmp_path, is_late):
    """Starts with a folder that each rank has for itself, because it is relative."""
    folders = [tmp_path / str(rank) / "out" for rank in range(2)]
    rank = int(os.environ["RANK"])
    os.chdir(folders[rank].parent)
    config = {**config, "output_dir": "out", "checkpointer": {**config["checkpointer"], "output_dir": "out"}}
    if rank and is_late:
        folders[1].mkdir()
        threading.Thread(target=show, args=folders, daemon=True).start()
    if is_late:
        return len(run_recipe(config))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(lock, "_TRIES", 10)
        with pytest.raises(ConfigError) as error:
            run_recipe(config)
    return str(error.value)


@pytest.mark.parametrize("is_late", [False, slow(True)])
def test_ranks_must_share_the_folder_but_may_see_it_late(is_late, tiny_config, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    config = tiny_config(max_steps_per_epoch=1)
    if not is_late:
        config["checkpointer"]["checkpoint_dir"] = "/nowhere"  # refused later
    found = run_distributed(start_on_a_node, 2, config, tmp_path, is_late)
    if is_late:
        assert found[0] == 1  # update step
        return
    host = os.uname().nodename
    text = f"output_dir=out: rank 1 ({host}:{tmp_path}/1/out) cannot find what rank 0 ({host}:{tmp_path}/0/out)"
    assert text in found[0]
    assert "set it to a folder that all nodes share" in found[1]
    assert not [path for rank in "01" for path in Path(tmp_path, rank, "out").iterdir()]
