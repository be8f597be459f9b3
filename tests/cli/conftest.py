"""A command in this process, and import paths of standard_stream.py, gguf_writer.py and fake_server.py."""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main

from blockdraft import cli

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("cli", "targets", "evaluation/servers")]


@pytest.fixture(scope="session", autouse=True)
def commands_are_made_once() -> Iterator[None]:
    """As in a process of its own: out of all the signatures, which takes longer than many a command runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


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
