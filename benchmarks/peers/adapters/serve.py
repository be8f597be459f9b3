"""The adapters' side of the protocol (see the README): one JSON object a line in, one a line out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Request = dict[str, Any]
Answer = dict[str, Any]


class Missing(Exception):
    """This peer cannot be had here; the message says why."""


@dataclass
class Clock:
    """When tokens came, for peers that tell after each step how many there are.

    Attributes:
        began: When decoding was asked for.
        times, counts: After each step, the time and the number of new tokens so far.
    """

    began: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def step(self, count: int) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(count)

    def answer(self, tokens: list[int]) -> Answer:
        """Answer of the protocol: tokens of the first step came with the prompt, later ones are `steps`."""
        return {
            "tokens": tokens,
            "first": self.counts[0],
            "steps": len(self.times) - 1,
            "prefill_seconds": self.times[0] - self.began,
            "decode_seconds": self.times[-1] - self.times[0],
        }


def serve(load: Callable[[Request], tuple[dict[str, str], dict[str, Callable[[Request], Answer]]]]) -> None:
    """Load, say so, and answer requests until the input ends.

    Args:
        load: Gets the first argument of the command line, which is JSON; returns what it tells about itself (versions,
            chosen settings) and the functions that answer requests, by name.
    """
    # Output of libraries must not mix with the answers.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: Answer) -> None:
        lines.write(json.dumps(message) + "\n")
        lines.flush()

    try:
        about, functions = load(json.loads(sys.argv[1]))
    except Missing as error:
        say({"missing": str(error)})
        return
    say({"ready": about, "answers": list(functions)})
    for line in sys.stdin:
        [(name, request)] = json.loads(line).items()
        try:
            say(functions[name](request))
        except Exception as error:  # reported, and the peer is left out from here on
            say({"error": f"{type(error).__name__}: {error}"})
            raise
