"""A run that is told to end early: by a file in its folder, or by a signal that makes the file."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor

from blockdraft.training.records import run_folder

FINISH = "finish"  # a file in the run's folder


def told_to_finish(folder: Path, accelerator: Accelerator) -> bool:
    """Whether the file is there; the same in all processes, so that they stop at one step."""
    told = accelerator.is_main_process and (folder / FINISH).exists()
    if accelerator.num_processes > 1:
        flag = torch.tensor(float(told), device=accelerator.device)
        told = bool(cast(Tensor, accelerator.reduce(flag, "sum")) > 0)
    return told


def forget_finish(folder: Path, accelerator: Accelerator) -> None:
    if accelerator.is_main_process:
        (folder / FINISH).unlink(missing_ok=True)


def finish_on_signal(out: Path) -> None:
    """From now on the signal USR1 makes the file of the run that writes to `out`, once that has a folder."""

    def finish(*_: object) -> None:
        if run_folder(out).is_dir():
            (run_folder(out) / FINISH).touch()

    if hasattr(signal, "SIGUSR1"):  # not on Windows
        signal.signal(signal.SIGUSR1, finish)
