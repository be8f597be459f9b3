"""What a stream heard of one request, whoever answered it, and the figures of a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.server.wire import Answer

REASON_LENGTH = 200


@dataclass
class Heard:
    """One request of a load. Times are seconds since the load began.

    Attributes:
        index: Which of the requests.
        times: When something of the answer came, and how much: tokens or characters.
        problem: What was wrong with the answer's form; empty where nothing was.
    """

    index: int
    sent: float
    times: list[tuple[float, float]] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Figures:
    """Of a load, without its warm-up. Seconds; a token's is the mean of an answer's tokens after its first piece, and
    a piece is what comes at once, often several tokens."""

    tokens_per_second: float
    requests: int
    first_median: float
    first_p95: float
    token_median: float
    token_p95: float
    piece_median: float
    piece_p95: float


def streamed(index: int, began: float, sent: float, answer: Answer) -> Heard:
    """What a streamed chat completion said."""
    heard = Heard(index, sent - began)
    if answer.status != 200:
        heard.problem = f"status {answer.status}: {answer.body[:REASON_LENGTH]}"
        return heard
    usage: dict[str, Any] = {}
    for moment, event in answer.events:
        if "error" in event:
            heard.problem = f"an error: {str(event['error'])[:REASON_LENGTH]}"
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            if text:
                heard.times.append((moment - began, float(len(text))))
                heard.text += text
            heard.finish = choice.get("finish_reason") or heard.finish
        usage = event.get("usage") or usage
    heard.tokens, heard.prompt_tokens = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
    if not heard.problem:
        missing = {"end": answer.whole, "[DONE]": answer.done, "finish_reason": heard.finish, "usage": usage}
        heard.problem = ", ".join(f"no {name}" for name, there in missing.items() if not there)
    return heard


def figures(all_heard: Sequence[Heard], begin: float, end: float) -> Figures:
    """Of what happened from one second to another: tokens that came, and latencies of requests sent."""
    tokens, firsts, each_token, pieces = 0.0, list[float](), list[float](), list[float]()
    for heard in all_heard:
        amount = sum(part for _, part in heard.times)
        if not amount or heard.problem:
            continue
        tokens += heard.tokens * sum(part for moment, part in heard.times if begin <= moment < end) / amount
        if begin <= heard.sent < end:
            moments = [moment for moment, _ in heard.times]
            firsts.append(moments[0] - heard.sent)
            pieces += np.diff(moments).tolist()
            after = heard.tokens * (1 - heard.times[0][1] / amount)  # tokens that came after the first piece
            if after >= 1:
                each_token.append((moments[-1] - moments[0]) / after)
    spread = [_middle(values) for values in (firsts, each_token, pieces)]
    return Figures(tokens / (end - begin), len(firsts), *(value for pair in spread for value in pair))


def _middle(values: list[float]) -> tuple[float, float]:
    """Median and 95th percentile."""
    return (float(np.median(values)), float(np.percentile(values, 95))) if values else (float("nan"), float("nan"))
