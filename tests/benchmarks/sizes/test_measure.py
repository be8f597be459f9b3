from pathlib import Path

import pytest
from benchmarks.harness.interleaving import interleaved
from benchmarks.harness.process import PeerProcess
from benchmarks.harness.records import Records
from benchmarks.sizes.measure import Run, Task, measure, right_draft_tokens, tasks
from benchmarks.sizes.ways import Way
from fakes import fake, started
from made import CHAIN, PLAIN_WAY, THEIR_CHAIN, THEIRS

TREE = Way("ours", "bfloat16", "tree:16")
TASKS = [Task("answers", i, (10 + i, 20), 4) for i in range(3)]


@pytest.mark.parametrize("acceptance_prob", [0.5, 0.735, 0.9])
def test_as_many_draft_tokens_are_right_as_chance_has_it(acceptance_prob: float) -> None:
    counts = right_draft_tokens(acceptance_prob)
    for stretch in (counts[:40], counts):
        for draft_tokens in (3, 15):
            mean = sum(min(count, draft_tokens) for count in stretch) / len(stretch)
            assert mean == pytest.approx(sum(acceptance_prob**i for i in range(1, draft_tokens + 1)), rel=0.07)


def test_tasks_are_the_prompts_and_prompts_of_a_length() -> None:
    answers, first, short, long = tasks("1", [[1, 2, 3]], 96, [2], [8, 4096])
    assert (answers.name, answers.prompt, answers.new_tokens, answers.accept) == ("answers", (1, 2, 3), 96, ())
    assert (first.name, first.prompt, first.new_tokens) == ("first 2", (2, 3), 1)
    assert (short.name, short.prompt, short.accept) == ("context 8", (2, 3, 1, 2, 3, 1, 2, 3), ())
    assert len(long.prompt) == 4096 and long.accept  # nobody was trained for that
    assert all(task.accept for task in tasks("qwen3-4b", [[1, 2, 3]], 96, [], [8]))


def test_which_ways_decode_what() -> None:
    answers, first, context = (Task(kind, 0, (1,), 4) for kind in ("answers", "first", "context"))
    forced = Task("answers", 0, (1,), 4, (2, 0))
    auto = Way("ours", "int8", "chain:auto")
    assert all(answers.takes(way) for way in (PLAIN_WAY, CHAIN, TREE, auto))
    assert [way for way in (PLAIN_WAY, CHAIN, TREE, auto) if first.takes(way)] == [PLAIN_WAY, CHAIN]
    for task in (context, forced):
        assert [way for way in (PLAIN_WAY, CHAIN, TREE, auto) if task.takes(way)] == [PLAIN_WAY, CHAIN]


def test_answers_are_kept_and_failures_stop_one_process_only(tmp_path: Path) -> None:
    behaviour = {PLAIN_WAY.process: {}, THEIRS: {"crash": "out of memory"}, THEIR_CHAIN: {"fail": 11}}

    def start(process: Way) -> PeerProcess:
        return started(fake(process.kind, **behaviour[process]), tmp_path)

    left = list(interleaved(TASKS, [PLAIN_WAY, CHAIN, THEIRS, THEIR_CHAIN], 1))
    runs = Records(Run, tmp_path / "runs.csv")
    missing = measure("1", 7, left, start, [2], runs)
    assert missing.keys() == {THEIRS, THEIR_CHAIN}
    assert "out of memory" in missing[THEIRS] and missing[THEIR_CHAIN] == "failed: ValueError: no"
    assert {(each.way, each.prompt) for each in runs.all} >= {(way, i) for way in (PLAIN_WAY, CHAIN) for i in range(3)}
    assert not any(each.way == THEIRS for each in runs.all)
    first = runs.all[0]
    assert (first.parameters, first.new_tokens, first.steps, first.answer) == (7, 4, 2, "10 11 12 13")
    assert first.decode_seconds == 0.1 and first.peak_bytes > 0
