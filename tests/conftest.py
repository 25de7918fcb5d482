import atexit
import contextlib
import gc
import os
import re
import shutil
import signal
import site
import sys
import tempfile
import zlib
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

SUPPORT = str(Path(__file__).parent / "support")
# The fork server and `tune run` start fresh interpreters, which must find the tests' components.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH", "")]))
# Threads slow down models this small. Set before torch is imported, and for the processes that tests
# start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A run has home, caches (with proofs of decoders, which are made once) and temporary files of its own, which its workers
# and the processes that tests start inherit: nothing of a user or of an earlier run is read, and nothing is left.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps each `tmp_path` for a while
    os.environ.setdefault("PYTHONUSERBASE", site.getuserbase())  # packages of `pip install --user`
    for name in [each for each in os.environ if re.search("_CACHE|^XDG_|^(HF|TORCH|TRITON)_HOME$|MPLCONFIGDIR", each)]:
        del os.environ[name]
    tempfile.tempdir = tempfile.mkdtemp(prefix="update_step_tests_")
    os.environ |= dict.fromkeys(("HOME", "TMPDIR", "HYPOTHESIS_STORAGE_DIRECTORY"), tempfile.tempdir)
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
sys.path.insert(0, SUPPORT)
gc.set_threshold(200_000, 20, 20)  # as support/sitecustomize.py does for the processes that tests start
# The fork server imports the test modules, too. At the end of the path, because the checkout's recipes/
# must not hide torchtune's package of that name.
sys.path.append(str(Path(__file__).parents[1]))

# A shell without job control starts background commands with SIGINT ignored, which programs would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import distributed_runs  # noqa: E402

# No test is timed: the machine may be busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_xdist_auto_num_workers(config):
    """Returns the number of workers: none for files or single tests, because workers start too slowly.

    Otherwise one worker more than there are cores, because many tests wait for processes of their own; at
    most 8, because each holds the imports twice.
    """
    files = [arg for arg in config.args if not Path(arg.split("::")[0]).is_dir()]
    return 0 if files else min(len(os.sched_getaffinity(0)) + 1, 8)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")
    parser.addoption("--part", help="I/N: with --all, of the slow tests those of part I (mod N), drawn by their names")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _skipped_for_want_of_hardware_only((yield), getattr(item, "path", ""))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_make_collect_report(collector):
    """Starts the fork server beside the imports of the tests, which take as long.

    From here on output is captured: what ranks print is shown with a test that fails.
    """
    if isinstance(collector, pytest.File):
        distributed_runs.start_fork_server()
    return _skipped_for_want_of_hardware_only((yield), collector.path)


def _skipped_for_want_of_hardware_only(report, path):
    """Turns a skip for any other reason into a failure, also for packages, which ``[test]`` installs."""
    if report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not re.search(r"CUDA|Linux|torch 2\.13", reason):
            report.outcome = "failed"
            report.longrepr = f"{path}: skipped for another reason than the machine: {reason}"
    return report


def pytest_collection_modifyitems(config, items):
    """Deselects slow tests without ``--all``, unless tests are named one by one.

    The programs as users start them take longest and go first, the smallest parts fill up the end.
    """
    import torch
    from torch.torch_version import TorchVersion

    if not (config.getoption("--all") or any("::" in argument for argument in config.args)):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
    elif part := config.getoption("--part"):
        index, num_parts = map(int, part.split("/"))
        others = {
            item
            for item in items
            if item.get_closest_marker("slow") and (zlib.crc32(item.nodeid.encode()) - index) % num_parts
        }
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    if TorchVersion(torch.__version__) < "2.13":
        for item in items:
            params = getattr(getattr(item, "callspec", None), "params", "")
            if re.search("pipeline|stage|pp-", f"{item.nodeid} {params}"):
                item.add_marker(pytest.mark.skip(reason="pipeline stages need torch 2.13"))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: len(item.path.parts))


def pytest_collection_finish(session):
    """Keeps the garbage collector from what was imported: it takes a fifth of a second each time."""
    gc.collect()
    gc.freeze()


class OneTestOrOneModule(LoadScopeScheduling):
    """Gives a worker a test at a time, or all tests of a file that share a fixture of their module."""

    def _split_scope(self, nodeid):
        file = nodeid.split("::")[0]
        return file if makes_something_for_its_module(self.config.rootpath / file) else nodeid

    def remove_node(self, node):
        """Gives the others what a crashed worker has not run.

        xdist 3.8 also gives them the scopes that it has finished: empty ones, at which they wait forever.
        """
        work = self.assigned_work[node]
        for scope in [scope for scope, tests in work.items() if all(tests.values())]:
            del work[scope]
        return super().remove_node(node)


@cache
def makes_something_for_its_module(file):
    return 'scope="module"' in file.read_text()


def pytest_xdist_make_scheduler(config, log):
    # Not its --dist=loadgroup, whose groups xdist 3.8 loses under pytest 9.2.
    return OneTestOrOneModule(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture(autouse=True)
def process_is_restored():
    """Ends a process group that a refused recipe leaves, and removes the handler of a DataLoader.

    PyTorch's handler of SIGCHLD raises in the main thread when a worker of any thread dies. Recipes block signals.
    """
    handler, blocked = (signal.getsignal(signal.SIGCHLD), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    signal.signal(signal.SIGCHLD, handler)
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(scope="session")
def weights_folder(tmp_path_factory):
    """Returns a folder with the tiny model's weights; configs of :func:`recipe_runs.tiny_config` use it."""
    import recipe_runs

    folder = tmp_path_factory.mktemp("tiny")
    recipe_runs.save_weights(folder)
    return folder


def config_maker(weights_folder, folder, kind="tiny_config"):
    import recipe_runs

    def make(**changes):
        config = getattr(recipe_runs, kind)(weights_folder, **changes)
        config["output_dir"] = config["checkpointer"]["output_dir"] = str(folder / "out")
        return config

    return make


@pytest.fixture
def tiny_config(weights_folder, tmp_path):
    """Makes tiny configs whose output goes to this test's own folder."""
    return config_maker(weights_folder, tmp_path)


@pytest.fixture
def tiny_dpo_config(weights_folder, tmp_path):
    """Makes such configs for preference tuning."""
    return config_maker(weights_folder, tmp_path, "tiny_dpo_config")


@pytest.fixture
def tiny_kd_config(weights_folder, tmp_path):
    """Makes such configs for distillation."""
    return config_maker(weights_folder, tmp_path, "tiny_kd_config")


@pytest.fixture(params=["tiny_config", "tiny_dpo_config", "tiny_kd_config"])
def recipe_and_config(request, weights_folder, tmp_path):
    """Returns each recipe of texts, and a maker of its tiny configs."""
    from recipe_runs import DPO, KD, SFT

    recipes = {"tiny_config": SFT, "tiny_dpo_config": DPO, "tiny_kd_config": KD}
    return recipes[request.param], config_maker(weights_folder, tmp_path, request.param)


@pytest.fixture(scope="module")
def module_config(weights_folder, tmp_path_factory):
    """Makes configs as :func:`tiny_config` for a whole module, with a folder of its own."""
    return config_maker(weights_folder, tmp_path_factory.mktemp("module"))


@pytest.fixture
def one_process():
    """Yields the ranks of a single process."""
    from recipe_utils.parallel.ranks import join_ranks

    ranks = join_ranks("cpu")
    yield ranks
    ranks.leave()


@pytest.fixture
def started():
    """Yields a list for the launchers that a test starts; ends those that still run after the test."""
    from programs import children_of

    processes = []
    yield processes
    for process in processes:
        if process.poll() is None:  # or its number may be another's by now
            for pid in [*children_of(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def in_float64():
    """Computes in double precision, from seed 0."""
    import tiny
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    with tiny.float64_throughout():
        yield
    torch.set_default_dtype(torch.float32)
