"""Count outputs that change with drafting and batches, and measure the price of `exact`.

    python benchmarks/exactness.py --prompts FILE [--limit 24] [--tokens 64] [--dtype bfloat16] [--json FILE]

The bundled pair decodes the prompts greedily, uncompiled, with both backends, with and without `exact`. Outputs are
compared with plain decoding of each prompt alone by the same target. Speeds are tokens per second over all prompts;
methods are interleaved by prompt, or by batch. `--json` writes the figures.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for those who start it as a script

from benchmarks.harness.command import Parser, in_words
from benchmarks.harness.report import table

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.evaluation.prompts import read_prompt_sets
from blockdraft.targets import load_target
from blockdraft.types import Drafting, SamplingParams

WAYS = {  # rows of a batch, whether a drafter drafts, how far
    "plain": (1, False, Drafting(None)),
    "chain": (1, True, Drafting(block_size=4)),
    "tree of 16": (1, True, Drafting(tree_budget=16)),
    "plain, batch of 8": (8, False, Drafting(None)),
    "chain, batch of 8": (8, True, Drafting(block_size=4)),
}


def main() -> None:
    parser = Parser(__doc__, threads=1)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backends", default="hf,native")
    parser.add_argument("--json", type=Path)
    options = parser.parse()
    with in_words():
        [given] = read_prompt_sets([options.prompts], options.limit)
    prompts, params = given.prompts, SamplingParams(options.tokens, ignore_eos=True)
    engines, loading = dict[tuple[str, str], Engine](), dict[str, float]()
    for backend in options.backends.split(","):
        for exact in (False, True):
            began = time.perf_counter()
            how = {"compile": "off", "threads": options.threads, "exact": exact}
            target = load_target("bundled", dtype=options.dtype, device="cpu", backend=backend, **how)
            loading[target.running] = time.perf_counter() - began
            for way, (rows, drafts, drafting) in WAYS.items():
                drafter = load_drafter(None if drafts else "none", target=target)
                engines[target.running, way] = Engine(target, drafter, rows, drafting)
    answers: dict[tuple[str, str], list[list[int]]] = {key: [] for key in engines}
    seconds = dict.fromkeys(engines, 0.0)
    for engine in engines.values():
        engine.generate([prompts[0]], SamplingParams(4))
    for first in range(0, len(prompts), 8):
        group = prompts[first : first + 8]
        for key, engine in engines.items():
            for at in range(0, len(group), engine.max_batch_size):
                began = time.perf_counter()
                done = engine.generate(group[at : at + engine.max_batch_size], params)
                seconds[key] += time.perf_counter() - began
                answers[key] += [completion.checked().token_ids for completion in done]
    results = []
    for (running, way), mine in answers.items():
        different = sum(a != b for a, b in zip(mine, answers[running, "plain"], strict=True))
        speed = sum(map(len, mine)) / seconds[running, way]
        share = seconds[running.removesuffix(", exact"), way] / seconds[running, way]
        found = {"target": running, "way": way, "different": different, "tokens_per_second": speed, "share": share}
        results.append(found)
    header = ["target", "way", f"answers of {len(prompts)} that differ", "tokens/s", "of the ordinary target's"]
    numbers = (("different", ""), ("tokens_per_second", ".1f"), ("share", ".2f"))
    lines = ([f["target"], f["way"], *(format(f[name], form) for name, form in numbers)] for f in results)
    print(table(header, lines))
    for running, spent in loading.items():
        print(f"Loading {running} took {spent:.1f} s.")
    if options.json is not None:
        facts = {"prompts": given.name, "limit": len(prompts), "tokens": options.tokens, "dtype": options.dtype}
        facts |= {"threads": options.threads, "loading_seconds": loading, "results": results}
        options.json.write_text(json.dumps(facts, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
