"""A server under load for long: its memory over time, and every answer compared."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness.command import tell
from benchmarks.server.load import SERVER, LoadSettings, Ways
from soak_report import Sample, grown_too_much, growth

PART = 20.0  # seconds after which streams start anew, and answers are compared


def soak(minutes: float, streams: int, out: Path) -> tuple[dict[str, Any], list[Sample], list[str]]:
    """Run so many streams; return figures, samples over time, and failures."""
    width, how = 1, LoadSettings(streams=(streams,), widths=(1,))
    samples, count, ended = list[Sample](), Counter[str](), threading.Event()
    problems = list[str]()
    with (
        tempfile.TemporaryDirectory(dir=out) as folder,
        Ways(width, how, [SERVER], out, Path(folder)) as ways,
    ):
        if SERVER in ways.missing:
            return {}, [], [f"the server did not start: {ways.missing[SERVER]}"]
        began, server = time.monotonic(), ways.servers[SERVER]

        def watch() -> None:
            while not ended.wait(1.0):
                samples.append(Sample(time.monotonic() - began, server.resident(), streams, count["tokens"]))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            while (left := 60 * minutes - (time.monotonic() - began)) > 0:
                heard, _ = ways.ask(SERVER, streams, min(PART, left), count["requests"])
                unequal, broken = ways.judge(heard)
                problems += broken
                tokens = sum(each.tokens for each in heard)
                count += Counter(requests=len(heard), tokens=tokens, differ=unequal, failed=len(broken))
                tell(f"{(time.monotonic() - began) / 60:.1f} of {minutes:g} minutes: {dict(count)}")
        finally:
            ended.set()
            watcher.join()
        left_over, status = server.busy(), server.close()
    summary = {"minutes": minutes, "streams": streams, **count}
    summary |= {"memory growth after the warm-up": growth(samples)}
    summary |= {"largest memory, MiB": max((s.resident for s in samples), default=0) / 2**20, "exit status": status}
    failures = [f"{number} answers {name}" for name in ("differ", "failed") if (number := count[name])]
    failures += [*problems[:5], *grown_too_much(samples, minutes)]
    failures += [] if count["requests"] else ["no request was answered"]
    failures += [f"requests are left at the end: {left_over}"] if left_over else []
    failures += [f"the server ended with {status}"] if status else []
    return summary, samples, failures
