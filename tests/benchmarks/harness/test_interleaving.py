from collections import Counter
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks.harness.interleaving import interleaved, interval, rates, ratios, tau, time_interleaved
from benchmarks.harness.report import picture, spread, table, write_files


def test_another_way_begins_each_time() -> None:
    found = list(interleaved("abc", ["x", "y"], 2, takes=lambda task, way: (task, way) != ("c", "y")))
    assert found[:5] == [(0, "a", "x"), (0, "a", "y"), (0, "b", "y"), (0, "b", "x"), (0, "c", "x")]
    assert Counter(found).most_common(1)[0][1] == 1 and len(found) == 2 * 5
    assert found[5:7] == [(1, "a", "y"), (1, "a", "x")]
    assert list(interleaved("a", [], 1)) == []


def test_calls_are_timed_interleaved_after_a_warm_up() -> None:
    log, moments = list[str](), count()

    def clock() -> float:
        return float(next(moments) ** 2)

    calls = {name: lambda name=name: log.append(name) for name in "ab"}
    found = time_interleaved(calls, 2, warm_up=1, clock=clock)
    assert log == ["a", "b"] * 3
    assert found == {"a": [1.0, 9.0], "b": [5.0, 13.0]}


@dataclass
class Part:
    repeat: int
    decode_seconds: float
    later_tokens: int = 4
    steps: int = 2


def test_rates_are_of_complete_repeats_and_ratios_within_them() -> None:
    slow = rates([Part(0, 1.0), Part(0, 3.0), Part(1, 20.0), Part(1, 20.0), Part(2, 1.0)], prompts=2)
    assert slow == {0: 2.0, 1: 0.2}
    assert ratios(rates([Part(1, 10.0), Part(1, 10.0)], 2), slow) == [2.0]
    assert tau([Part(0, 1.0), Part(0, 1.0, 8)]) == 3 and tau([]) == 0
    assert rates([Part(0, 0.0)], 1) == {}


def test_an_interval_of_the_median() -> None:
    low, high = interval([1.0 + i / 100 for i in range(21)])
    assert 1.02 < low < 1.10 < high < 1.18
    assert interval([2.0] * 5) == (2.0, 2.0)


def test_tables_and_spreads() -> None:
    assert table(["a", "b"], [["1", "2"]], left=1) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"
    assert spread([1, 3, 2]) == "2.00 (1.00 to 3.00)" and spread([]) == ""


def test_files_are_whole(tmp_path: Path) -> None:
    write_files(tmp_path / "new", {"a.md": "text", "b.json": {"c": 1}, "d": b"bytes"})
    assert {path.name: path.read_text() for path in (tmp_path / "new").iterdir()} == {
        "a.md": "text",
        "b.json": '{\n "c": 1\n}\n',
        "d": "bytes",
    }
    with picture(tmp_path / "one.png", 1, 2, figsize=(2, 1)) as (_, panels):
        panels[0][1].plot([1, 2])
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
