"""Rows of a path are those of its files in order; the sides of a split depend on the rows alone."""

import gzip
import json
import pickle
from itertools import chain

import datasets
import pytest
from chats import CHATML, say, tokenizer_of

from recipe_utils.preference import pair_dataset
from recipe_utils.text import conversation_dataset, text_pieces_dataset
from recipe_utils.text.conversations.paths import PathRows
from recipe_utils.update_steps.samples import SampleError

ROWS = [{"text": f"row {i}"} for i in range(1000)]


def write(path, rows):
    """Writes rows to a new file, in the format of its name."""
    path.parent.mkdir(exist_ok=True, parents=True)
    lines = [json.dumps(row) for row in rows]
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
        return str(path)
    if path.suffix == ".csv":
        lines = ["text", *(row["text"] for row in rows)]
    text = json.dumps(rows, indent=1) if path.suffix == ".json" else "".join(f"{line}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
    return str(path)


def texts(path, *split):
    rows = PathRows(path if isinstance(path, list) else str(path), *split)
    return [rows[i]["text"] for i in range(len(rows))]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json", "csv", "jsonl.gz"])
@pytest.mark.parametrize(
    "names", ["data/train-00000-of-00002 data/train-00001-of-00002", "a b", "my_train.1 my_train.2"]
)
def test_files_of_a_path_are_read_by_name(names, suffix, tmp_path):
    last, first = (tmp_path / f"{name}.{suffix}" for name in reversed(names.split()))
    paths = [write(first, ROWS[:3]), write(last, ROWS[3:5])]
    for name in ("README.md", "dataset_infos.json", ".hidden.json", "_SUCCESS.csv"):
        (tmp_path / name).write_text("{}")
    expected = [row["text"] for row in ROWS[:5]]
    pattern = f"{first.parent}/*[ab12].{suffix}"
    for path in (tmp_path, pattern, f"{tmp_path}/**/*[ab12].{suffix}", paths, [pattern]):
        assert texts(path) == expected
    assert texts([*paths[::-1], paths[0]]) == expected[3:] + 2 * expected[:3]
    rows = PathRows(paths)
    rows = pickle.loads(pickle.dumps(rows))
    with pytest.raises(SampleError, match=rf"^(line|row) [23] of {last}: KeyError"), rows.naming(4):
        rows[4]["no"]
    with pytest.raises(IndexError):
        rows[5]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("train.jsonl test.jsonl", "set it to one of {0}/*test*.jsonl, {0}/*train*.jsonl$"),
        (
            "data/train-0-of-2.csv data/train-1-of-2.csv data/test-0-of-1.csv",
            "{0}/data/test-*.csv, {0}/data/train-*.csv$",
        ),
        ("train_sft-0-of-1.csv train_gen-0-of-1.csv", "set it to one of {0}/train_gen-*.csv, {0}/train_sft-*.csv$"),
        ("train.jsonl more.jsonl", "set it to one of {0}/*.jsonl, {0}/*train*.jsonl$"),
        ("a.jsonl a.jsonl.gz", "several splits or formats"),
        ("a.jsonl a.csv", "several splits or formats"),
        ("a.md b/a.csv", r"a folder with a.md, b; set it to a file, or a pattern such as {0}/\*.txt$"),
        ("", "a folder with nothing"),
    ],
)
def test_other_folders_are_refused_with_what_to_set(names, text, tmp_path):
    for name in names.split():
        write(tmp_path / name, ROWS[:1])
    pattern = text.replace("/*", r"/\*").replace("*.", r"\*.").replace(r"\\", "\\").format(tmp_path)
    with pytest.raises(ValueError, match=pattern):
        PathRows(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "text"), [([], "path=.*empty"), ("/no/*.jsonl", "path=/no/.*no file matches"), (["/no.csv"], "'/no.csv'")]
)
def test_no_file_is_refused(path, text):
    with pytest.raises((ValueError, OSError), match=text):
        PathRows(path)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json", "csv"])
def test_sides_are_those_of_the_rows_alone(suffix, tmp_path):
    whole = write(tmp_path / f"whole.{suffix}", ROWS)
    sides = {side: texts(whole, side, 0.2) for side in ("train", "validation")}
    assert sorted(chain(*sides.values())) == sorted(row["text"] for row in ROWS)
    assert 160 < len(sides["validation"]) < 240
    # Other rows beside them, in another order, in several files, and twice
    more = [{"text": f"other {i}"} for i in range(99)]
    others = [*more, *ROWS[::-1], *ROWS[:300]]
    parts = [write(tmp_path / f"{i}.{suffix}", others[i::3]) for i in range(3)]
    for side, rows in sides.items():
        assert set(texts(parts, side, 0.2)) - {row["text"] for row in more} == set(rows)
    # A larger fraction moves rows to validation only.
    assert set(sides["validation"]) < set(texts(whole, "validation", 0.3))


def test_sides_are_those_of_lines_without_white_space_and_containers(tmp_path):
    plain = write(tmp_path / "plain.jsonl", ROWS)
    content = "\ufeff" + "".join(f"  {json.dumps(row)}\t\r\n\n" for row in ROWS)
    (tmp_path / "other.jsonl").write_bytes(content.rstrip().encode())
    for name in ("packed.jsonl.gz", "a.json"):
        write(tmp_path / name, ROWS)
    for path in (tmp_path / name for name in ("packed.jsonl.gz", "other.jsonl", "a.json")):
        assert texts(path, "validation", 0.1) == texts(plain, "validation", 0.1)


def test_the_hash_is_that_of_files_and_side(tmp_path):
    paths = [write(tmp_path / f"{i}.jsonl", ROWS[20 * i : 20 * i + 20]) for i in range(2)]
    given = [(paths[0],), (paths[1],), (paths,), (paths[::-1],), (str(tmp_path),)]
    given += [(paths, side, fraction) for side in ("train", "validation") for fraction in (0.3, 0.4)]
    hashes = [PathRows(*each).content_hash for each in given]
    assert hashes[2] == hashes[4]
    assert len({*hashes}) == len(hashes) - 1
    write(tmp_path / "1.jsonl", [{"text": "rew 20"}, *ROWS[21:40]])
    assert PathRows(str(tmp_path)).content_hash != hashes[4]


@pytest.mark.parametrize(
    "split", [("train", None), (None, 0.1), ("test", 0.1), ("train[:95%]", None), ("train", 0), ("train", 1.0)]
)
def test_a_wrong_split_is_refused(split, tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    text = r"^split=.*, validation_fraction=.*: set them to train or validation and to a"
    with pytest.raises(ValueError, match=text):
        PathRows(path, *split)


def test_a_side_without_rows_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS[:3])
    with pytest.raises(ValueError, match=r"^split=validation, .*=1e-09: none of the 3 rows is of it; set another"):
        PathRows(path, "validation", 1e-9)


def test_datasets_take_csv_lists_and_splits(tmp_path):
    """JSON text of messages in a field, texts of pairs, and a text file in a list with rows."""
    tokenizer = tokenizer_of(tmp_path / "tokenizer", CHATML, max_seq_len=99)
    chats = [
        {"text": json.dumps(json.dumps([say("user", f"{i}?"), say("assistant", "4")])).replace(r"\"", '""')}
        for i in range(9)
    ]
    chats = write(tmp_path / "chat.csv", chats).replace("text", "messages")
    (tmp_path / "chat.csv").write_text((tmp_path / "chat.csv").read_text().replace("text", "messages", 1))
    (tmp_path / "pairs.tsv").write_text("chosen\tprompt\trejected\n" + "".join(f"a\t{i}?\tb\n" for i in range(9)))
    (tmp_path / "wiki.txt").write_text("<p> 001")
    texts = [str(tmp_path / "wiki.txt"), write(tmp_path / "wiki.txt.jsonl", [{"body": f"{i}"} for i in range(9)])]
    for make, path, key in (
        (conversation_dataset, chats, "tokens"),
        (pair_dataset, str(tmp_path / "pairs.tsv"), "chosen_input_ids"),
        (text_pieces_dataset, texts, "tokens"),
    ):
        more = {"column": "body"} if make is text_pieces_dataset else {}
        of_all, *sides = (
            [tokenizer.decode(sample[key]) for sample in make(tokenizer, path, **more, **split)]
            for split in ({}, *({"split": side, "validation_fraction": 0.5} for side in ("train", "validation")))
        )
        assert sorted(chain(*sides)) == sorted(of_all)
        assert all(sides)
        assert len({*of_all}) == len(of_all) == (10 if more else 9)
        assert all(f"{i}" in text for i, text in enumerate(of_all[bool(more) :]))
    assert of_all[0].startswith("<p> 001")
