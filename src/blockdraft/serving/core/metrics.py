"""Counters of the server for Prometheus, and statistics of drafting for answers, under names like those of vLLM."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from blockdraft.engine import Chunk, Request
from blockdraft.serving.core.events import Finished

PREFIX = "blockdraft:"
FIRST_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_TOKENS = (1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)
WHOLE = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Counts of values by bucket. A bucket holds the values above the bound before it, up to its own.

    Args:
        bounds: Upper bounds of all buckets but the last, ascending.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def metric(self, name: str, explanation: str) -> Metric:
        names = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(f"{PREFIX}{name}", explanation, buckets=buckets, sum_value=self._sum)


class Metrics(Collector):
    """Sums over all requests, written and read in the event loop.

    Args:
        gauges: For each gauge, by name, its explanation and a function that returns its value.
    """

    def __init__(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        self._gauges = gauges
        self._first, self._between, self._whole = map(Histogram, (FIRST_TOKEN, BETWEEN_TOKENS, WHOLE))
        self._ended: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._seconds: dict[str, float] = dict.fromkeys(("prompt", "draft", "verify"), 0.0)
        self._drafted_at: Counter[int] = Counter()
        self._accepted_at: Counter[int] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for name, (explanation, look_up) in self._gauges.items():
            yield GaugeMetricFamily(f"{PREFIX}{name}", explanation, value=look_up())
        ended = CounterMetricFamily(f"{PREFIX}requests", "Requests that have ended.", labels=["finished_reason"])
        for reason, count in self._ended.items():
            ended.add_metric([reason], count)
        yield ended
        for name, explanation in SUMS.items():
            yield CounterMetricFamily(f"{PREFIX}{name}", explanation, value=self._sums[name])
        for name, seconds in self._seconds.items():
            told = f"Seconds of all requests in: {name}. Requests decoded together each count them in full."
            yield CounterMetricFamily(f"{PREFIX}{name}_seconds", told, value=seconds)
        at = CounterMetricFamily(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
            "Cycles in which the guess at this position, counted from 0, was accepted.",
            labels=["position"],
        )
        shares = GaugeMetricFamily(
            f"{PREFIX}spec_decode_acceptance_per_pos",
            "Share of all cycles in which the first i guesses were accepted (S_i, i from 1).",
            labels=["position"],
        )
        cycles = self._sums["num_cycles"]
        for position in sorted(self._drafted_at):
            at.add_metric([str(position)], self._accepted_at[position])
            shares.add_metric([str(position + 1)], self._accepted_at[position] / cycles)
        yield at
        yield shares
        tau = self._sums["num_cycle_tokens"] / cycles if cycles else 1.0
        explanation = "Mean tokens of a cycle (tau), 1 without drafting."
        yield GaugeMetricFamily(f"{PREFIX}spec_decode_mean_acceptance_length", explanation, value=tau)
        yield self._first.metric("time_to_first_token_seconds", "Seconds from a request's arrival to its first token.")
        explanation = "Seconds between tokens; those of a cycle share its time."
        yield self._between.metric("inter_token_latency_seconds", explanation)
        yield self._whole.metric("e2e_request_latency_seconds", "Seconds from a request's arrival to its end.")

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error, before or while it was decoded."""
        self._ended[f"error_{status}"] += 1

    def begin(self) -> Meter:
        return Meter(self)

    def end(self, request: Request, reason: str | None, seconds: float) -> None:
        """Count a request that the engine has ended.

        Args:
            reason: Why it ended; None where `refused` counts it.
            seconds: From its arrival to its end.
        """
        stats = request.stats
        if reason is not None:
            self._ended[reason] += 1
        self._whole.add(seconds)
        drafts = [drafted for drafted in stats.drafted if drafted]
        self._sums += Counter(
            prompt_tokens=len(request.prompt),
            prompt_tokens_cached=stats.remembered,
            generation_tokens=len(request.token_ids),
            num_cycles=len(stats.committed),
            num_cycle_tokens=sum(stats.committed),
            spec_decode_num_drafts=len(drafts),
            spec_decode_num_draft_tokens=sum(drafts),
            spec_decode_num_accepted_tokens=sum(request.drafted),
        )
        for name, more in (
            ("prompt", stats.prefill_seconds),
            ("draft", stats.draft_seconds),
            ("verify", stats.verify_seconds),
        ):
            self._seconds[name] += more
        for drafted, committed in zip(stats.drafted, stats.committed, strict=False):
            self._drafted_at.update(range(drafted))
            self._accepted_at.update(range(min(drafted, committed - 1)))


SUMS = {
    "prompt_tokens": "Tokens of prompts.",
    "prompt_tokens_cached": "Tokens of prompts whose keys and values were still in memory.",
    "generation_tokens": "Tokens of answers.",
    "num_cycles": "Cycles of all requests.",
    "num_cycle_tokens": "Tokens committed by cycles.",
    "spec_decode_num_drafts": "Cycles that drafted.",
    "spec_decode_num_draft_tokens": "Guesses; a tree counts those of its longest path.",
    "spec_decode_num_accepted_tokens": "Guesses that became part of an answer.",
}


class Meter:
    """Measures the times of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = self._last = time.perf_counter()
        self._has_begun = False

    def chunk(self, chunk: Chunk) -> None:
        """Count the tokens of a chunk that arrives now."""
        now, count = time.perf_counter(), len(chunk.token_ids)
        if not count:
            return
        if self._has_begun:
            self._metrics._between.add((now - self._last) / count, count)
        else:
            self._metrics._first.add(now - self._began)
        self._has_begun, self._last = True, now

    def end(self, request: Request, reason: str | None) -> None:
        self._metrics.end(request, reason, time.perf_counter() - self._began)


def metrics_of(ends: Sequence[Finished], max_draft_tokens: int) -> dict[str, Any]:
    """Statistics of drafting over the answers to one request.

    Args:
        ends: Last events of the answers.
        max_draft_tokens: Most guesses of a cycle.
    """
    draft_tokens, accepted = list[int](), list[int]()
    for end in ends:
        cycles = list(zip(end.stats.committed, end.stats.drafted, strict=True))
        counts = [min(tokens - 1, drafted) for tokens, drafted in cycles]
        if counts:  # the end of the answer may have cut the last cycle, bonus included
            counts[-1] = end.usage.accepted - sum(counts[:-1])
        drafts = [(drafted, count) for (_, drafted), count in zip(cycles, counts, strict=True) if drafted]
        draft_tokens += [drafted for drafted, _ in drafts]
        accepted += [count for _, count in drafts]
    histogram = Counter(accepted)
    seconds = {
        "prompt": sum(end.stats.prefill_seconds for end in ends),
        "draft": sum(end.stats.draft_seconds for end in ends),
        "verify": sum(end.stats.verify_seconds for end in ends),
        "total": sum(end.stats.total_seconds for end in ends),
    }
    committed = sum(sum(end.stats.committed) for end in ends)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + sum(accepted) / len(accepted) if accepted else 1.0,
            "draft_acceptance_rate": sum(accepted) / sum(draft_tokens) if draft_tokens else 0.0,
            "acceptance_histogram": [histogram[count] for count in range(max(accepted, default=-1) + 1)],
            "num_spec_steps": len(accepted),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": sum(draft_tokens),
            "num_spec_tokens": max_draft_tokens,
        },
        "seconds": seconds,
        "tokens_per_second": committed / seconds["total"] if seconds["total"] else 0.0,
    }
