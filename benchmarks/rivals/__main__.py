"""Compare kinds of drafters for one target, trained on the same tokens: `make bench-rivals ARGS="..."`.

    blockdraft data chats.jsonl --regenerate --out build/data          # the responses to learn from
    make bench-rivals ARGS="--data build/data --prompts gsm8k.jsonl --prompts humaneval.jsonl"

Each kind of drafter is trained with several seeds by `blockdraft train`, with the values of recipe.toml, and measured
by `blockdraft bench` with chains and trees of several sizes. The recipe gives each kind about as many weights, for the
bundled target; set the sizes for another target in a recipe of your own.

An interrupted run continues with the same command; --anew starts over. More seeds, kinds and temperatures are added to
the results in --out: drafters/, bench/ and rivals.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.harness.command import CORES, ROOT, Parser, digest, in_words, keep_settings, listed, tell
from benchmarks.harness.process import PeerError
from benchmarks.harness.report import number, spread, table
from benchmarks.sizes.pairs import parameters

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

TITLES = {
    "dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "flow": "flow map", "eagle3": "EAGLE-3",
    "medusa": "Medusa", "mtp": "MTP", "lookup": "lookup",
}  # fmt: skip
UNTRAINED = ("lookup",)
BASE = "dflash"  # the kind that the others are compared with
QUICK = {"seeds": 1, "steps": 4, "limit": 3, "max_new_tokens": 32, "repeats": 1, "methods": "chain:4,tree:16"}
METHODS = "chain:2,chain:3,chain:5,chain:8,tree:8,tree:24,tree:60"


class Measured(NamedTuple):
    """The figures of one method on one prompt set, as `blockdraft bench` writes them."""

    kind: str
    seed: int
    temperature: float
    prompt_set: str
    method: str
    figures: dict[str, Any]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, quick=QUICK, resumes=True, threads=CORES, out=ROOT / "build" / "rivals")
    add = parser.add_argument
    add("--target", metavar="MODEL", default="bundled", help="folder or hub name (bundled)")
    add("--data", type=Path, required=True, metavar="DIR", help="responses of the target, made by `blockdraft data`")
    form = 'JSON lines {"prompt": ...} or {"turns": [...]}; may be repeated'
    add("--prompts", type=Path, required=True, action="append", metavar="FILE", help=form)
    add("--recipe", type=Path, default=Path(__file__).with_name("recipe.toml"), help="a table for each kind")
    add("--kinds", type=listed(known=TITLES), default=",".join(TITLES), help=f"of {','.join(TITLES)}")
    add("--seeds", type=int, default=3, help="of each trained kind (3)")
    add("--steps", type=int, default=400, help="training steps of each drafter (400)")
    add("--temperatures", type=listed(float), default="0,1")
    add("--methods", type=listed(), default=METHODS, help=f"as of `blockdraft bench` ({METHODS})")
    add("--limit", type=int, default=32, help="prompts of each file (32)")
    add("--max-new-tokens", type=int, default=128, help="of a response (128)")
    add("--repeats", type=int, default=3, help="of each measurement (3)")
    return parser.parse(words)


def blockdraft(*words: object) -> None:
    """Run a command of blockdraft. Raises PeerError if it fails."""
    command = [sys.executable, "-m", "blockdraft", *map(str, words)]
    if status := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise PeerError(f"blockdraft {words[0]} {words[1]} ended with {status}; see above.")


def read_recipe(file: Path, kind: str, **values: Any) -> dict[str, Any]:
    """Return the recipe of a kind: the table `all`, its own table, and further values."""
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    return {**tables.get("all", {}), **tables.get(kind, {}), **values}


def train(kind: str, seed: int, given: argparse.Namespace) -> Path:
    """Train a drafter, or continue its training, and return its folder."""
    folder: Path = given.out / "drafters" / f"{kind}-{seed}"
    finished = folder.with_name(f"{folder.name}.json")
    if not finished.exists():
        tell(f"training {kind}, seed {seed}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        recipe = folder.with_name(f"{folder.name}.toml")
        values = read_recipe(given.recipe, kind, seed=seed, steps=given.steps)
        recipe.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
        began = time.monotonic()
        blockdraft("train", kind, recipe, "--target", given.target, "--data", given.data, "--out", folder)
        facts = {"minutes": (time.monotonic() - began) / 60, "parameters": parameters(folder)}
        finished.write_text(json.dumps(facts), encoding="utf-8")
    return folder


def methods_of(kind: str, given: argparse.Namespace) -> list[str]:
    """Return the methods of a kind: its chains are cut to its block size, and repeated ones dropped."""
    recipe = read_recipe(given.recipe, kind)
    longest = recipe.get("block_size", 8) + (kind == "dspark")  # whose block size leaves the anchor out

    def cut(method: str) -> str:
        shape, _, size = method.partition(":")
        return f"chain:{min(int(size), longest)}" if shape == "chain" and size.isdigit() else method

    return list(dict.fromkeys(map(cut, given.methods)))


def measure(kind: str, seed: int, temperature: float, drafter: Path | str, given: argparse.Namespace) -> list[Measured]:
    """Measure a drafter with all methods, or read the figures of an earlier run."""
    out: Path = given.out / "bench" / f"{kind}-{seed}-{temperature:g}"
    results = out / "results.json"
    if not results.exists():
        tell(f"measuring {kind}, seed {seed}, temperature {temperature:g}")
        words = [word for file in given.prompts for word in ("--prompts", file)]
        words += ["--target", given.target, "--drafter", drafter, "--temperature", temperature, "--seed", 0]
        words += ["--methods", ",".join(["none", *methods_of(kind, given)]), "--repeats", given.repeats]
        words += ["--limit", given.limit, "--max-new-tokens", given.max_new_tokens, "--threads", given.threads]
        blockdraft("bench", *words, "--overwrite", "--out", out)
    sets = json.loads(results.read_text(encoding="utf-8"))["sets"]
    return [
        Measured(kind, seed, temperature, prompt_set, method, figures)
        for prompt_set, one in sets.items()
        for method, figures in one.items()
        if method != "none" and figures["tau"] is not None
    ]


def run(given: argparse.Namespace) -> list[Measured]:
    """Train and measure what is left, seed after seed, and return all figures."""
    fixed = {name: getattr(given, name) for name in ("target", "steps", "limit", "max_new_tokens", "methods")}
    fixed |= {"recipe": digest(given.recipe), "prompts": [digest(file) for file in given.prompts]}
    keep_settings(given.out, fixed, given.anew)
    found = list[Measured]()
    for seed in range(given.seeds):
        for kind in given.kinds:
            if kind in UNTRAINED and seed:
                continue
            drafter = kind if kind in UNTRAINED else train(kind, seed, given)
            for temperature in given.temperatures:
                found += measure(kind, seed, temperature, drafter, given)
    return found


def _mean(rows: Iterable[Measured], name: str) -> dict[int, float]:
    """Return a figure by seed, averaged over the prompt sets."""
    by_seed: dict[int, list[float]] = {}
    for row in rows:
        by_seed.setdefault(row.seed, []).append(row.figures[name])
    return {seed: mean(values) for seed, values in by_seed.items()}


def _fastest(rows: Sequence[Measured]) -> list[Measured]:
    """Return the rows of the method with the highest mean speed-up."""
    methods = dict.fromkeys(row.method for row in rows)
    by_method = [[row for row in rows if row.method == method] for method in methods]
    return max(by_method, key=lambda own: mean(_mean(own, "speedup").values()))


def page(found: Sequence[Measured], out: Path) -> str:
    """Return all figures as Markdown."""
    parts = ["# Kinds of drafters", _drafters(found, out)]
    for temperature in dict.fromkeys(row.temperature for row in found):
        own = [row for row in found if row.temperature == temperature]
        parts += [f"## tau at temperature {temperature:g}", _taus(own)]
        parts += [f"## Speed-up at temperature {temperature:g}", _speedups(own)]
    return "\n\n".join(parts) + "\n"


def _drafters(found: Sequence[Measured], out: Path) -> str:
    lines = []
    for kind in dict.fromkeys(row.kind for row in found):
        facts = [json.loads(file.read_text()) for file in sorted((out / "drafters").glob(f"{kind}-*.json"))]
        weights = f"{facts[0]['parameters'] / 1e6:.2f} M" if facts else ""
        lines.append([TITLES[kind], weights, str(len(facts)), spread([each["minutes"] for each in facts], 1)])
    return table(["drafter", "weights", "seeds", "training, minutes"], lines)


def _taus(found: Sequence[Measured]) -> str:
    sets, lines = list(dict.fromkeys(row.prompt_set for row in found)), []
    for kind in dict.fromkeys(row.kind for row in found):
        for method in dict.fromkeys(row.method for row in found if row.kind == kind):
            own = [row for row in found if (row.kind, row.method) == (kind, method)]
            cells = (spread(list(_mean((r for r in own if r.prompt_set == name), "tau").values())) for name in sets)
            accepted = own[0].figures["acceptance_by_position"]
            lines.append([TITLES[kind], method, *cells, " ".join(f"{share:.2f}" for share in accepted[:8])])
    text = f"Median and range of the seeds. S_i, the share of steps that accept i draft tokens, of {sets[0]}.\n\n"
    return text + table(["drafter", "method", *sets, "S_1 S_2 ..."], lines)


def _speedups(found: Sequence[Measured]) -> str:
    best = {}
    for kind in dict.fromkeys(row.kind for row in found):
        best[kind] = _fastest([row for row in found if row.kind == kind])
    base, lines = _mean(best[BASE], "speedup") if BASE in best else {}, []
    for kind, own in best.items():
        speedups, tau, cost = (_mean(own, name) for name in ("speedup", "tau", "step_cost"))
        over = [speedups[seed] / base[seed] for seed in speedups if seed in base]
        cells = (spread(list(speedups.values())), number(mean(tau.values())), number(mean(cost.values())))
        lines.append([TITLES[kind], own[0].method, *cells, spread(over)])
    text = "The fastest method of each kind, mean of the prompt sets: median and range of the seeds.\n\n"
    return text + table(["drafter", "method", "speed-up", "tau", "R", f"over {TITLES[BASE]}"], lines)


def main(words: Sequence[str] | None = None) -> None:
    with in_words():
        given = arguments(words)
        found = run(given)
        text = page(found, given.out)
        (given.out / "rivals.md").write_text(text, encoding="utf-8")
        print(text)
        if changed := sorted({f"{row.kind} {row.method}" for row in found if row.figures["identical"] != 1}):
            raise ValueError(f"These change tokens, so their speed says nothing: {', '.join(changed)}.")


if __name__ == "__main__":
    main()
