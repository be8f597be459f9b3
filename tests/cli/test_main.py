"""How commands start and end."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_no_traceback() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "blockdraft", "env"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "No space left on device; free space, and give the command again." in done.stderr


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
