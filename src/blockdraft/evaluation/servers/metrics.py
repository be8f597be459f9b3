"""Counters of a server's /metrics page: guesses, accepted guesses, and cached tokens of prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from prometheus_client.parser import text_string_to_metric_families

from blockdraft.errors import UsageError

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "blockdraft": "blockdraft"}
# Counters of tokens of prompts that were cached.
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
        prefix: Beginning of the names of this engine's metrics; None for an unknown engine.
        values: Values by name, one for each combination of labels.
        accepted_at: Number of accepted guesses by position in the block, counted from 0.
        caches: Whether the server says that it caches prefixes; None if it does not say.
    """

    prefix: str | None
    values: Mapping[str, Sequence[float]]
    accepted_at: Mapping[int, float]
    caches: bool | None = None

    @property
    def engine(self) -> str | None:
        return None if self.prefix is None else ENGINES[self.prefix]


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of guesses.

    Attributes:
        tau: Tokens of a cycle; None if the server does not count them.
        by_position: S_1, S_2, ...; empty if the server does not count them.
    """

    tau: float | None = None
    by_position: tuple[float, ...] = ()


def parse(text: str) -> Snapshot:
    """Read the text of a /metrics page. Raises a UsageError if it is not in Prometheus' format."""
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


def acceptance(before: Snapshot | None, after: Snapshot | None) -> Acceptance:
    """Acceptance between two moments. SGLang counts only its newest cycles, and no positions."""
    if before is None or after is None or after.prefix is None:
        return Acceptance()
    if after.prefix == "sglang":
        lengths = [value for value in after.values.get("sglang:spec_accept_length", ()) if value]
        return Acceptance(fmean(lengths) if lengths else None)
    drafts, accepted = (
        grown(before, after, f"{after.prefix}:spec_decode_num_{name}_total") for name in ("drafts", "accepted_tokens")
    )
    if drafts is None or accepted is None:
        return Acceptance()
    cycles, tokens = (grown(before, after, f"blockdraft:num_{name}_total") for name in ("cycles", "cycle_tokens"))
    if not cycles or tokens is None:  # other engines count only cycles that drafted
        cycles, tokens = drafts, drafts + accepted
        made, answers = (
            grown(before, after, f"vllm:{name}_total") for name in ("generation_tokens", "request_success")
        )
        if made is not None and answers is not None:
            # vLLM counts accepted guesses behind the end of an answer too. An answer's first token needs no draft.
            tokens = min(tokens, made - answers)
    places = range(max(after.accepted_at, default=-1) + 1)
    counts = [after.accepted_at.get(i, 0.0) - before.accepted_at.get(i, 0.0) for i in places]
    return Acceptance(tokens / cycles, tuple(count / cycles for count in counts)) if cycles else Acceptance(1.0)


def grown(before: Snapshot, after: Snapshot, name: str) -> float | None:
    """Growth of a counter; None if the server has none of this name, or was restarted meanwhile. A counter that is only
    shown after its first event began at 0."""
    if name not in after.values:
        return None
    count = sum(after.values[name]) - sum(before.values.get(name, ()))
    return count if count >= 0 else None


def drafted(before: Snapshot | None, after: Snapshot | None) -> bool:
    """Whether counters show that the server has drafted between two moments."""
    found = acceptance(before, after)
    return found.tau is not None and (found.tau > 1 or any(found.by_position))


def cached_tokens(before: Snapshot | None, after: Snapshot | None) -> tuple[str, float] | None:
    """Name and growth of the counter of cached tokens; None if the server has none."""
    for name in CACHED if before is not None and after is not None else ():
        assert before is not None and after is not None
        count = grown(before, after, name)
        if count is not None:
            return name, count
    return None
