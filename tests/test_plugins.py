from pathlib import Path

import pytest

from blockdraft.plugins import plugin_names, plugins
from blockdraft.training import objectives


def test_files_of_another_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("VALUE = 3\n")
    (tmp_path / "base.py").write_text("")
    names = plugin_names(objectives.__name__)
    assert "decay" in names and "base" not in names
    monkeypatch.setattr(objectives, "__path__", [*objectives.__path__, str(tmp_path)])
    assert plugin_names(objectives.__name__) == sorted([*names, "mine"])
    assert plugins(objectives.__name__)["mine"].VALUE == 3
