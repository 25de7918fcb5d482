"""A checkpoint is whole or passed over, and nothing that a stranger wrote is ever executed."""

import json
import pickle
import re
import zlib

import checkpoint_runs
import pytest
import torch
from checkpoint_runs import RECIPE, Malicious, build, save_once

from recipe_utils.checkpoint.folder import MARKER, check_whole, find_newest_whole, remove_leftovers
from recipe_utils.checkpoint.layout import read_index
from recipe_utils.checkpoint.load import load
from recipe_utils.files import CheckpointError

TENSORS = "rank_00000.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with step_1 and step_2."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        save_once(folder, step)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it to damage."""
    for path in saved.iterdir():
        (tmp_path / path.name).mkdir()
        for name, content in checkpoint_runs.files_of(path).items():
            (tmp_path / path.name / name).write_bytes(content)
    return tmp_path


def change_marker(path, **changes):
    marker = json.loads((path / MARKER).read_text())
    (path / MARKER).write_text(json.dumps({**marker, **changes}))


def truncate(path):
    with (path / TENSORS).open("r+b") as file:
        file.truncate(1000)


DAMAGES = {
    "truncated": (truncate, rf"{TENSORS}: it has 1000 bytes instead of \d+"),
    "missing": (lambda path: (path / "state.json").unlink(), "state.json: No such file"),
    "no marker": (lambda path: (path / MARKER).unlink(), "complete.json: No such file"),
    "torn marker": (lambda path: (path / MARKER).write_text('{"format": '), "complete.json.*JSON"),
    "list": (lambda path: (path / MARKER).write_text("[1]"), "complete.json.*a list instead"),
    "nesting": (lambda path: (path / MARKER).write_text("[" * 100_000), "complete.json.*no JSON"),
    "no files": (lambda path: change_marker(path, files=None), "complete.json.*does not say"),
    "outside": (
        lambda path: change_marker(path, files={"../../secret.json": [1, 1]}),
        "complete.json.*does not say",
    ),
    "recipe": (
        lambda path: change_marker(path, recipe="other"),
        f"it is of recipe other, this one is {RECIPE}",
    ),
    "version": (lambda path: change_marker(path, version=9), "version 9, this one reads 1"),
    "format": (lambda path: change_marker(path, format="else"), "no checkpoint of torchtune"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_or_foreign_checkpoint_is_passed_over_with_a_reason(folder, damage):
    do, reason = DAMAGES[damage]
    do(folder / "step_2")
    found, [(path, said)] = find_newest_whole(folder, RECIPE)
    assert found == folder / "step_1"
    assert path == folder / "step_2"
    assert re.search(reason, said)
    model, optimizer = build(seed=1)
    with pytest.raises(CheckpointError, match=reason):
        load(path, model, optimizer, recipe=RECIPE)


def test_the_newest_is_the_one_with_the_most_steps(folder):
    (folder / "step_2").rename(folder / "step_10")
    assert find_newest_whole(folder, RECIPE) == (folder / "step_10", [])
    assert find_newest_whole(folder / "nowhere", RECIPE) == (None, [])


@pytest.mark.parametrize("name", [TENSORS, "tensors.json", "optimizer.json", "state.json"])
def test_a_flipped_bit_is_found_before_anything_is_loaded(folder, name):
    path = folder / "step_2" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    model, optimizer = build(seed=1)
    before = checkpoint_runs.contents(model, optimizer)
    assert find_newest_whole(folder, RECIPE)[0] == folder / "step_2"
    with pytest.raises(CheckpointError, match=rf"{name}: its bytes"):
        load(folder / "step_2", model, optimizer, recipe=RECIPE)
    checkpoint_runs.assert_equal(checkpoint_runs.contents(model, optimizer), before)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    "name", [MARKER, TENSORS, "tensors.json", "optimizer.json", "state.json", ".metadata"]
)
def test_a_pickle_in_place_of_a_file_is_not_executed(folder, tmp_path, name, zipped):
    crime, path = tmp_path / "crime", folder / "step_2" / name
    with path.open("wb") as file:
        dump = torch.save if zipped else pickle.dump
        dump(Malicious(crime), file)
    if name in (".metadata", MARKER):
        facts = {}
    else:  # the stranger knows the format
        content = path.read_bytes()
        facts = {name: [len(content), zlib.crc32(content)]}
    if name != MARKER:
        marker = json.loads((folder / "step_2" / MARKER).read_text())
        change_marker(folder / "step_2", files=marker["files"] | facts)

    model, optimizer = build(seed=1)
    find_newest_whole(folder, RECIPE)
    if name == ".metadata":  # the name of PyTorch's own; not even looked at
        load(folder / "step_2", model, optimizer, recipe=RECIPE)
    else:
        with pytest.raises(CheckpointError, match=name):
            load(folder / "step_2", model, optimizer, recipe=RECIPE)
    assert not crime.exists()
    with path.open("rb") as file:
        torch.load(file, weights_only=False) if zipped else pickle.load(file)
    assert crime.exists(), "the pickle is harmless"


PART = {"file": TENSORS, "offset": [0], "shape": [3]}


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ({"dtype": "F32", "shape": [3], "parts": [PART | {"file": "/etc/x"}]}, "/etc/x is no file"),
        ({"dtype": "F32", "shape": [4], "parts": [PART]}, r"do not make up \(4,\)"),
        ({"dtype": "O", "shape": [3], "parts": [PART]}, "O is no dtype"),
        ({"dtype": "F32", "shape": [3]}, "parts"),
        ({"dtype": "F32", "shape": "x", "parts": []}, "tensors.json"),
        (7, "tensors.json"),
    ],
)
def test_an_index_that_cannot_be_is_refused(tensor, reason):
    good = {"dtype": "F32", "shape": [3], "parts": [PART]}
    assert read_index({"a": good}, [TENSORS]).state_dict_metadata["a"].size == (3,)
    with pytest.raises(CheckpointError, match=reason):
        read_index({"a": tensor}, [TENSORS])


def test_only_folders_with_our_temporary_names_are_removed(folder):
    kept = ["step_3", "step_x.tmp", "my_step_3.tmp", "step_4.tmp.bak", "epoch_0.tmp"]
    for name in [*kept, "step_3.tmp", "step_4.tmp", "step_2.old.tmp"]:
        (folder / name).mkdir()
    (folder / "step_5.tmp").write_text("a file")
    (folder / "step_6.tmp").symlink_to(folder / "step_3")
    removed = [path.name for path in remove_leftovers(folder)]
    assert sorted(removed) == ["step_2.old.tmp", "step_3.tmp", "step_4.tmp"]
    left = {path.name for path in folder.iterdir()}
    assert left == {*kept, "step_1", "step_2", "step_5.tmp", "step_6.tmp"}


def test_a_checkpoint_that_was_about_to_be_replaced_gets_its_name_back(folder):
    (folder / "step_2").rename(folder / "step_2.old.tmp")
    assert remove_leftovers(folder) == []
    assert check_whole(folder / "step_2", RECIPE) is None
