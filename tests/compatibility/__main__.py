"""Test every combination whose packages are installed, and write docs/compatibility.md from all outcomes so far.

Outcomes of other environments are read from, and added to, `OUTCOMES`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest


class Outcomes:
    """Collects the outcomes that the tests record."""

    def __init__(self) -> None:
        self.cells: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            properties: Any = report.user_properties
            self.cells += [cell for name, value in properties if name == "cells" for cell in value]


OUTCOMES = Path(__file__).parents[2] / "build" / "compatibility.json"
outcomes = Outcomes()
code = pytest.main([str(Path(__file__).parent), "-k", "not page", *sys.argv[1:]], plugins=[outcomes])
# Imported after the tests, because pytest must be the first to import these modules.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "targets")]
from compatibility_cells import DOCUMENT, Cell, document  # noqa: E402

known = json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else []
known += outcomes.cells
OUTCOMES.parent.mkdir(exist_ok=True)
OUTCOMES.write_text(json.dumps(known), encoding="utf-8")
DOCUMENT.write_text(document({Cell(*cell): outcome for cell, outcome in known}), encoding="utf-8")
print(f"{DOCUMENT}: {len(outcomes.cells)} cells")
raise SystemExit(code)
