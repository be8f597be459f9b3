"""The log's line of a generated response."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from blockdraft.engine import Request
from blockdraft.engine.stats import merge

log = logging.getLogger(__name__)


def log_responses(source: str, requests: Sequence[Request], arrived: float, reason: str | None) -> None:
    """Log the tokens and seconds of the choices of one HTTP request, without any text.

    Args:
        source: Client and path.
        arrived: When the request arrived, by `time.perf_counter`.
        reason: Why choices ended that had not ended by themselves; None for an error.
    """
    stats, written = merge(request.stats for request in requests), sum(len(request.token_ids) for request in requests)
    prompt = sum(len(request.prompt) for request in requests)
    unread = prompt - sum(request.num_prefilled for request in requests)
    parts = [f"{prompt:,} tokens"]
    if stats.remembered:
        parts.append(f"{stats.remembered:,} from the cache")
    if unread:
        parts.append(f"{unread:,} not read")
    seconds = time.perf_counter() - arrived
    reading, tau = f"read in {stats.read_seconds:.2f} s", f", tau {stats.tau:.2f}" if any(stats.drafted) else ""
    reasons = {request.finish_reason or reason or "error" for request in requests}
    log.info(
        "%s: %s, %s; wrote %s (%.1f/s)%s; %.2f s in all, %s",
        *(source, ", ".join(parts), reading, f"{written:,}", stats.tokens_per_second, tau, seconds),
        " and ".join(sorted(reasons)),
    )
