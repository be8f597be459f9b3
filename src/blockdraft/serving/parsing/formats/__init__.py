"""How models write tool calls, one file a format; each holds `FORMAT`, which follows the protocol in `base`."""

from __future__ import annotations

from typing import cast

from blockdraft.plugins import plugins
from blockdraft.serving.parsing.formats.base import Format


def known_formats() -> dict[str, Format]:
    """All formats by the names of their files."""
    return {name: cast(Format, file.FORMAT) for name, file in plugins(__name__).items()}
