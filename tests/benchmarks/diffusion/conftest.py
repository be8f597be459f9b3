"""A text of few characters, and tiny models of it."""

from pathlib import Path

import pytest

from benchmarks.diffusion.settings import TextSettings
from benchmarks.diffusion.text import Corpus, compare


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join("\n" if i % 11 == 0 else chr(97 + i * i % 7) for i in range(2000)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(text_file: Path) -> Corpus:
    return Corpus(text_file, held_out=0.1)


@pytest.fixture(scope="session")
def tiny() -> TextSettings:
    return TextSettings(
        models=("autoregressive", "block 1", "block 4", "whole clipped"),
        seeds=2,
        steps=3,
        batch=2,
        length=16,
        hidden=16,
        layers=1,
        heads=2,
        draws=4,
        scored=100,
    )


@pytest.fixture(scope="session")
def text_folder(corpus: Corpus, tiny: TextSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of models that were trained and measured."""
    folder = tmp_path_factory.mktemp("models") / "text"
    compare(corpus, tiny, folder, lambda *told: None)
    return folder
