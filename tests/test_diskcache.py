import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from blockdraft import diskcache
from blockdraft.diskcache import code_key, delete_abandoned, is_partial, key_of, least_used, touch, written


def test_keys_differ_where_facts_do() -> None:
    assert key_of("a", 1) == key_of("a", 1) and len(key_of("a", 1)) == 16
    keys = {key_of("a", 1), key_of("a", "1"), key_of("a1"), key_of(["a", 1]), key_of("a", None), key_of(Path("a"), 1)}
    assert len(keys) == 6


def test_the_key_of_code_is_that_of_its_folders(tmp_path: Path, constants: Callable[..., None]) -> None:
    constants(diskcache, __file__=str(tmp_path / "diskcache.py"))
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "code.py").write_text("a = 1\n")
    before = code_key.__wrapped__("one")
    (tmp_path / "other" / "code.py").write_text("a = 2\n")
    assert code_key.__wrapped__("one") == before
    (tmp_path / "one" / "code.h").write_text("int a;\n")
    assert code_key.__wrapped__("one") != before


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "kind" / "file.json"
    with written(path) as partial:
        assert is_partial(partial) and stat.S_IMODE(partial.stat().st_mode) == 0o600
        partial.write_text("first")
        assert not path.exists()
    with pytest.raises(ValueError, match="half way"), written(path) as partial:
        partial.write_text("sec")
        raise ValueError("half way")
    assert path.read_text() == "first" and [*path.parent.iterdir()] == [path]


def test_abandoned_files_are_deleted(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("a.1.partial", "a.2.partial", "b.json"))
    for path in (old, new, other):
        path.touch()
    os.utime(old, (1, 1))
    os.utime(other, (1, 1))
    delete_abandoned(tmp_path)
    assert {*tmp_path.iterdir()} == {new, other}
    delete_abandoned(tmp_path, "a.", seconds=0)
    assert {*tmp_path.iterdir()} == {other}


def test_the_least_recently_used_are_to_be_deleted(tmp_path: Path) -> None:
    now = time.time()
    paths = [tmp_path / f"{number}.x" for number in range(4)]
    for age, path in enumerate(reversed(paths)):  # the first is the oldest
        path.write_bytes(bytes(10))
        os.utime(path, (now - 100 * age, now - 100 * age))
    (tmp_path / "big.y").write_bytes(bytes(1000))
    assert list(least_used(tmp_path, "*.x", 40)) == []
    assert list(least_used(tmp_path, "*.x", 20)) == paths[:2]
    assert list(least_used(tmp_path, "*.x", 0, keep=paths[:1])) == paths[1:]
    touch(paths[0])
    assert list(least_used(tmp_path, "*.x", 30)) == paths[1:2]
