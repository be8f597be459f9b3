"""How often answers change with drafts and batches, and what `exact` costs.

    python benchmarks/exactness.py --prompts FILE [--limit 24] [--tokens 64] [--dtype bfloat16] [--json FILE]

The bundled pair decodes the prompts greedily, uncompiled, by both backends, with and without `exact`. Counted are the
answers that differ from those of plain decoding alone by the same target. Speeds are tokens a second over all prompts;
ways take turns on each prompt (batches on each group), so that other work on the machine meets all of them alike.
Prints a table, and writes JSON where that is asked for.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.evaluation.prompts import read_prompt_sets
from blockdraft.targets import load_target
from blockdraft.types import Drafting, SamplingParams

WAYS = {  # rows of a batch, whether the drafter guesses, how far
    "plain": (1, False, Drafting()),
    "chain": (1, True, Drafting(block_size=4)),
    "tree of 16": (1, True, Drafting(tree_budget=16)),
    "plain, batch of 8": (8, False, Drafting()),
    "chain, batch of 8": (8, True, Drafting(block_size=4)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backends", default="hf,native")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    [prompts] = read_prompt_sets([options.prompts], options.limit)
    params = SamplingParams(options.tokens, ignore_eos=True)
    engines, checks = {}, {}
    for backend in options.backends.split(","):
        for exact in (False, True):
            began = time.perf_counter()
            target = load_target(None, options.dtype, "cpu", backend, "off", None, options.threads, exact)
            checks[target.running] = time.perf_counter() - began
            for way, (rows, guesses, drafting) in WAYS.items():
                drafter = load_drafter(None if guesses else "none", target=target)
                engines[target.running, way] = Engine(target, drafter, rows, drafting)
    answers: dict[tuple[str, str], list[list[int]]] = {key: [] for key in engines}
    seconds = dict.fromkeys(engines, 0.0)
    for engine in engines.values():
        engine.generate([prompts.prompts[0]], SamplingParams(4))
    for first in range(0, len(prompts.prompts), 8):
        group = prompts.prompts[first : first + 8]
        for key, engine in engines.items():
            size = engine.max_batch_size
            for at in range(0, len(group), size):
                began = time.perf_counter()
                done = engine.generate(group[at : at + size], params)
                seconds[key] += time.perf_counter() - began
                answers[key] += [completion.checked().token_ids for completion in done]
    print(f"| target | way | answers of {len(prompts.prompts)} that differ | tokens/s | of the ordinary target's |")
    print("|---|---|---|---|---|")
    rows = []
    for (running, way), mine in answers.items():
        different = sum(a != b for a, b in zip(mine, answers[running, "plain"], strict=True))
        speed = sum(map(len, mine)) / seconds[running, way]
        share = seconds[running.removesuffix(", exact"), way] / seconds[running, way]
        print(f"| {running} | {way} | {different} | {speed:.1f} | {share:.2f} |")
        rows.append({"target": running, "way": way, "different": different, "tokens_per_second": speed, "share": share})
    for running, spent in checks.items():
        print(f"Loading {running} took {spent:.1f} s.")
    if options.json is not None:
        facts = {"prompts": prompts.name, "limit": len(prompts.prompts), "tokens": options.tokens}
        facts |= {"dtype": options.dtype, "threads": options.threads, "loading_seconds": checks}
        options.json.write_text(json.dumps(facts | {"results": rows}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
