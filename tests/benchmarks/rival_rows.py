"""Figures without a model: DFlash accepts more and EAGLE-3 drafts in several passes."""

from benchmarks.rivals.figures import Figures
from benchmarks.rivals.records import NATIVE, PLAIN, TORCH, Answers, Cycle, Forward, Trained

TARGET_WEIGHTS = 1000
PASSES = {"dflash": "8:1.0", "eagle3": "1:7.0", "prompt_lookup": ""}
TAUS = {("dflash", 0): 3.0, ("dflash", 1): 3.2, ("eagle3", 0): 2.0, ("eagle3", 1): 2.2, ("prompt_lookup", 0): 1.2}


def answers(kind: str, seed: int, tau: float, name: str = "maths", way: str = "chain:7", same: float = 1.0) -> Answers:
    place = {"kind": kind, "seed": seed, "set": name, "temperature": 0.0, "way": way, "prompts": 4, "looping": 0}
    counts = {"tokens": int(100 * tau), "cycles": 100, "accepted": "0.8 0.4", "draft_tokens": 7.0}
    return Answers(**place, **counts, passes=PASSES.get(kind, ""), draft_seconds=0.001, seconds=0.002, same=same)


def cycle(kind: str, ratio: float, running: str = NATIVE, repeat: int = 1, way: str = "chain:7") -> Cycle:
    place = {"kind": kind, "width": 1, "running": running, "batch": 1, "way": way, "repeat": repeat}
    times = {"seconds": 0.01 * ratio, "draft_seconds": 0.004, "plain_seconds": 0.01}
    compiled = int(kind == "dflash" and running == NATIVE)
    return Cycle(**place, **times, compiled=compiled, weight_bytes=2_000_000, state_bytes=512)


def figures(*more: Answers) -> Figures:
    records = [answers(kind, seed, tau, name) for (kind, seed), tau in TAUS.items() for name in ("maths", "code")]
    counts = {"parameters": 300, "steps": 10, "tokens": 5000, "seconds": 60.0, "peak_bytes": 2**30}
    return Figures(
        TARGET_WEIGHTS,
        1.25,
        [Trained(kind, seed, **counts, passed=200, observed=100) for kind in ("dflash", "eagle3") for seed in (0, 1)],
        [answers(PLAIN, 0, 1.0, way=PLAIN), *records, *more],
        [Forward(1, running, nodes, 0.008 * cost) for running in (NATIVE, TORCH) for nodes, cost in ((1, 1), (8, 2))],
        [
            cycle(kind, ratio * noise, running, repeat)
            for kind, ratio in (("dflash", 1.5), ("eagle3", 2.5))
            for running in (NATIVE, TORCH)
            for repeat, noise in enumerate((1.0, 1.0, 5.0), 1)
        ],
    )
