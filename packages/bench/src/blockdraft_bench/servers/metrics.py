"""Counters on a server's /metrics page: draft tokens, accepted tokens, and cached prompt tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from prometheus_client.parser import text_string_to_metric_families

from blockdraft.errors import UsageError

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "blockdraft": "blockdraft"}
# Counters of cached prompt tokens.
CACHED = (
    "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits_total",
    "sglang:cached_tokens_total",
    "llamacpp:prompt_tokens_cached_total",
    "blockdraft:prompt_tokens_cached_total",
)


@dataclass(frozen=True)
class Snapshot:
    """Counters at one moment.

    Attributes:
        prefix: Prefix of this engine's metric names; None if the engine is unknown.
        values: Values by name, one for each combination of labels.
        accepted_at: Accepted draft tokens by position in the block, from 0.
        caches: Whether the server reports that it caches prefixes; None if it does not report it.
    """

    prefix: str | None
    values: Mapping[str, Sequence[float]]
    accepted_at: Mapping[int, float]
    caches: bool | None = None

    @property
    def engine(self) -> str | None:
        return None if self.prefix is None else ENGINES[self.prefix]


@dataclass(frozen=True)
class ServerAcceptance:
    """Acceptance of draft tokens.

    Attributes:
        tau: Tokens per target forward pass; None if the server does not count them.
        by_position: S_1, S_2, ...; empty if the server does not count them.
    """

    tau: float | None = None
    by_position: tuple[float, ...] = ()


def parse(text: str) -> Snapshot:
    """Parse a /metrics page. Raises a UsageError if it is not in Prometheus' format."""
    values: dict[str, list[float]] = defaultdict(list)
    accepted_at: dict[int, float] = defaultdict(float)
    caches = None
    try:
        for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
            values[sample.name].append(sample.value)
            if sample.name.endswith(":spec_decode_num_accepted_tokens_per_pos_total"):
                accepted_at[int(sample.labels["position"])] += sample.value
            if sample.name == "vllm:cache_config_info" and "enable_prefix_caching" in sample.labels:
                caches = sample.labels["enable_prefix_caching"].lower() == "true"
    except (ValueError, KeyError) as error:
        raise UsageError(f"/metrics is not in Prometheus' format ({error}).") from error
    prefix = next((prefix for prefix in ENGINES if any(name.startswith(f"{prefix}:") for name in values)), None)
    return Snapshot(prefix, values, accepted_at, caches)


def acceptance(before: Snapshot | None, after: Snapshot | None) -> ServerAcceptance:
    """Return the acceptance between two moments. SGLang reports only its latest steps, and no positions."""
    if before is None or after is None or after.prefix is None:
        return ServerAcceptance()
    if after.prefix == "sglang":
        lengths = [value for value in after.values.get("sglang:spec_accept_length", ()) if value]
        return ServerAcceptance(fmean(lengths) if lengths else None)
    drafts = growth(before, after, f"{after.prefix}:spec_decode_num_drafts_total")
    accepted = growth(before, after, f"{after.prefix}:spec_decode_num_accepted_tokens_total")
    if drafts is None or accepted is None:
        return ServerAcceptance()
    steps = growth(before, after, "blockdraft:num_steps_total")
    tokens = growth(before, after, "blockdraft:num_step_tokens_total")
    if not steps or tokens is None:  # other engines count only steps that drafted
        steps, tokens = drafts, drafts + accepted
        made = growth(before, after, "vllm:generation_tokens_total")
        responses = growth(before, after, "vllm:request_success_total")
        if made is not None and responses is not None:
            # vLLM also counts tokens accepted after the end of a response. A response's first token needs no draft.
            tokens = min(tokens, made - responses)
    if not steps:
        return ServerAcceptance(1.0)
    positions = range(max(after.accepted_at, default=-1) + 1)
    shares = ((after.accepted_at.get(i, 0.0) - before.accepted_at.get(i, 0.0)) / steps for i in positions)
    return ServerAcceptance(tokens / steps, tuple(shares))


def growth(before: Snapshot, after: Snapshot, name: str) -> float | None:
    """Return the growth of a counter, or None if the server has none of this name or was restarted.

    A counter that appears with its first event started at 0.
    """
    if name not in after.values:
        return None
    count = sum(after.values[name]) - sum(before.values.get(name, ()))
    return count if count >= 0 else None


def drafted(before: Snapshot | None, after: Snapshot | None) -> bool:
    """Return whether the counters show that the server has drafted between two moments."""
    between = acceptance(before, after)
    return between.tau is not None and (between.tau > 1 or any(between.by_position))


def cached_tokens(before: Snapshot | None, after: Snapshot | None) -> tuple[str, float] | None:
    """Return name and growth of the counter of cached prompt tokens, or None if the server has none."""
    if before is None or after is None:
        return None
    grown = ((name, growth(before, after, name)) for name in CACHED)
    return next(((name, count) for name, count in grown if count is not None), None)
