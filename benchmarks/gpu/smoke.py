"""Quick checks of a device.

Its tokens are compared with the CPU's, drafted tokens with plain ones, and a plain step with the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.gpu.measure import PARAMS, copy_bandwidth, profile_kernels, time_step
from benchmarks.gpu.shapes import SHAPES, build, bytes_per_token
from benchmarks.harness.command import tell

from blockdraft.decode.proposal import ChainPlan
from blockdraft.drafters import load_drafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine import Engine
from blockdraft.engine.adaptive.costs import Probe
from blockdraft.targets import BUNDLED, load_target
from blockdraft.types import Drafting, SamplingParams

SHAPE = {"cuda": "qwen3-0.6b", "cpu": "tiny"}
CONTEXT, REPEATS = 512, 20
MIN_SHARE = 0.35  # of the roofline, for a compiled plain step
PROMPTS = (
    "Tom has 3 boxes with 12 pens each. How many pens has he?",
    "def add(a, b):",
    "Who wrote Hamlet?",
    "1, 2, 3,",
)
SAMPLED = SamplingParams(48, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True)
GREEDY = SamplingParams(48, ignore_eos=True)
DRAFTS: dict[str, tuple[Any, Drafting]] = {
    "plain": ("none", Drafting(None)),
    "chain": ("bundled", Drafting(8)),
    "tree": ("bundled", Drafting(tree_budget=16)),
}
EAGER: dict[str, Any] = {"backend": "native", "compile": "off"}


@dataclass(frozen=True)
class Check:
    """A check and what it found; `passed` is None where nothing is promised."""

    name: str
    passed: bool | None
    told: str


def answers(drafts: str, dtype: str, device: torch.device | str, **how: Any) -> list[list[int]]:
    """Return tokens of the bundled pair, greedy and sampled."""
    target = load_target(BUNDLED, dtype=dtype, device=device, **how)
    drafter, drafting = DRAFTS[drafts]
    with Engine(target, load_drafter(drafter, target=target), len(PROMPTS), drafting) as engine:
        return [each.token_ids for params in (GREEDY, SAMPLED) for each in engine.generate(PROMPTS, params)]


def same(found: list[list[int]], expected: list[list[int]]) -> tuple[bool, str]:
    """Return whether all responses are equal, and say it in words."""
    equal = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
    return equal == len(expected), f"{equal} of {len(expected)} answers are the same"


def checks(device: torch.device) -> Iterator[Check]:
    """Yield all checks."""
    ways = {"native": EAGER, "hf": {"backend": "hf"}}
    if device.type == "cuda":
        ways["compiled"] = {"backend": "native", "compile": "on"}
    expected = answers("plain", "float32", "cpu", **EAGER)
    for way, how in ways.items():
        for drafts in DRAFTS:
            found = same(answers(drafts, "float32", device, **how), expected)
            yield Check(f"float32, {way}, {drafts}, against plain on the CPU", *found)
    for exact in (True, False):
        own = {name: how | {"exact": exact} for name, how in ways.items() if name == "native" or not exact}
        for way, how in own.items():
            plain = answers("plain", "bfloat16", device, **how)
            for drafts in ("chain", "tree"):
                equal, told = same(answers(drafts, "bfloat16", device, **how), plain)
                name = f"bfloat16{', exact' if exact else ''}, {way}, {drafts}, against plain"
                yield Check(name, equal if exact else None, told)
    bandwidth, name = copy_bandwidth(device, REPEATS), SHAPE[device.type]
    for way in ("native", "captured", "compiled")[: 3 if device.type == "cuda" else 1]:
        target, _ = build(SHAPES[name], way, torch.bfloat16, device)
        probe, plan = Probe(target, NoDrafter()), ChainPlan(1, [PARAMS])
        seconds, profiled = time_step(probe, CONTEXT, plan, REPEATS).total, profile_kernels(probe, CONTEXT, plan)
        share = bytes_per_token(target, SHAPES[name].target, CONTEXT) / bandwidth / seconds
        told = f"{1000 * seconds:.2f} ms, {100 * share:.0f} % of the roofline at {bandwidth / 1e9:.0f} GB/s"
        told += "" if profiled is None else f", {profiled[0]:.0f} kernels"
        yield Check(f"plain step of {name}, {way}", share >= MIN_SHARE if way == "compiled" else None, told)


def run(device: torch.device) -> bool:
    """Print all checks. Returns whether those passed that must."""
    passed = True
    tell(f"Checks on {device}; five minutes on a GPU")
    for check in checks(device):
        passed = passed and check.passed is not False
        word = {True: "ok", False: "FAILED", None: "-"}[check.passed]
        print(f"{word:7} {check.name}: {check.told}", flush=True)
    return passed
