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

from benchmarks.harness.command import (
    ROOT,
    Parser,
    add_settings,
    in_words,
    keep_settings,
    read_options,
    report_failures,
)
from benchmarks.harness.records import Records
from benchmarks.server import faults, fuzz, report
from benchmarks.server.load import LoadSettings, Run, broken, measure
from benchmarks.server.soak import soak
from benchmarks.soak.report import summary_table

QUICK = {"streams": "1,4", "repeats": "1", "seconds": "4", "requests": "8", "batch": "4", "threads": "1"}
FIXED = ("seconds", "requests", "batch", "prefix_tokens", "dtype", "threads")
SOAKED = {"streams": (16,), "widths": (1,)}  # of a soak where nothing else is asked for


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, out=ROOT / "build" / "server", quick=QUICK, resumes=True)
    add = parser.add_argument
    add("what", nargs="?", choices=("load", "soak", "faults", "fuzz"), default="load")
    add_settings(parser, LoadSettings)
    add("--minutes", type=float, default=10.0, help="of a soak (10)")
    add("--cases", type=int, default=10_000, help="fuzzed requests (10000)")
    add("--seed", type=int, default=0, help="of the fuzzed requests (0)")
    return parser.parse(words)


def run(given: argparse.Namespace) -> list[str]:
    """Do it; returns what does not hold."""
    out = given.out / given.what if given.what != "load" else given.out
    if given.anew:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    if given.what == "faults":
        return faults.run(out)
    if given.what == "fuzz":
        return fuzz.run(given.cases, given.seed, out)
    if given.what == "soak":
        summary, failures = soak(given.minutes, read_options(LoadSettings, given, **SOAKED), out)
        print(summary_table(summary))
        return failures
    how = read_options(LoadSettings, given)
    keep_settings(out, {name: getattr(how, name) for name in FIXED})
    runs = Records(Run, out / "runs.csv")
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
    raise SystemExit(report_failures(failures))


if __name__ == "__main__":
    main()
