"""`blockdraft serve` under load: `make bench-server`, or `python -m benchmarks.server [load|soak|faults]`.

load    Streams each send the next request when they have a response, on the bundled pair and on one four times as wide:
        our server with and without drafting, our engine without a server, and llama.cpp's server with and without
        drafting. They are interleaved; the same command continues an interrupted run; --anew starts over. Writes
        runs.csv, server.md and server.png to --out.
soak    Our server under load for --minutes: its memory over time, and every response compared. Writes samples.csv and
        soak.png.
faults  Our server under load while clients vanish, read slowly or send garbage, the engine fails, the queue is full,
        and the server is terminated.

The status is 1 if a response differs from plain decoding or another check fails.
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
from benchmarks.server import faults, report
from benchmarks.server.load import LoadSettings, Run, broken, measure
from benchmarks.server.soak import soak
from benchmarks.soak.report import summary_table

QUICK = {"streams": "1,4", "repeats": "1", "seconds": "4", "requests": "8", "batch": "4", "threads": "1"}
FIXED = ("seconds", "requests", "batch", "prefix_tokens", "dtype", "threads")
SOAKED = {"streams": (16,), "widths": (1,)}  # of a soak where nothing else is asked for


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, out=ROOT / "build" / "server", quick=QUICK, resumes=True)
    add = parser.add_argument
    add("what", nargs="?", choices=("load", "soak", "faults"), default="load")
    add_settings(parser, LoadSettings)
    add("--minutes", type=float, default=10.0, help="of a soak (10)")
    return parser.parse(words)


def run(given: argparse.Namespace) -> list[str]:
    """Do it; returns what does not hold."""
    out = given.out / given.what if given.what != "load" else given.out
    if given.anew:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    if given.what == "faults":
        return faults.run(out)
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
