"""The architectures that z-lab's layout and the speculators format hold, a file each; `base.py` says what is in it."""

from __future__ import annotations

from blockdraft.errors import UsageError
from blockdraft.formats.architectures.base import Architecture, LlamaCpp, Shapes, Speculator
from blockdraft.plugins import plugins


def by_name() -> dict[str, Architecture]:
    """Every architecture, by each of its spellings under `architectures`."""
    found = [module.ARCHITECTURE for module in plugins(__name__).values()]
    return {name: architecture for architecture in found for name in architecture.names}


def architecture_of(config: object) -> Architecture:
    """The architecture that a configuration belongs to. Raises ValueError where it is none of these."""
    for architecture in by_name().values():
        if architecture.config is type(config):
            return architecture
    raise UsageError(
        f"{type(config).__name__} is a configuration for which z-lab's layout and the speculators format have no "
        "words; write the drafter in a layout of its own."
    )


def tensor_shapes(config: object) -> Shapes:
    """Name and shape of every tensor of a checkpoint with this configuration."""
    return architecture_of(config).shapes(config)


__all__ = ["Architecture", "LlamaCpp", "Shapes", "Speculator", "architecture_of", "by_name", "tensor_shapes"]
