"""Early ends of runs: complete ones, by a file or the signal USR1, and interruptions that are saved, by TERM or INT."""

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

from blockdraft.training.progress import FINISH, run_folder

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
    """Signals TERM and INT, as exceptions or, in `deferred`, as a request that the caller looks at.

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
        """Context in which these signals raise `Stopped`. It changes nothing outside of the main thread, which alone
        gets signals."""
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
        """Context in which the first signal is noted and raises nothing, or, if not `deferred`, raises again."""
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
    """Whether any process makes each of these requests. All processes get the same answer, so they act together."""
    if accelerator.num_processes == 1:
        return list(requests)
    flags = torch.tensor(requests, dtype=torch.float32, device=accelerator.device)
    return [bool(flag > 0) for flag in cast(Tensor, accelerator.reduce(flags, "sum"))]


def finish_requested(folder: Path, accelerator: Accelerator) -> bool:
    """Whether the run in `folder` was asked to finish. All processes get the same answer, so they finish together."""
    return agreed(accelerator, accelerator.is_main_process and (folder / FINISH).exists())[0]


def clear_finish_request(folder: Path, accelerator: Accelerator) -> None:
    if accelerator.is_main_process:
        (folder / FINISH).unlink(missing_ok=True)


def finish_on_signal(out: Path) -> None:
    """Let the signal USR1 request the end of the run that writes to `out`. Signals before the run has a folder do
    nothing."""

    def finish(*_: object) -> None:
        if run_folder(out).is_dir():
            (run_folder(out) / FINISH).touch()

    if hasattr(signal, "SIGUSR1"):  # not on Windows
        signal.signal(signal.SIGUSR1, finish)
