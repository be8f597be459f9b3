from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.records import Records, whole_lines


@dataclass(frozen=True)
class Line:
    KEY = ("name", "count")

    name: str
    count: int
    seconds: float
    text: str = ""


LINES = [Line("a, b", 1, 0.5, '"said"'), Line("a, b", 2, 1e-9), Line("c", 1, 2.0, "über")]


def test_measurements_are_read_again_and_written_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.csv"
    records = Records(Line, path)
    assert not records.all and not path.exists()
    records.add(*LINES[:1])
    records.add(*LINES)
    with path.open("a") as file:
        file.write("d,1,0.")  # killed in the middle of a line
    for _ in range(2):
        again = Records(Line, path)
        assert again.all == LINES and again.had == {("a, b", 1), ("a, b", 2), ("c", 1)}
    again.add(Line("c", 1, 9.0), Line("d", 1, 0.25))
    assert Records(Line, path).all == [*LINES, Line("d", 1, 0.25)]


def test_a_heading_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "lines.csv"
    path.write_text("name,coun")
    Records(Line, path).add(*LINES[:1])
    assert Records(Line, path).all == LINES[:1]


def test_lines_that_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert whole_lines(path) == []
    path.write_text("one\ntwo\nthr")
    assert whole_lines(path) == ["one", "two"] and path.read_text() == "one\ntwo\n"
