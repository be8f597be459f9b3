"""Runs the tests of all cells and writes docs/compatibility.md from those that pass."""

import sys
from pathlib import Path
from typing import Any

import pytest


class Outcomes:
    """What the tests of cells have found."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.found += [each for name, value in report.user_properties if name == "cells" for each in value]  # type: ignore[attr-defined]


outcomes = Outcomes()
code = pytest.main([str(Path(__file__).parent), "-k", "not page", *sys.argv[1:]], plugins=[outcomes])
# Now, since pytest wants to see modules before anyone else imports them.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "targets")]
from compatibility_cells import DOCUMENT, Cell, document  # noqa: E402

DOCUMENT.write_text(document({Cell(*cell): outcome for cell, outcome in outcomes.found}), encoding="utf-8")
print(f"{DOCUMENT}: {len(outcomes.found)} cells")
raise SystemExit(code)
