from pathlib import Path

import pytest

from blockdraft.formats import quantized
from blockdraft.plugins import plugin_names, plugins


def test_files_of_another_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("VALUE = 3\n")
    (tmp_path / "base.py").write_text("")
    names = plugin_names(quantized.__name__)
    assert "awq" in names and "base" not in names
    monkeypatch.setattr(quantized, "__path__", [*quantized.__path__, str(tmp_path)])
    assert plugin_names(quantized.__name__) == sorted([*names, "mine"])
    assert plugins(quantized.__name__)["mine"].VALUE == 3
