"""Runs the tests of all cells that this environment has the packages for, and writes docs/compatibility.md from those
that have passed here and, as `OUTCOMES` holds them, in other environments."""

import json
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


OUTCOMES = Path(__file__).parents[2] / "build" / "compatibility.json"
outcomes = Outcomes()
code = pytest.main([str(Path(__file__).parent), "-k", "not page", *sys.argv[1:]], plugins=[outcomes])
# Now, since pytest wants to see modules before anyone else imports them.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "targets")]
from compatibility_cells import DOCUMENT, Cell, document  # noqa: E402

known = json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else []
known += outcomes.found
OUTCOMES.parent.mkdir(exist_ok=True)
OUTCOMES.write_text(json.dumps(known), encoding="utf-8")
DOCUMENT.write_text(document({Cell(*cell): outcome for cell, outcome in known}), encoding="utf-8")
print(f"{DOCUMENT}: {len(outcomes.found)} cells")
raise SystemExit(code)
