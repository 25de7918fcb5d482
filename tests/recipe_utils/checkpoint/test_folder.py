"""An incomplete checkpoint is skipped, and nothing that a stranger wrote is ever executed."""

import json
import pickle
import re
import shutil
import zlib

import checkpoint_runs
import pytest
import torch
from checkpoint_runs import RECIPE, Malicious, build, change_marker, flip_a_bit, save_once, state

from recipe_utils.checkpoint.folder import MARKER, find_newest_whole, remove_leftovers
from recipe_utils.checkpoint.layout import read_index
from recipe_utils.checkpoint.load import load
from recipe_utils.files import CheckpointError

TENSORS = "rank_00000.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        save_once(folder, step)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """Returns a folder with step_1 and step_2 to damage."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


def truncate(path):
    with (path / TENSORS).open("r+b") as file:
        file.truncate(1000)


def write_marker(text):
    return lambda path: (path / MARKER).write_text(text)


def with_marker(**changes):
    return lambda path: change_marker(path, **changes)


DAMAGES = {
    "truncated": (truncate, rf"{TENSORS}: it has 1000 bytes instead of \d+"),
    "missing": (lambda path: (path / "state.json").unlink(), "state.json: No such file"),
    "no marker": (lambda path: (path / MARKER).unlink(), "complete.json: No such file"),
    "torn marker": (write_marker('{"format": '), "complete.json.*Invalid JSON"),
    "list": (write_marker("[1]"), "complete.json.*should be an object"),
    "nesting": (write_marker("[" * 100_000), "complete.json.*recursion limit"),
    "no recipe": (write_marker("{}"), "complete.json: recipe={} is invalid .Field required"),
    "outside": (with_marker(files={"../../secret.json": [1, 1]}), "complete.json: files.*pattern"),
    "recipe": (with_marker(recipe="other"), f"it is of recipe other, this one is {RECIPE}"),
    "version": (with_marker(version=9), "complete.json: version=9 is invalid .Input should be 1"),
    "format": (with_marker(format="else"), "format='else' is invalid .Input should be 'torchtune-"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_or_foreign_checkpoint_is_skipped_with_a_reason(folder, damage):
    do, reason = DAMAGES[damage]
    do(folder / "step_2")
    found, [(path, given)] = find_newest_whole(folder, RECIPE)
    assert (found, path) == (folder / "step_1", folder / "step_2")
    assert re.search(reason, given)
    with pytest.raises(CheckpointError, match=reason):
        load(path, *build(seed=1), state(0))


def test_the_newest_is_the_one_with_the_most_steps(folder):
    (folder / "step_2").rename(folder / "step_10")
    assert find_newest_whole(folder, RECIPE) == (folder / "step_10", [])
    assert find_newest_whole(folder / "nowhere", RECIPE) == (None, [])


@pytest.mark.parametrize("name", [TENSORS, "tensors.json", "optimizer.json", "state.json"])
def test_a_flipped_bit_is_found_before_anything_is_loaded(folder, name):
    flip_a_bit(folder / "step_2" / name)
    model, optimizer = build(seed=1)
    before = checkpoint_runs.contents(model, optimizer)
    assert find_newest_whole(folder, RECIPE)[0] == folder / "step_2"
    with pytest.raises(CheckpointError, match=rf"{name}: its bytes"):
        load(folder / "step_2", model, optimizer, state(0))
    checkpoint_runs.assert_equal(checkpoint_runs.contents(model, optimizer), before)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", [MARKER, TENSORS, "tensors.json", "optimizer.json", "state.json", ".metadata"])
def test_a_pickle_in_place_of_a_file_is_not_executed(folder, tmp_path, name, zipped):
    crime, path = tmp_path / "crime", folder / "step_2" / name
    files = json.loads((path.parent / MARKER).read_text())["files"]
    with path.open("wb") as file:
        dump = torch.save if zipped else pickle.dump
        dump(Malicious(crime), file)
    if name in files:  # the stranger knows the format
        content = path.read_bytes()
        change_marker(path.parent, files={**files, name: [len(content), zlib.crc32(content)]})

    find_newest_whole(folder, RECIPE)
    if name == ".metadata":  # the name of PyTorch's own; never opened
        load(path.parent, *build(seed=1), state(0))
    else:
        with pytest.raises(CheckpointError, match=name):
            load(path.parent, *build(seed=1), state(0))
    assert not crime.exists()
    with path.open("rb") as file:
        torch.load(file, weights_only=False) if zipped else pickle.load(file)
    assert crime.exists(), "the pickle is harmless"


PART = {"file": TENSORS, "offset": [0], "shape": [3]}
TENSOR = {"dtype": "F32", "shape": [3], "parts": [PART]}


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ({**TENSOR, "parts": [{**PART, "file": "/etc/passwd"}]}, "/etc/passwd is no file of the"),
        ({**TENSOR, "parts": [{**PART, "offset": [1]}]}, "a part of a lies outside of it"),
        ({**TENSOR, "parts": [{**PART, "offset": [-1]}]}, "a part of a lies outside of it"),
        ({**TENSOR, "shape": [4]}, r"do not make up \(4,\)"),
        ({**TENSOR, "dtype": "O"}, "O is no dtype"),
        ({"dtype": "F32", "shape": [3]}, "parts"),
        ({"dtype": "F32", "shape": "x", "parts": []}, "tensors.json"),
        (7, "tensors.json"),
    ],
)
def test_an_index_that_cannot_be_is_refused(tensor, reason):
    assert read_index({"a": TENSOR}, [TENSORS]).state_dict_metadata["a"].size == (3,)
    with pytest.raises(CheckpointError, match=reason):
        read_index({"a": tensor}, [TENSORS])


def test_only_folders_with_our_temporary_names_are_removed(folder):
    kept = ["step_3", "step_x.tmp", "my_step_3.tmp", "step_4.tmp.bak", "epoch_0.tmp"]
    for name in [*kept, "step_3.tmp", "step_4.tmp", "step_2.old.tmp", "export.tmp"]:
        (folder / name).mkdir()
    (folder / "step_5.tmp").write_text("a file")
    (folder / "step_6.tmp").symlink_to(folder / "step_3")
    remove_leftovers(folder)
    assert {path.name for path in folder.iterdir()} == {*kept, "step_1", "step_2", "step_5.tmp", "step_6.tmp"}
