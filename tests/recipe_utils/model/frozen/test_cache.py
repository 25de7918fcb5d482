"""Cached outputs are found again by any training with the same context, or computed again."""

import gc
import os
import re
import resource
import signal
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from distributed_runs import fork_context, run_distributed
from safetensors.torch import load_file, save_file

from recipe_utils.files import CheckpointError
from recipe_utils.model.frozen.cache import OutputCache
from recipe_utils.parallel.process_group import new_cpu_group

CONTEXT = {"weights": "1f", "kind": "top_k"}
WIDTH = 3
MIB = 1 << 20


def key(number):
    return number.to_bytes(15, "little") + b"\0"


def num_rows(number):
    return number % 4  # some have none


def values(*numbers):
    """Returns rows of samples one after the other, distinct in each place."""
    rows = [number + torch.arange(num_rows(number)) / 8 for number in numbers]
    column = torch.cat([torch.zeros(0), *rows])
    return {
        "tokens": (1000 * column[:, None] + torch.arange(WIDTH)).int(),
        "log_probs": (-column[:, None] - torch.arange(WIDTH)).bfloat16(),
        "rest": column.double() / 3,
    }


def add(cache, *numbers):
    keys = [key(number) for number in numbers]
    cache.add(keys, [num_rows(number) for number in numbers], values(*numbers))


def added(cache, *numbers):
    add(cache, *numbers)
    cache.write()
    cache.reload()
    return cache


def filled(folder, *numbers):
    return added(opened(folder), *numbers)


def opened(folder, context=CONTEXT, group=None, **options):
    return OutputCache(folder, "teacher_cache_dir", context, group, **options)


def known(cache, *numbers):
    return [number for number in numbers if all(cache.contains([key(number)]))]


def assert_found(cache, *numbers):
    found = cache.find([key(number) for number in numbers])
    wanted = values(*numbers)
    assert found.keys() == wanted.keys()
    for name, rows in wanted.items():
        assert found[name].dtype == rows.dtype
        assert torch.equal(found[name], rows), name


def test_outputs_are_found_to_the_last_bit_in_any_order_and_more_than_once(tmp_path):
    numbers = [7, 3, 11, 256, 65_536, 5]
    for cache in (filled(tmp_path, *numbers), opened(tmp_path)):
        assert len(cache) == 6
        assert_found(cache, *numbers)
        assert_found(cache, 256, 5, 5, 11, 256)
        assert known(cache, 1, 3, 5, 9, 70_000) == [3, 5]


def test_the_cache_shares_no_memory_with_its_callers(tmp_path):
    cache, given = opened(tmp_path), values(3)
    cache.add([key(3)], [3], given)
    given["rest"].zero_()
    added(cache).find([key(3)])["rest"].zero_()
    assert_found(cache, 3)


def test_samples_without_rows_and_no_samples_have_values_of_no_rows(tmp_path):
    for cache in (filled(tmp_path / "few", 4, 8), filled(tmp_path / "more", 4, 5, 8)):
        for numbers in ([], [4], [8, 4, 4]):
            assert_found(cache, *numbers)
    empty = filled(tmp_path / "new")
    assert empty.find([]) == {}
    assert known(empty, 1, 2) == list((tmp_path / "new").iterdir()) == []


def test_an_unknown_sample_is_refused(tmp_path):
    cache = filled(tmp_path, 1, 2)
    with pytest.raises(KeyError) as error:
        cache.find([key(1), key(3)])
    assert error.value.args == (1,)


def test_known_outputs_are_not_written_again(tmp_path):
    cache = opened(tmp_path)
    for _ in range(3):
        add(cache, 1)
        cache.write()
    added(cache, 1)
    filled(tmp_path, 1)
    assert len(list(tmp_path.iterdir())) == 1


def test_parts_are_written_at_their_maximum_size(tmp_path):
    cache = opened(tmp_path, max_part_bytes=2 * MIB)
    for number in range(1, 11):
        cache.add([key(number)], [1], {"hidden": torch.full((1, MIB), number, dtype=torch.uint8)})
    assert len(list(tmp_path.iterdir())) == 3
    cache.write()
    cache.reload()
    assert len(list(tmp_path.iterdir())) == 4
    assert cache.find([key(n) for n in (10, 1, 5)])["hidden"][:, -1].tolist() == [10, 1, 5]


def test_parts_are_written_at_their_maximum_age(tmp_path):
    cache = opened(tmp_path, max_seconds=0.0)
    add(cache, 1)
    add(cache, 2)
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_found_with_another_context(tmp_path):
    filled(tmp_path, 1, 2)
    other = opened(tmp_path, {**CONTEXT, "kind": "hidden"})
    assert len(other) == 0
    sample = {"tokens": [1, 2], "labels": [2, 3]}
    assert other.key_of(sample) != opened(tmp_path).key_of(sample)
    assert known(opened(tmp_path, dict(reversed(CONTEXT.items()))), 1, 2) == [1, 2]


def test_a_key_depends_on_all_numbers_of_a_sample_and_not_on_their_container(tmp_path):
    cache = opened(tmp_path)
    sample = {"tokens": [1, 2, 3], "labels": [-100, 2, 3]}
    own = cache.key_of(sample)
    assert len(own) == 16
    for as_array in (torch.tensor, np.array):
        assert cache.key_of({name: as_array(numbers) for name, numbers in sample.items()}) == own
    positions = {"seq_lens": torch.tensor([2, 1]), "input_pos": torch.tensor([0, 1, 0])}
    others = [
        {**sample, "tokens": [1, 2, 4]},
        {**sample, "labels": [-100, 2, 4]},
        {"tokens": [1, 2], "labels": [3, -100, 2, 3]},
        {**sample, **positions},
        {**sample, "seq_lens": [2, 1]},
        {**sample, "input_pos": [2, 1]},
        {**sample, **positions, "seq_lens": [1, 2]},
    ]
    assert len({own, *map(cache.key_of, others)}) == len(others) + 1


# ---- Damage ------------------------------------------------------------------------------------------


def rewrite(file, **changes):
    save_file({**load_file(file), **changes}, file)


def replace_in(file, old, new):
    file.write_bytes(file.read_bytes().replace(old, new, 1))


def tear(file):
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES = {
    "torn": tear,
    "empty": lambda file: file.write_bytes(b""),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "another key": lambda file: rewrite(file, keys=load_file(file)["keys"].flip(1)),
    "other rows": lambda file: rewrite(file, num_rows=load_file(file)["num_rows"].flip(0)),
    "another dtype": lambda file: replace_in(file, b'"dtype":"BF16"', b'"dtype":"F16" '),
    "foreign": lambda file: save_file({"weight": torch.zeros(3)}, file),
    "keys of another dtype": lambda file: rewrite(file, keys=torch.zeros(2, 16).bfloat16()),
    "a shorter column": lambda file: rewrite(
        file, **{"values.rest": load_file(file)["values.rest"][:-1]}
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_skipped_once_and_computed_again(damage, tmp_path, caplog):
    filled(tmp_path, 1, 2)
    (file,) = tmp_path.iterdir()
    DAMAGES[damage](file)
    filled(tmp_path, 3)
    caplog.clear()
    cache = opened(tmp_path)
    assert known(cache, 1, 2, 3) == [3]
    assert_found(added(cache, 2, 1), 1, 2, 3)
    assert caplog.text.count("skipped, its outputs are computed again") == 1
    assert str(file) in caplog.text


def test_a_part_with_other_columns_than_the_others_is_skipped(tmp_path, caplog):
    for number, columns in ((1, values(1)), (2, {"hidden": torch.zeros(2, 5)})):
        cache = opened(tmp_path / str(number))
        cache.add([key(number)], [len(next(iter(columns.values())))], columns)
        cache.write()
        for file in (tmp_path / str(number)).iterdir():
            file.rename(tmp_path / file.name)
    assert len(opened(tmp_path)) == 1
    assert "it contains other outputs than other parts" in caplog.text


@pytest.mark.parametrize("already_open", [False, True])
def test_a_flipped_bit_in_a_sample_s_values_is_found_when_they_are_read(already_open, tmp_path):
    cache = filled(tmp_path, 1, 2, 3)
    (file,) = tmp_path.iterdir()
    wanted = values(2)["rest"].numpy().tobytes()
    place = file.read_bytes().index(wanted) + 5
    with file.open("r+b") as damaged:  # in place: the file stays the one that is open
        damaged.seek(place)
        damaged.write(bytes([wanted[5] ^ 16]))
    if not already_open:
        cache = opened(tmp_path)
    assert_found(cache, 1, 3)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(file))}: .*; delete the file"):
        cache.find([key(3), key(2)])
    file.unlink()
    assert len(opened(tmp_path)) == 0


# ---- Writers that die, and full disks ----------------------------------------------------------------


def write_and_die_before_the_rename(folder):
    cache = filled(folder, 1, 2)
    add(cache, 3)

    def die(event, _):
        if event == "os.rename":
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    cache.write()


def test_a_killed_writer_leaves_earlier_parts_and_an_unfinished_one(tmp_path, caplog):
    process = fork_context.Process(target=write_and_die_before_the_rename, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    (unfinished,) = tmp_path.glob(".*.unfinished")
    cache = opened(tmp_path)
    assert len(cache) == 2
    assert_found(added(cache, 3), 3, 1, 2)
    assert not caplog.text
    # It might be another training's, so it stays.
    assert unfinished.exists()


def write_with_disk_full(folder):
    cache = filled(folder, 1)
    add(cache, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, -1))
    with pytest.raises(OSError, match=f"File too large: '{folder}/"):
        cache.write()
    assert len(list(folder.iterdir())) == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    assert_found(added(cache), 1, 2)
    return len(list(folder.iterdir()))


def test_after_a_full_disk_no_part_is_left_and_the_outputs_can_be_written_later(tmp_path):
    with fork_context.Pool(1) as pool:
        assert pool.apply(write_with_disk_full, (tmp_path,)) == 2


# ---- Ranks, and memory -------------------------------------------------------------------------------


def add_on_ranks(folder):
    cache = opened(folder, group=new_cpu_group(30))
    rank = torch.distributed.get_rank()
    before = known(cache, *range(30))
    if rank != 1:  # one has nothing new
        add(cache, rank, 10 + rank, 20)
    cache.write()
    cache.reload()
    numbers = known(cache, *range(30))
    assert_found(cache, *reversed(numbers))
    return before, numbers


def test_all_ranks_find_outputs_of_all_and_skip_the_same_damaged_parts(tmp_path):
    filled(tmp_path, 28)
    (file,) = tmp_path.iterdir()
    tear(file)
    filled(tmp_path, 29)
    for before, after in run_distributed(add_on_ranks, 3, tmp_path):
        assert before == [29]
        assert after == [0, 2, 10, 12, 20, 29]
    assert len(list(tmp_path.iterdir())) == 4


def test_the_index_has_no_object_per_sample(tmp_path):
    num = 20_000
    cache = opened(tmp_path)
    cache.add([key(number) for number in range(num)], [1] * num, {"x": torch.zeros(num, 1)})
    cache.write()
    tracemalloc.start()
    cache = opened(tmp_path)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(cache) == num
    assert num_bytes < 50 * num


def anonymous_bytes():
    """Returns memory of this process that is not mapped from files."""
    gc.collect()
    with open("/proc/self/smaps_rollup") as facts:
        (line,) = [line for line in facts if line.startswith("Anonymous:")]
    return int(line.split()[1]) * 1024


def memory_of_reads(folder):
    """Returns bytes in memory for a few samples, and for all."""
    torch.zeros(1).clone()
    before = anonymous_bytes()
    cache = opened(folder)
    for number in (5, 50, 99):
        assert cache.find([key(number)])["hidden"][0, 0] == number
    few = anonymous_bytes() - before
    everything = cache.find([key(number) for number in range(100)])
    return few, anonymous_bytes() - before, everything["hidden"].nbytes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")
def test_a_part_of_100_mb_is_not_loaded_to_read_a_few_samples(tmp_path):
    cache = opened(tmp_path, max_part_bytes=200 * MIB)
    for number in range(100):
        rows = torch.full((16, MIB // 16), number, dtype=torch.uint8)
        cache.add([key(number)], [16], {"hidden": rows})
    cache.write()
    assert len(list(tmp_path.iterdir())) == 1
    with fork_context.Pool(1) as pool:  # a process without freed memory that it could use again
        few, everything, num_bytes = pool.apply(memory_of_reads, (tmp_path,))
    assert num_bytes == 100 * MIB
    assert few < 5 * MIB
    assert 100 * MIB <= everything < 110 * MIB
