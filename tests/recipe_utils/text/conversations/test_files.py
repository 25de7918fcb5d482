"""Rows of files are those that Python's json and the library datasets read, in any container, without the file in memory."""

import csv
import gzip
import io
import json
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe_utils.text.conversations import files
from recipe_utils.text.conversations.files import FileRows
from recipe_utils.update_steps.samples import SampleError

TEXTS = ('é "[{,\\', ']}\u2028\n\\"' * 99, "")
ROWS = [{"a": i, "text": text} for i, text in enumerate(TEXTS)]
LINES = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in ROWS).encode()


def rows_of(path):
    rows = FileRows(str(path))
    return [rows[i] for i in range(len(rows))]


def tar(content):
    header = bytearray(512)
    header[257:262] = b"ustar"
    return bytes(header) + content


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        LINES.rstrip(),
        b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"),
        json.dumps(ROWS).encode(),
        b"\xef\xbb\xbf \n" + json.dumps(ROWS, indent=2, ensure_ascii=False).encode() + b"\n",
        gzip.compress(LINES, mtime=0),
        gzip.compress(json.dumps(ROWS).encode(), mtime=0),
        json.dumps({"version": 1, "data": ROWS}).encode(),
        json.dumps(
            {"features": [{"name": "a"}], "rows": [{"row_idx": i, "row": row} for i, row in enumerate(ROWS)]}
        ).encode(),
        b"\xef\xbb\xbf" + json.dumps({"rows": ROWS, "tags": ["a"]}, indent=2).encode(),
        b'{"examples": [\n' + b",\n".join(json.dumps(row).encode() for row in ROWS) + b"\n]}\n",
        gzip.compress(json.dumps({"train": ROWS}, indent="\t").encode(), mtime=0),
    ],
)
def test_rows_are_read_whatever_the_name_of_the_file(content, tmp_path):
    (path := tmp_path / "rows").write_bytes(content)
    rows = FileRows(str(path))
    again = pickle.loads(pickle.dumps(rows))
    assert [rows[i] for i in range(3)] == [again[i] for i in range(3)] == ROWS == rows_of(path)
    assert rows.name_of(2) in (f"line 3 of {path}", f"row 3 of {path}")
    with ProcessPoolExecutor(1) as pool:  # a worker's end must not remove an unpacked file
        assert pool.submit(rows.__getitem__, 1).result() == rows[1] == ROWS[1]


@given(st.lists(st.sampled_from(["", " ", "\t\r", '{"a": 1}', ' {"a": [2]}\r', "{", "7"]), max_size=30))
def test_lines_are_those_that_are_not_blank_across_chunks(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.write_bytes("\n".join(["{}", *lines]).encode())
    expected = [(i, line) for i, line in enumerate(["{}", *lines], 1) if line.strip()]
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(files, "_CHUNK", 7)
        rows = FileRows(str(path))
    assert [rows.name_of(i) for i in range(len(rows))] == [f"line {i} of {path}" for i, _ in expected]
    for i, (_, line) in enumerate(expected):
        if line in ("{", "7"):
            with pytest.raises(SampleError, match=r"^it is (not one JSON|a int)"):
                rows[i]
        else:
            assert rows[i] == json.loads(line)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("row", [{"data": [{"a": 1}], "tools": [{"b": 2}]}, {"tools": [{"b": 2}]}, {"data": ["x"]}])
def test_an_object_without_one_list_of_rows_is_a_row(row, indent, tmp_path):
    (path := tmp_path / "rows.json").write_text(json.dumps(row, indent=indent))
    rows = FileRows(str(path))
    assert [rows[0]] == [row] == rows_of(path)
    assert rows.name_of(0) == f"{'row' if indent else 'line'} 1 of {path}"


PIECES = st.sampled_from(["a", " ", "1", "é", '"', ",", ";", "\t", "\n", "\r\n", "\u2028"])
FIELDS = st.lists(PIECES).map("".join).filter(lambda text: text.strip() or not text)


@given(
    st.lists(st.tuples(FIELDS, FIELDS, st.just("7")), min_size=1, max_size=9),
    st.sampled_from([(".csv", ","), (".csv", ";"), (".csv", "\t"), (".tsv", "\t"), (".CSV.gz", ",")]),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
    st.booleans(),
)
def test_csv_has_the_texts_that_were_written(tmp_path_factory, values, name, end, has_bom):
    """Empty fields are absent, and so is a column without a name."""
    suffix, delimiter = name
    path = tmp_path_factory.mktemp("csv") / f"rows{suffix}"
    text, lines = io.StringIO(newline=""), []
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end)
    for value in [("id 1", "né\nw", ""), *values]:
        lines.append(text.getvalue().count("\n") + 1)
        writer.writerow(value)
    content = b"\xef\xbb\xbf" * has_bom + text.getvalue().encode()
    path.write_bytes(gzip.compress(content, mtime=0) if suffix.endswith("gz") else content)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(files, "_CHUNK", 7)
        rows = FileRows(str(path))
    named = [dict(zip(("id 1", "né\nw"), value, strict=False)) for value in values]
    expected = [{key: text for key, text in row.items() if text} for row in named]
    assert [rows[i] for i in range(len(rows))] == expected
    assert [rows.name_of(i) for i in range(len(rows))] == [f"line {line} of {path}" for line in lines[1:]]


def test_csv_has_long_fields_and_json_lines_are_no_csv(tmp_path):
    (path := tmp_path / "rows.csv").write_text(f"text\n001\n{'x' * 200_000}\n")
    assert rows_of(path) == [{"text": "001"}, {"text": "x" * 200_000}]
    path.write_bytes(LINES)
    assert rows_of(path) == ROWS


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"3\n", r"^it is not CSV \(it needs one field for each of the columns a, b; quote fields that contain ','"),
        (b"3,4,5\n", "one field for each"),
        (b'"3" x,4\n', "^it is not CSV"),
        (b'3",4\n5,"6"" 7"\n3",4\n', "write two quotes for one"),
        (b"\xe9,4\n", "^byte 4 is not UTF-8"),
    ],
)
def test_a_wrong_row_of_csv_is_an_error_of_that_row(content, text, tmp_path):
    (path := tmp_path / "rows.csv").write_bytes(b"a,b\n1,2\n" + content)
    rows = FileRows(str(path))
    assert rows[0] == {"a": "1", "b": "2"}
    with pytest.raises(SampleError, match=text):
        rows[1]


def test_columns_of_one_name_are_an_error(tmp_path):
    (path := tmp_path / "rows.csv").write_text("a,,b,,a\n1,2,3,4,5\n")
    with pytest.raises(SampleError, match="two of the columns a, b, a have one name; rename one"):
        rows_of(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a,b\n", "empty"),
        (b'a,b\n1,2\n"3,4\n5,6\n', "no end, probably from line 3"),
        ("a,b\n1,2\n".encode("utf-16"), "UTF-16"),
    ],
)
def test_other_csv_is_refused(content, text, tmp_path):
    (path := tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^path=.*rows.csv: it is .*{text}"):
        FileRows(str(path))


def test_tables_are_read_with_the_library_datasets(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "rows.jsonl")  # a parquet file all the same
    table.save_to_disk(tmp_path / "saved", num_shards=2)
    datasets.DatasetDict(train=table).save_to_disk(tmp_path / "splits")
    for path in (tmp_path / "rows.jsonl", tmp_path / "saved"):
        rows = FileRows(str(path))
        assert [rows[i] for i in range(3)] == ROWS
        assert rows.name_of(1) == f"row 2 of {path}"
        assert pickle.loads(pickle.dumps(rows))[2] == ROWS[2]
    with pytest.raises(ValueError, match=r"the splits train; set it to .*splits/train$"):
        FileRows(str(tmp_path / "splits"))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"[ ]", "empty"),
        (LINES.decode().encode("utf-16"), "UTF-16"),
        (LINES.decode().encode("utf-16-be"), "NUL bytes"),
        (b"\x28\xb5\x2f\xfd" + LINES, "zstd -d"),
        (b"PK\x03\x04" + LINES, "unzip"),
        (tar(LINES), "a tar archive|NUL"),
        (gzip.compress(LINES, mtime=0)[:-9], "cannot be unpacked"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html>", "HTML"),
        (b"PAR1 and no more", "a table that cannot be read"),
        (json.dumps(ROWS).encode()[:-1], "no JSON array"),
        (
            json.dumps({"train": ROWS, "test": ROWS}).encode(),
            "an object of the splits train, test; write the rows of one to a file",
        ),
        (b'[{"a": 1}]\n[{"a": 2}]', "no JSON array"),
        (b'{\n  "a": 1\n}\n{\n  "a": 2\n}\n', "jq -c"),
        (b'[{"role": "user", "content": "a"}]', "one conversation; write"),
        (b'{"data": [{"role": "user", "content": "a"}]}', "one conversation; write"),
    ],
)
def test_other_files_are_refused_by_what_they_are(content, text, tmp_path):
    (path := tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^path=.*rows.jsonl: it is .*({text})"):
        FileRows(str(path))


def test_the_hash_is_that_of_the_content(tmp_path):
    """One answer changed, the number of bytes and lines unchanged."""
    hashes = []
    for content in (LINES, LINES.replace(b'{"a": 1', b'{"a": 4'), LINES):
        (path := tmp_path / "rows.jsonl").write_bytes(content)
        hashes.append(FileRows(str(path)).content_hash)
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_large_file_stays_out_of_memory(tmp_path):
    """200,000 rows of 200 MB: 8 bytes a row, and less than 32 MB for the scan, are not the page cache's."""
    with open(path := tmp_path / "rows.jsonl", "wb") as file:
        for i in range(200):
            file.write(f'{{"a": {i}, "text": "{1000 * "x"}"}}\n'.encode() * 1000)
    program = """
import sys
from recipe_utils.text.conversations.files import FileRows
peak = lambda: int(dict(line.split(":") for line in open("/proc/self/status") if ":" in line)["VmHWM"].split()[0])
before = peak()
rows = FileRows(sys.argv[1])
assert [rows[i]["a"] for i in range(0, len(rows), 1000)] == [*range(200)]
print(len(rows), peak() - before)
"""
    printed = subprocess.run([sys.executable, "-c", program, path], check=True, capture_output=True, text=True).stdout
    num_rows, kilobytes = map(int, printed.split()[-2:])
    assert num_rows == 200_000
    assert kilobytes < 34_000
