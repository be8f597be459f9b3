from dataclasses import dataclass
from pathlib import Path

from benchmarks.csv_rows import Rows


@dataclass(frozen=True)
class Line:
    name: str
    count: int
    seconds: float

    @property
    def key(self) -> str:
        return self.name


def test_lines_are_read_again_and_written_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.csv"
    rows = Rows(Line, path)
    rows.add(Line("a", 1, 0.5), Line('b, "c"', 2, 1e-9))
    with path.open("a") as file:
        file.write("cut o")
    for _ in range(2):
        again = Rows(Line, path)
        assert again.all == rows.all and again.had == {"a", 'b, "c"'}
    again.add(Line("a", 9, 9.0), Line("d", 3, 2.0))
    assert [line.name for line in Rows(Line, path).all] == ["a", 'b, "c"', "d"]
    assert Rows(Line, path).all[0].count == 1
