"""Projections beside what a machine does."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.radar.here import DRAFTED, PLAIN, Figure, Subject, main, page
from blockdraft.radar.devices import find, machine_of
from blockdraft.radar.project import project
from blockdraft.radar.shape import read_shape

MACHINE = machine_of(find("M4"))


def figure(what: str, factor: float) -> Figure:
    """A speed that is a projection times a factor; calibrated, it is met."""
    row = project(read_shape("smollm2"), MACHINE, "bf16", 128)
    assert row.drafted is not None
    interval = row.plain if what == PLAIN else row.drafted
    other = project(read_shape("smollm2"), MACHINE, "bf16", 128, tau=2.0 if what == DRAFTED else None, block_size=5)
    value = interval.mid * factor
    return Figure(Subject("a", Path("a"), "bf16", {}, None), 1, what, 2.0, value, row, other)


@pytest.mark.parametrize("what", [PLAIN, DRAFTED])
@pytest.mark.parametrize(("factor", "inside"), [(1.0, True), (1.2, True), (5.0, False), (0.1, False)])
def test_a_deviation(what: str, factor: float, inside: bool) -> None:
    made = figure(what, factor)
    assert made.off(made.roofline) == pytest.approx(1 / factor - 1)
    assert made.inside(made.roofline) == inside


def test_the_page_counts_what_is_near() -> None:
    text = page([figure(PLAIN, 1.0), figure(PLAIN, 0.9), figure(PLAIN, 3.0), figure(PLAIN, 0.2)], MACHINE)
    assert "| bandwidth and arithmetic | 50 % | 50 % |" in text


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    words = ["--widths", "1", "--kinds", "int4", "--batches", "2", "--tokens", "8", "--repeats", "1"]
    assert main([*words, "--out", str(tmp_path), "--threads", "1"]) == 0
    lines = (tmp_path / "radar-here.md").read_text().splitlines()
    assert [line.split("|")[4].strip() for line in lines if line.startswith("| pair")] == [PLAIN, DRAFTED]
