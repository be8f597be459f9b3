from pathlib import Path
from types import SimpleNamespace

import pytest

from blockdraft import drafters
from blockdraft.formats import quantized
from blockdraft.plugins import FILES, FOLDERS, RUNNERS, plugin_names, plugins, runner_class


def test_files_of_another_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("VALUE = 3\n")
    (tmp_path / "base.py").write_text("")
    names = plugin_names(quantized.__name__)
    assert "awq" in names and "base" not in names
    monkeypatch.setattr(quantized, "__path__", [*quantized.__path__, str(tmp_path)])
    assert plugin_names(quantized.__name__) == sorted([*names, "mine"])
    assert plugins(quantized.__name__)["mine"].VALUE == 3


def test_every_file_of_a_drafter_is_registered() -> None:
    root = Path(drafters.__path__[0])
    folders = {path.parent.name for path in root.glob("*/drafter.py")}
    assert set(FOLDERS) == folders
    for name, files in FOLDERS.items():
        parts = {"drafter", "layout", "train", "checks", "gguf", "speculators"}
        assert set(files) == {part for part in parts if (root / name / f"{part}.py").is_file()}
    registered = {path.stem for path in root.glob("*.py") if "\nDRAFTER = " in path.read_text()}
    assert set(FILES) == registered


@pytest.mark.parametrize("backend", RUNNERS)
def test_every_runner_can_be_imported(backend: str) -> None:
    """Also without the packages of its backend."""
    for architecture in RUNNERS[backend]:
        assert isinstance(runner_class(SimpleNamespace(architecture=architecture), backend), type)


def test_other_networks_have_no_runner() -> None:
    assert runner_class(SimpleNamespace(architecture=None), "compiled") is None
    assert runner_class(SimpleNamespace(), "captured") is None
