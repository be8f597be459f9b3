"""How modules of transformers take their cache."""

from __future__ import annotations

import inspect

from torch import nn


def cache_argument(module: nn.Module) -> str:
    """Name of the argument by which a model, or a layer that attends, takes its cache. Release 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
