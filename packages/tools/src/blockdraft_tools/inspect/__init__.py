"""Reports on checkpoints: `inspect` describes a drafter, target or adapter by its files, without loading it."""

from __future__ import annotations

from blockdraft_tools.inspect.look import inspect
from blockdraft_tools.inspect.report import Check, Report

__all__ = ["Check", "Report", "inspect"]
