"""Consoles of commands, which need no model to print."""

from __future__ import annotations

import sys

from rich.console import Console


def terminal() -> Console:
    """Console of a terminal. Brackets in names and tokens are not markup."""
    return Console(highlight=False, markup=False)


def plain(width: int = 100) -> Console:
    """Console without colours and lines, whatever the environment asks for."""
    return Console(file=sys.stdout, force_terminal=False, highlight=False, markup=False, width=width)


def standard(width: int = 100) -> Console:
    """Console of standard output, whether that is a terminal or not. The width is for what is none."""
    return terminal() if sys.stdout.isatty() else plain(width)
