from pathlib import Path

import pytest
from benchmarks.harness.records import Records
from benchmarks.sizes import report
from benchmarks.sizes.measure import Run
from benchmarks.sizes.report import Figures, changed, draw, page
from benchmarks.sizes.ways import Way
from made import CHAIN, PLAIN_WAY, THEIR_CHAIN, THEIRS, run

LOOP = " ".join(["7 8 9"] * 40)


def test_ratios_are_taken_within_complete_repeats() -> None:
    runs = [run(PLAIN_WAY, seconds, repeat) for repeat, seconds in enumerate([4, 40, 4])]
    runs += [run(CHAIN, seconds, repeat) for repeat, seconds in enumerate([2, 10, 1])]
    found = Figures(runs)
    assert found.ratios("1", CHAIN, PLAIN_WAY, "answers") == [2, 4, 4]
    assert found.speed("1", PLAIN_WAY, "answers") == 1  # 4 tokens behind the first, in 4 seconds
    assert found.tau("1", CHAIN, "answers") == 2
    runs = [run(PLAIN_WAY, 4, repeat, prompt) for repeat in range(2) for prompt in range(2)]
    runs += [run(CHAIN, 2, 0, 0), run(CHAIN, 2, 0, 1), run(CHAIN, 1, 1, 0)]
    assert Figures(runs).rates("1", CHAIN, "answers") == {0: 2}


def test_answers_that_run_in_circles_are_left_out() -> None:
    runs = [run(way, 1, prompt=i, answer=LOOP if i else "1 2 3") for way in (PLAIN_WAY, CHAIN) for i in range(2)]
    runs.append(run(CHAIN, 1, prompt=1, size="2"))
    found = Figures(runs)
    assert found.repetitive == {("1", 16): 1}
    assert {(each.size, each.prompt) for each in found.runs} == {("1", 0), ("2", 1)}
    assert (
        len(Figures([run(PLAIN_WAY, 1, answer=LOOP, forced=1)]).runs) == 1
    )  # where draft tokens are replaced none is easy


def test_the_fastest_of_a_side() -> None:
    found = Figures([run(PLAIN_WAY, 4), run(CHAIN, 2), run(THEIRS, 1), run(THEIR_CHAIN, 3)])
    assert found.best("1", "ours", 16, "answers") == CHAIN
    assert found.best("1", "ours", 16, "answers", method="plain") == PLAIN_WAY
    assert found.best("1", "llama.cpp", 16, "answers") == THEIRS
    assert found.best("1", "ours", 4, "answers") is None


def test_equal_answers_and_ways_that_change_tokens() -> None:
    runs = [run(PLAIN_WAY, 1, repeat, prompt) for repeat in range(2) for prompt in range(4)]
    runs += [run(THEIRS, 1, 0, prompt, answer="1 2" if prompt == 3 else "1 2 3 4 5") for prompt in range(4)]
    assert Figures(runs).equal("1", PLAIN_WAY, THEIRS) == pytest.approx(3 / 4)
    assert Figures([*runs, run(PLAIN_WAY, 1, 2, 0, answer="9")]).equal("1", PLAIN_WAY, THEIRS) == pytest.approx(2 / 4)
    assert Figures(runs).equal("1", PLAIN_WAY, CHAIN) is None
    runs += [run(CHAIN, 1, 0, prompt) for prompt in range(4)]
    assert changed(runs) == changed([*runs, run(THEIR_CHAIN, 1, 3, answer="1 9")]) == []
    assert changed([*runs, run(CHAIN, 1, 3, answer="1 9")]) == ["bfloat16 chain:3 at 1"]


@pytest.mark.slow
def test_the_published_page_is_made_of_the_published_runs() -> None:
    folder = Path(report.__file__).parent
    runs = Records(Run, folder / "runs.csv").all
    assert page(runs, {}) == (folder / "sizes.md").read_text()
    text = page(runs, {("1", Way("ours", "int4", method)): "no such kind" for method in ("plain", "chain:3")})
    assert "- no such kind: ours int4 plain at 1, ours int4 chain:3 at 1" in text


@pytest.mark.slow
def test_the_published_runs_are_drawn(tmp_path: Path) -> None:
    draw(Records(Run, Path(report.__file__).parent / "runs.csv").all, tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")
