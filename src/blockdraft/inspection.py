"""The place where `blockdraft.tools.inspect` was found before."""

from blockdraft.tools.inspect import Check, Report, inspect

__all__ = ["Check", "Report", "inspect"]
