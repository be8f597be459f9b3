import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import fake, trial

from benchmarks.peers.figures import Difference, figures
from benchmarks.peers.registry import PLAIN, REFERENCE
from benchmarks.peers.report import Results, page, picture, table, write

PEERS = [fake(REFERENCE), fake("a"), fake("b"), fake(PLAIN)]


@pytest.fixture
def results() -> Results:
    trials = [trial(REFERENCE, 0, None)]
    for repeat in range(3):
        trials += [trial(peer, 0, repeat, seconds=each) for peer, each in ((REFERENCE, 4.0), ("a", 1.0), (PLAIN, 2.0))]
    trials[-2] = replace(trials[-2], tokens=(1, 2, 3, 4, 6))
    return Results(
        settings={
            "target_name": "the bundled one",
            "drafter_name": "the bundled one",
            "prompts": {"set": 3},
            "dtype": "float32",
            "device": "cpu",
            "threads": 2,
            "max_new_tokens": 5,
            "repeats": 3,
        },
        hardware={"cpu": "A processor", "cores": 2, "memory_bytes": 2**33, "gpu": None},
        about={"a": {"fake": "1.0"}, PLAIN: {"fake": "1.0"}},
        missing={"b": "no | compiler\nhere"},
        sets={"set": figures(trials)},
        looping={"set": 2},
        differences=[Difference("a", "set", 0, 5, 5, 6, 0.0625)],
    )


def test_the_table_has_a_row_for_each_peer(results: Results) -> None:
    rows = table(PEERS, results.sets["set"], results.missing).splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0] == [REFERENCE, "a fake", "1.0", "1.0-1.0", "1.00", "0.50", "1.00", "4.500", "all"]
    assert cells[1] == ["a", "a fake", "4.0", "4.0-4.0", "4.00", "2.00", "1.00", "1.500", "0.0 %"]
    assert cells[2] == ["b", "missing: no / compiler here", *[""] * 7]
    assert cells[3][4:6] == ["2.00", "1.00"]


def test_the_page_says_under_which_conditions(results: Results) -> None:
    text = page(results, PEERS, "python -m benchmarks.peers --repeats 3")
    for fact in (
        "## set: 1 prompts",
        "limit of 5 new tokens",
        "left out: 2 of 3",
        "| a | set 1 | 5 | 5 | 6 | 0.062 |",
        "A processor, 2 cores, 8 GiB",
        "cpu, float32, 2",
        "`python -m benchmarks.peers --repeats 3`",
        f"- a, {PLAIN}: fake 1.0",
    ):
        assert fact in text, fact
    assert "Nowhere." in page(replace(results, differences=[]), PEERS, "")


def test_the_picture_shows_every_set(results: Results) -> None:
    one = picture(results, PEERS)
    two = picture(replace(results, sets={"set": results.sets["set"], "other": results.sets["set"]}), PEERS)
    assert one.startswith(b"\x89PNG") and two.startswith(b"\x89PNG")

    def width(png: bytes) -> int:
        return int.from_bytes(png[16:20], "big")

    assert width(two) > 1.4 * width(one)


def test_files_are_complete(results: Results, tmp_path: Path) -> None:
    written = write(tmp_path / "new", results, PEERS, "command")
    assert sorted(path.name for path in written) == ["peers.json", "peers.md", "peers.png"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["peers.json", "peers.md", "peers.png"]
    found = json.loads((tmp_path / "new" / "peers.json").read_text())
    assert found["sets"]["set"]["a"]["over_reference"] == 4
    assert found["missing"] == {"b": "no | compiler\nhere"}
