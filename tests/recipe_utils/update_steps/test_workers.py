"""A killed DataLoader worker costs time, but no sample."""

import re
import threading

import pytest
import tiny
from distributed_runs import run_distributed
from recipe_runs import slow
from torch.utils.data import DataLoader

from recipe_utils.update_steps import workers
from recipe_utils.update_steps.prefetch import Prefetched
from recipe_utils.update_steps.workers import WorkerDiedError, load_batches

SAMPLES = tiny.make_samples(24)
BATCHES = [[3, 0, 7], [], [11], [5, 5, 2, 1], [4], [9, 8], [23]]
EXPECTED = [[SAMPLES[i] for i in batch] for batch in BATCHES]


@pytest.mark.parametrize(("indices", "num_workers"), [([5], 2), slow([23], 2), ([3, 11, 4], 1)])
def test_batches_come_whole_and_in_order_if_workers_are_killed(indices, num_workers, tmp_path, caplog):
    dataset = tiny.KillsItsWorker(SAMPLES, indices, tmp_path)
    assert list(load_batches(dataset, BATCHES, num_workers)) == EXPECTED
    assert len(caplog.messages) == len(indices)
    expected = r"A DataLoader worker \(pid \d+\) ended by SIGKILL; a new one loads its samples"
    assert all(re.match(expected, warning) for warning in caplog.messages)


@pytest.mark.parametrize(("how", "shown"), [("SIGKILL", "SIGKILL"), slow(7, "exit code 7")])
def test_a_sample_that_ends_every_worker_is_an_error_that_names_it_and_how(how, shown):
    dataset = tiny.KillsItsWorker(SAMPLES, [5], folder=None, how=how)
    batches = load_batches(dataset, BATCHES, num_workers=1)
    assert [next(batches) for _ in range(3)] == EXPECTED[:3]
    with pytest.raises(
        WorkerDiedError, match=rf"num_workers=1: .* ended by {shown} while .* only samples 5, 5, 2, 1, and"
    ):
        next(batches)


class WaitsForTheFirstDeath(DataLoader):
    is_first = True

    def __iter__(self):
        loading = super().__iter__()
        if WaitsForTheFirstDeath.is_first:
            WaitsForTheFirstDeath.is_first = False
            loading._workers[0].join(30)
        return loading


def batches_of_a_worker_that_dies_at_once(folder):
    dataset = tiny.KillsItsWorker(SAMPLES, [3], folder)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(workers, "DataLoader", WaitsForTheFirstDeath)
        with Prefetched(load_batches(dataset, BATCHES, num_workers=1), 2, threading.Event()) as prefetched:
            return list(prefetched)


@pytest.mark.slow  # PyTorch looks for dead workers every 5 s
def test_a_worker_that_dies_at_once_is_replaced(tmp_path):
    assert run_distributed(batches_of_a_worker_that_dies_at_once, 1, tmp_path) == [EXPECTED]


class Fails(tiny.Samples):
    def __getitem__(self, index):
        raise RuntimeError("DataLoader worker (pid 1) is what a dataset may say, too")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_dataset_raises_is_not_taken_for_a_death(num_workers, caplog):
    with pytest.raises(RuntimeError, match="is what a dataset may say, too"):
        next(load_batches(Fails(SAMPLES), BATCHES, num_workers))
    assert not caplog.messages
