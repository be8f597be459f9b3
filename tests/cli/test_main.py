"""How commands start and end."""

import errno
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from blockdraft import cli


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_traceback(
    number: int, monkeypatch: pytest.MonkeyPatch, blockdraft: Callable[..., Any]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, "No space left on device", "drafter.run/log.jsonl")

    monkeypatch.setattr(cli, "app", full)
    done = blockdraft()
    assert done.code == 1 and "'drafter.run/log.jsonl'; free space, and give the command again." in done.err


def test_a_text_in_the_place_of_a_path(blockdraft: Callable[..., Any]) -> None:
    done = blockdraft("inspect", "word " * 80)
    assert done.code == 2 and done.err == f"error: {('word ' * 12)!r}... is too long to be a path or name.\n"


@pytest.mark.parametrize(
    "words", [("--version",), ("--help",), ("models",), ("cache", "list"), ("pull", "nosuch"), ("radar", "--devices")]
)
def test_what_computes_nothing_starts_without_torch(words: tuple[str, ...]) -> None:
    code = "import atexit, sys; from blockdraft.cli import main; "
    code += "atexit.register(lambda: print(sorted({'torch', 'transformers'} & set(sys.modules)))); main()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.stdout.endswith("[]\n")
