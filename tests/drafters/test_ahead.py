import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.drafters import hits, load_drafter
from blockdraft.drafters.ahead import NAME, AheadDrafter, AheadState
from blockdraft.drafters.draft_lm import DraftLMDrafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.proposal import Plan
from blockdraft.targets import Target, TargetOutput, load_target
from blockdraft.types import Drafting, RequestDrafting, SamplingParams

GREEDY = SamplingParams(24, ignore_eos=True)
PROMPTS = [[(5 * i * i + 7 * row) % 60 + 4 for i in range(1 + 3 * row)] for row in range(5)]


class Pace:
    """Lets a draft model's passes ahead happen one by one, or fail: those in other threads than the tests' own."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._forward, self._own = model.forward, threading.get_ident()
        self._free, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self.error: Exception | None = None
        self.held = False
        self.passes = 0
        monkeypatch.setattr(model, "forward", self._paced)

    def _paced(self, *args: Any, **named: Any) -> TargetOutput:
        if threading.current_thread().name != NAME:
            return self._forward(*args, **named)
        if self.held:
            assert self._free.acquire(timeout=20)
        try:
            self.passes += 1
            output = self._forward(*args, **named)
            if self.error is not None:
                raise self.error
            return output
        finally:
            self._done.release()

    def let(self, count: int) -> None:
        """So many passes happen, and are over when this returns."""
        for _ in range(count):
            self._free.release()
            assert self._done.acquire(timeout=20)

    def hurry(self) -> None:
        """From now on all happen."""
        self.held = False
        self._free.release()


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.fixture
def usual(tiny_lm_dir: Path, target: Target) -> DraftLMDrafter:
    loaded = load_drafter(tiny_lm_dir, target=target)
    assert isinstance(loaded, DraftLMDrafter)
    return loaded


@pytest.fixture
def drafter(tiny_lm_dir: Path, target: Target) -> AheadDrafter:
    loaded = load_drafter(tiny_lm_dir, target=target, device="cpu", ahead=3)
    assert isinstance(loaded, AheadDrafter)
    return loaded


@pytest.fixture
def pace(drafter: AheadDrafter, monkeypatch: pytest.MonkeyPatch) -> Pace:
    return Pace(drafter._drafter.model, monkeypatch)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(20)
            assert not thread.is_alive()


def finish(state: AheadState) -> None:
    """Wait until all is drafted ahead that is to be."""
    if state.work._thread is not None:
        state.work._thread.join(20)


def observe(drafter: Any, state: Any, rows: list[list[int]]) -> None:
    longest = max(map(len, rows))
    padded = torch.tensor([row + [77] * (longest - len(row)) for row in rows], dtype=torch.long)
    drafter.observe(state, padded, None, [len(row) for row in rows])


def foreseen_of(state: AheadState, row: int = 0) -> list[tuple[int, int]]:
    """Outcomes of which something was drafted, that do not lie on the chain: guesses accepted, and the token."""
    _, outcomes = state.work.found[row]
    return [(len(path) - 2, path[-1]) for path, guesses in outcomes.items() if guesses][-3:]


# The guesses are those of the same model without drafting ahead.


@pytest.mark.parametrize("seconds", [None, [1.0, 1.1, 1.2, 1.4, 1.7]])
def test_guesses_are_the_usual_ones_hit_or_miss(
    drafter: AheadDrafter, usual: DraftLMDrafter, pace: Pace, seconds: list[float] | None
) -> None:
    """With rows that leave, come and stand still, outcomes that were foreseen or not, and drafts half done."""
    generator = torch.Generator().manual_seed(3)
    texts = [[9, 8, 7], [4] * 12, [30]]
    params = [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams()]
    ours, theirs = drafter.new_state(3, 90), usual.new_state(3, 90)
    rows = [0, 90, 180]
    anchor = torch.randint(4, 60, (3,), generator=generator)
    for each, state in ((drafter, ours), (usual, theirs)):
        observe(each, state, texts)
    for cycle in range(12):
        if cycle == 5:  # a row leaves, and another one comes in its place
            for state in (ours, theirs):
                state.close(90)
                state.open(90, 60)
            rows, texts = [0, 90, 180], [texts[0], list(range(20, 40)), texts[2]]
            for each, state in ((drafter, ours), (usual, theirs)):
                observe(each, state.of([90]), [texts[1]])
        if cycle == 8:  # another order, of fewer rows
            rows, texts, params, anchor = [180, 0], [texts[2], texts[0]], params[:2], anchor[[2, 0]]
        of_ours, of_theirs = ours.of(rows), theirs.of(rows)
        plan = Plan(5 if cycle % 3 else 4, params[: len(rows)], cycle_seconds=seconds)
        hits_before = drafter.foreseen
        made = drafter.propose(of_ours, anchor, plan)
        expected = usual.propose(of_theirs, anchor, plan)
        assert made.tokens.tolist() == expected.tokens.tolist(), cycle
        assert torch.equal(made.parents, expected.parents)
        if expected.chances is not None:
            assert made.chances is not None
            torch.testing.assert_close(torch.tensor(made.chances), torch.tensor(expected.chances))
            torch.testing.assert_close(made.expected, expected.expected)
        if cycle in (1, 2, 4, 10):
            assert drafter.foreseen == hits_before + 1, cycle
        # Outcomes that were foreseen, except in every third cycle.
        finish(of_ours)
        new, following = list[list[int]](), list[int]()
        for place, row in enumerate(rows):
            likely = foreseen_of(of_ours, row) if row in of_ours.work.found else []
            accepted, token = likely[cycle % 3] if likely and cycle % 3 != 2 else (0, 63)
            new.append(made.tokens[place, : 1 + accepted].tolist())
            following.append(token)
        for each, state in ((drafter, of_ours), (usual, of_theirs)):
            observe(each, state, new)
        texts = [text + more for text, more in zip(texts, new, strict=True)]
        anchor = torch.tensor(following)
    assert 4 <= drafter.foreseen < drafter.tried
