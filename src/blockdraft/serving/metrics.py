"""Server metrics for Prometheus, and draft statistics for responses. Names follow vLLM."""

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
from blockdraft.serving.request import Finished

PREFIX = "blockdraft:"
FIRST_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_TOKENS = (1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)
WHOLE_REQUEST = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
COUNTERS = {
    "prompt_tokens": "Prompt tokens.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "generation_tokens": "Generated tokens.",
    "num_steps": "Decoding steps of all requests.",
    "num_step_tokens": "Tokens committed by decoding steps.",
    "spec_decode_num_drafts": "Decoding steps that drafted.",
    "spec_decode_num_draft_tokens": "Draft tokens; a tree counts those of its longest path.",
    "spec_decode_num_accepted_tokens": "Draft tokens in the output.",
    "prompt_seconds": "Seconds of prefill. Requests of one batch each count them in full.",
    "draft_seconds": "Seconds in the drafter. Requests of one batch each count them in full.",
    "verify_seconds": "Seconds in the target. Requests of one batch each count them in full.",
}


class Histogram:
    """Counts values by bucket. The one of prometheus_client cannot add a value several times at once.

    Args:
        bounds: Upper bounds of all buckets but the last, ascending.
    """

    def __init__(self, name: str, explanation: str, bounds: tuple[float, ...]) -> None:
        self._name, self._explanation, self._bounds = name, explanation, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def metric(self) -> Metric:
        buckets = list(zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True))
        return HistogramMetricFamily(f"{PREFIX}{self._name}", self._explanation, buckets=buckets, sum_value=self._sum)


class Metrics(Collector):
    """Totals over all requests. Only the event loop reads and writes them.

    Args:
        gauges: Explanation of each gauge and a function that returns its value, by name.
    """

    def __init__(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        self._gauges = gauges
        self.first_token = Histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", FIRST_TOKEN
        )
        self.between_tokens = Histogram(
            "inter_token_latency_seconds",
            "Seconds between tokens; the tokens of a decoding step share its time.",
            BETWEEN_TOKENS,
        )
        self.whole_request = Histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", WHOLE_REQUEST
        )
        self._ended: Counter[str] = Counter()
        self._totals: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._drafted_at: Counter[int] = Counter()
        self._accepted_at: Counter[int] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for name, (explanation, value_of) in self._gauges.items():
            yield GaugeMetricFamily(f"{PREFIX}{name}", explanation, value=value_of())
        ended = CounterMetricFamily(f"{PREFIX}requests", "Finished requests.", labels=["finished_reason"])
        for reason, count in self._ended.items():
            ended.add_metric([reason], count)
        yield ended
        for name, explanation in COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}{name}", explanation, value=self._totals[name])
        accepted = CounterMetricFamily(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
            "Decoding steps whose draft token at this position, counted from 0, was accepted.",
            labels=["position"],
        )
        shares = GaugeMetricFamily(
            f"{PREFIX}spec_decode_acceptance_per_pos",
            "Share of decoding steps whose first i draft tokens were accepted (S_i, i from 1).",
            labels=["position"],
        )
        steps = self._totals["num_steps"]
        for position in sorted(self._drafted_at):
            accepted.add_metric([str(position)], self._accepted_at[position])
            shares.add_metric([str(position + 1)], self._accepted_at[position] / steps)
        yield accepted
        yield shares
        tau = self._totals["num_step_tokens"] / steps if steps else 1.0
        explanation = "Mean tokens of a decoding step (tau); 1 without drafting."
        yield GaugeMetricFamily(f"{PREFIX}spec_decode_mean_acceptance_length", explanation, value=tau)
        for histogram in (self.first_token, self.between_tokens, self.whole_request):
            yield histogram.metric()

    def count_error(self, status: int) -> None:
        """Count an HTTP request that ended with an error."""
        self._ended[f"error_{status}"] += 1

    def count_end(self, request: Request, reason: str | None) -> None:
        """Count a finished engine request. `reason` is None if `count_error` counts it."""
        stats = request.stats
        if reason is not None:
            self._ended[reason] += 1
        drafts = [drafted for drafted in stats.drafted if drafted]
        for name, value in {
            "prompt_tokens": len(request.prompt),
            "prompt_tokens_cached": stats.remembered,
            "generation_tokens": len(request.token_ids),
            "num_steps": len(stats.committed),
            "num_step_tokens": sum(stats.committed),
            "spec_decode_num_drafts": len(drafts),
            "spec_decode_num_draft_tokens": sum(drafts),
            "spec_decode_num_accepted_tokens": sum(request.drafted),
            "prompt_seconds": stats.prefill_seconds,
            "draft_seconds": stats.draft_seconds,
            "verify_seconds": stats.verify_seconds,
        }.items():
            self._totals[name] += value
        for drafted, committed in zip(stats.drafted, stats.committed, strict=False):
            self._drafted_at.update(range(drafted))
            self._accepted_at.update(range(min(drafted, committed - 1)))


class Meter:
    """Measures the times of one choice.

    Args:
        arrived: When its request arrived, by `time.perf_counter`.
    """

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics, self._arrived = metrics, arrived
        self._last: float | None = None

    def count(self, chunk: Chunk) -> None:
        """Count the tokens of a chunk that arrives now."""
        now, count = time.perf_counter(), len(chunk.token_ids)
        if not count:
            return
        if self._last is None:
            self._metrics.first_token.add(now - self._arrived)
        else:
            self._metrics.between_tokens.add((now - self._last) / count, count)
        self._last = now

    def end(self, request: Request, reason: str | None) -> None:
        self._metrics.whole_request.add(time.perf_counter() - self._arrived)
        self._metrics.count_end(request, reason)


def draft_statistics(ends: Sequence[Finished], max_draft_tokens: int) -> dict[str, Any]:
    """Return the draft statistics of all choices of a request.

    Args:
        max_draft_tokens: Maximum draft tokens of a decoding step.
    """
    drafted_counts, accepted_counts = list[int](), list[int]()
    for end in ends:
        steps = list(zip(end.stats.committed, end.stats.drafted, strict=True))
        accepted = [min(committed - 1, drafted) for committed, drafted in steps]
        if accepted:  # the end of the output may have cut the last step, bonus token included
            accepted[-1] = end.usage.accepted - sum(accepted[:-1])
        drafts = [(drafted, count) for (_, drafted), count in zip(steps, accepted, strict=True) if drafted]
        drafted_counts += [drafted for drafted, _ in drafts]
        accepted_counts += [count for _, count in drafts]
    histogram, num_drafts = Counter(accepted_counts), len(accepted_counts)
    num_accepted, num_drafted = sum(accepted_counts), sum(drafted_counts)
    seconds = {
        "prompt": sum(end.stats.prefill_seconds for end in ends),
        "draft": sum(end.stats.draft_seconds for end in ends),
        "verify": sum(end.stats.verify_seconds for end in ends),
        "total": sum(end.stats.total_seconds for end in ends),
    }
    committed_tokens = sum(sum(end.stats.committed) for end in ends)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + num_accepted / num_drafts if num_drafts else 1.0,
            "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
            "acceptance_histogram": [histogram[count] for count in range(max(accepted_counts, default=-1) + 1)],
            "num_spec_steps": num_drafts,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": num_drafted,
            "num_spec_tokens": max_draft_tokens,
        },
        "seconds": seconds,
        "tokens_per_second": committed_tokens / seconds["total"] if seconds["total"] else 0.0,
    }
