from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rival_rows import figures

from benchmarks.harness.records import Records
from benchmarks.rivals import records, report
from benchmarks.rivals.figures import Figures
from benchmarks.rivals.report import QUICK, draw, page

FOLDER = Path(report.__file__).parent
KINDS = {"trained": "Trained", "answers": "Answers", "forwards": "Forward", "cycles": "Cycle", "speeds": "Speed"}


@pytest.mark.slow
def test_the_published_tables_are_made_of_the_published_records(tmp_path: Path) -> None:
    own = {name: Records(getattr(records, kind), FOLDER / f"{name}.csv").all for name, kind in KINDS.items()}
    found = Figures(5_400_000, 1.25, **own)
    published, text = (FOLDER / "rivals.md").read_text(), page(found, 1_370_000, "All of it.", quick=False)
    for heading in ("## tau at temperature 1", "## Real answers"):
        expected, made = (each.partition(heading)[2].partition("\n## ")[0] for each in (published, text))
        assert expected == made and made
    assert "Left out, since the plain answer loops: " in text and "with a *" not in text
    draw(found, tmp_path / "rivals.png", quick=False)
    assert (tmp_path / "rivals.png").read_bytes().startswith(b"\x89PNG")


def test_a_quick_run_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page(figures(), 300, "", quick=True).startswith(f"**{QUICK}**")
    told: list[str] = []
    monkeypatch.setattr(Figure, "suptitle", lambda self, text, **style: told.append(text))
    draw(figures(), tmp_path / "rivals.png", quick=True)
    assert told == [QUICK]
