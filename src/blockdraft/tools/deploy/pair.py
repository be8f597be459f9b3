"""Checks from their files whether a drafter fits a target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blockdraft.drafters import for_others
from blockdraft.errors import UsageError
from blockdraft.tools.inspect import Report, inspect

# Checks of `inspect` that only warn. If one fails, fewer guesses are accepted, or long texts are refused.
SOFT = {"context", "fingerprint", "mask token"}


def checked_pair(drafter: str | Path, target: str, note: Callable[[str], None]) -> Report:
    """The report of `inspect` on a drafter, if it fits the target.

    Args:
        drafter: Folder, or "bundled" for the bundled DFlash drafter, which other engines can read.
        target: Folder or hub name.
        note: Called with each warning, a line of text.

    Raises:
        UsageError: The folder holds no drafter, cannot be read, or the drafter does not fit.
    """
    report = inspect(for_others(drafter, note), target)
    if report.what != "drafter" or not Path(report.path).is_dir():
        raise UsageError(f"{drafter} is not the folder of a drafter; give one (GGUF files work with llama.cpp only).")
    wrong = [check for check in report.fits if check.holds is False]
    hard = [f"{check.name} ({check.said})" for check in wrong if check.name not in SOFT]
    if hard:
        raise UsageError(f"{drafter} does not fit {target}: {'; '.join(hard)}. Use a drafter made for this target.")
    for check in wrong:
        note(f"{drafter} may not fit {target}: {check.name} ({check.said}).")
    return report
