"""Rows and the drafter's context, where no answer would show an error."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from blockdraft.decode.proposal import Plan
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.engine import Engine, Request
from blockdraft.engine.request import Row
from blockdraft.engine.runner import Runner
from blockdraft.targets import Target, TargetOutput, load_target
from blockdraft.types import Drafting, SamplingParams

PROMPTS = [[5, 9, 17, 4], [8, 30], [40, 3, 22, 19, 7, 6, 5]]
GREEDY = SamplingParams(60, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.fixture(scope="module")
def drafter(tiny_drafter_dir: Path, target: Target) -> Drafter:
    return load_drafter(tiny_drafter_dir, target=target)


def made(target: Target, drafter: Drafter, params: SamplingParams = GREEDY) -> tuple[Runner, list[Row]]:
    """A runner with rows of the prompts, none of which is read, and a row's slots besides."""
    engine, runner = Engine(target, drafter, drafting=Drafting(None)), Runner(target, drafter, 200 * (len(PROMPTS) + 1))
    requests: list[Request] = [engine.request(prompt, params) for prompt in PROMPTS]
    rows = [Row(request, 200 * place, 200) for place, request in enumerate(requests)]
    for row in rows:
        runner.open(row.start, row.capacity)
    return runner, rows


def read(runner: Runner, rows: list[Row]) -> None:
    assert runner.read(rows, [len(row.request.prompt) for row in rows]) == []


def test_prompts_are_filled_up_with_tokens_of_their_own(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are padded with a token of their own: another's values might be NaN, and would stay in the row's
    slots."""
    forward, seen = target.forward, list[list[int]]()

    def spy(tokens: Tensor, *args: Any, **kwargs: Any) -> TargetOutput:
        seen.extend(tokens.tolist())
        return forward(tokens, *args, **kwargs)

    monkeypatch.setattr(target, "forward", spy)
    runner, rows = made(target, drafter)
    read(runner, rows)
    assert [row[: len(prompt)] for row, prompt in zip(seen, PROMPTS, strict=True)] == PROMPTS
    assert all(len(row) == 7 and set(row) <= set(prompt) for row, prompt in zip(seen, PROMPTS, strict=True))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(60, 1.0, seed=3)], ids=["greedy", "sampled"])
def test_rows_that_have_read_their_prompts_get_their_own_token_beside_one_that_has_not(
    target: Target, drafter: Drafter, params: SamplingParams
) -> None:
    expected = [
        completion.token_ids[0]
        for completion in Engine(target, drafter, drafting=Drafting(None)).generate(PROMPTS, params)
    ]
    assert len(set(expected)) == 3
    runner, rows = made(target, drafter, params)
    assert runner.read(rows, [2, 2, 7]) == []
    assert [row.read for row in rows] == [2, 2, 7] and rows[0].reading
    assert [row.request.token_ids for row in rows] == [[], expected[1:2], expected[2:]]
    assert runner.read(rows[:1], [2]) == []
    assert rows[0].request.token_ids == expected[:1]


def test_few_features_of_plain_cycles_are_kept(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockdraft.engine.draft_context.MOST_KEPT", 3)
    runner, rows = made(target, drafter)
    read(runner, rows)
    for _ in range(10):
        runner.step(rows, Plan(1, [GREEDY] * len(rows)))
        assert len(runner.draft_context._kept) <= 3
    runner.draft_context.catch_up()
    starts = [row.start for row in rows]
    assert runner.state.of(starts).lengths == runner.cache.of(starts).lengths


@pytest.mark.parametrize("leaves", ["copy", "close", "shrink"])
def test_the_drafter_is_told_of_all_cycles_before_a_row_changes(target: Target, drafter: Drafter, leaves: str) -> None:
    runner, rows = made(target, drafter)
    read(runner, rows)
    for _ in range(4):
        runner.step(rows, Plan(1, [GREEDY] * len(rows)))
    first, others = rows[0].start, [row.start for row in rows[1:]]
    held = runner.held(first)
    assert held == len(PROMPTS[0]) + 4
    if leaves == "close":
        runner.close(first)
    elif leaves == "shrink":
        runner.shrink(first, held)
        others.append(first)
    else:
        new = 200 * len(rows)
        runner.open(new, held)
        runner.copy(first, new, held)
        others += [first, new]
    assert runner.state.of(others).lengths == runner.cache.of(others).lengths
