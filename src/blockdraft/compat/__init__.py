"""Interfaces of other projects, as thin layers over the engine."""

from blockdraft.compat.mixin import DFlashConfig, DFlashGenerationMixin
from blockdraft.compat.zlab import DFlash2DraftModel, DFlashDraftModel, spec_generate

__all__ = ["DFlash2DraftModel", "DFlashConfig", "DFlashDraftModel", "DFlashGenerationMixin", "spec_generate"]
