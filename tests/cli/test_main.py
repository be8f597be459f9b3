"""How commands end."""

import errno
from collections.abc import Callable
from typing import Any

import pytest

from blockdraft import cli


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_traceback(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(number, "No space left on device", "drafter.run/log.jsonl")

    monkeypatch.setattr(cli, "app", full)
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 1
    assert "'drafter.run/log.jsonl'; free space, and give the command again." in capsys.readouterr().err


def test_other_errors_of_the_system_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "x")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(PermissionError):
        cli.main()


def test_a_text_in_the_place_of_a_path(blockdraft: Callable[..., Any]) -> None:
    done = blockdraft("inspect", "word " * 80)
    assert done.code == 2 and done.err == f"error: {('word ' * 12)!r}... is too long to be a path or name.\n"
