"""Models that are measured: whether they run compiled, and how long their forwards take."""

from __future__ import annotations

from typing import Any


def why_uncompiled(target: Any, *drafters: Any) -> str | None:
    """Why a target or one of its drafters does not run compiled, None where all do."""
    if getattr(target, "compiled", None) is None:
        return f"the target is not compiled: {target.backend_reason or 'there is no reason'}"
    for drafter in drafters:
        if reason := getattr(drafter, "compile_reason", None):  # of one that has a network
            return f"the drafter is not compiled: {reason}"
    return None
