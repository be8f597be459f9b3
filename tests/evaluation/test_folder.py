import os
from pathlib import Path
from typing import Any

import pytest

from blockdraft.evaluation.folder import check_folder, write
from blockdraft.evaluation.results import Results


def test_write(found: Results, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    write(folder, found, with_pictures=False)
    assert [path.name for path in folder.iterdir()] == ["results.json"]
    assert (folder / "results.json").read_text() == found.as_json()


def test_pictures_of_other_results_go(found: Results, tmp_path: Path) -> None:
    (tmp_path / "speedup.png").write_bytes(b"old")
    write(tmp_path, found, with_pictures=False)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_no_half_file(
    found: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    (tmp_path / "results.json").write_text("old")

    def half(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:10])
        raise error

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
        write(tmp_path, found, with_pictures=False)
    if isinstance(error, OSError):
        assert str(caught.value) == f"{tmp_path} cannot be written to (No space left on device)."
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert (tmp_path / "results.json").read_text() == "old"


def test_results_have_their_name_only_when_they_are_complete(
    found: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed cannot clean up; then a file of another name stays behind."""
    replaced: list[tuple[str, str]] = []
    replace = Path.replace

    def watched(self: Path, new: Path) -> Any:
        assert not new.exists()
        replaced.append((self.read_text(), new.name))
        return replace(self, new)

    monkeypatch.setattr(Path, "replace", watched)
    write(tmp_path, found, with_pictures=False)
    assert replaced == [(found.as_json(), "results.json")]


def test_check_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_folder(tmp_path / "new" / "folder", overwrite=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "results.json").write_text("old")
    check_folder(tmp_path, overwrite=True)
    with pytest.raises(ValueError, match=r"results\.json exists; .* --overwrite"):
        check_folder(tmp_path, overwrite=False)
    for folder in (tmp_path / "results.json", tmp_path / "results.json" / "inside"):
        with pytest.raises(ValueError, match="is no writable folder"):
            check_folder(folder, overwrite=True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="is no writable folder"):
        check_folder(tmp_path, overwrite=True)
