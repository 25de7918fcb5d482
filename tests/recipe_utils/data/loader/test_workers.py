"""A DataLoader worker that is killed costs time, and no sample."""

import re

import pytest
import tiny

from recipe_utils.data.loader.workers import WorkerDiedError, load_batches

SAMPLES = tiny.make_samples(24)
BATCHES = [[3, 0, 7], [], [11], [5, 5, 2, 1], [4], [9, 8], [23]]
EXPECTED = [[SAMPLES[i] for i in batch] for batch in BATCHES]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("index", [3, 5, 23])
def test_batches_come_whole_and_in_order_when_a_worker_is_killed(
    index, num_workers, tmp_path, caplog
):
    dataset = tiny.KillsItsWorker(SAMPLES, [index], tmp_path)
    assert list(load_batches(dataset, BATCHES, num_workers)) == EXPECTED
    (warning,) = caplog.messages
    assert re.match(
        r"A DataLoader worker \(pid \d+\) ended by SIGKILL; a new one loads its samples", warning
    )


def test_each_batch_may_lose_a_worker_once(tmp_path, caplog):
    dataset = tiny.KillsItsWorker(SAMPLES, [3, 11, 4], tmp_path)
    assert list(load_batches(dataset, BATCHES, num_workers=1)) == EXPECTED
    assert len(caplog.messages) == 3


@pytest.mark.parametrize(
    ("how", "said"), [("SIGKILL", "SIGKILL"), ("SIGSEGV", "SIGSEGV"), (7, "exit code 7")]
)
def test_a_sample_that_ends_every_worker_is_an_error_that_names_it_and_how(how, said, tmp_path):
    dataset = tiny.KillsItsWorker(SAMPLES, [5], folder=None, how=how)
    batches = load_batches(dataset, BATCHES, num_workers=1)
    assert [next(batches) for _ in range(3)] == EXPECTED[:3]
    with pytest.raises(
        WorkerDiedError,
        match=rf"num_workers=1: .* ended by {said} while .* only samples 5, 5, 2, 1, and",
    ):
        next(batches)


class Fails(tiny.Samples):
    def __getitem__(self, index):
        raise RuntimeError("DataLoader worker (pid 1) is what a dataset may say, too")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_dataset_raises_is_not_taken_for_a_death(num_workers, caplog):
    with pytest.raises(RuntimeError, match="is what a dataset may say, too"):
        next(load_batches(Fails(SAMPLES), BATCHES, num_workers))
    assert not caplog.messages
