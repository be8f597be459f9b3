"""What a load comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockdraft.evaluation.servers.client import Heard


@dataclass(frozen=True)
class Level:
    """One prompt set at one temperature and one number of requests at a time. Figures that nothing was heard for are
    None.

    Attributes:
        server: "url" or "against", as in the options.
        failed: Requests without a whole answer; they count in nothing else.
        tokens_per_second: Of all requests together, while as many as asked for were under way.
        first_median, first_p95: Seconds from sending a request to the first piece of its answer.
        token_median, token_p95: Seconds between tokens: the mean of an answer after its first piece, over answers.
        tau: Tokens of a cycle; None where the server does not count them.
        acceptance_by_position: S_1, S_2, ...; empty likewise.
        speedup: Tokens per second over those of the second server.
    """

    server: str
    prompt_set: str
    temperature: float
    concurrency: int
    requests: int
    failed: int
    tokens_per_second: float | None
    first_median: float | None
    first_p95: float | None
    token_median: float | None
    token_p95: float | None
    tau: float | None
    acceptance_by_position: tuple[float, ...]
    speedup: float | None = None


def speeds(all_heard: Sequence[Heard], began: float, busy_until: float) -> dict[str, Any]:
    """The fields of a `Level` that are about time. Of answers that go on behind `busy_until` the tokens before it
    count; a piece of text holds the same share of an answer's tokens as of its characters."""
    tokens, firsts, between = 0.0, list[float](), list[float]()
    for heard in all_heard:
        size = sum(count for _, count in heard.pieces)
        if heard.problem or not size:
            continue
        tokens += heard.tokens * sum(count for moment, count in heard.pieces if moment <= busy_until) / size
        firsts.append(heard.pieces[0][0] - heard.sent)
        after_first = heard.tokens * (1 - heard.pieces[0][1] / size)
        if after_first >= 1:
            between.append((heard.pieces[-1][0] - heard.pieces[0][0]) / after_first)
    spread = {"first": firsts, "token": between}
    found = {f"{name}_{what}": _middle(values, share) for name, values in spread.items() for what, share in SHARES}
    return found | {"tokens_per_second": tokens / (busy_until - began) if tokens else None}


SHARES = (("median", 50), ("p95", 95))


def _middle(values: list[float], share: int) -> float | None:
    return float(np.percentile(values, share)) if values else None
