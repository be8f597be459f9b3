"""Kinds of drafters against each other, on one target at an equal budget: `make bench-rivals ARGS="..."`.

DFlash, DFlash2, DSpark, a flow map, EAGLE-3, Medusa, an MTP head and a small language model are trained for the same
target on the same tokens, each with about as many weights, several seeds of each; prompt lookup needs no training. Each
then answers prompt sets in chains and trees of several sizes: tokens a cycle (tau), the share of cycles that accept i
guesses (S_i), the time of a draft and of a cycle (R), memory, and what that makes of the speed-up: on this processor,
and where a forward of 16 tokens costs little more than one of a single token.

    blockdraft data chats.jsonl --regenerate --out build/data          # what the target says, to learn from
    make bench-rivals ARGS="--data build/data --prompts gsm8k.jsonl --prompts humaneval.jsonl --prompts mt-bench.jsonl"

An interrupted run goes on where it was; --anew forgets it. More seeds, kinds, ways, widths and batches are added to
what is there. Written to --out: trained.csv, answers.csv, forwards.csv, cycles.csv and speeds.csv with all figures,
rivals.md, rivals.png, and the drafters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import psutil

from benchmarks.harness.command import in_words
from benchmarks.rivals.bench import ROOT, Bench
from benchmarks.rivals.kinds import KINDS
from benchmarks.rivals.ways import parse
from blockdraft.errors import UsageError

QUICK = {
    "seeds": 1,
    "tokens": 20_000,
    "limit": 3,
    "max_new_tokens": 32,
    "ways": "chain:3,chain:7,tree:16",
    "batches": "1,4",
    "repeats": 1,
}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", metavar="MODEL", help="folder or hub name; the bundled one by default")
    add("--data", type=Path, required=True, metavar="DIR", help="token data of the target, made by `blockdraft data`")
    add(
        "--prompts",
        type=Path,
        required=True,
        action="append",
        metavar="FILE",
        help='JSON lines {"prompt": ...} or {"turns": [...]}; may be repeated',
    )
    add("--recipe", type=Path, default=Path(__file__).with_name("recipe.toml"), help="how each kind is trained")
    add("--parameters", type=int, help="weights of each drafter; by default those of DFlash as the recipe has it")
    add("--kinds", default=",".join(KINDS), help=f"of {','.join(KINDS)}")
    add("--seeds", type=int, default=3, help="of each kind (3)")
    add("--tokens", type=int, default=2_000_000, help="of text that each drafter is trained on (2000000)")
    add("--temperatures", default="0,1")
    add(
        "--ways",
        default="chain:1,chain:2,chain:4,chain:7,tree:8,tree:24,tree:60",
        help="chains and trees of N guesses",
    )
    add("--widths", help="how many times as wide cycles are timed, powers of two (1,4; of another target 1)")
    add("--batches", default="1,4,16", help="rows of the cycles that are timed")
    add("--limit", type=int, default=32, help="prompts of each file (32)")
    add("--max-new-tokens", type=int, default=128, help="of an answer (128)")
    add("--repeats", type=int, default=5, help="of what is timed (5)")
    add("--cost-of-16", type=float, default=1.25, help="time of a forward of 16 tokens over one, simulated (1.25)")
    add("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    add("--uncompiled", action="store_true", help="measure a target or drafters that do not run compiled, too")
    quick = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in QUICK.items())
    add("--quick", action="store_true", help=f"a short run that shows that all works: {quick}, widths 1,2")
    add("--anew", action="store_true", help="forget what was made before")
    add("--out", type=Path, help="build/rivals, or build/rivals-quick")
    given = parser.parse_args(words)
    if given.quick:
        parser.set_defaults(**QUICK)
        given = parser.parse_args(words)
    given.out = given.out or ROOT / "build" / ("rivals-quick" if given.quick else "rivals")
    given.widths = given.widths or ("1" if given.target else "1,2" if given.quick else "1,4")
    given.kinds, given.widths, given.batches, given.temperatures = (
        [kind(word) for word in text.split(",") if word]
        for text, kind in ((given.kinds, str), (given.widths, int), (given.batches, int), (given.temperatures, float))
    )
    given.ways = [parse(word) for word in given.ways.split(",")]
    if unknown := [name for name in given.kinds if name not in KINDS]:
        raise UsageError(f"Kind {unknown[0]!r} is unknown; there are {', '.join(KINDS)}.")
    if given.seeds < 1 or given.tokens < 1 or given.repeats < 1:
        raise UsageError("--seeds, --tokens and --repeats must be at least 1.")
    return given


def main() -> None:
    with in_words():
        Bench(arguments()).run()


if __name__ == "__main__":
    main()
