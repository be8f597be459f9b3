"""A plugin that is installed for one test, as pip would install it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blockdraft import plugins


def forget() -> None:
    """Look for plugins anew."""
    plugins.entry_points.cache_clear()
    plugins.load.cache_clear()


@pytest.fixture
def installed_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install packages: called with a distribution's name, its entry_points.txt, and the folder that holds its code."""

    def install(name: str, entry_points: str, code: Path) -> None:
        information = tmp_path / "site" / f"{name}-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        (information / "entry_points.txt").write_text(entry_points, encoding="utf-8")
        for folder in (information.parent, code):
            monkeypatch.syspath_prepend(str(folder))
        forget()

    yield install
    monkeypatch.undo()
    forget()
