"""Server metrics for Prometheus, and draft statistics for responses. Names follow vLLM."""

from __future__ import annotations

import time
from collections import Counter as TotalCounter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from blockdraft.engine import Chunk, Request
from blockdraft.kernels.cpu.threads import thread_choice
from blockdraft.serving.request import Finished

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # times of creation, of no use here
PREFIX = "blockdraft:"
HISTOGRAMS = {
    "time_to_first_token": (
        "Seconds from a request's arrival to its first token.",
        (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    ),
    "inter_token_latency": (
        "Seconds between tokens; the tokens of a decoding step share its time.",
        (1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5),
    ),
    "e2e_request_latency": (
        "Seconds from a request's arrival to its end.",
        (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
    ),
}
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


class Metrics:
    """Totals over all requests. Only the event loop changes them.

    Args:
        gauges: Explanation of each gauge and a function that returns its value, by name.

    Attributes:
        registry: All metrics.
    """

    def __init__(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        self.registry = CollectorRegistry()
        more: Any = {"registry": self.registry}
        for name, (explanation, value_of) in gauges.items():
            Gauge(PREFIX + name, explanation, **more).set_function(value_of)
        threads = Gauge(f"{PREFIX}threads", "Threads of the forward pass on a CPU, and why.", ["reason"], **more)
        choice = thread_choice()
        threads.labels(choice.reason).set(choice.threads)
        self._ended = Counter(f"{PREFIX}requests", "Finished requests.", ["finished_reason"], **more)
        self._totals = {name: Counter(PREFIX + name, explanation, **more) for name, explanation in COUNTERS.items()}
        self._tau = Gauge(
            f"{PREFIX}spec_decode_mean_acceptance_length",
            "Mean tokens of a decoding step (tau); 1 without drafting.",
            **more,
        )
        self._tau.set(1.0)
        self._accepted = Counter(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
            "Decoding steps whose draft token at this position, counted from 0, was accepted.",
            ["position"],
            **more,
        )
        self._shares = Gauge(
            f"{PREFIX}spec_decode_acceptance_per_pos",
            "Share of decoding steps whose first i draft tokens were accepted (S_i, i from 1).",
            ["position"],
            **more,
        )
        self._num_steps = self._num_step_tokens = 0
        self._accepted_at = TotalCounter[int]()  # steps that accepted the draft token at a position
        self.first_token, self.between_tokens, self.whole_request = (
            Histogram(f"{PREFIX}{name}_seconds", explanation, buckets=buckets, **more)
            for name, (explanation, buckets) in HISTOGRAMS.items()
        )

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)

    def count_error(self, status: int) -> None:
        """Count an HTTP request that ended with an error."""
        self._ended.labels(f"error_{status}").inc()

    def count_end(self, request: Request, reason: str | None) -> None:
        """Count a finished engine request. `reason` is None if `count_error` counts it."""
        stats = request.stats
        if reason is not None:
            self._ended.labels(reason).inc()
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
            self._totals[name].inc(value)
        self._num_steps += len(stats.committed)
        self._num_step_tokens += sum(stats.committed)
        accepted = TotalCounter[int]()
        for drafted, committed in zip(stats.drafted, stats.committed, strict=False):
            accepted.update({position: position < committed - 1 for position in range(drafted)})
        self._accepted_at.update(accepted)
        for position, count in accepted.items():
            self._accepted.labels(position).inc(count)
        for position, count in self._accepted_at.items():
            self._shares.labels(position + 1).set(count / self._num_steps)
        if self._num_steps:
            self._tau.set(self._num_step_tokens / self._num_steps)


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
            self._metrics.first_token.observe(now - self._arrived)
        else:
            for _ in range(count):
                self._metrics.between_tokens.observe((now - self._last) / count)
        self._last = now

    def end(self, request: Request, reason: str | None) -> None:
        self._metrics.whole_request.observe(time.perf_counter() - self._arrived)
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
    num_drafts = len(accepted_counts)
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
            "acceptance_histogram": [
                accepted_counts.count(count) for count in range(max(accepted_counts, default=-1) + 1)
            ],
            "num_spec_steps": num_drafts,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": num_drafted,
            "num_spec_tokens": max_draft_tokens,
        },
        "seconds": seconds,
        "tokens_per_second": committed_tokens / seconds["total"] if seconds["total"] else 0.0,
    }
