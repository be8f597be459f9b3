"""`blockdraft env`, the overview and the completion of the command line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from blockdraft import cli
from blockdraft.cli.env import facts


def test_facts(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = CliRunner().invoke(cli.app, ["env"])
    assert result.exit_code == 0
    found = dict(re.findall(r"^(\S.*?)  +(.+)$", result.output, re.M))
    assert {"blockdraft", "python", "torch", "transformers", "processor", "memory", "compiled decoder"} <= found.keys()
    assert (
        re.match(r"\d+\.\d+", found["torch"]) and found["cache"] == str(own_cache) and found["OMP_NUM_THREADS"] == "1"
    )


def test_why_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from blockdraft.cpu import build

    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(build, "begun", build.begun.__wrapped__)
    assert dict(facts())["compiled decoder"] == "none, since there is no C compiler (no-such-compiler)"


def test_the_overview_groups_all_commands() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert all(command.rich_help_panel for command in commands.values())
    output = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "120", "TERM": "dumb"}).output
    headings = [cli.RUN, cli.TRAIN, cli.MEASURE, cli.OTHER]
    places = [output.index(heading) for heading in headings]
    assert places == sorted(places)


@pytest.mark.parametrize(("typed", "offered"), [("blockdraft ch", "chat"), ("blockdraft chat --tem", "--temperature")])
def test_the_shell_completes(typed: str, offered: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_BLOCKDRAFT_COMPLETE": "complete_bash"}
    code = "import sys; sys.argv = ['blockdraft']; from blockdraft.cli import app; app(prog_name='blockdraft')"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **words}, capture_output=True)
    assert offered in done.stdout.decode().split()
