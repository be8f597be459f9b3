import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.harness.process import PeerError, Processes
from benchmarks.harness.records import Records
from benchmarks.peers.measure import UNTIMED, Difference, Task, Trial, differences, figures, measure
from benchmarks.peers.registry import PLAIN, REFERENCE, Peer
from fakes import fake, started, trial

REQUEST = {"max_new_tokens": 5, "stops": [0]}
TASKS = [Task("set", i, (10 + i, 20, 30)) for i in range(3)]


def run(
    folder: Path, *peers: Peer, repeats: int = 2, stop_after: int | None = None
) -> tuple[list[Trial], dict[str, str]]:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done == stop_after and stage == "answers" and total > 3:
            raise KeyboardInterrupt

    named, trials = {peer.name: peer for peer in peers}, Records(Trial, folder / "trials.csv")
    with Processes(lambda name: started(named[name], folder)) as processes:
        measure(processes, list(named), TASKS, repeats, REQUEST, trials, interrupt)
    return trials.all, processes.missing


def asked(folder: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line)["decode"] for line in (folder / f"{name}.asked").read_text().splitlines()]


def test_every_peer_answers_every_prompt_in_every_round(tmp_path: Path) -> None:
    found, _ = run(tmp_path, fake(REFERENCE), fake("a"), fake("b"))
    counts = Counter((t.peer, t.repeat) for t in found)
    assert counts == {(REFERENCE, UNTIMED): 3} | {(p, r): 3 for p in (REFERENCE, "a", "b") for r in (0, 1)}
    assert all(t.tokens == list(range(10 + t.index, 15 + t.index)) for t in found)
    timed = [t for t in found if t.repeat != UNTIMED]
    blocks = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert all(len({t.key for t in block}) == 1 and len({t.peer for t in block}) == 3 for block in blocks)
    assert Counter(block[0].peer for block in blocks) == {REFERENCE: 2, "a": 2, "b": 2}
    assert asked(tmp_path, "a")[0] == {**REQUEST, "prompt": [10, 20, 30]} and len(asked(tmp_path, "a")) == 1 + 6


def test_prompts_that_loop_are_left_out(tmp_path: Path) -> None:
    found, _ = run(tmp_path, fake(REFERENCE, loop=11), fake("a"))
    assert {t.index for t in found if t.repeat != UNTIMED} == {0, 2}
    assert {t.index for t in found if t.repeat == UNTIMED} == {0, 1, 2}


def test_an_interrupted_run_goes_on_and_a_finished_one_asks_nothing_more(tmp_path: Path) -> None:
    peers = fake(REFERENCE), fake("a")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *peers, stop_after=5)
    before = Records(Trial, tmp_path / "trials.csv").all
    after, _ = run(tmp_path, *peers)
    assert len(before) == 3 + 5 and after[:8] == before and len(after) == 3 + 2 * 2 * 3
    assert Counter((t.peer, t.key, t.repeat) for t in after).most_common(1)[0][1] == 1
    questions = asked(tmp_path, "a")
    assert run(tmp_path, *peers)[0] == after and asked(tmp_path, "a") == questions


def test_a_peer_that_fails_is_left_behind_unless_it_is_the_reference(tmp_path: Path) -> None:
    found, missing = run(tmp_path, fake(REFERENCE), fake("a", die=12), fake("b"))
    assert missing == {"a": "failed: it ended with 1: out of memory"}
    assert sum(t.peer == "b" for t in found) == 6
    with pytest.raises(PeerError, match="out of memory"):
        run(tmp_path / "other", fake(REFERENCE, die=12), fake("a"))


ANSWERS = [trial(REFERENCE, i) for i in range(2)]


def rounds(peer: str, *seconds: float) -> list[Trial]:
    """Rounds of two prompts, one for each of these times."""
    return [trial(peer, i, repeat, seconds=each / 2) for repeat, each in enumerate(seconds) for i in range(2)]


def test_speeds_are_medians_of_the_complete_repeats_and_ratios_compare_the_same_repeat() -> None:
    found = figures([*ANSWERS, *rounds(REFERENCE, 8, 4, 2), *rounds("a", 8, 4)[:3], *rounds("b", 8)[:1]])
    one = found[REFERENCE]
    assert one.tokens_per_second_by_repeat == (1, 2, 4) and one.tokens_per_second == 2  # 2 * 4 tokens after the first
    assert one.over_reference == 1 and one.over_plain is None and one.seconds_per_answer == 0.5 + 2
    assert one.prompts == 2 and one.same == 1 and one.tau == 1
    assert found["a"].tokens_per_second_by_repeat == (1,) and "b" not in found
    trials = [*ANSWERS, *rounds(REFERENCE, 8, 80, 8), *rounds(PLAIN, 4, 40, 4), *rounds("a", 2, 10, 40)]
    found = figures(trials)
    assert found["a"].over_reference == pytest.approx(4) and found[PLAIN].over_reference == pytest.approx(2)
    assert found["a"].over_plain == pytest.approx(2)  # of 2, 4 and 0.1


def test_tokens_that_came_with_the_prompt_do_not_count() -> None:
    found = figures([*ANSWERS, *(replace(t, first=3, steps=1) for t in rounds("a", 2))])["a"]
    assert found.tokens_per_second == 2 and found.tau == 2
    assert figures([replace(t, answer="1", steps=0, decode_seconds=0.0) for t in [*ANSWERS, *rounds("a", 1)]]) == {}


def test_where_answers_differ() -> None:
    trials = rounds("a", 1, 1)
    trials[2] = replace(trials[2], answer="1 2 3 4")
    assert figures([*ANSWERS, *trials])["a"].same == 0.5  # a prompt differs if one answer does
    questions: list[tuple[list[int], int, int]] = []

    def margin(context: Sequence[int], one: int, other: int) -> float:
        questions.append((list(context), one, other))
        return 0.125

    trials = [trial("a", 0, 0), trial("a", 1, 0, "1 2 9 4 5"), trial("a", 1, 1, "1 8 9 4 5")]  # the first one is told
    trials += [trial("b", 0, 0, "1 2 3"), trial("c", 0, 0, "1 2 3 4 5 6")]
    assert differences([*ANSWERS, *trials], [Task("set", i, (10 + i, 20)) for i in range(2)], margin) == [
        Difference("a", "set", 1, 3, 3, 9, 0.125),
        Difference("b", "set", 0, 4, 4, None, None),
        Difference("c", "set", 0, 6, None, 6, None),
    ]
    assert questions == [([11, 20, 1, 2], 3, 9)]
