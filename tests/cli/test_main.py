"""How commands start and end."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_no_traceback(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        words, environment = [sys.executable, "-m", "blockdraft", "env"], os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device; free space, and give the command again.\n"


def test_a_text_in_the_place_of_a_path(blockdraft: Callable[..., Any]) -> None:
    done = blockdraft("inspect", "word " * 80)
    assert done.code == 2 and done.err == f"error: {('word ' * 12)!r}... is too long to be a path or name.\n"


COMMANDS = """
import sys
from blockdraft.cli import main
for words in ("--version", "--help", "models", "cache list", "pull nosuch", "radar --devices"):
    try:
        main(words.split())
    except SystemExit as end:
        print(words, end.code or 0, sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_light_commands_import_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", COMMANDS], capture_output=True, text=True, check=True)
    ends = [line for line in done.stdout.splitlines() if line.endswith(" []")]
    assert [line.split()[-2] for line in ends] == ["0", "0", "0", "0", "2", "0"]
