"""A command in this process. And for gguf_writer.py and fake_server.py, which lie beside other tests."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from blockdraft import cli

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("targets", "evaluation/servers")]


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def blockdraft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs the command with these words."""

    def run(*words: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["blockdraft", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as exited:
            code = int(exited.code or 0)
        return Result(code, *capsys.readouterr())

    return run
