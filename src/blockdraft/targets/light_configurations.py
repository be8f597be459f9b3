"""Configurations of transformers without its modelling code, which takes as long to import as torch, and 80 MB.

`transformers.utils.type_validators`, which configurations such as LlamaConfig import, needs the table of activations
only to check a name, and `transformers.activations` imports torch._dynamo, torch.distributed and code of models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

ACTIVATIONS = "transformers.activations"


class LazyActivations(Mapping[str, Any]):
    """The table `ACT2FN` of transformers, imported when somebody looks into it."""

    def __getitem__(self, name: str) -> Any:
        return _activations().ACT2FN[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_activations().ACT2FN)

    def __len__(self) -> int:
        return len(_activations().ACT2FN)


class _Activations(ModuleType):
    """What `transformers.activations` is while the checks of configurations are imported. Whoever wants more of it
    meanwhile, as in another thread, gets it."""

    ACT2FN = LazyActivations()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks every module for __path__
            raise AttributeError(name)
        return getattr(_activations(), name)


def _activations() -> ModuleType:
    if isinstance(sys.modules.get(ACTIVATIONS), _Activations):
        del sys.modules[ACTIVATIONS]
    return import_module(ACTIVATIONS)


def import_validators() -> None:
    """Import the checks of configurations without the activations, unless either has been imported already."""
    if ACTIVATIONS in sys.modules or "transformers.utils.type_validators" in sys.modules:
        return
    sys.modules[ACTIVATIONS] = _Activations(ACTIVATIONS)
    try:
        with suppress(ImportError):  # other releases of transformers need no such module, or more of it
            import_module("transformers.utils.type_validators")
    finally:
        if isinstance(sys.modules.get(ACTIVATIONS), _Activations):
            del sys.modules[ACTIVATIONS]
