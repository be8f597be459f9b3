"""DFlash v1 (arXiv 2602.06036): slots 1, 2, ... of a block of masks, each taught the token at its own place."""

from __future__ import annotations

from blockdraft.nn.dflash import DFlashNetwork
from blockdraft.training.recipe import Recipe
from blockdraft.training.variants.base import Variant


class DFlashVariant(Variant[Recipe, DFlashNetwork]):
    """All that the base class does, and nothing else."""


VARIANT = DFlashVariant
