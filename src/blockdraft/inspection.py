"""Former place of `blockdraft.tools.inspect`."""

from blockdraft.tools.inspect import Check, Report, inspect

__all__ = ["Check", "Report", "inspect"]
