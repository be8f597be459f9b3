"""What is made of the figures of all sizes; measuring itself is `make bench-sizes ARGS=--quick`."""

import csv
from pathlib import Path

import pytest

from benchmarks.sizes.__main__ import Size, draw, parameters, table, write_figures
from benchmarks.sizes.widen import TARGET


def size(width: int, dtype: str, plain: float, drafted: float) -> Size:
    def method(speed: float, tau: float) -> dict[str, object]:
        speeds = [0.9 * speed, speed, 1.1 * speed]
        return {
            "tokens_per_second": speed,
            "speedup": speed / plain,
            "tau": tau,
            "tokens_per_second_by_repeat": speeds,
            "speedup_by_repeat": [each / plain for each in speeds],
        }

    return Size(width, dtype, 5_000_000 * width**2, {"none": method(plain, 1.0), "dflash:4": method(drafted, 2.5)})


SIZES = [size(1, "bfloat16", 1000.0, 1100.0), size(2, "bfloat16", 300.0, 450.0)]


def test_the_table_has_a_line_for_each_size() -> None:
    lines = table(SIZES).splitlines()
    assert lines[2:] == [
        "| 5 M | bfloat16 | 1000 | 1100 (1.10 times, tau 2.50) |",
        "| 20 M | bfloat16 | 300 | 450 (1.50 times, tau 2.50) |",
    ]


def test_every_repeat_is_kept(tmp_path: Path) -> None:
    write_figures(SIZES, tmp_path / "figures.csv")
    with (tmp_path / "figures.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 3
    assert float(rows[-1]["speedup"]) == pytest.approx(1.65) and rows[-1]["method"] == "dflash:4"


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw([*SIZES, size(1, "float32", 900.0, 1000.0)], tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")


def test_parameters_are_those_of_the_weights() -> None:
    assert 5_300_000 < parameters(TARGET) < 5_500_000
