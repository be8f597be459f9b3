"""transformers, imported in half of the time: its configurations without its modelling code, which takes as long to
import as torch, and 80 MB, and one search of its 2,000 files for names instead of two.

`transformers.utils.type_validators`, which configurations such as LlamaConfig import, needs the table of activations
only to check a name, and `transformers.activations` imports torch._dynamo, torch.distributed and code of models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ACTIVATIONS = "transformers.activations"
MODELS = "transformers.models"


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


def import_lightly() -> None:
    """Import what the configurations of transformers need. Modules call this before they import a configuration."""
    _import_models()
    _import_validators()


def _import_validators() -> None:
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


def _import_models() -> None:
    """Import `transformers.models`, which lists the names in all of its files, with the list that transformers made
    when it was imported itself."""
    import transformers

    utils: Any = import_module("transformers.utils.import_utils")
    search = getattr(utils, "define_import_structure", None)
    if MODELS in sys.modules or search is None:  # imported already, or another release of transformers
        return
    folder, prefix = Path(transformers.__file__).parent / "models", "models."

    def found(place: str, prefix_of_keys: str | None = None) -> Any:
        if prefix_of_keys is not None or Path(place).parent != folder:
            return search(place, prefix_of_keys)
        whole = search(folder, prefix.rstrip("."))  # transformers asked so, and the answer is kept
        return {
            needs: {module.removeprefix(prefix): names for module, names in of.items() if module.startswith(prefix)}
            for needs, of in whole.items()
        }

    utils.define_import_structure = found
    try:
        import_module(MODELS)
    finally:
        utils.define_import_structure = search
