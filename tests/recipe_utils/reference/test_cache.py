"""Cached log-probabilities are found again with the same context, or computed again."""

import os
import resource
import signal
import sys

import numpy as np
import pytest
from distributed_runs import fork_context, run_distributed

from recipe_utils.files import CheckpointError
from recipe_utils.parallel.process_group import new_cpu_group
from recipe_utils.reference import cache as cache_file
from recipe_utils.reference.cache import ReferenceCache, Sequences
from recipe_utils.settings.problems import ConfigError

CONTEXT = {"weights": "1f", "layout": "packed"}


def sequences_of(*numbers):
    fingerprints = tuple(number.to_bytes(15, "little") + b"\0" for number in numbers)
    return Sequences(tuple(f"pair {number}" for number in numbers), fingerprints)


def values_of(number):
    """Returns one or two values."""
    return [-number / 3, -number / 7][: 1 + number % 2]


def log_probs(*numbers):
    rows = [np.array(values_of(number)).tobytes() for number in numbers]
    return dict(zip(sequences_of(*numbers).fingerprints, rows, strict=True))


def opened(folder, context=CONTEXT, group=None):
    return ReferenceCache(folder, context, group)


def filled(folder, *numbers):
    cache = opened(folder)
    cache.add(log_probs(*numbers))
    cache.write()
    return cache


def known(cache, *numbers):
    return [number for number in numbers if cache.contains(sequences_of(number))]


def assert_found(cache, *numbers):
    assert cache.find(sequences_of(*numbers)).tolist() == [value for number in numbers for value in values_of(number)]


def test_log_probabilities_are_found_to_the_last_bit_in_any_order_and_more_than_once(tmp_path):
    numbers = [7, 3, 11, 256, 65_536, 5]
    for cache in (filled(tmp_path, *numbers), opened(tmp_path)):
        assert len(cache) == 6
        assert_found(cache, *numbers)
        assert_found(cache, 256, 5, 5, 11, 256)
        assert known(cache, 1, 3, 5, 9, 70_000) == [3, 5]
        assert cache.find(sequences_of()).shape == (0,)  # of a dummy microbatch
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 1000 + 6 * 24 + 8 * (4 * 2 + 2)


def test_an_unknown_pair_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"reference_cache_dir=.*: pair 3 is not in the cache"):
        filled(tmp_path, 1, 2).find(sequences_of(1, 3))


def test_nothing_is_found_with_another_context(tmp_path):
    filled(tmp_path, 1, 2)
    assert len(opened(tmp_path, {**CONTEXT, "layout": "padded"})) == 0
    assert known(opened(tmp_path, dict(reversed(CONTEXT.items()))), 1, 2) == [1, 2]


def test_trainings_that_share_a_file_keep_each_other_s_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file, "_SECONDS_BETWEEN_WRITES", 0.0)
    one, other = opened(tmp_path), opened(tmp_path)
    one.add(log_probs(1))
    other.add(log_probs(2))
    assert_found(opened(tmp_path), 1, 2)
    assert len(list(tmp_path.iterdir())) == 1


DAMAGES = {
    "torn": lambda data: data[:-1],
    "a row less": lambda data: data[:-36],
    "a flipped bit": lambda data: data[:40] + bytes([data[40] ^ 16]) + data[41:],
    "empty": lambda data: b"",
    "foreign": lambda data: b"{}",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_warned_of_and_computed_again(damage, tmp_path, caplog):
    filled(tmp_path, 1, 2)
    (file,) = tmp_path.iterdir()
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    cache = opened(tmp_path)
    assert len(cache) == 0
    assert f"{file}: corrupt; its log-probabilities are computed again" in caplog.text
    filled(tmp_path, 2, 1)
    assert_found(opened(tmp_path), 1, 2)


def write_and_die_before_the_rename(folder):
    cache = filled(folder, 1, 2)
    cache.add(log_probs(3))

    def die(event, _):
        if event == "os.rename":
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    cache.write()


def test_a_killed_writer_leaves_the_earlier_file(tmp_path, caplog):
    process = fork_context.Process(target=write_and_die_before_the_rename, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert_found(opened(tmp_path), 1, 2)
    assert_found(filled(tmp_path, 3), 1, 2, 3)
    assert not caplog.text


def write_with_disk_full(folder):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    cache = filled(folder, 1)
    cache.add(log_probs(2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, -1))
    with pytest.raises(ConfigError, match=r"reference_cache_dir: \[Errno 27\] File too large"):
        cache.write()
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    assert_found(opened(folder), 1)
    cache.write()
    assert_found(opened(folder), 1, 2)
    return len(list(folder.iterdir()))


def test_after_a_full_disk_the_earlier_file_is_left_and_can_be_written_later(tmp_path):
    with fork_context.Pool(1) as pool:
        assert pool.apply(write_with_disk_full, (tmp_path,)) == 1


def find_on_ranks(folder):
    cache = opened(folder, group=new_cpu_group(30))
    before = known(cache, *range(30))
    cache.add(log_probs(0, 20))
    cache.write()
    assert_found(cache, 20, 29, 0)
    return before


def test_all_ranks_find_what_the_first_one_reads(tmp_path):
    filled(tmp_path, 29)
    assert run_distributed(find_on_ranks, 3, tmp_path) == [[29]] * 3
    assert_found(opened(tmp_path), 0, 20, 29)
