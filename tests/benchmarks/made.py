"""Made-up runs, without a model."""

from benchmarks.sizes.measure import ANSWERS, Run
from benchmarks.sizes.ways import LLAMA, OURS, PLAIN, Way

PLAIN_WAY, CHAIN = Way(OURS, "bfloat16", PLAIN), Way(OURS, "bfloat16", "chain:3")
THEIRS, THEIR_CHAIN = Way(LLAMA, "bf16", PLAIN), Way(LLAMA, "bf16", "chain:3", "bf16")


def run(
    way: Way,
    seconds: float,
    repeat: int = 0,
    prompt: int = 0,
    size: str = "1",
    name: str = ANSWERS,
    answer: str = "1 2 3 4 5",
    parameters: int = 5_000_000,
    steps: int = 2,
    forced: int = 0,
) -> Run:
    """Run with an answer of 5 tokens, whose last 4 took so many seconds."""
    numbers = {"forced": forced, "new_tokens": 5, "steps": steps, "prefill_seconds": 0.5, "decode_seconds": seconds}
    place = {"size": size, "parameters": parameters, "set": name, "prompt": prompt, "repeat": repeat}
    return Run(**vars(way), **place, **numbers, peak_bytes=2**30, answer=answer)
