from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rival_rows import figures

from benchmarks.rivals.report import QUICK, draw, page


def test_the_page_has_every_table() -> None:
    text = page(figures(), 320, "All of it.", quick=False)
    assert "QUICK" not in text
    assert "| DFlash | 0.00 M | 94% | 2 | 0.01 M | 1.0 (1.0 to 1.0) | 1.00 | 2.0 | 512 | compiled |" in text
    assert "| prompt lookup |  |  |" in text
    assert "Left out, since the plain answer loops: 2 of maths." in text
    assert "| DFlash | chain:7 | 3.10 (3.00 to 3.20) |  | 3.10 (3.00 to 3.20) |  | 0.80 | 0.40 |" in text
    assert "| 1 | EAGLE-3* | chain:7 | 4.00 | 2.50 |" in text
    assert "| DFlash | chain:7 | 1.90 (1.80 to 2.00), tau 3.00 |" in text
    assert "2.07 (2.00 to 2.13), chain:7 | 0.84 (0.80 to 0.88), chain:7 | 2.46 (2.42 to 2.50) |" in text
    assert "- this CPU, width 1, as measured, temperature 0: DFlash 2.07, EAGLE-3 0.84." in text


def test_what_is_not_compiled_is_marked() -> None:
    found = figures()
    text = page(found, 320, "", quick=False)
    assert text.count("With a * the drafter is not compiled") == 2 and "| EAGLE-3* |" in text
    all_of_it = replace(found, cycles=[replace(row, compiled=1) for row in found.cycles])
    text = page(all_of_it, 320, "", quick=False)
    assert "With a *" not in text and "| EAGLE-3* |" not in text


def test_a_size_far_from_the_budget_is_told() -> None:
    assert "60% (its shape allows none nearer)" in page(figures(), 500, "", quick=False)


def test_a_quick_run_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page(figures(), 300, "", quick=True).startswith(f"**{QUICK}**")
    told: list[str] = []
    monkeypatch.setattr(Figure, "suptitle", lambda self, text, **style: told.append(text))
    draw(figures(), tmp_path / "rivals.png", quick=True)
    assert told == [QUICK] and (tmp_path / "rivals.png").read_bytes().startswith(b"\x89PNG")
