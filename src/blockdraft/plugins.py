"""Registry of the drafters' modules, and the modules of other packages by name.

The tables below name what a drafter consists of. A module is imported when it is first used.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

DRAFTERS = "blockdraft.drafters"

# Drafters without a trained draft network: one file each, which ends in `DRAFTER`.
FILES = ["block_diffusion", "draft_lm", "hybrid", "lookup", "none"]

# Drafters with a network: one folder each, and its files beside `network`. `drafter` ends in `DRAFTER`.
# The files of DFlash hold the layout of flow, and the checks of DFlash2 and DSpark.
FOLDERS: dict[str, tuple[str, ...]] = {
    "dflash": ("drafter", "layout", "train", "checks", "gguf"),
    "dflash2": ("drafter", "layout", "train"),
    "dspark": ("drafter", "layout", "train"),
    "eagle3": ("drafter", "layout", "train", "checks", "gguf"),
    "flow": ("drafter", "train"),
    "medusa": ("drafter", "layout", "train", "checks"),
    "mtp": ("drafter", "layout", "train", "checks"),
}

# Runners that are faster than torch's operations: by backend, then by `DraftNetwork.architecture`.
RUNNERS: dict[str, dict[str, str]] = {
    "compiled": {
        "dflash": "drafters.dflash.compiled.CompiledDraftPass",
        "dflash2": "drafters.dflash.compiled.CompiledConvolvedPass",
        "dspark": "drafters.dflash.compiled.CompiledDraftPass",
        "eagle3": "kernels.cpu.compiled_autoregressive.CompiledAutoregressive",
        "medusa": "drafters.medusa.compiled.CompiledHeads",
        "mtp": "kernels.cpu.compiled_autoregressive.CompiledAutoregressive",
    },
    "captured": {
        "dflash": "drafters.dflash.captured.CapturedDraftPass",
        "dflash2": "drafters.dflash.captured.CapturedDraftPass",
        "dspark": "drafters.dflash.captured.CapturedDraftPass",
        "eagle3": "kernels.cuda.captured_autoregressive.CapturedAutoregressive",
        "mtp": "kernels.cuda.captured_autoregressive.CapturedAutoregressive",
    },
    "jax": {
        "dflash": "drafters.dflash.jax.JaxDraftPass",
        "dspark": "drafters.dflash.jax.JaxDraftPass",
        "eagle3": "drafters.eagle3.jax.JaxEagle3",
        "mtp": "drafters.mtp.jax.JaxMTP",
    },
    "mlx": {
        "dflash": "drafters.dflash.mlx.MLXDraftPass",
        "dflash2": "drafters.dflash.mlx.MLXDraftPass",
        "dspark": "drafters.dflash.mlx.MLXDraftPass",
        "eagle3": "mlx.autoregressive.MLXAutoregressive",
        "mtp": "mlx.autoregressive.MLXAutoregressive",
    },
}


def drafter_modules() -> dict[str, ModuleType]:
    """Import the module of each kind of drafter that ends in `DRAFTER`, by the name of the kind."""
    return {name: import_module(f"{DRAFTERS}.{name}") for name in FILES} | parts("drafter")


def part_names(part: str) -> list[str]:
    """Return the kinds of drafters that have a file for this part, such as "train"."""
    return [name for name, files in FOLDERS.items() if part in files]


def parts(part: str) -> dict[str, ModuleType]:
    """Import the files of all drafters for this part, by the name of the kind."""
    return {name: import_module(f"{DRAFTERS}.{name}.{part}") for name in part_names(part)}


def runner_class(network: Any, backend: str) -> Any:
    """Return the class that runs a draft network on a backend, or None where only torch's operations do."""
    path = RUNNERS[backend].get(getattr(network, "architecture", None) or "")
    if path is None:
        return None
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"blockdraft.{module}"), name)


def plugin_names(package: str) -> list[str]:
    """Return the names of a package's modules and folders except `base`, sorted."""
    return sorted(_module_names(tuple(import_module(package).__path__)))


def plugins(package: str) -> dict[str, ModuleType]:
    """Import the modules of a package, by name."""
    return {name: import_module(f"{package}.{name}") for name in plugin_names(package)}


@cache
def _module_names(folders: tuple[str, ...]) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(folders) if module.name != "base"]
