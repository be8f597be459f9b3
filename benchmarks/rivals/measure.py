"""Measurements of a drafter: its answers, its cycles, and its speed beside others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.models import forward_calls
from benchmarks.harness.process import Progress
from benchmarks.harness.turns import time_in_turns
from benchmarks.rivals.kinds import KINDS
from benchmarks.rivals.records import PLAIN, Answers, Cycle, Forward, Speed, Way, ways_of
from blockdraft.decode.proposal import ChainPlan, Plan, Proposal
from blockdraft.drafters import Drafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine import Engine, loops, merge
from blockdraft.engine.adaptive.costs import Probe
from blockdraft.evaluation.methods import PLAIN as NONE
from blockdraft.evaluation.prompts import PromptSet
from blockdraft.evaluation.settings import Settings
from blockdraft.evaluation.speed import figures
from blockdraft.evaluation.speed import measure as measure_speeds
from blockdraft.nn.autoregressive import AutoregressiveNetwork, DraftNodes
from blockdraft.targets import Target
from blockdraft.timing import DRAFTING, listening
from blockdraft.types import SamplingParams

CONTEXT = 128  # committed tokens of each row while cycles are timed
CYCLES = 4  # that a time is the mean of
NODES = (1, 2, 4, 8, 16, 32, 64)


class CountedNodes:
    """Counter of the nodes of draft passes."""

    def __init__(self, inner: DraftNodes, passes: Counter[int]) -> None:
        self._inner, self._passes = inner, passes

    @property
    def room(self) -> int:
        return self._inner.room

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        self._passes.update([tokens.size(1)])
        return self._inner(tokens, parents)


class Watched:
    """A drafter that counts what it does for rows that are decoded alone.

    Attributes:
        cycles, draft_tokens: Proposals, and the guesses in them.
        passes: Draft passes, by the tokens that each takes.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.cycles = self.draft_tokens = 0
        self.passes: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, state: Any, anchor: Tensor, plan: Plan) -> Proposal:
        with self._counting(plan):
            proposal = self.inner.propose(state, anchor, plan)
        self.cycles += 1
        self.draft_tokens += int((proposal.parents >= 0).sum())
        return proposal

    @contextmanager
    def _counting(self, plan: Plan) -> Iterator[None]:
        """Count the passes within. A drafter that counts them itself, as `counted`, is believed. Networks that guess a
        token at a time are watched; the others have one pass for all guesses, or as many as their diffusion steps."""
        inner: Any = self.inner
        network, model = getattr(inner, "network", None), getattr(inner, "model", None)
        if (counted := getattr(inner, "counted", None)) is not None:
            before = Counter(counted)
            yield
            self.passes.update(counted - before)
        elif isinstance(network, AutoregressiveNetwork):
            run, nodes, chain = inner._run, inner._run.nodes, inner._run.chain

            def counted_chain(*given: Any) -> Any:  # of all nodes in one call, one token each
                found = chain(*given)
                self.passes.update([1] * (found[0].size(1) - 1) if found else [])
                return found

            run.nodes, run.chain = lambda *given: CountedNodes(nodes(*given), self.passes), counted_chain
            yield
            del run.nodes, run.chain  # the class's own again
        elif model is not None:
            forward = model.forward
            model.forward = lambda tokens, *rest, **named: (
                self.passes.update([tokens.size(1)]) or forward(tokens, *rest, **named)
            )
            yield
            del model.forward  # the class's own again
        else:
            config = getattr(inner, "config", None)
            reads_block = config is not None and hasattr(config, "mask_token_id")
            slots = plan.block_size - (inner.block_size - config.block_size) if reads_block else 1
            self.passes.update([slots] * getattr(inner, "diffusion_steps", 1) if network is not None else [])
            yield


def answers(
    target: Target,
    drafter: Drafter,
    prompts: PromptSet,
    kind: str,
    seed: int = 0,
    temperature: float = 0.0,
    tokens: int = 128,
    wanted: Sequence[Way] = (),
    plain: Mapping[int, list[int]] | None = None,
    tell: Progress = lambda stage, done, total: None,
) -> tuple[list[Answers], dict[int, list[int]]]:
    """Decode a prompt set in every way, a prompt at a time. Prompt i is decoded with the seed i.

    Args:
        plain: Plain decoding's answers by prompt; None where this is plain decoding.

    Returns:
        The figures, and the answers of the last way by prompt.
    """
    looping = {i for i, ids in (plain or {}).items() if loops(ids)}
    chosen = [i for i in range(len(prompts.prompts)) if i not in looping]
    ways = [None] if plain is None else ways_of(wanted, drafter.block_size, KINDS[kind].trees)
    found, said = list[Answers](), dict[int, list[int]]()
    for way in ways:
        watched: Any = Watched(drafter)
        drafting, name = (None, PLAIN) if way is None else (way.drafting(drafter.block_size), way.name)
        completions = {}
        with Engine(target, watched, 1, drafting) as engine:
            for done, i in enumerate(chosen, 1):
                [one] = engine.generate([prompts.prompts[i]], SamplingParams(tokens, temperature, seed=i))
                completions[i] = one.checked()
                tell(f"{kind} seed {seed}, {prompts.name} at {temperature:g}, {name}", done, len(chosen))
        said = {i: one.token_ids for i, one in completions.items()}
        if plain is None:
            looping = {i for i, ids in said.items() if loops(ids)}
        stats = merge(one.stats for i, one in completions.items() if i not in looping)
        cycles, proposed = max(len(stats.committed), 1), max(watched.cycles, 1)
        found.append(
            Answers(
                kind=kind,
                seed=seed,
                set=prompts.name,
                temperature=temperature,
                way=name,
                prompts=len(chosen) - len(looping & said.keys()),
                looping=len(looping),
                tokens=sum(stats.committed),
                cycles=len(stats.committed),
                accepted=" ".join(f"{share:.4f}" for share in stats.acceptance_by_position),
                draft_tokens=watched.draft_tokens / proposed,
                passes=" ".join(f"{size}:{count / proposed:.4f}" for size, count in sorted(watched.passes.items())),
                draft_seconds=stats.draft_seconds / cycles,
                seconds=stats.total_seconds / cycles,
                same=1.0 if plain is None else sum(said[i] == plain[i] for i in said) / max(len(said), 1),
            )
        )
    return found, said


@torch.no_grad()
def forwards(target: Target, width: int, running: str, repeats: int) -> list[Forward]:
    """Times of the target's forward of one row by its nodes."""
    context = min(CONTEXT, target.max_context // 4)
    sizes = [size for size in NODES if context + size < target.max_context]

    def several(call: Any) -> None:
        for _ in range(CYCLES):
            call()

    calls = {size: partial(several, call) for size, call in forward_calls(target, context, sizes).items()}
    times = time_in_turns(calls, repeats, warm_up=1)
    return [Forward(width, running, size, median(each) / CYCLES) for size, each in times.items()]


def cycles(
    target: Target,
    drafter: Drafter,
    kind: str,
    width: int,
    running: str,
    batch: int,
    wanted: Sequence[Way],
    repeats: int,
    tell: Progress = lambda stage, done, total: None,
) -> list[Cycle]:
    """Cycles of every way and of plain decoding, in turns."""
    plain, own = Probe(target, NoDrafter()), Probe(target, drafter)
    ways = ways_of(wanted, drafter.block_size, KINDS[kind].trees)
    compiled = getattr(drafter, "compile_reason", "no") is None
    if model := getattr(drafter, "model", None):
        compiled = model.backend == "native" and model.compile_reason is None
    found = []
    for repeat in range(repeats + 1):
        plain_seconds, _ = _timed(plain, ChainPlan(1, [SamplingParams()] * batch))
        for way in ways:
            seconds, drafting = _timed(own, way.plan(drafter.block_size, batch))
            if repeat:  # the first warms up
                place = {"kind": kind, "width": width, "running": running, "batch": batch, "way": way.name}
                times = {"seconds": seconds, "draft_seconds": drafting, "plain_seconds": plain_seconds}
                memory = {"weight_bytes": drafter.weight_bytes(), "state_bytes": drafter.state_bytes(1, 1)}
                found.append(Cycle(**place, repeat=repeat, compiled=int(compiled), **times, **memory))
        tell(f"cycles of {kind}, {width} times as wide, {running}, {batch} rows", repeat + 1, repeats + 1)
    return found


def _timed(probe: Probe, plan: Plan) -> tuple[float, float]:
    """Seconds of a cycle, and those in the drafter."""
    room = (CYCLES + 1) * plan.block_size + max(plan.tree_budget, plan.block_size)
    context = max(min(CONTEXT, probe.target.max_context - room - 1), 1)
    with probe.target.lock:
        runner, rows = probe.rows(len(plan.params), context, room)
        runner.step(rows, plan)
        with listening() as heard:
            for _ in range(CYCLES):
                runner.step(rows, plan)
    return sum(heard.values()) / CYCLES, sum(heard[part] for part in DRAFTING) / CYCLES


def speeds(
    target: Target,
    chosen: Mapping[tuple[str, Way], Drafter],
    prompts: PromptSet,
    tokens: int,
    repeats: int,
    tell: Progress,
) -> list[Speed]:
    """Speeds of greedy answers one after the other, all methods in turns.

    Args:
        chosen: Drafters by kind and way.
    """
    names = {NONE: (PLAIN, PLAIN)} | {f"{kind} {way.name}": (kind, way.name) for kind, way in chosen}
    engines = {NONE: Engine(target, None, 1)}
    for (kind, way), drafter in chosen.items():
        engines[f"{kind} {way.name}"] = Engine(target, drafter, 1, way.drafting(drafter.block_size))
    trials = measure_speeds(engines, [prompts], SamplingParams(tokens), Settings(repeats=repeats), tell)
    return [
        Speed(
            *names[name],
            set=prompts.name,
            tokens_per_second=one.tokens_per_second,
            speedup=one.speedup,
            lowest=min(one.speedup_by_repeat),
            highest=max(one.speedup_by_repeat),
            tau=one.tau or 1.0,
        )
        for name, one in figures(trials).items()
        if one.speedup is not None and one.tokens_per_second is not None
    ]
