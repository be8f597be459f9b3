"""Lossless fast decoding of language models with block-diffusion drafters."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockdraft.drafters import Drafter, load_drafter
    from blockdraft.engine import Completion, Engine
    from blockdraft.targets import Target, load_target
    from blockdraft.types import Drafting, Grammar, LoadOptions, RequestDrafting, SamplingParams

# Imported at first use, so that the command line starts without torch.
_HOMES = {
    "Completion": "engine",
    "Drafter": "drafters",
    "Drafting": "types",
    "Engine": "engine",
    "Grammar": "types",
    "LoadOptions": "types",
    "RequestDrafting": "types",
    "SamplingParams": "types",
    "Target": "targets",
    "load_drafter": "drafters",
    "load_target": "targets",
}

__all__ = [
    "Completion",
    "Drafter",
    "Drafting",
    "Engine",
    "Grammar",
    "LoadOptions",
    "RequestDrafting",
    "SamplingParams",
    "Target",
    "load_drafter",
    "load_target",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
