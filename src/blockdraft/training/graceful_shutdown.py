"""Early but complete ends of runs, requested by a file in the run's folder or by a signal."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor

from blockdraft.training.progress import run_folder

FINISH = "finish"  # name of the file in the run's folder


def finish_requested(folder: Path, accelerator: Accelerator) -> bool:
    """Whether the run in `folder` was asked to finish. All processes get the same answer, so they stop together."""
    requested = accelerator.is_main_process and (folder / FINISH).exists()
    if accelerator.num_processes > 1:
        flag = torch.tensor(float(requested), device=accelerator.device)
        requested = bool(cast(Tensor, accelerator.reduce(flag, "sum")) > 0)
    return requested


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
