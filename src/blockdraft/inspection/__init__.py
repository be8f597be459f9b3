"""What a checkpoint is: `inspect` tells a drafter, a target or an adapter by its files, without loading it."""

from __future__ import annotations

from blockdraft.inspection.base import Check, Report
from blockdraft.inspection.look import inspect

__all__ = ["Check", "Report", "inspect"]
