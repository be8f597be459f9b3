"""Folders that appear whole, and what is left beside them."""

import shutil
from pathlib import Path

import pytest

from blockdraft.formats.folder import clear_remains


def test_remains_go_and_what_they_replaced_comes_back(tmp_path: Path) -> None:
    for name in ("new", "old"):
        (tmp_path / ".drafter.x" / name).mkdir(parents=True)
    (tmp_path / ".drafter.mine").mkdir()
    (tmp_path / ".drafter.mine" / "notes").touch()
    clear_remains(tmp_path / "drafter")
    assert {path.name for path in tmp_path.iterdir()} == {"drafter", ".drafter.mine"}


def test_what_another_process_takes_away_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree

    def late(path: Path) -> None:
        remove(path)
        remove(path)

    for name in "ab":
        (tmp_path / f".drafter.{name}").mkdir()
    monkeypatch.setattr(shutil, "rmtree", late)
    clear_remains(tmp_path / "drafter")
    assert not list(tmp_path.iterdir())
