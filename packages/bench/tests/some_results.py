"""Results of made-up benchmarks."""

from blockdraft.engine import Completion, Stats
from blockdraft_bench.speed import Trial

PLAIN_TRIAL, DRAFTED_TRIAL = [1] * 6, [3, 1, 2]

ARGUMENTS = {"temperature": 0.0, "repeats": 2, "running": "native, compiled", "dtype": "float32", "device": "cpu"}
KINDS = dict.fromkeys(("chosen", "sampled"), "dflash")
ARGUMENTS |= {"kinds": {"none": "none", "x": "eagle3", **KINDS}, "vocab_size": 265, "draft_vocabs": {"x": 40}}
ARGUMENTS |= {"drafter_notes": {"x": "has weights of 4 bits", "chosen": None}}


def trial(method: str, prompt_set: str, repeat: int | None, seconds: float, committed: list[int]) -> Trial:
    stats = Stats(committed, [0 if method == "none" else 3] * len(committed))
    return Trial(method, prompt_set, (0,), repeat, (Completion("", [0] * 7, "stop", [], stats),), seconds)
