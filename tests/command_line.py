"""Fixtures of tests that run commands, and import paths of standard_stream.py and gguf_writer.py."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from blockdraft import cli

sys.path += [str(Path(__file__).parent / folder) for folder in ("cli", "targets")]


@pytest.fixture(scope="session", autouse=True)
def commands_are_made_once() -> Iterator[None]:
    """As in a process of its own: out of all the signatures, which takes longer than many a command runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


def commands_of(group: Any) -> dict[str, Any]:
    """Return the commands of a group by name, those of plugins included."""
    return {name: group.get_command(None, name) for name in group.list_commands(None)}


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def blockdraft(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command with these words. `stdin` comes through a pipe.

    With `terminal`, output goes to a terminal; with `typing`, input comes from one.
    """
    from standard_stream import Stream

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(*words: object, stdin: str | bytes = b"", terminal: bool = False, typing: bool = False) -> Result:
        out, err = Stream(terminal=terminal), Stream()
        content = stdin.encode() if isinstance(stdin, str) else stdin
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "stdin", Stream(content, typing))
            try:
                cli.main([*map(str, words)])
                code = 0
            except SystemExit as exited:
                code = int(exited.code or 0)
        return Result(code, out.text(), err.text())

    return run


@pytest.fixture
def altered(tmp_path: Path, tiny_target_dir: Path) -> Callable[..., Path]:
    """Copies the tiny target and leaves out a file or changes its weights.

    `nan_token` is a token whose embedding is not finite, so that a prompt with it fails.
    """
    import shutil

    from safetensors.torch import load_file, save_file

    def copy(without: str = "", nan_token: int | None = None) -> Path:
        folder = tmp_path / "altered"
        shutil.copytree(tiny_target_dir, folder, ignore=lambda *_: [without])
        if nan_token is not None:
            weights = load_file(folder / "model.safetensors")
            weights["model.embed_tokens.weight"][nan_token] = float("nan")
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return copy
