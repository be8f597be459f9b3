"""What making the pair took, by what its runs have left."""

import json
from pathlib import Path

from making import Making, Took, answers_kept, took_drafter, took_target


def seconds_are(folder: Path, seconds: float) -> None:
    """Pretend that what each process noted took so long."""
    file = folder / "making.jsonl"
    lines = [{**json.loads(line), "seconds": seconds} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_steps_of_all_processes_are_summed_by_stage(tmp_path: Path) -> None:
    assert took_target(tmp_path) == []
    for stage, start, noted in (
        ("main", 0, (100, 200)),
        ("main", 200, (300,)),
        ("settle", 0, (60,)),
        ("settle", 0, (40,)),
    ):
        making = Making(tmp_path, stage, start, 50)
        for step in noted:  # each takes the place of the one before
            making.note(step)
    seconds_are(tmp_path, 120)
    assert took_target(tmp_path) == [Took("main", 300, 15_000, 4.0), Took("settle", 100, 5_000, 4.0)]


def test_steps_that_nobody_timed_are_shown(tmp_path: Path) -> None:
    Making(tmp_path, "main", 200, 50_000).note(300)
    seconds_are(tmp_path, 60)
    [took] = took_target(tmp_path)
    assert took == Took("main", 300, 15_000_000, 1.0, untimed=200)
    assert took.row() == "| main | 300 | 15.0 M | 1 (without 200 steps, which were not timed) |"


def test_a_drafters_run_tells_by_its_log(tmp_path: Path) -> None:
    assert took_drafter(tmp_path / "drafter") is None
    log = tmp_path / "drafter.run/log.jsonl"
    log.parent.mkdir()
    lines = [{"step": n, "tokens": 600, "tokens_per_second": 10.0} for n in (1, 2)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert took_drafter(tmp_path / "drafter") == Took("drafter", 2, 1200, 2.0)


def test_answers_that_looped_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"number": 1, "ids": [1, 2, 3]}\n{"number": 2}\n{"number": 3, "ids": [4]}\n')
    assert answers_kept([file, tmp_path / "none.jsonl"]) == (2, 4)
