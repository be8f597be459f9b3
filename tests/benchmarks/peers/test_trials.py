import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from fakes import fake, started

from benchmarks.harness.process import PeerError
from benchmarks.peers.registry import REFERENCE, Peer
from benchmarks.peers.trials import Journal, Task, measure

REQUEST = {"max_new_tokens": 5, "stops": [0]}


def run(folder: Path, tasks: Sequence[Task], *peers: Peer, repeats: int = 2, stop_after: int | None = None) -> Journal:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done == stop_after and stage.startswith("round"):
            raise KeyboardInterrupt

    journal = Journal(folder / "journal.jsonl", {"repeats": repeats})
    with ExitStack() as stack:
        processes = {peer.name: stack.enter_context(started(peer, folder)) for peer in peers}
        measure(processes, tasks, repeats, REQUEST, journal, interrupt)
    return journal


def test_every_peer_answers_every_prompt_in_every_round(tmp_path: Path, tasks: list[Task]) -> None:
    found = run(tmp_path, tasks, fake(REFERENCE), fake("a"), fake("b"))
    counts = Counter((t.peer, t.repeat) for t in found.trials)
    assert counts == {(REFERENCE, None): 3} | {(p, r): 3 for p in (REFERENCE, "a", "b") for r in (0, 1)}
    assert all(t.tokens == tuple(range(10 + t.index, 15 + t.index)) for t in found.trials)


def test_peers_take_turns_prompt_by_prompt(tmp_path: Path, tasks: list[Task]) -> None:
    found = run(tmp_path, tasks, fake(REFERENCE), fake("a"), fake("b"))
    timed = [t for t in found.trials if t.repeat is not None]
    blocks = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert all(len({t.key for t in block}) == 1 and len({t.peer for t in block}) == 3 for block in blocks)
    assert Counter(block[0].peer for block in blocks) == {REFERENCE: 2, "a": 2, "b": 2}


def test_prompts_that_loop_are_left_out(tmp_path: Path, tasks: list[Task]) -> None:
    found = run(tmp_path, tasks, fake(REFERENCE, loop=11), fake("a"))
    assert {t.index for t in found.trials if t.repeat is not None} == {0, 2}
    assert {t.index for t in found.trials if t.repeat is None} == {0, 1, 2}


def test_an_interrupted_run_goes_on(tmp_path: Path, tasks: list[Task]) -> None:
    peers = fake(REFERENCE), fake("a")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, tasks, *peers, stop_after=8)
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"peer": "a", "prom')  # the machine went down here
    before = Journal(tmp_path / "journal.jsonl", {"repeats": 2}).trials
    assert len(before) == 8
    after = run(tmp_path, tasks, *peers).trials
    assert after[:8] == before
    assert Counter((t.peer, t.key, t.repeat) for t in after).most_common(1)[0][1] == 1
    assert len(after) == 3 + 2 * 2 * 3
    assert Journal(tmp_path / "journal.jsonl", {"repeats": 2}).trials == after


def test_a_finished_run_asks_nothing_more(tmp_path: Path, tasks: list[Task]) -> None:
    peers = fake(REFERENCE), fake("a")
    run(tmp_path, tasks, *peers)
    asked = (tmp_path / "a.asked").read_text()
    run(tmp_path, tasks, *peers)
    assert (tmp_path / "a.asked").read_text() == asked


def test_another_run_is_not_mixed_in(tmp_path: Path, tasks: list[Task]) -> None:
    run(tmp_path, tasks, fake(REFERENCE))
    with pytest.raises(ValueError, match="unfinished run with other repeats; .* --restart"):
        Journal(tmp_path / "journal.jsonl", {"repeats": 3})


def test_a_peer_that_fails_is_left_behind(tmp_path: Path, tasks: list[Task]) -> None:
    peers = fake(REFERENCE), fake("a", die=12), fake("b")
    found = run(tmp_path, tasks, *peers)
    assert found.failed == {"a": "failed: it ended with 1: out of memory"}
    assert sum(t.peer == "b" for t in found.trials) == 6
    assert Journal(tmp_path / "journal.jsonl", {"repeats": 2}).failed == found.failed


def test_nothing_goes_without_the_reference(tmp_path: Path, tasks: list[Task]) -> None:
    with pytest.raises(PeerError, match="out of memory"):
        run(tmp_path, tasks, fake(REFERENCE, die=12), fake("a"))


def test_peers_warm_up_on_a_whole_answer(tmp_path: Path, tasks: list[Task]) -> None:
    run(tmp_path, tasks, fake(REFERENCE), fake("a"), repeats=1)
    asked = [json.loads(line)["decode"] for line in (tmp_path / "a.asked").read_text().splitlines()]
    assert len(asked) == 1 + 3
    assert asked[0] == {**REQUEST, "prompt": [10, 20, 30]}
