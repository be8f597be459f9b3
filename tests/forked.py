"""Commands in processes of their own, forked from one that has imported their modules: each import takes seconds."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from several_processes import write_threads

MODULES = [
    *("blockdraft.cli", "blockdraft.drafters", "blockdraft.targets.native", "blockdraft_train.cli.train"),
    *("blockdraft_train.trainer", "blockdraft_train.variants.dflash", "matplotlib.backends.backend_agg"),
    *("matplotlib.pyplot", "torch._dynamo", "transformers.models.auto.tokenization_auto"),
]
CONTEXT = multiprocessing.get_context("forkserver")


def process(function: Callable[..., None], *arguments: object) -> multiprocessing.context.ForkServerProcess:
    """Return a process for this function, which is not started."""
    CONTEXT.set_forkserver_preload(MODULES)
    return CONTEXT.Process(target=function, args=arguments, daemon=True)


class Command:
    """A running `blockdraft` command.

    Args:
        words: Its words.
        stderr: File for its standard error.
        more: Environment variables besides those of this process.
    """

    def __init__(self, *words: object, stderr: str | Path = os.devnull, more: Mapping[str, str] | None = None) -> None:
        self._process = process(_run, [*map(str, words)], os.environ | dict(more or {}), str(stderr))
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


def run_twice_at_once(*words: object, folder: Path, more: Mapping[str, str] | None = None) -> str:
    """Run a command to its end in two processes with the variables that Accelerate's launcher sets.

    Args:
        folder: Folder for their standard errors, and for the threads that they have at their ends.
        more: Further variables.

    Returns:
        The standard error of the first.
    """
    folder.mkdir()
    (folder / "threads").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "THREADS": str(folder / "threads")}
    group |= dict(more or {})
    ranks = ("0", "1")
    commands = [
        Command(*words, stderr=folder / rank, more=group | {"RANK": rank, "LOCAL_RANK": rank}) for rank in ranks
    ]
    ended = [command.wait() for command in commands]
    errors = [(folder / rank).read_text() for rank in ranks]
    assert ended == [0, 0], errors
    return errors[0]


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
    try:
        main(words)
    finally:
        if "THREADS" in environment:
            write_threads()
