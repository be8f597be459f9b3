"""Calls of other implementations, as thin layers over the engine."""

from blockdraft.compat.mixin import DFlashConfig, DFlashGenerationMixin
from blockdraft.compat.zlab import DFlashDraftModel

__all__ = ["DFlashConfig", "DFlashDraftModel", "DFlashGenerationMixin"]
