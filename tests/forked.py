"""Commands in processes of their own, forked from one that has imported their modules: each import takes seconds."""

import multiprocessing
import os
import signal
import sys
import warnings
from pathlib import Path

MODULES = ["blockdraft.cli", "blockdraft.drafters", "blockdraft.training.trainer", "matplotlib.pyplot", "transformers"]
CONTEXT = multiprocessing.get_context("forkserver")


class Command:
    """A running `blockdraft` command.

    Args:
        words: Its words.
        stderr: File for its standard error.
    """

    def __init__(self, *words: object, stderr: str | Path = os.devnull) -> None:
        CONTEXT.set_forkserver_preload(MODULES)
        self._process = CONTEXT.Process(target=_run, args=([*map(str, words)], str(stderr)))
        self._process.start()

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def wait(self, seconds: float = 240) -> int:
        """Return the exit code, which is negative after a signal."""
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, f"it runs for more than {seconds} seconds"
        return code


def run(*words: object, stderr: str | Path = os.devnull) -> None:
    """Run a command to its end, which must be a success."""
    assert Command(*words, stderr=stderr).wait() == 0


def _run(words: list[str], stderr: str) -> None:
    import torch

    from blockdraft.cli import main

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with open(stderr, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    main(words)
