"""Chats of the kind that the bundled pair was trained on."""

import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "src/blockdraft/pair/tiny"


def chats(count: int) -> list[str]:
    """What users say: the prompts of the benchmarks, then word problems."""
    sys.path.append(str(ROOT / "recipes/tiny"))
    from word_problems import word_problem

    lines = (ROOT / "benchmarks/peers/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rng = random.Random(7)
    return [*(json.loads(line)["prompt"] for line in lines), *(word_problem(rng)[0] for _ in range(count))][:count]
