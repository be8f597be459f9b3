"""How the commands load a target."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from blockdraft.types import DEFAULT_BACKEND, Backend

if TYPE_CHECKING:
    import torch

    from blockdraft.targets import Target


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
