"""Options that are generated from settings classes, and how commands read them."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from command_line import commands_of
from pydantic import Field
from typer.testing import CliRunner

from blockdraft.cli import app
from blockdraft.cli.options import Only, add
from blockdraft.errors import UsageError
from blockdraft.settings import Count, Flag, Texts, settings


@settings
class Shape:
    size: Count = Field(3, description="Size of a thing.")
    kind: Literal["round", "flat"] | None = Field(None, description="Kind of a thing; by default any.")
    names: Annotated[Texts, Flag("--name", repeat=True)] = Field((), description="Name of a thing.")
    shiny: bool = Field(False, description="Whether it shines.")
    hollow: bool = Field(True, description="Whether it is hollow.")
    extent: int | Literal["auto"] = Field("auto", description="Extent of a thing.")


@settings
class Colour:
    red: float = Field(0.5, description="Share of red.")
    size: int = Field(1, description="Size of a spot.")

    def __post_init__(self) -> None:
        if self.red > 1:
            raise UsageError(f"red must be at most 1, got {self.red}.")


TAKEN: list[object] = []
PINK = Colour(0.75, size=9)
ABSENT = ("--target", "/no/such/model")  # reported where loading begins


def command(
    *, shape: Shape, colour: Annotated[Colour, Only("red", red="--crimson")] = PINK, loud: bool = False
) -> None:
    """Do something."""
    TAKEN.append((shape, colour, loud))
    if loud:
        raise UsageError("size is too loud.")


def run(*arguments: str) -> str:
    program = typer.Typer(pretty_exceptions_enable=False)
    add(program, command)
    TAKEN.clear()
    result = CliRunner().invoke(program, arguments, env={"COLUMNS": "160"})
    return str(result.exception) if isinstance(result.exception, ValueError) else result.output


def test_fields_of_settings_are_flags() -> None:
    assert run() == "" and [(Shape(), PINK, False)] == TAKEN
    assert run("--size", "5", "--kind", "flat", "--name", "a", "--name", "b,c", "--shiny", "--no-hollow") == ""
    assert [(Shape(5, "flat", ("a", "b,c"), True, False), PINK, False)] == TAKEN
    assert run("--extent", "4", "--crimson", "1") == "" and [(Shape(extent=4), Colour(1.0, 9), False)] == TAKEN


def test_help_shows_descriptions_values_and_defaults() -> None:
    shown = run("--help")
    for text in ("round|flat", "Kind of a thing; by default any.", "[default: 3]", "N|auto", "[default: 0.75]"):
        assert text in shown
    assert "Size of a spot" not in shown and "--no-hollow" in shown and "None" not in shown


def test_all_errors_are_reported_together_by_flag() -> None:
    assert run("--size", "0") == "--size must be at least 1, got '0'."
    assert run("--size", "x", "--kind", "odd", "--crimson", "2") == (
        "--size must be a whole number, got 'x'. --kind must be 'round' or 'flat', got 'odd'. "
        "--crimson must be at most 1, got 2.0."
    )
    assert not TAKEN
    assert run("--loud") == "--size is too loud."


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0", "--draft-vocab must be at least 1, got 0."),
        ("abc", "--draft-vocab is 'abc', which is no file"),
        ("ids.json", "ids.json must be a list of token ids, 0 or more, got 'a'."),
    ],
)
def test_draft_vocabularies_are_read_before_targets_load(
    given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.json").write_text('["a"]')
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}')
    for words in (["generate", "hello"], ["chat"], ["serve", "--port", "0"], ["bench", "--prompts", "prompts.jsonl"]):
        error = CliRunner().invoke(app, [*words, *ABSENT, "--drafter", "lookup", "--draft-vocab", given]).exception
        assert isinstance(error, UsageError) and message in str(error)


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "hello"),
        ("chat",),
        ("serve", "--port", "0"),
        ("calibrate",),
        ("bench", "--prompts", "prompts.jsonl", "--methods", "chain"),
        ("bench", "--prompts", "prompts.jsonl", "--methods", "nowhere:4"),
    ],
)
def test_drafters_are_looked_for_before_targets_load(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}')
    named = ("--drafter", "nowhere") if "nowhere:4" not in words else ()
    error = CliRunner().invoke(app, [*words, *ABSENT, *named]).exception
    assert isinstance(error, UsageError) and "nowhere is no drafter; give a folder" in str(error)


def test_commands_that_load_a_target_can_choose_the_backend() -> None:
    commands = commands_of(typer.main.get_command(app))
    names = {name: {parameter.name for parameter in command.params} for name, command in commands.items()}
    odd = {name for name, options in names.items() if ("target" in options) != ("backend" in options)}
    # quantize decodes on the native backend alone, and the others read files without loading a target.
    assert odd == {"quantize", "inspect"}
    exact = [name for name, options in names.items() if "exact" in options]
    assert exact == ["generate", "chat", "serve", "bench", "calibrate", "doctor"]
