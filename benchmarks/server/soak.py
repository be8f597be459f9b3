"""A server under load for long: its memory by time, and every answer its own."""

from __future__ import annotations

import csv
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from benchmarks.server.load import LoadSettings, Ways, make_pair
from benchmarks.server.report import SERVER
from benchmarks.soak.report import MOST_GROWTH, SHORTEST_MINUTES, Sample, growth, picture

PART = 20.0  # seconds after which streams start anew, and answers are compared


def soak(minutes: float, streams: int, width: int, how: LoadSettings, out: Path) -> tuple[dict[str, Any], list[str]]:
    """Run it; returns numbers to show, and what does not hold. Writes samples.csv and soak.png."""
    samples, count, ended = list[Sample](), Counter[str](), threading.Event()
    problems = list[str]()
    with (
        tempfile.TemporaryDirectory(dir=out) as folder,
        Ways(make_pair(width, Path(folder)), how, [SERVER], out, Path(folder)) as ways,
    ):
        if SERVER in ways.missing:
            return {}, [f"the server did not start: {ways.missing[SERVER]}"]
        began, server = time.monotonic(), ways.servers[SERVER]

        def watch() -> None:
            while not ended.wait(1.0):
                seconds = time.monotonic() - began
                samples.append(Sample(seconds, server.resident(), streams, count["tokens"]))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            first = 0
            while (left := 60 * minutes - (time.monotonic() - began)) > 0:
                heard, _ = ways.ask(SERVER, streams, min(PART, left), first)
                unequal, broken = ways.judge(heard)
                problems += broken
                first += len(heard)
                count += Counter(
                    requests=len(heard), tokens=sum(h.tokens for h in heard), differ=unequal, failed=len(broken)
                )
                print(f"{(time.monotonic() - began) / 60:.1f} of {minutes:g} minutes: {dict(count)}", file=sys.stderr)
        finally:
            ended.set()
            watcher.join()
        left_over = metrics(server.get("/metrics").decode())
        status = server.close()
    with (out / "samples.csv").open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(field.name for field in fields(Sample))
        lines.writerows(astuple(sample) for sample in samples)
    if len(samples) > 2:
        picture(samples, out / "soak.png")
    grown = growth(samples) if samples else 0.0
    summary = {"minutes": minutes, "streams": streams, **count, "memory growth after the warm-up": grown}
    summary |= {"largest memory, MiB": max((s.resident for s in samples), default=0) / 2**20, "exit status": status}
    failures = [f"{number} answers {name}" for name in ("differ", "failed") if (number := count[name])]
    failures += problems[:5]
    if not count["requests"]:
        failures.append("no request was answered")
    if left_over:
        failures.append(f"requests are left at the end: {left_over}")
    if status:
        failures.append(f"the server ended with {status}")
    if minutes >= SHORTEST_MINUTES and grown > MOST_GROWTH:
        failures.append(f"memory has grown by {grown:.1%}")
    return summary, failures


def metrics(text: str) -> dict[str, float]:
    """Gauges of requests that run or wait, where they are not zero."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith("#"):
            continue
        if name.split("{")[0].endswith(("_running", "_waiting")) and float(value):
            found[name] = float(value)
    return found
