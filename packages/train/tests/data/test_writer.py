"""Writing of data folders: in pieces, resumed, and refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from some_documents import DOCUMENTS, IDENTITY, ids, write

from blockdraft_train.data import writer as writing
from blockdraft_train.data.documents import read_data
from blockdraft_train.data.writer import DataWriter


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    write(tmp_path, [[1], [2]])
    with pytest.raises(ValueError, match="is unfinished; run the `blockdraft data` command"):
        read_data(tmp_path)
    writer = DataWriter(tmp_path, IDENTITY)
    assert writer.done == {1, 2}
    writer.begin()
    writer.add(3, DOCUMENTS[3])
    writer.add(0, DOCUMENTS[0])
    writer.finish()
    assert ids(tmp_path) == [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]


def test_shards_are_written_in_time(tmp_path: Path, constants: Callable[..., None]) -> None:
    """A shard ends by size, or by the seconds of work in it."""
    constants(writing, SHARD_TOKENS=4)
    writer = write(tmp_path / "size", [])
    writer.add(0, DOCUMENTS[0])
    assert list((tmp_path / "size").glob("tokens-*")) == []
    writer.add(1, DOCUMENTS[1])
    assert [path.name for path in (tmp_path / "size").glob("tokens-*")] == ["tokens-00000.safetensors"]
    constants(writing, SHARD_SECONDS=-1.0)
    writer.add(3, DOCUMENTS[3])
    assert len(load_file(tmp_path / "size/tokens-00001.safetensors")["rows"]) == 1


def test_other_arguments_and_other_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [[0]]).finish()
    with pytest.raises(ValueError, match=r"made with length 9, not 10; choose another folder for --out"):
        DataWriter(tmp_path / "a", IDENTITY | {"length": 10})
    (tmp_path / "b").mkdir()
    (tmp_path / "b/notes.txt").touch()
    with pytest.raises(ValueError, match="holds other files"):
        DataWriter(tmp_path / "b", IDENTITY)


def test_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    writer = DataWriter(tmp_path, IDENTITY)
    writer.begin()
    writer.add(0, [], "no supervised token")
    with pytest.raises(ValueError, match=r"None of the 1 records has a token to learn from .*'no supervised token': 1"):
        writer.finish()
    with pytest.raises(ValueError, match="unfinished"):
        read_data(tmp_path)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    writer = write(tmp_path, [[0]])
    writer.add(1, DOCUMENTS[1])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"cannot be written \(File too large\)"):
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name for path in tmp_path.iterdir()} == {"data.json", "tokens-00000.safetensors"}


def test_a_killed_write_leaves_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".data.json.123.tmp").write_text("{")
    write(tmp_path, [[0]]).finish()
    assert not list(tmp_path.glob(".*")) and len(read_data(tmp_path)) == 1
    with pytest.raises(ValueError, match=r"inside cannot be written to \(Not a directory\)"):
        write(tmp_path / "data.json/inside", [])
    with pytest.raises(ValueError, match=r"data\.json holds other files"):
        write(tmp_path / "data.json", [])
