"""Interfaces of other projects, as thin layers over the engine."""

from blockdraft_compat.mixin import DFlashConfig, DFlashGenerationMixin
from blockdraft_compat.zlab import DFlash2DraftModel, DFlashDraftModel, spec_generate

__all__ = ["DFlash2DraftModel", "DFlashConfig", "DFlashDraftModel", "DFlashGenerationMixin", "spec_generate"]
