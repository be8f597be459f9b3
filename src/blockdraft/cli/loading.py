"""How the commands load a target."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from blockdraft.cli.options import (
    Adapter,
    Command,
    CompileForward,
    Device,
    Dtype,
    Exact,
    KeysValues,
    Quantize,
    Revision,
    RoundDrafter,
    TargetBackend,
    TargetFolder,
    Threads,
    extent,
    with_options,
)
from blockdraft.types import DEFAULT_BACKEND, DEFAULT_COMPILE, Backend

if TYPE_CHECKING:
    import torch

    from blockdraft.targets import Target

WHICH = 3  # options that say which target; the others say how it is run


@dataclass(frozen=True)
class TargetOptions:
    """Which target a command decodes with, and how that is run; see `takes_target`."""

    target: TargetFolder = None
    adapter: Adapter = None
    revision: Revision = None
    dtype: Dtype = None
    device: Device = None
    backend: TargetBackend = DEFAULT_BACKEND
    threads: Threads = "auto"
    compile: CompileForward = DEFAULT_COMPILE
    quantize: Quantize = None
    kv_dtype: KeysValues = None
    round_drafters: RoundDrafter = True
    exact: Exact = False

    def load(self) -> Target:
        how = {field.name: getattr(self, field.name) for field in fields(self)}
        return load(how.pop("target"), **how | {"threads": extent("threads", self.threads)})


def takes_target(command: Command) -> Command:
    """`with_options` for a command that takes `TargetOptions`: those that say which target come first, as where it
    takes them, and those that say how it is run last."""
    how = {field.name for field in fields(TargetOptions)[WHICH:]}
    return with_options(command, last=how.__contains__)


def quiet() -> None:
    """Spare the user the chatter of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def tell(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def load(
    path: str | None,
    dtype: str | None = None,
    device: torch.device | str | None = None,
    backend: Backend = DEFAULT_BACKEND,
    **how: Any,
) -> Target:
    """`load_target`, without chatter. Where the native decoder was to be used if it could and cannot, standard error
    says why. `how` is passed on."""
    from blockdraft.targets import load_target

    quiet()
    target = load_target(path, dtype, device, backend, **how)
    if target.backend_reason is not None:
        tell(f"The target runs on transformers (backend hf): {target.backend_reason}.")
    return target
