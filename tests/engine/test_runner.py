"""Rows and the drafter's context, where no answer would show an error."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from copies import copy_with
from torch import Tensor

from blockdraft.decode.proposal import ChainPlan, Plan, Proposal, chain
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine import Engine, Request
from blockdraft.engine.request import RunningSequence
from blockdraft.engine.runner import OBSERVE_TOKENS, Runner
from blockdraft.targets import Target, TargetOutput, load_target
from blockdraft.types import Drafting, SamplingParams

PROMPTS = [[5, 9, 17, 4], [8, 30], [40, 3, 22, 19, 7, 6, 5]]
GREEDY = SamplingParams(100, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.fixture(scope="module")
def drafter(tiny_drafter_dir: Path, target: Target) -> Drafter:
    return load_drafter(tiny_drafter_dir, target=target)


def made(target: Target, drafter: Drafter, params: SamplingParams = GREEDY) -> tuple[Runner, list[RunningSequence]]:
    """A runner with rows of the prompts, none of which is read, and a row's slots besides."""
    engine, runner = Engine(target, drafter, drafting=Drafting(None)), Runner(target, drafter, 200 * (len(PROMPTS) + 1))
    requests: list[Request] = [engine.request(prompt, params) for prompt in PROMPTS]
    rows = [RunningSequence(request, 200 * place, 200) for place, request in enumerate(requests)]
    for row in rows:
        runner.open(row.start, row.capacity)
    return runner, rows


def read(runner: Runner, rows: list[RunningSequence]) -> None:
    assert runner.prefill(rows, [len(row.request.prompt) for row in rows]) == []


def test_prompts_are_filled_up_with_tokens_of_their_own(target: Target, drafter: Drafter) -> None:
    """Prompts are padded with a token of their own: another's values might be NaN, and would stay in the row's
    slots."""
    forward, seen = target.forward, list[list[int]]()

    def spy(tokens: Tensor, *args: Any, **kwargs: Any) -> TargetOutput:
        seen.extend(tokens.tolist())
        return forward(tokens, *args, **kwargs)

    runner, rows = made(copy_with(target, forward=spy), drafter)
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
    assert runner.prefill(rows, [2, 2, 7]) == []
    assert [row.prefilled for row in rows] == [2, 2, 7] and rows[0].in_prefill
    assert [row.request.token_ids for row in rows] == [[], expected[1:2], expected[2:]]
    assert runner.prefill(rows[:1], [2]) == []
    assert rows[0].request.token_ids == expected[:1]


class Listener(NoDrafter):
    """Records what it observes, and fails for sequences that hold the token `bad`."""

    block_size = 4

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad
        self.observed: list[list[list[int]]] = []  # by call the tokens of each sequence

    def propose(self, state: Any, anchor: Tensor, plan: Plan) -> Proposal:
        return chain(anchor[:, None])

    def observe(self, state: Any, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        if (tokens == self.bad).any():
            raise ArithmeticError(f"cannot observe {self.bad}")
        self.observed.append([ids[:n] for ids, n in zip(tokens.tolist(), lengths, strict=True)])


def test_tokens_of_plain_steps_are_observed_at_once_before_a_draft(target: Target) -> None:
    listener = Listener()
    runner, rows = made(target, listener)
    read(runner, rows)
    listener.observed.clear()
    for _ in range(5):
        runner.step(rows, ChainPlan(1, [GREEDY] * 3))
    assert listener.observed == []
    runner.step(rows, ChainPlan(4, [GREEDY] * 3))
    assert listener.observed == [
        [row.request.token_ids[:5] for row in rows],
        [row.request.token_ids[5:6] for row in rows],
    ]
    runner.step(rows, ChainPlan(1, [GREEDY] * 3))
    runner.step(rows[:1], ChainPlan(1, [GREEDY]))  # another batch
    assert listener.observed[2:] == [[row.request.token_ids[6:7] for row in rows]]


def test_nothing_is_observed_of_a_sequence_that_leaves_alone(target: Target) -> None:
    listener = Listener()
    runner, rows = made(target, listener)
    read(runner, rows)
    listener.observed.clear()
    runner.step(rows[:1], ChainPlan(1, [GREEDY]))
    runner.close(rows[0].start)
    runner.catch_up()
    assert listener.observed == []


def test_long_pauses_are_observed_in_pieces(target: Target) -> None:
    listener = Listener()
    runner, rows = made(target, listener, GREEDY)
    read(runner, rows)
    listener.observed.clear()
    count = OBSERVE_TOKENS // 3 + 10
    for _ in range(count):
        runner.step(rows, ChainPlan(1, [GREEDY] * 3))
    runner.catch_up()
    assert [len(tokens[0]) for tokens in listener.observed] == [OBSERVE_TOKENS // 3, 10]
    for i, row in enumerate(rows):
        assert sum((tokens[i] for tokens in listener.observed), []) == row.request.token_ids[:count]


def test_a_sequence_that_the_drafter_cannot_observe_ends_alone(target: Target) -> None:
    listener = Listener(bad=PROMPTS[1][0])
    runner, rows = made(target, listener)
    read(runner, rows)
    assert [row.request.finish_reason for row in rows] == [None, "error", None]
    assert str(rows[1].request.failure) == "The drafter failed: ArithmeticError: cannot observe 8"
    assert listener.observed == [[PROMPTS[0]], [PROMPTS[2]]]


@pytest.mark.parametrize("leaves", ["copy", "close", "shrink"])
def test_the_drafter_observes_all_steps_before_a_row_changes(target: Target, drafter: Drafter, leaves: str) -> None:
    runner, rows = made(target, drafter)
    read(runner, rows)
    for _ in range(4):
        runner.step(rows, ChainPlan(1, [GREEDY] * len(rows)))
    first, others = rows[0].start, [row.start for row in rows[1:]]
    held = runner.committed_length(first)
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
