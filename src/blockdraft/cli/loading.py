"""How commands load a target, and what they print on standard error."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from blockdraft.timing import telling
from blockdraft.types import DEFAULT_BACKEND, Backend

if TYPE_CHECKING:
    import torch

    from blockdraft.targets import Target


def load(
    path: str | None,
    dtype: str | None = None,
    device: torch.device | str | None = None,
    backend: Backend = DEFAULT_BACKEND,
    **how: Any,
) -> Target:
    """`load_target` without the messages of transformers. Standard error says if it takes long, and why another
    backend than our own decoder runs the target, where none was asked for.

    Args:
        how: More arguments of `load_target`.
    """
    from blockdraft.targets import load_target

    quiet()
    with telling(tell, "Loading the target", at_once=False):
        target = load_target(path, dtype, device, backend, **how)
    if target.backend_reason is not None:
        by = {"hf": "transformers", "native": "our own decoder"}.get(target.backend, target.backend)
        tell(f"The target runs on {by} (backend {target.backend}): {target.backend_reason}.")
    elif target.chosen_for is not None and backend == DEFAULT_BACKEND:
        tell(f"The target runs on {target.backend}, since {target.chosen_for}; --backend native is our own decoder.")
    return target


def quiet() -> None:
    """Silence the messages and progress bars of transformers, which may be imported later."""
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


def tell(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)
