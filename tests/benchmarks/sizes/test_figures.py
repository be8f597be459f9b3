import pytest
from made import CHAIN, PLAIN_WAY, THEIR_CHAIN, THEIRS, run

from benchmarks.sizes.figures import Figures
from benchmarks.sizes.report import page
from benchmarks.sizes.ways import Way

LOOP = " ".join(["7 8 9"] * 40)


def test_ratios_are_taken_within_a_repeat() -> None:
    runs = [run(PLAIN_WAY, seconds, repeat) for repeat, seconds in enumerate([4, 40, 4])]
    runs += [run(CHAIN, seconds, repeat) for repeat, seconds in enumerate([2, 10, 1])]
    found = Figures(runs)
    assert found.ratios("1", CHAIN, PLAIN_WAY, "answers") == [2, 4, 4]
    assert found.speed("1", PLAIN_WAY, "answers") == 1  # 4 tokens behind the first, in 4 seconds
    assert found.tau("1", CHAIN, "answers") == 2


def test_a_repeat_counts_once_it_has_all_prompts() -> None:
    runs = [run(PLAIN_WAY, 4, repeat, prompt) for repeat in range(2) for prompt in range(2)]
    runs += [run(CHAIN, 2, 0, 0), run(CHAIN, 2, 0, 1), run(CHAIN, 1, 1, 0)]
    assert Figures(runs).rates("1", CHAIN, "answers") == {0: 2}


def test_answers_that_run_in_circles_are_left_out() -> None:
    runs = [run(way, 1, prompt=i, answer=LOOP if i else "1 2 3") for way in (PLAIN_WAY, CHAIN) for i in range(2)]
    runs.append(run(CHAIN, 1, prompt=1, size="2"))
    found = Figures(runs)
    assert found.looping == {("1", 16): 1}
    assert {(each.size, each.prompt) for each in found.runs} == {("1", 0), ("2", 1)}
    assert len(Figures([run(PLAIN_WAY, 1, answer=LOOP, forced=1)]).runs) == 1  # where guesses are replaced none is easy


def test_the_fastest_of_a_side() -> None:
    runs = [run(PLAIN_WAY, 4), run(CHAIN, 2), run(THEIRS, 1), run(THEIR_CHAIN, 3)]
    found = Figures(runs)
    assert found.fastest("1", "ours", 16, "answers") == CHAIN
    assert found.fastest("1", "ours", 16, "answers", method="plain") == PLAIN_WAY
    assert found.fastest("1", "llama.cpp", 16, "answers") == THEIRS
    assert found.fastest("1", "ours", 4, "answers") is None


def test_equal_answers() -> None:
    runs = [run(PLAIN_WAY, 1, repeat, prompt) for repeat in range(2) for prompt in range(4)]
    runs += [run(THEIRS, 1, 0, prompt, answer="1 2" if prompt == 3 else "1 2 3 4 5") for prompt in range(4)]
    assert Figures(runs).equal("1", PLAIN_WAY, THEIRS) == pytest.approx(3 / 4)
    assert Figures([*runs, run(PLAIN_WAY, 1, 2, 0, answer="9")]).equal("1", PLAIN_WAY, THEIRS) == pytest.approx(2 / 4)
    assert Figures(runs).equal("1", PLAIN_WAY, CHAIN) is None


def test_auto_stands_beside_the_fastest_chain() -> None:
    slower, auto = Way(CHAIN.side, CHAIN.kind, "chain:7"), Way(CHAIN.side, CHAIN.kind, "chain:auto")
    runs = [run(way, seconds) for way, seconds in ((PLAIN_WAY, 9), (CHAIN, 2), (slower, 4), (auto, 8))]
    assert f"| {CHAIN.kind} | {CHAIN.method} | 0.25 (0.25 to 0.25) |" in page(runs, {})
    assert "Not measured." in page(runs[:3], {})
