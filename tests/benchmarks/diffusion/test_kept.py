from dataclasses import dataclass
from pathlib import Path

from benchmarks.diffusion.kept import Kept, whole_lines


@dataclass(frozen=True)
class Row:
    name: str
    number: int
    share: float
    text: str = ""


ROWS = [Row("a, b", 1, 0.5, '"said"'), Row("a, b", 2, 1e-9), Row("c", 1, 2.0, "über")]


def test_what_was_measured_is_read_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "new" / "rows.csv", Row, key=2)
    assert not kept.all and not kept.path.exists()
    kept.add(ROWS[:1])
    kept.add(ROWS[1:])
    with kept.path.open("a") as file:
        file.write("d,1,0.")  # killed in the middle of a line
    again = Kept(kept.path, Row, key=2)
    assert again.all == ROWS and again.had("a, b", 2) and not again.had("d", 1)
    again.add([Row("d", 1, 0.25)])
    assert Kept(kept.path, Row, key=2).all == [*ROWS, Row("d", 1, 0.25)]


def test_a_heading_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("name,numb")
    kept = Kept(path, Row, key=1)
    kept.add(ROWS[:1])
    assert Kept(path, Row, key=1).all == ROWS[:1]


def test_lines_that_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert whole_lines(path) == []
    path.write_text("one\ntwo\nthr")
    assert whole_lines(path) == ["one", "two"] and path.read_text() == "one\ntwo\n"
