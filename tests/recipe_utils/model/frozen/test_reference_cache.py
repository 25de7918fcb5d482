"""What a cache holds is found again by any training with the same context, whole or not at all."""

import numpy as np
import pytest
import torch
from distributed_runs import run_distributed
from safetensors.torch import load_file, save_file

from recipe_utils.model.frozen.reference_cache import ReferenceCache
from recipe_utils.parallel.process_group import new_cpu_group

CONTEXT = {"weights": "1f", "dtype": "torch.float32"}


def key(number):
    return number.to_bytes(15, "little") + b"\0"  # a key may well end with zeros


def values(*numbers):
    return torch.tensor(
        [[-1.0 / 3 - n for n in numbers], [-2.5 * n for n in numbers]], dtype=torch.float64
    )


def filled(folder, numbers, context=CONTEXT):
    cache = ReferenceCache(folder, context, None)
    cache.add([key(n) for n in numbers], values(*numbers))
    cache.share()
    return cache


def known(cache, numbers):
    found = cache.find([key(n) for n in numbers])
    return [n for n, value in zip(numbers, found[0], strict=True) if not value.isnan()]


def test_what_was_added_is_found_to_the_last_digit_in_any_order(tmp_path):
    numbers = [7, 3, 11, 256, 65_536, 5]
    for cache in (filled(tmp_path, numbers), ReferenceCache(tmp_path, CONTEXT, None)):
        assert len(cache) == 6
        assert torch.equal(cache.find([key(n) for n in sorted(numbers)]), values(*sorted(numbers)))
        assert known(cache, [1, 3, 5, 9, 70_000]) == [3, 5]
        assert cache.find([]).shape == (2, 0)


def test_nothing_is_found_in_an_empty_one(tmp_path):
    assert known(ReferenceCache(tmp_path / "new", CONTEXT, None), [1, 2]) == []


def test_what_was_not_shared_yet_is_not_found(tmp_path):
    cache = filled(tmp_path, [1])
    cache.add([key(2)], values(2))
    assert known(cache, [1, 2]) == [1]
    cache.share()
    assert known(cache, [1, 2]) == [1, 2]


def test_each_training_has_one_file_of_what_it_computed(tmp_path):
    first = filled(tmp_path, [1, 2])
    second = filled(tmp_path, [3])
    first.add([key(4)], values(4))
    first.share()
    first.share()  # nothing new
    sizes = sorted(len(load_file(file)["keys"]) for file in tmp_path.iterdir())
    assert sizes == [1, 3]
    assert known(second, [1, 2, 3, 4]) == [1, 2, 3]
    assert known(ReferenceCache(tmp_path, CONTEXT, None), [1, 2, 3, 4]) == [1, 2, 3, 4]


def test_of_another_context_nothing_is_found(tmp_path):
    filled(tmp_path, [1, 2])
    assert len(ReferenceCache(tmp_path, {**CONTEXT, "dtype": "torch.bfloat16"}, None)) == 0


def wrong_shape(file, content):
    save_file({**content, "log_probs": content["log_probs"][:1]}, file)


def other_numbers(file, content):
    save_file({**content, "log_probs": content["log_probs"] + 1}, file)


def torn(file, content):
    file.write_bytes(file.read_bytes()[:100])


def empty(file, content):
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [wrong_shape, other_numbers, torn, empty])
def test_a_damaged_file_is_passed_over_and_the_others_are_read(damage, tmp_path, caplog):
    filled(tmp_path, [1, 2])
    (file,) = tmp_path.iterdir()
    damage(file, load_file(file))
    filled(tmp_path, [3])
    caplog.clear()
    assert known(ReferenceCache(tmp_path, CONTEXT, None), [1, 2, 3]) == [3]
    assert "passed over, what it held is computed again" in caplog.text
    assert str(file) in caplog.text


def test_a_full_disk_costs_the_file_and_not_the_training(tmp_path, caplog):
    cache = filled(tmp_path / "gone", [1])
    for file in (tmp_path / "gone").iterdir():
        file.unlink()
    (tmp_path / "gone").rmdir()
    cache.add([key(2)], values(2))
    cache.share()
    assert known(cache, [1, 2]) == [1, 2]
    assert "the log-probabilities stay in memory" in caplog.text


def share_on_ranks(folder):
    group = new_cpu_group(30)
    cache = ReferenceCache(folder, CONTEXT, group)
    rank = torch.distributed.get_rank()
    if rank != 1:  # one has nothing new
        cache.add([key(n) for n in (rank, 10 + rank)], values(rank, 10 + rank))
    cache.share()
    return known(cache, list(range(14)))


def test_all_ranks_know_what_one_has_computed(tmp_path):
    for of_rank in run_distributed(share_on_ranks, 4, tmp_path):
        assert of_rank == [0, 2, 3, 10, 12, 13]
    (file,) = tmp_path.iterdir()
    assert load_file(file)["keys"].dtype == torch.uint8
    assert np.array_equal(load_file(file)["log_probs"].shape, (6, 2))
