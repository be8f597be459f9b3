"""Lossless fast decoding of language models with block-diffusion drafters."""

from blockdraft.compat import DFlashConfig, DFlashGenerationMixin
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.engine import Completion, Engine
from blockdraft.targets import Target, load_target
from blockdraft.types import SamplingParams

__all__ = [
    "Completion",
    "DFlashConfig",
    "DFlashGenerationMixin",
    "Drafter",
    "Engine",
    "SamplingParams",
    "Target",
    "load_drafter",
    "load_target",
]
