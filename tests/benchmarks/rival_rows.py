"""Figures without a model: DFlash accepts more and EAGLE-3 drafts in several passes."""

from benchmarks.rivals.figures import Figures
from benchmarks.rivals.rows import NATIVE, PLAIN, TORCH, Answers, Cycle, Forward, Speed, Trained

TARGET_WEIGHTS = 1000
PASSES = {"dflash": "8:1.0", "eagle3": "1:7.0", "prompt_lookup": ""}
TAUS = {("dflash", 0): 3.0, ("dflash", 1): 3.2, ("eagle3", 0): 2.0, ("eagle3", 1): 2.2, ("prompt_lookup", 0): 1.2}


def answers(kind: str, seed: int, tau: float, name: str = "maths", way: str = "chain:7", same: float = 1.0) -> Answers:
    looping = 2 if kind == PLAIN else 0
    return Answers(
        *(kind, seed, name, 0.0, way, 4, looping, int(100 * tau), 100, "0.8 0.4", 7.0, PASSES.get(kind, "")),
        *(0.001, 0.002, same),
    )


def cycle(kind: str, ratio: float, running: str = NATIVE, repeat: int = 1, way: str = "chain:7") -> Cycle:
    compiled = int(kind == "dflash" and running == NATIVE)
    return Cycle(kind, 1, running, 1, way, repeat, compiled, 0.01 * ratio, 0.004, 0.01, 2_000_000, 512)


def figures(*more: Answers) -> Figures:
    rows = [answers(kind, seed, tau, name) for (kind, seed), tau in TAUS.items() for name in ("maths", "code")]
    return Figures(
        TARGET_WEIGHTS,
        1.25,
        [Trained(kind, seed, 300, 10, 5000, 60.0, 2**30, 200, 100) for kind in ("dflash", "eagle3") for seed in (0, 1)],
        [answers(PLAIN, 0, 1.0, way=PLAIN), *rows, *more],
        [Forward(1, running, nodes, 0.008 * cost) for running in (NATIVE, TORCH) for nodes, cost in ((1, 1), (8, 2))],
        [
            cycle(kind, ratio * noise, running, repeat)
            for kind, ratio in (("dflash", 1.5), ("eagle3", 2.5))
            for running in (NATIVE, TORCH)
            for repeat, noise in enumerate((1.0, 1.0, 5.0), 1)
        ],
        [
            Speed(PLAIN, PLAIN, "maths", 100.0, 1.0, 1.0, 1.0, 1.0),
            Speed("dflash", "chain:7", "maths", 190.0, 1.9, 1.8, 2.0, 3.0),
        ],
    )
