"""Commands in processes of their own, forked from one that has imported their modules: each import takes seconds."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

MODULES = ["blockdraft.cli", "blockdraft.drafters", "blockdraft_train.trainer", "matplotlib.pyplot", "transformers"]
CONTEXT = multiprocessing.get_context("forkserver")


class Command:
    """A running `blockdraft` command.

    Args:
        words: Its words.
        stderr: File for its standard error.
    """

    def __init__(self, *words: object, stderr: str | Path = os.devnull) -> None:
        CONTEXT.set_forkserver_preload(MODULES)
        arguments = [*map(str, words)], {**os.environ}, str(stderr)
        self._process = CONTEXT.Process(target=_run, args=arguments, daemon=True)
        self._process.start()

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def wait(self, seconds: float | None = 240) -> int:
        """Return the exit code, which is negative after a signal. Raise a TimeoutError if it does not end in time."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise TimeoutError(f"it runs for more than {seconds} seconds")
        return self._process.exitcode


def run(*words: object) -> None:
    """Run a command to its end, which must be a success."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as stderr:
        assert Command(*words, stderr=stderr.name).wait() == 0, stderr.read()


class Popen:
    """Takes the place of `subprocess.Popen` for `python -m blockdraft ...`."""

    def __init__(self, command: Sequence[str], preexec_fn: Callable[[], None] | None = None) -> None:
        assert list(command[:3]) == [sys.executable, "-m", "blockdraft"], command
        self._command = Command(*command[3:])

    def terminate(self) -> None:
        self._command.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self._command.wait(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired("blockdraft", timeout or 0) from None


def _run(words: list[str], environment: dict[str, str], stderr: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import torch

    from blockdraft.cli import main

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with open(stderr, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    main(words)
