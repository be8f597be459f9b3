"""Benchmark how close "auto" comes to the best fixed block size when it starts from wrong costs.

The bundled pair, made wider (`sizes/widen.py`), decodes the same prompts plainly, in blocks of several fixed sizes
(with `--tree`, in trees of that many draft tokens), and with "auto". The stored costs of "auto" are missing, right,
halved, doubled, shuffled, randomly halved or doubled, or those of a machine where drafts cost nothing or as much as ten
tokens. All are interleaved prompt by prompt, and each "auto" is one engine throughout. Speed is tokens over the time of
the steps. A ratio compares a stretch of prompts with the fixed size that was best over all prompts. With
`--temperature 2` the text cannot be predicted, and plain decoding is best.

The command fails if the pair does not run compiled. It writes auto.md and auto.json.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Parser, in_words
from benchmarks.harness.models import why_uncompiled
from benchmarks.harness.report import number, table, write_files
from benchmarks.sizes.widen import DRAFTER, TARGET, widen

from blockdraft import Drafting, Engine, SamplingParams, load_drafter, load_target
from blockdraft.engine.adaptive.costs import Costs, Points, Probe, measure
from blockdraft.evaluation.prompts import read_prompt_sets

SIZES = (1, 2, 3, 4, 5, 6, 8)
STRETCHES = ((0, 100), (100, 500), (500, 1 << 30))  # steps


@dataclass
class Run:
    """Results of one decoding method, prompt by prompt."""

    engine: Engine
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def answer(self, prompt: str, params: SamplingParams) -> None:
        [completion] = self.engine.generate([prompt], params)
        stats = completion.checked().stats
        self.tokens.append(sum(stats.committed))
        self.seconds.append(stats.total_seconds)
        self.steps.append(len(stats.committed))

    def rate(self, prompts: list[int]) -> float:
        return sum(self.tokens[n] for n in prompts) / sum(self.seconds[n] for n in prompts)

    def during(self, first: int, end: int) -> list[int]:
        """Return the prompts that begin after so many steps."""
        began, found = 0, []
        for prompt, steps in enumerate(self.steps):
            if first <= began < end:
                found.append(prompt)
            began += steps
        return found


def wrong_costs(costs: Costs, tree: bool, seed: int = 0) -> dict[str, Costs]:
    """Return stored costs to begin with, by what is wrong with them."""
    generator = random.Random(seed)

    def changed(plain: float, draft: Any) -> Costs:
        def points(each: Points) -> Points:
            return tuple((draft_tokens, seconds * draft(draft_tokens)) for draft_tokens, seconds in each)

        kinds = {name: tuple(points(each) for each in getattr(costs, name)) for name in ("chain", "tree")}
        return replace(costs, plain=tuple(seconds * plain for seconds in costs.plain), **kinds)

    def shuffled(each: Points) -> Points:
        seconds = [second for _, second in each]
        generator.shuffle(seconds)
        return tuple((draft_tokens, second) for (draft_tokens, _), second in zip(each, seconds, strict=True))

    kind = "tree" if tree else "chain"
    return {
        "right": costs,
        "plain halved": changed(0.5, lambda _: 1.0),
        "plain doubled": changed(2.0, lambda _: 1.0),
        "shuffled": replace(costs, **{kind: tuple(shuffled(each) for each in getattr(costs, kind))}),
        "at random": changed(generator.choice((0.5, 1, 2)), lambda _: generator.choice((0.5, 1, 2))),
        "drafts cost nothing": changed(1.0, lambda draft_tokens: costs.plain[0] / dict(costs.chain[0])[1]),
        "drafts cost ten tokens": changed(0.1, lambda _: 1.0),
    }


def run(given: argparse.Namespace) -> dict[str, Any]:
    [prompts] = read_prompt_sets([given.prompts], given.limit)
    with tempfile.TemporaryDirectory() as folder:
        wide = [widen(source, Path(folder) / source.name, given.width) for source in (TARGET, DRAFTER)]
        target = load_target(wide[0], dtype=given.dtype, compile="on", quantize=given.quantize)
        drafter, none = load_drafter(wide[1], target=target), load_drafter("none", target=target)
    if reason := why_uncompiled(target, drafter):
        raise ValueError(f"not measured, since {reason}")
    costs = measure(Probe(target, drafter), drafter.block_size, 1, target.max_context)
    room: dict[str, Any] = {"max_batch_size": 1, "cache_tokens": 1024}
    drafting = Drafting(tree_budget="auto") if given.tree else Drafting("auto")
    runs = {"1": Run(Engine(target, none, **room))}
    for size in SIZES[1:]:
        fixed_size = Drafting(size, tree_budget=size - 1 if given.tree else 0)
        runs[str(size)] = Run(Engine(target, drafter, drafting=fixed_size, **room))
    for name, wrong in {"none": None, **wrong_costs(costs, given.tree)}.items():
        engine = Engine(target, drafter, drafting=drafting, **room)
        engine.controller._costs = lambda wrong=wrong: wrong  # instead of the file
        runs[name] = Run(engine)
    for prompt_number, prompt in enumerate(prompts.prompts):
        params = SamplingParams(given.tokens, given.temperature, seed=prompt_number)
        order = list(runs.values())
        for one in order if prompt_number % 2 else order[::-1]:
            one.answer(prompt, params)
    every = list(range(len(prompts.prompts)))
    fixed = {size: runs[str(size)].rate(every) for size in SIZES}
    best = max(fixed, key=lambda size: fixed[size])
    found: dict[str, Any] = {}
    for name, one in runs.items():
        if name not in map(str, SIZES):
            stretches = [one.during(*stretch) for stretch in STRETCHES]
            found[name] = [one.rate(part) / runs[str(best)].rate(part) if part else None for part in stretches]
    asked = {name: getattr(given, name) for name in ("width", "dtype", "quantize", "temperature", "tree")}
    steps = {name: sum(one.steps) for name, one in runs.items()}
    return asked | {"running": target.running, "fixed": fixed, "best": best, "auto": found, "steps": steps}


def page(result: dict[str, Any]) -> str:
    rates = ", ".join(f"{size}: {rate:.1f}" for size, rate in result["fixed"].items())
    text = (
        f"The bundled pair {result['width']} times as wide ({result['running']}), temperature "
        f"{result['temperature']:g}, {'trees' if result['tree'] else 'chains'}. Tokens/s by fixed block size (1 is "
        f"plain): {rates}.\n\n"
    )
    header = [
        "stored costs",
        f"first 100 steps / blocks of {result['best']}",
        "steps 100 to 500",
        "after 500",
        "steps",
    ]
    lines = (
        [name, *(number(ratio, ".3f") for ratio in ratios), str(result["steps"][name])]
        for name, ratios in result["auto"].items()
    )
    return text + table(header, lines) + "\n"


def main() -> None:
    parser = Parser(__doc__, out=Path("build/auto"))
    parser.add_argument("prompts", type=Path, help='JSON lines {"prompt": ...} or {"turns": [...]}')
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", help="int8 or int4")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tree", action="store_true", help="trees in the place of chains")
    given = parser.parse()
    with in_words():
        result = run(given)
    write_files(given.out, {"auto.json": result, "auto.md": page(result)})
    print(page(result))


if __name__ == "__main__":
    main()
