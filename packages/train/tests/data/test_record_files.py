"""Records are read from files and folders of all kinds as they were written, and what cannot be read is named."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from blockdraft_train.data.records import ChatRecord, parse_record, read_records
from blockdraft_train.data.settings import RecordSettings

PLAIN = RecordSettings()
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CHAT = ChatRecord(MESSAGES)
CALL = {"name": "weather", "arguments": {"city": "Bergen", "days": None}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, constants: Callable[..., None]) -> None:
    constants(datasets.config, HF_DATASETS_CACHE=str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["a[1] b", "ü#%20 x", "q?*", "a::b", "[!a]", "{a}"])
def test_names_that_look_like_patterns(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    (folder / "t").mkdir(parents=True)
    (folder / "p").mkdir()
    row = {"prompt": "q", "response": "a"}
    (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    with gzip.open(folder / f"{name}.jsonl.gz", "wt") as file:
        file.write(json.dumps(row) + "\n")
    (folder / "t" / f"{name}.txt").write_text("q")
    for place in (folder / f"{name}.parquet", folder / "p" / f"{name}.parquet"):
        pq.write_table(pa.table({key: [value] for key, value in row.items()}), place)
    for source in (f"{name}.jsonl", f"{name}.jsonl.gz", f"{name}.parquet", "t", "p"):
        records = [record for _, record in read_records([str(folder / source)], PLAIN)]
        assert records == (["q"] if source == "t" else [CHAT]), source


def test_a_pointer_in_place_of_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match=r"a\.jsonl is a pointer of Git LFS"):
        list(read_records([str(tmp_path / "a.jsonl")], PLAIN))


def test_kinds_of_sources(tmp_path: Path) -> None:
    records = [{"text": "one"}, {"messages": MESSAGES}, {"text": "zwei \u2028 ü"}]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps([{"text": "three"}]), encoding="utf-8")
    table = datasets.Dataset.from_list([{"text": "four"}])
    table.to_parquet(tmp_path / "c.parquet")
    datasets.DatasetDict(train=table, test=datasets.Dataset.from_list([{"text": "five"}])).save_to_disk(tmp_path / "d")
    table.save_to_disk(tmp_path / "e")
    (tmp_path / "f").mkdir()
    (tmp_path / "f/train.jsonl").write_text('{"text": "six"}\n')
    names = ["a.jsonl", "b.json", "c.parquet", "d", "e", "f"]
    result = list(read_records([str(tmp_path / name) for name in names], PLAIN))
    assert [record for _, record in result] == ["one", CHAT, "zwei \u2028 ü", "three", "four", "four", "four", "six"]
    assert result[2][0] == f"{lines}, record 3" and result[3][0].endswith("b.json, record 1")
    assert [record for _, record in read_records([str(tmp_path / "d")], RecordSettings(split="test"))] == ["five"]
    assert len(list(read_records([str(lines), str(tmp_path / "b.json")], RecordSettings(limit=2)))) == 2


def test_no_file_beside_those_of_splits_is_left_out_in_silence(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "test.jsonl").write_text('{"text": "two"}\n')
    assert [record for _, record in read_records([str(tmp_path)], PLAIN)] == ["one"]
    (tmp_path / "a.jsonl").write_text('{"text": "three"}\n')
    with pytest.raises(ValueError, match=r"named after splits \(.*\), and a.jsonl would be left out; give the files"):
        list(read_records([str(tmp_path)], PLAIN))
    (tmp_path / "README.md").write_text("A card.")
    assert [record for _, record in read_records([str(tmp_path)], PLAIN)] == ["one"]


def test_folders_of_tokens_are_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path} holds tokens, not records: give it as --data"):
        list(read_records([str(tmp_path)], PLAIN))


def test_json_keeps_its_types(tmp_path: Path) -> None:
    """Texts that look like dates stay texts, nulls and missing keys stay what they are; in folders too."""
    raws = [
        {"prompt": "2024-05-01", "response": "2024-05-02T10:00:00Z"},
        {"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": [CALL]}], "tools": [TOOL]},
        {"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": [CALL | {"arguments": {"other": "x"}}]}]},
    ]
    (tmp_path / "folder").mkdir()
    lines = "\r\n\n".join(map(json.dumps, raws)).encode()
    (tmp_path / "UPPER.JSONL").write_bytes(b"\xef\xbb\xbf" + lines)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "folder/train.jsonl").write_bytes(lines)
    (tmp_path / "pretty.json").write_text(json.dumps(raws, indent=2))
    expected = [parse_record(raw, PLAIN) for raw in raws]
    for name in ("UPPER.JSONL", "packed.jsonl.gz", "folder", "pretty.json"):
        assert [record for _, record in read_records([str(tmp_path / name)], PLAIN)] == expected, name
    (tmp_path / "single.json").write_text(json.dumps(raws[0], indent=2))
    assert [record for _, record in read_records([str(tmp_path / "single.json")], PLAIN)] == expected[:1]


def test_parquet_adds_no_nulls(tmp_path: Path) -> None:
    """A column of objects has the keys of all rows, and null where a row has none."""
    chats = [
        [MESSAGES[0], {"role": "assistant", "content": "", "tool_calls": [CALL | {"arguments": {key: "x"}}]}]
        for key in ("city", "town")
    ]
    datasets.Dataset.from_list([{"messages": chat} for chat in chats]).to_parquet(tmp_path / "a.parquet")
    result = [record for _, record in read_records([str(tmp_path / "a.parquet")], PLAIN)]
    assert result == [parse_record({"messages": chat}, PLAIN) for chat in chats]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    def read(name: str, settings: RecordSettings = PLAIN) -> None:
        list(read_records([str(tmp_path / name)], settings))

    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"nothing": 1}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, record 2: it has the fields"):
        read("bad.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"text": "one"}\nnothing\n{"text": "two"}\n')
    with pytest.raises(ValueError, match=r"broken\.jsonl, record 2: it is no JSON"):
        read("broken.jsonl")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n' * 1000)[:-20])
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz cannot be read, at record \d+ or after it"):
        read("cut.jsonl.gz")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.txt").touch()
    for name in ("empty.jsonl", "empty.txt"):
        with pytest.raises(ValueError, match=f"{name} is empty"):
            read(name)
    for name in ("latin.jsonl", "latin.json", "latin.txt"):
        (tmp_path / name).write_bytes('{"text": "ü"}'.encode("latin-1"))
        with pytest.raises(ValueError, match=f"{name} is no UTF-8 text"):
            read(name)
    (tmp_path / "notes.doc").write_text("text")
    with pytest.raises(ValueError, match=r"of no known kind; give .* or \.txt files"):
        read("notes.doc")
    for name in ("absent.jsonl", "absent.txt", "absent.csv", "~/absent.doc"):
        with pytest.raises(ValueError, match="There is no"):
            read(name)
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": "a"}])).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match="cannot be read as a dataset"):
        read("splits", RecordSettings(split="holdout"))
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        RecordSettings(limit=0)


def test_text_files(tmp_path: Path) -> None:
    """A text file is one record, in a folder too, unless that holds other data."""
    (tmp_path / "b").mkdir()
    for name, text in (("b/two.txt", "two\n\nlines"), ("b/one.txt", "ünö")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert [record for _, record in read_records([str(tmp_path / "b/two.txt")], PLAIN)] == ["two\n\nlines"]
    assert list(read_records([str(tmp_path / "b")], PLAIN)) == [
        (f"{tmp_path / 'b'}, record 1", "ünö"),
        (f"{tmp_path / 'b'}, record 2", "two\n\nlines"),
    ]
    (tmp_path / "b/train.jsonl").write_text('{"text": "three"}\n')
    assert "three" in [record for _, record in read_records([str(tmp_path / "b")], PLAIN)]
