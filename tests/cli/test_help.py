"""The overview, the help screens, and the completion of the command line."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from command_line import commands_of
from thinned import thinned
from typer.testing import CliRunner

from blockdraft import cli
from blockdraft.cli.options import Command


def shown(*words: str, width: int = 120) -> str:
    result = CliRunner().invoke(cli.app, [*words], env={"COLUMNS": str(width), "TERM": "dumb"})
    assert result.exit_code == 0
    return result.output


def commands(group: Any = None, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    group = group or typer.main.get_command(cli.app)
    for name, command in commands_of(group).items():
        words = (*before, *name.split())
        yield from commands(command, words) if hasattr(command, "commands") else [(words, command)]


def test_the_overview_groups_all_commands() -> None:
    report = commands_of(typer.main.get_command(cli.app))
    assert all(command.rich_help_panel for command in report.values())
    output = shown("--help")
    places = [output.index(item) for item in ("Run models", "Make a drafter", "Measure", "This machine")]
    assert places == sorted(places)
    assert "bench server" in output


def test_errors_of_commands_name_options_as_they_are_typed(blockdraft: Callable[..., Any]) -> None:
    assert blockdraft("generate", "hi", "--top-k", -1).err.startswith("error: --top-k must be ")
    assert "--seed must be " in blockdraft("bench", "--seed", -1).err
    message = blockdraft("train", "dflash", "--eval-every", "x", "--layers", "0").err
    assert "--eval-every must be" in message and "--layers must be" in message
    assert "--format must be one of zlab, " in blockdraft("export", "bundled", "--format", "nope", "--out", "x").err


def test_every_command_has_both_helps() -> None:
    report = dict(commands())
    assert len(report) >= 25 and all(isinstance(command, Command) for command in report.values())
    for words, command in report.items():
        names = {parameter.name for parameter in command.params}
        assert command.common <= names, words
        assert len(command.common) <= 11 and (command.common or len(names) <= 11), words


@pytest.mark.parametrize("words", thinned([words for words, _ in commands()], keep=4), ids=" ".join)
def test_help_is_short_and_help_all_is_whole(words: tuple[str, ...]) -> None:
    command = dict(commands())[words]
    flags = {parameter.name: parameter.opts[0] for parameter in command.params if parameter.opts[0].startswith("-")}
    required = {parameter.name for parameter in command.params if parameter.required}
    short, whole = shown(*words, "--help"), shown(*words, "--help-all")
    for name, flag in flags.items():
        row = re.compile(rf"^│ [* ]*{flag}[ ,]", re.M)
        assert row.search(whole) and bool(row.search(short)) == (
            not command.common or name in command.common | required
        )
    left_out = len(flags) - len(command.common & set(flags) | required & set(flags)) if command.common else 0
    assert (f"--help-all shows {left_out} more options." in short) == (left_out > 0)
    assert "more options" not in whole and whole == shown(*words, "--help-all")


def test_two_words_name_a_command(blockdraft: Callable[..., Any]) -> None:
    assert "bench server [OPTIONS]" in blockdraft("bench", "server", "--help").out
    assert "bench [OPTIONS]" in blockdraft("bench", "--help").out
    assert "No such command 'benches'" in blockdraft("benches").err
    assert "unexpected extra argument" in blockdraft("bench", "sever").err


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("blockdraft chat --tem", "--temperature"), pytest.param("blockdraft ch", "chat", marks=pytest.mark.slow)],
)
def test_the_shell_completes(typed: str, offered: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_BLOCKDRAFT_COMPLETE": "complete_bash"}
    code = "import sys; sys.argv = ['blockdraft']; from blockdraft.cli import app; app(prog_name='blockdraft')"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **words}, capture_output=True)
    assert offered in done.stdout.decode().split()
