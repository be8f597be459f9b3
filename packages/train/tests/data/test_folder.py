"""Folders with data or results."""

import os
from pathlib import Path

import pytest

from blockdraft.errors import UsageError
from blockdraft.folders import check_overwrite


def test_check_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_overwrite(tmp_path / "new" / "folder", ["results.json"], overwrite=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "results.json").write_text("old")
    check_overwrite(tmp_path, ["results.json"], overwrite=True)
    check_overwrite(tmp_path, ["other.json"], overwrite=False)
    with pytest.raises(UsageError, match=r"results\.json exists; .* --overwrite"):
        check_overwrite(tmp_path, ["other.json", "results.json"], overwrite=False)
    for folder in (tmp_path / "results.json", tmp_path / "results.json" / "inside"):
        with pytest.raises(UsageError, match="is no folder"):
            check_overwrite(folder, ["results.json"], overwrite=True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="may not be written to"):
        check_overwrite(tmp_path, ["results.json"], overwrite=True)
