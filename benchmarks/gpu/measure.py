"""Measurements of steps, each of one row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from benchmarks.harness.interleaving import time_interleaved
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from blockdraft.decode.proposal import ChainPlan, Plan, Proposal
from blockdraft.drafters import Drafter
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine.adaptive.costs import Probe
from blockdraft.targets import Target
from blockdraft.timing import FORWARD, NETWORKS, listening
from blockdraft.types import SamplingParams

COPIED_BYTES = {"cuda": 2**31, "cpu": 2**27}
PROFILED_STEPS = 4
PARAMS = SamplingParams(1)


@dataclass(frozen=True)
class StepTimes:
    """Median times of one kind of step, in seconds.

    Attributes:
        total: From step to step.
        draft, verify, host: In the drafter's networks, in the target's forward, and outside both, in other steps, in
            which each of them is waited for.
        tokens: Mean tokens committed.
    """

    total: float
    draft: float
    verify: float
    host: float
    tokens: float


class Forced:
    """A drafter that runs its draft passes as usual, and replaces the draft tokens to be right as often as asked.

    Args:
        inner: The drafter; it drafts chains.
        answer: The target's coming tokens.
        right: Numbers of right draft tokens in each step, used cyclically.
    """

    def __init__(
        self, inner: Drafter, prompt_length: int, answer: Sequence[int], right: Sequence[int], vocab_size: int
    ) -> None:
        self.inner, self.answer, self.right, self.vocab_size = inner, answer, right, vocab_size
        self._place, self._step = -prompt_length, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, state: Any, anchor: Tensor, plan: Plan) -> Proposal:
        proposal = self.inner.propose(state, anchor, plan)
        right = self.right[self._step % len(self.right)]
        self._step += 1
        known = list(self.answer[self._place + 1 : self._place + proposal.tokens.size(1)])
        known[right:] = [(token + 1) % self.vocab_size for token in known[right:]]
        tokens = proposal.tokens.clone()
        tokens[0, 1 : 1 + len(known)] = torch.tensor(known, device=tokens.device)
        return replace(proposal, tokens=tokens)

    def observe(self, state: Any, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        self._place += lengths[0]
        self.inner.observe(state, tokens, hidden_states, lengths)


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """Return the bytes that a large copy reads and writes per second."""
    size = COPIED_BYTES.get(device.type, COPIED_BYTES["cpu"])
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    times = time_interleaved({"copy": lambda: copy.copy_(source)}, repeats, warm_up=1, clock=clock(device))
    return 2 * size / min(times["copy"])


def clock(device: torch.device) -> Callable[[], float]:
    """Return a clock that waits until the device is idle."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def room(probe: Probe, plan: Plan, steps: int) -> int:
    """Return the KV slots that these steps need after the context, with the nodes of the last one."""
    return steps * probe.drafter.block_size + plan.tree_budget


def time_step(probe: Probe, context: int, plan: Plan, repeats: int) -> StepTimes:
    """Time steps of this plan behind a context."""
    runner, rows = probe.open_sequences(1, context, room(probe, plan, 2 * repeats + 2))
    now = clock(probe.target.device)
    totals = time_interleaved({"step": lambda: runner.step(rows, plan)}, repeats, warm_up=2, clock=now)["step"]
    parts = []
    for _ in range(repeats):
        with listening(now) as heard:
            runner.step(rows, plan)
        draft, verify = sum(heard[part] for part in NETWORKS - {FORWARD}), heard[FORWARD]
        parts.append((draft, verify, sum(heard.values()) - draft - verify))
    committed = rows[0].request.stats.committed[2:]
    draft, verify, host = (median(part) for part in zip(*parts, strict=True))
    tokens = sum(committed) / len(committed)
    return StepTimes(total=median(totals), draft=draft, verify=verify, host=host, tokens=tokens)


def forced_rate(target: Target, drafter: DFlashDrafter, context: int, tau: float, steps: int) -> tuple[float, float]:
    """Return tokens per second, and per step, when draft tokens are right as often as `tau` says.

    The latter falls short of `tau` where the target decides otherwise inside a block than alone, as bfloat16 and the
    nearly equal logits of random weights make it do.
    """
    length = int(steps * tau) + 2 * drafter.block_size
    runner, rows = Probe(target, NoDrafter()).open_sequences(1, context, length)
    answer = rows[0].request.token_ids
    while len(answer) < length:
        runner.step(rows, ChainPlan(1, [PARAMS]))
    reached = [int(step * (tau - 1) + 1e-9) for step in range(steps + 1)]
    right = [after - before for before, after in pairwise(reached)]  # differing by at most one
    forced: Any = Forced(drafter, context, answer, right, target.vocab_size)  # it has the rest from the inner drafter
    runner, rows = Probe(target, forced).open_sequences(1, context, length)
    now, plan = clock(target.device), ChainPlan(drafter.block_size, [PARAMS])
    runner.step(rows, plan)
    before, began = len(rows[0].request.token_ids), now()
    for _ in range(steps - 1):
        runner.step(rows, plan)
    tokens = len(rows[0].request.token_ids) - before
    return tokens / (now() - began), tokens / (steps - 1)


def profile_kernels(probe: Probe, context: int, plan: Plan) -> tuple[float, float] | None:
    """Return the kernels of a step, and the share of the time in which none ran on the device; None without a GPU."""
    if probe.target.device.type != "cuda":
        return None
    runner, rows = probe.open_sequences(1, context, room(probe, plan, PROFILED_STEPS + 2))
    for _ in range(2):
        runner.step(rows, plan)
    now = clock(probe.target.device)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        now()
        for _ in range(PROFILED_STEPS):
            runner.step(rows, plan)
        now()
    kernels = [e.time_range for e in found.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    idle = gaps([(each.start, each.end) for each in kernels])
    return None if idle is None else (len(kernels) / PROFILED_STEPS, idle)


def gaps(spans: Sequence[tuple[float, float]]) -> float | None:
    """Return the share of the time from the first start to the last end in which none of the spans ran."""
    if not spans:
        return None
    busy, reached = 0.0, min(start for start, _ in spans)
    first = reached
    for begin, end in sorted(spans):
        busy += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return 1 - busy / (reached - first)
