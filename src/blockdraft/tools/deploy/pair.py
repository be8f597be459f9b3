"""Whether a drafter goes with a target, by their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blockdraft.drafters import for_others
from blockdraft.errors import UsageError
from blockdraft.tools.inspect import Report, inspect

# Checks of `inspect` without which answers stay right: fewer guesses may be accepted, or long texts refused.
SOFT = {"context", "fingerprint", "mask token"}


def checked_pair(drafter: str | Path, target: str, note: Callable[[str], None]) -> Report:
    """What is found out about a drafter that goes with this target.

    Args:
        drafter: Folder, or "bundled": the bundled DFlash drafter, which other engines read.
        target: Folder or hub name.
        note: Told of what may be wrong nevertheless, a line each.

    Raises:
        ValueError: It is no drafter's folder, cannot be read, or does not fit.
    """
    report = inspect(for_others(drafter, note), target)
    if report.what != "drafter" or not Path(report.path).is_dir():
        raise UsageError(
            f"{drafter} is no drafter's folder; give that of a drafter (a GGUF file is for llama.cpp alone)."
        )
    wrong = [check for check in report.fits if check.holds is False]
    hard = [f"{check.name} ({check.said})" for check in wrong if check.name not in SOFT]
    if hard:
        raise UsageError(f"{drafter} does not go with {target}: {'; '.join(hard)}. Use a drafter made for it.")
    for check in wrong:
        note(f"{drafter} may not be for {target}: {check.name} ({check.said}).")
    return report
