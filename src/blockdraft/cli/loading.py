"""How the commands load a target."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from blockdraft.cli.options import (
    Adapter,
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
)
from blockdraft.types import DEFAULT_BACKEND, DEFAULT_COMPILE, Backend

if TYPE_CHECKING:
    import torch

    from blockdraft.targets import Target

WHICH = 3  # options that say which target; the others say how it is run
Command = TypeVar("Command", bound=Callable[..., None])


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
    """Give a command the options of `TargetOptions` in the place of its parameter `run`, which they make up: those that
    say which target come first, those that say how it is run last."""
    names = [field.name for field in fields(TargetOptions)]
    hints = get_type_hints(TargetOptions, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, kind, default=getattr(TargetOptions, name), annotation=hints[name]) for name in names
    ]

    @wraps(command)
    def with_target(**given: Any) -> None:
        command(run=TargetOptions(**{name: given.pop(name) for name in names}), **given)

    others = inspect.signature(command, eval_str=True).parameters.values()
    own = [parameter.replace(kind=kind) for parameter in others if parameter.name != "run"]
    shown = [*options[:WHICH], *own, *options[WHICH:]]
    with_target.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    with_target.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return with_target  # type: ignore[return-value]


def quiet() -> None:
    """Spare the user the chatter of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


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
        print(f"The target runs on transformers (backend hf): {target.backend_reason}.", file=sys.stderr, flush=True)
    return target
