"""`blockdraft serve` under load: `make bench-server`.

Streams each send the next request when they have a response, on the bundled pair and on one four times as wide: our
server with and without drafting, our engine without a server, and llama.cpp's server with and without drafting. They
are interleaved; the same command continues an interrupted run; --anew starts over. Writes runs.csv, server.md and
server.png to --out. The status is 1 if a response differs from plain decoding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

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
from benchmarks.server import report
from benchmarks.server.load import LoadSettings, Run, broken, measure

Measure: TypeAlias = Callable[[LoadSettings, Path, Records[Run]], Mapping[str, str]]
QUICK = {"streams": "1,4", "repeats": "1", "seconds": "4", "requests": "8", "batch": "4", "threads": "1"}
FIXED = ("seconds", "requests", "batch", "prefix_tokens", "dtype", "threads")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, out=ROOT / "build" / "server", quick=QUICK, resumes=True)
    add_settings(parser, LoadSettings)
    return parser.parse(words)


def run(given: argparse.Namespace, measure: Measure = measure) -> list[str]:
    """Do it; returns what does not hold."""
    out, how = given.out, read_options(LoadSettings, given)
    keep_settings(out, {name: getattr(how, name) for name in FIXED}, given.anew)
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
