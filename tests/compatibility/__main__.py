"""Runs the tests of all cells and writes docs/compatibility.md from those that pass."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "targets")]

from compatibility_cells import DOCUMENT, Cell, document  # noqa: E402


class Outcomes:
    """What the tests of cells have found."""

    def __init__(self) -> None:
        self.found: dict[Cell, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            for name, value in report.user_properties:
                if name == "cells":
                    self.found.update({Cell(*cell): outcome for cell, outcome in value})  # type: ignore[attr-defined]


outcomes = Outcomes()
code = pytest.main([str(Path(__file__).parent), "-k", "not page", *sys.argv[1:]], plugins=[outcomes])
DOCUMENT.write_text(document(outcomes.found), encoding="utf-8")
print(f"{DOCUMENT}: {len(outcomes.found)} cells")
raise SystemExit(code)
