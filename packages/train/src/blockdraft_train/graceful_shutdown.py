"""Early ends of runs.

A file or SIGUSR1 requests a complete end. SIGTERM and SIGINT interrupt a run, which is saved first.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from blockdraft_train.progress import FINISH, run_folder

STOPS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Interruption by a signal.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    @property
    def exit_status(self) -> int:
        """Exit status of a process that the signal ended, as shells report it."""
        return 128 + self.number


class StopSignals:
    """Turns SIGTERM and SIGINT into exceptions, or, inside `deferred`, into a flag that the caller polls.

    A second signal always raises the exception.

    Args:
        note: Called with a sentence when a signal is deferred.

    Attributes:
        number: Number of the first signal; None if none has come.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.number: int | None = None
        self._note, self._deferred = note, False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Make these signals raise `Stopped`. Outside of the main thread, which alone gets signals, nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._take) for number in STOPS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self, deferred: bool = True) -> Iterator[None]:
        """Record the first signal without raising. With `deferred` False, make it raise again."""
        outside, self._deferred = self._deferred, deferred
        try:
            yield
        finally:
            self._deferred = outside

    def _take(self, number: int, frame: Any) -> None:
        first, self.number = self.number is None, number
        if not first or not self._deferred:
            raise Stopped(number)
        name = signal.Signals(number).name.removeprefix("SIG")
        with suppress(RuntimeError):  # the signal came while something else was printed
            self._note(f"Signal {name}: the run stops once its state is saved. Another signal stops it at once.")


def agreed(accelerator: Accelerator, *requests: bool) -> list[bool]:
    """Return, for each request, whether any process makes it. All processes get the same result."""
    if accelerator.num_processes == 1:
        return list(requests)
    flags = torch.tensor(requests, dtype=torch.float32, device=accelerator.device)
    return [bool(flag > 0) for flag in cast(Tensor, accelerator.reduce(flags, "sum"))]


def finish_requested(folder: Path, accelerator: Accelerator) -> bool:
    """Return whether the run in `folder` was asked to finish. All processes get the same result."""
    return agreed(accelerator, accelerator.is_main_process and (folder / FINISH).exists())[0]


def clear_finish_request(folder: Path, accelerator: Accelerator) -> None:
    if accelerator.is_main_process:
        (folder / FINISH).unlink(missing_ok=True)


def finish_on_signal(out: Path) -> None:
    """Let SIGUSR1 request the end of the run that writes to `out`.

    Signals before the run has a folder do nothing.
    """

    def finish(*_: object) -> None:
        if run_folder(out).is_dir():
            (run_folder(out) / FINISH).touch()

    if hasattr(signal, "SIGUSR1"):  # not on Windows
        signal.signal(signal.SIGUSR1, finish)
