"""Reading of data folders, finished or not."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from some_documents import DOCUMENTS, IDENTITY, ids, write

from blockdraft.targets import load_target_text
from blockdraft_train.data.documents import Document, grown_since, read_data
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter


def test_documents_come_in_the_order_of_their_records(tmp_path: Path) -> None:
    manifest = write(tmp_path / "a", [[3, 1], [0, 2]]).finish()
    read = read_data(tmp_path / "a")
    assert ids(tmp_path / "a") == [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]
    assert [doc.supervised.tolist() for doc in read] == [[i % 2 == 1 for i in row] for row in ids(tmp_path / "a")]
    assert [doc.cut for doc in read] == [False, False, True, False]
    assert (read[0].tokens.dtype, read[0].supervised.dtype) == (torch.int64, torch.bool)
    assert (len(read), read.lengths, read.tokenizer, read.folder) == (4, [3, 2, 4, 2], "abc", tmp_path / "a")
    assert read[-1].tokens.tolist() == [10, 11] and len(read[1:3]) == 2
    counts = {
        "rows": 4,
        "documents": 4,
        "tokens": 11,
        "supervised": 6,
        "cut": 1,
        "left_out": {"repetitive response": 1},
    }
    assert manifest["counts"] == counts
    assert manifest["target"] == "somewhere"


def test_the_fingerprint_is_of_the_contents(tmp_path: Path) -> None:
    first, second = (
        write(tmp_path / name, order).finish() for name, order in [("a", [[3], [1, 0, 2]]), ("b", [[0, 1, 2, 3]])]
    )
    assert first["fingerprint"] == second["fingerprint"] == read_data(tmp_path / "b").fingerprint
    others = DataWriter(tmp_path / "c", IDENTITY)
    others.begin()
    for record, made in DOCUMENTS.items():
        others.add(record, [Document(doc.tokens, ~doc.supervised) for doc in made])
    assert others.finish()["fingerprint"] != first["fingerprint"]


def test_documents_are_mapped_and_not_read(tmp_path: Path) -> None:
    write(tmp_path, [[0, 1, 2, 3]]).finish()
    read = read_data(tmp_path)
    path = next(tmp_path.glob("tokens-*"))
    content = path.read_bytes()
    with path.open("r+b") as file:  # the same file, changed behind its back
        at = content.index(torch.tensor([6, 7, 8, 9], dtype=torch.int32).numpy().tobytes())
        file.seek(at)
        file.write(torch.tensor([66], dtype=torch.int32).numpy().tobytes())
    assert read[2].tokens.tolist() == [66, 7, 8, 9]
    again = pickle.loads(pickle.dumps(read))
    assert again.lengths == read.lengths and again[2].tokens.tolist() == [66, 7, 8, 9]
    assert len(pickle.dumps(read)) < 1000


def test_how_much_has_come_since(tmp_path: Path) -> None:
    """Number of new documents since any state of the folder; None for a state of other data."""
    seen: dict[str, tuple[int, int]] = {}  # documents and tokens by fingerprint

    def look() -> None:
        data = read_data(tmp_path, unfinished=True)
        seen[data.fingerprint] = len(data), sum(data.lengths)

    write(tmp_path, [[1], [2]])
    look()
    writer = DataWriter(tmp_path, IDENTITY)
    writer.begin()
    look()
    writer.add(3, DOCUMENTS[3])
    writer.flush()
    look()
    writer.finish()
    look()
    finished = read_data(tmp_path).fingerprint
    writer = DataWriter(tmp_path, IDENTITY)
    writer.begin()
    assert read_data(tmp_path, unfinished=True).fingerprint == finished
    writer.add(0, DOCUMENTS[0])
    assert writer.finish()["fingerprint"] not in seen
    look()
    data = read_data(tmp_path)
    assert sorted(seen.values()) == [(2, 6), (3, 8), (3, 8), (4, 11)]
    for fingerprint, (count, tokens) in seen.items():
        assert grown_since(data, fingerprint) == (4 - count, 11 - tokens)
    assert grown_since(data, data.fingerprint) == (0, 0)
    assert grown_since(data, "0123") is None


def test_data_that_are_being_made(tmp_path: Path) -> None:
    """An opened folder does not change when more is written, in other processes either."""
    writer = DataWriter(tmp_path, IDENTITY)
    writer.begin()
    with pytest.raises(ValueError, match="is unfinished and holds nothing to learn from yet; wait until"):
        read_data(tmp_path, unfinished=True)
    writer.add(3, DOCUMENTS[3])
    writer.flush()
    writer.add(1, DOCUMENTS[1])  # not on disk yet
    view = read_data(tmp_path, unfinished=True)
    assert [doc.tokens.tolist() for doc in view] == [[10, 11]] and not view.finished and view.fingerprint
    writer.flush()
    later = read_data(tmp_path, unfinished=True)
    assert later.lengths == [2, 4, 2] and later.fingerprint != view.fingerprint
    assert grown_since(later, view.fingerprint) == (2, 6)
    again = pickle.loads(pickle.dumps(view))
    assert (again.lengths, again.fingerprint) == (view.lengths, view.fingerprint) == ([2], view.fingerprint)
    with pytest.raises(ValueError, match="is unfinished"):
        read_data(tmp_path)
    writer.finish()
    assert read_data(tmp_path, unfinished=True).finished and read_data(tmp_path, unfinished=True).lengths == [2, 4, 2]


def test_a_shard_that_no_manifest_knows_yet(tmp_path: Path) -> None:
    """Readers skip a record without a document, and a resumed writer counts it."""
    write(tmp_path, [[0]])
    before = (tmp_path / "data.json").read_bytes()
    write(tmp_path, [[1]])
    (tmp_path / "data.json").write_bytes(before)
    assert read_data(tmp_path, unfinished=True).lengths == [3]
    writer = DataWriter(tmp_path, IDENTITY)
    assert writer.done == {0, 1}
    writer.begin()
    data = read_data(tmp_path, unfinished=True)
    assert data.lengths == [3, 2, 4] and data.manifest["counts"]["rows"] == 2


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="data.json does not exist; give a folder made by `blockdraft data` or by `.* --record`"
    ):
        read_data(tmp_path)
    write(tmp_path / "a", [[0], [1]]).finish()
    shard = tmp_path / "a/tokens-00001.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ValueError, match="copy it again"):
        read_data(tmp_path / "a")
    shard.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="tokens-00001.safetensors is broken"):
        read_data(tmp_path / "a")
    manifest = tmp_path / "a/data.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    with pytest.raises(ValueError, match="is of format 2 and this version reads 1"):
        read_data(tmp_path / "a")
    manifest.write_text("{")
    with pytest.raises(ValueError, match=r"data\.json cannot be read"):
        read_data(tmp_path / "a")


def test_tokenizers(tmp_path: Path, tiny_target_dir: Path) -> None:
    ours, other = (load_target_text(tiny_target_dir).tokenizer for _ in range(2))
    assert ours is not None and other is not None
    assert tokenizer_fingerprint(ours) == tokenizer_fingerprint(other)
    ours("text", truncation=True, max_length=2)  # which a fast tokenizer remembers
    assert tokenizer_fingerprint(ours) == tokenizer_fingerprint(other)
    other.add_tokens(["<|new|>"])
    assert tokenizer_fingerprint(ours) != tokenizer_fingerprint(other)
    write(tmp_path, [[0]]).finish()
    read_data(tmp_path).check_tokenizer(None)
    with pytest.raises(ValueError, match="with the tokenizer abc and the target's is"):
        read_data(tmp_path).check_tokenizer(ours)
