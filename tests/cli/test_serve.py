"""`blockdraft serve`: its options, and what it refuses before it loads anything."""

import sys

import pytest

from blockdraft import cli


def failing(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["blockdraft", "serve", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--host", "0.0.0.0"], "set BLOCKDRAFT_API_KEY, or add --allow-open"),
        (["--port", "70000"], "--port must be from 0"),
        (["--max-batch-size", "0"], "--max-batch-size must be at least 1, got '0'"),
        (["--temperature", "-1"], "--temperature must be at least 0"),
        (["--served-model-name", " "], "--served-model-name holds an empty name"),
        (["--target", "/no/such/model", "--drafter", "none"], "/no/such/model"),
    ],
)
def test_what_cannot_be_is_told(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in failing([*arguments, *([] if "--port" in arguments else ["--port", "0"])], monkeypatch, capsys)


def test_lacking_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.modules["blockdraft.cli.serve"], "NEEDED", ("no_such_package",))
    assert "pip install 'blockdraft[server]'" in failing([], monkeypatch, capsys)


def test_the_key_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", " ")
    assert "--api-key is empty" in failing([], monkeypatch, capsys)
