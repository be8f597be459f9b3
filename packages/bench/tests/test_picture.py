import sys
from pathlib import Path

import matplotlib.figure
import pytest
import torch
from some_results import ARGUMENTS, PLAIN_TRIAL, trial

from blockdraft_bench.report import write
from blockdraft_bench.results import Results, results


def test_bars_are_speedups_and_a_line_the_acceptance(
    found: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
    write(tmp_path, found)
    speedups, acceptance = drawn[0].axes
    assert [bar.get_height() for bar in speedups.patches] == pytest.approx([2, 3])
    assert [label.get_text() for label in speedups.get_xticklabels()] == ["first", "second"]
    assert acceptance.lines[0].get_ydata() == pytest.approx([2 / 3, 1 / 3, 0])


def test_plain_decoding_alone_is_drawn(tmp_path: Path) -> None:
    write(tmp_path, results([trial("none", "a", None, 6.0, PLAIN_TRIAL)], ARGUMENTS, torch.device("cpu")))
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_an_earlier_picture_is_deleted(
    found: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results.png").write_bytes(b"old")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write(tmp_path, found)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
