"""Cycles of arbitrary tokens, for measuring."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from blockdraft.decode.proposal import Plan
from blockdraft.drafters import Drafter, slots_behind
from blockdraft.engine.request import Request, Row
from blockdraft.engine.runner import Runner
from blockdraft.machine import wait_for
from blockdraft.targets import Target
from blockdraft.types import SamplingParams


@dataclass(frozen=True)
class Probe:
    """Runs cycles of a pair outside of any engine."""

    target: Target
    drafter: Drafter

    def rows(self, count: int, context: int, room: int) -> tuple[Runner, list[Row]]:
        """Rows whose prompts, of `context` arbitrary tokens, have been read, with slots for `room` more, or for as
        many as drafters want, even past the end of the target's context."""
        prompt = [(7 * i + 3) % self.target.vocab_size for i in range(context)]
        capacity = self.target.row_slots(context + slots_behind(self.drafter, room))
        runner, params = Runner(self.target, self.drafter, count * capacity), SamplingParams(room, seed=0)
        requests = [Request(prompt=prompt, params=params, tokenizer=self.target.tokenizer) for _ in range(count)]
        rows = [Row(request, place * capacity, capacity) for place, request in enumerate(requests)]
        for row in rows:
            runner.open(row.start, capacity)
        runner.read(rows, [context] * count)
        return runner, rows

    def __call__(self, rows: int, context: int, draft_tokens: int, tree: bool, count: int) -> list[tuple[int, float]]:
        """As `stored_costs.Cycles`."""
        drafter = self.drafter
        # Asked as the controller asks: with times by which just so many guesses pay, or for a chain of this length.
        knows = drafter.knows_probabilities if tree else drafter.knows_lengths
        seconds = [1.0] * (draft_tokens + 1) if draft_tokens and knows else None
        block_size = drafter.block_size if seconds and tree else min(drafter.block_size, draft_tokens + 1)
        plan = Plan(block_size, [SamplingParams()] * rows, draft_tokens if tree else 0, seconds)
        with self.target.lock:
            runner, running = self.rows(rows, context, count * drafter.block_size + draft_tokens)
            return [self._timed(runner, running, plan) for _ in range(count)]

    def _timed(self, runner: Runner, rows: Sequence[Row], plan: Plan) -> tuple[int, float]:
        wait_for(self.target.device)
        began = time.perf_counter()
        outcome = runner.step(rows, plan)
        wait_for(self.target.device)
        return outcome.draft_tokens, time.perf_counter() - began
