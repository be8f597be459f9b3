"""The examples run, and say what they are there to say."""

import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.usefixtures("own_cache")
TESTED = ["chat", "compare_methods", "many_prompts", "own_drafter", "quickstart"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_are_short_listed_and_tested() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == TESTED
    for name in TESTED:
        assert f"[{name}.py]({name}.py)" in table
        assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 60


def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    load("quickstart").main()
    out = capsys.readouterr().out
    assert "of them guessed, tau " in out and out.count("The answer is") == 2


def test_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 37 + 58?\nAnd 12 + 7?\n"))
    load("chat").main()
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert len(notes) == 2 and " 0 remembered" in notes[0] and " 0 remembered" not in notes[1]


@pytest.mark.slow
def test_compare_methods(capsys: pytest.CaptureFixture[str]) -> None:
    load("compare_methods").main()
    out = capsys.readouterr().out
    assert out.count("tokens/s, tau ") == 5 and "same tokens: True" in out


@pytest.mark.slow
def test_many_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    load("many_prompts").main()
    assert "same answers both ways: True" in capsys.readouterr().out


@pytest.mark.slow
def test_own_drafter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load("own_drafter").main(tmp_path / "own", steps=2)
    out = capfd.readouterr().out
    assert (tmp_path / "own/drafter/model.safetensors").is_file()
    assert [line.split()[-2] for line in out.splitlines() if line.startswith(("none ", "chain "))] == ["100", "100"]
