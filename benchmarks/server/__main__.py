"""`blockdraft serve` under load: `make bench-server`, or `python -m benchmarks.server [load|soak|faults|fuzz]`.

load    Streams that each send the next request when they have their answer, on the bundled pair and on one four times
        as wide: our server with drafting and without, our engine without a server, and llama.cpp's llama-server, with
        drafting and without. They take turns; an interrupted run goes on where it was; --anew forgets it. Written to
        --out: runs.csv, server.md, server.png.
soak    Our server under load for --minutes: its memory by time, and every answer compared. samples.csv, soak.png.
faults  Our server under load, while clients vanish, read slowly or send garbage, the engine fails, the queue is full,
        and the server is told to end.
fuzz    Requests made at random from the server's own OpenAPI document, and broken; none may be answered with 5xx.
        The same command goes on where it was.

The status is 1 where an answer is not that of plain decoding, or something else does not hold.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.command import in_words, keep_settings
from benchmarks.server import faults, fuzz, report
from benchmarks.server.load import LoadSettings, broken, measure
from benchmarks.server.runs import Runs
from benchmarks.server.soak import soak
from benchmarks.soak.report import table

ROOT = Path(__file__).parents[2]
QUICK: dict[str, Any] = {"streams": (1, 4), "repeats": 1, "seconds": 4.0, "requests": 8, "batch": 4, "threads": 1}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", nargs="?", choices=("load", "soak", "faults", "fuzz"), default="load")
    for field in fields(LoadSettings):
        default = getattr(LoadSettings(), field.name)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        add(f"--{field.name.replace('_', '-')}", type=_reader(default), help=f"({shown})")
    add("--minutes", type=float, default=10.0, help="of a soak (10)")
    add("--cases", type=int, default=10_000, help="fuzzed requests (10000)")
    add("--seed", type=int, default=0, help="of the fuzzed requests (0)")
    add("--quick", action="store_true", help="a load of a few minutes, small enough to see that all works")
    add("--anew", action="store_true", help="forget what was measured before")
    add("--out", type=Path, default=ROOT / "build" / "server")
    return parser.parse_args(words)


def _reader(default: Any) -> Any:
    if not isinstance(default, tuple):
        return type(default)
    kind = type(default[0])
    return lambda text: tuple(kind(each.strip()) for each in text.split(",") if each.strip())


def run(given: argparse.Namespace) -> list[str]:
    """Do it; returns what does not hold."""
    out = given.out / given.what if given.what != "load" else given.out
    if given.anew and out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    chosen = QUICK if given.quick else {}
    chosen |= {f.name: getattr(given, f.name) for f in fields(LoadSettings) if getattr(given, f.name) is not None}
    how = replace(LoadSettings(), **chosen)
    if given.what == "soak":
        summary, failures = soak(given.minutes, max(given.streams or (16,)), max(given.widths or (1,)), how, out)
        print(table(summary))
        return failures
    if given.what == "faults":
        return faults.run(out)
    if given.what == "fuzz":
        return fuzz.run(given.cases, given.seed, out)
    same = ("seconds", "requests", "batch", "prefix_tokens", "dtype", "threads")
    keep_settings(out, {name: getattr(how, name) for name in same})
    runs = Runs(out / "runs.csv")
    missing = measure(how, out, runs)
    if not runs.all:
        raise ValueError(f"Nothing could be measured: {'; '.join(missing.values())}")
    page = report.page(runs.all, missing)
    (out / "server.md").write_text(page, encoding="utf-8")
    report.draw(runs.all, out / "server.png")
    print(page)
    return broken(runs.all)


def main() -> None:
    with in_words():
        failures = run(arguments())
    print(*[f"FAILED {failure}" for failure in failures], sep="\n")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
