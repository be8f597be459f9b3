from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from blockdraft.cli import app, loading
from blockdraft.cli.options import FieldOptions, RecordOptions, TargetOptions, extent, option, with_options
from blockdraft.data.settings import RecordSettings
from blockdraft.errors import UsageError
from blockdraft.settings import Count, settings


@dataclass
class Explained:
    """Something.

    Attributes:
        size: Of a thing,
            over two lines; None is none of these.
        other: Another.
    """

    size: int | None = None
    other: int = 0


def test_options_are_explained_as_in_the_docstring() -> None:
    assert option(Explained, "size").help == "Of a thing, over two lines; the default is none of these."
    assert option(Explained, "other", metavar="N").help == "Another."


@settings
class Checked:
    """Something.

    Attributes:
        size: Of a thing.
        kind: Of it; None is any.
    """

    size: Count = 3
    kind: Literal["round", "flat"] | None = None


def test_a_command_takes_all_fields_of_settings_as_options() -> None:
    taken, program = [], typer.Typer(pretty_exceptions_enable=False)

    @program.command()
    @with_options
    def command(*, checked: Checked, records: RecordOptions) -> None:
        taken.append((checked, records))

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(program, arguments)
        return str(result.exception) if isinstance(result.exception, ValueError) else result.output

    assert run() == "" and taken.pop() == (Checked(), RecordOptions())
    assert run("--size", "5", "--kind", "flat", "--split", "test") == ""
    assert taken.pop() == (Checked(5, "flat"), RecordOptions("test"))
    told = run("--help")
    assert "round|flat" in told and "Of it; the default is any." in told and "default: 3" in told
    assert run("--size", "0") == "size is 0; it must be at least 1."
    assert run("--kind", "odd") == "kind is 'odd'; it must be 'round' or 'flat'."
    assert not taken


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("0", "--draft-vocab is 0; it must be at least 1."),
        ("abc", "--draft-vocab is 'abc', which is no file"),
        ("ids.json", "ids.json holds 'a'; it must be a list of token ids, 0 or more."),
    ],
)
def test_draft_vocabularies_are_read_before_targets_load(
    given: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.json").write_text('["a"]')
    monkeypatch.setattr(TargetOptions, "load", lambda *_: pytest.fail("the target is loaded"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}')
    for words in (["generate", "hello"], ["chat"], ["serve"], ["bench", "--prompts", "prompts.jsonl"]):
        found = CliRunner().invoke(app, [*words, "--target", "bundled", "--draft-vocab", given]).exception
        assert isinstance(found, UsageError) and told in str(found)


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "hello"),
        ("chat",),
        ("serve",),
        ("calibrate",),
        ("bench", "--prompts", "prompts.jsonl", "--methods", "chain"),
        ("bench", "--prompts", "prompts.jsonl", "--methods", "nowhere:4"),
    ],
)
def test_drafters_are_looked_for_before_targets_load(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("the target is loaded"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}')
    named = ("--drafter", "nowhere") if "nowhere:4" not in words else ()
    found = CliRunner().invoke(app, [*words, "--target", "bundled", *named]).exception
    assert isinstance(found, UsageError) and "nowhere is no drafter; give a folder" in str(found)


def test_more_threads_than_processors_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "load", lambda *_, **how: how["threads"])
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for threads, told in (("2", ""), ("3", "--threads is 3, more than this machine's 2 processors"), ("auto", "")):
        assert str(TargetOptions("bundled", threads=threads).load()) == threads
        err = capsys.readouterr().err
        assert told in err and bool(told) == bool(err)


def test_records() -> None:
    assert RecordOptions().settings() == FieldOptions().settings() == RecordSettings()
    assert RecordOptions("test", "main").settings(5) == RecordSettings("test", "main", 5)
    assert FieldOptions(prompt_field="q", response_field="a").settings() == RecordSettings(
        prompt_field="q", response_field="a"
    )


def test_extents() -> None:
    assert [extent("size", text) for text in (None, "auto", "7", "-1")] == [None, "auto", 7, -1]
    with pytest.raises(ValueError, match="size is 'Auto'; it must be a whole number or auto"):
        extent("size", "Auto")


def test_whoever_loads_a_target_can_choose_the_backend() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    names = {name: {parameter.name for parameter in command.params} for name, command in commands.items()}
    assert sum("target" in found for found in names.values()) >= 7
    odd = [name for name, found in names.items() if ("target" in found) != ("backend" in found)]
    # quantize decodes on the native backend alone, and the others read files without loading a target.
    assert set(odd) == {"quantize", "inspect", "push"}
    exact = [name for name, found in names.items() if "exact" in found]
    assert exact == ["generate", "chat", "serve", "bench", "bench suite", "calibrate", "doctor"]
