"""Measurement of a server under load, or of two interleaved, with a comparison of their responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blockdraft.errors import UsageError
from blockdraft.prompt_sets import PromptSet
from blockdraft.types import SamplingParams
from blockdraft_bench.servers.client import Answer, Client
from blockdraft_bench.servers.metrics import acceptance, cached_tokens, drafted
from blockdraft_bench.settings import LoadSettings

URL, AGAINST = "url", "against"
ROUNDS = 4  # minimum number of requests per level, in multiples of its concurrency
PROBE_TOKENS = 8  # of the responses that show whether a server caches prefixes
SHOWN = 60  # characters shown of responses that differ
WITHOUT_CACHE = (
    "start it with --no-enable-prefix-caching (vLLM), --disable-radix-cache (SGLang), --no-cache-prompt --cache-ram 0 "
    "(llama.cpp) or --prefix-tokens 0 (blockdraft serve)"
)

# Called with the stage, the requests answered so far, and their total.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ServerInfo:
    """Properties of a server.

    Attributes:
        url: Its address.
        model: Name of its model.
        engine: Engine, recognized by its metric names; None if it is unknown.
        prefix_caching: Whether the server caches prompt prefixes; None if that is unknown.
        seen_by: Evidence for that, in words.
    """

    url: str
    model: str
    engine: str | None
    prefix_caching: bool | None
    seen_by: str


@dataclass(frozen=True)
class Difference:
    """A prompt to which two servers respond differently.

    Attributes:
        prompt_set: Name of its set.
        prompt: Number of the prompt in its set, from 1.
        at: Number of characters that both responses share at the beginning.
        text, other: Next characters of the first and of the second server's response.
    """

    prompt_set: str
    prompt: int
    at: int
    text: str
    other: str


@dataclass(frozen=True)
class Equality:
    """Comparison of two servers' greedy responses, made one request at a time."""

    prompts: int
    identical: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class LevelResults:
    """Results of one prompt set at one temperature and one concurrency. Figures without data are None.

    Attributes:
        server: "url" or "against", as in the options.
        prompt_set: Name of the set.
        temperature: Temperature of the requests.
        concurrency: Concurrent requests.
        requests: Number of requests.
        failed: Requests without a complete response, which count nowhere else.
        tokens_per_second: Tokens of all requests together, while the concurrency is full.
        first_median, first_p95: Seconds from a request to the first piece of its response.
        token_median, token_p95: Mean seconds between a response's tokens after its first piece, over responses.
        tau: Tokens per target forward pass; None if the server does not count them.
        acceptance_by_position: S_1, S_2, ...; empty if the server does not count them.
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


@dataclass(frozen=True)
class LoadResults:
    """Results of a measurement.

    Attributes:
        servers: Servers by "url" and, if there is a second one, "against".
        equality: Comparison of two servers' responses; None for one server.
        levels: Results by level.
        problems: Distinct failures of requests.
        stopped: Why the last levels are missing; empty if none is.
    """

    servers: dict[str, ServerInfo]
    equality: Equality | None
    levels: tuple[LevelResults, ...]
    problems: tuple[str, ...]
    stopped: str = ""


def measure(
    clients: Sequence[Client],
    sets: Sequence[PromptSet],
    params: Sequence[SamplingParams],
    settings: LoadSettings,
    progress: Progress = lambda stage, done, total: None,
) -> LoadResults:
    """Measure a server under load, or two interleaved.

    Args:
        clients: Client of one server, or those of two with the same model, of which the second does not draft.
        params: Sampling parameters of each series of levels, which differ in temperature. Request i uses `seed` + i.

    Returns:
        Results of all levels. If a server dies or hangs after the first level, those before, with `stopped`.

    Raises:
        UsageError: A server cannot be reached or does not answer, caches prefixes although that is not allowed, or the
            second one drafts.
    """
    return asyncio.run(_measure(dict(zip((URL, AGAINST), clients, strict=False)), sets, params, settings, progress))


async def _measure(
    clients: Mapping[str, Client],
    sets: Sequence[PromptSet],
    params: Sequence[SamplingParams],
    settings: LoadSettings,
    progress: Progress,
) -> LoadResults:
    async with AsyncExitStack() as stack:
        for client in clients.values():
            await stack.enter_async_context(client)
        longest = max((prompt for prompt_set in sets for prompt in prompt_set.prompts), key=len)
        infos = {name: await _inspect(client, longest, settings) for name, client in clients.items()}
        equality = await _compare(clients, sets, params[0], progress) if AGAINST in clients else None
        plan = [(prompt_set, how, n) for prompt_set in sets for how in params for n in settings.concurrency]
        counts = [max(settings.requests or max(len(prompt_set.prompts), ROUNDS * n), n) for prompt_set, _, n in plan]
        total, done = len(clients) * sum(counts), 0
        levels, problems, stopped = list[LevelResults](), dict[str, None](), ""
        for number, ((prompt_set, how, n), count) in enumerate(zip(plan, counts, strict=True)):
            measured = dict[str, LevelResults]()
            stage = f"{prompt_set.name}, temperature {how.temperature:g}, {n} at a time"
            for name in list(clients)[:: 1 if number % 2 == 0 else -1]:  # servers take turns to begin
                progress(stage, done, total)
                try:
                    measured[name], failures = await _level(clients[name], name, prompt_set, how, n, count)
                except UsageError as error:
                    if not levels and not measured:
                        raise
                    stopped = f"{error} This was at {stage}."
                    break
                done += count
                progress(stage, done, total)
                problems.update(dict.fromkeys(failures))
            levels += _with_speedup(measured)
            if stopped:
                break
    return LoadResults(infos, equality, tuple(levels), tuple(problems), stopped)


def _with_speedup(measured: Mapping[str, LevelResults]) -> list[LevelResults]:
    speeds = [measured[name].tokens_per_second if name in measured else None for name in (URL, AGAINST)]
    speedup = speeds[0] / speeds[1] if speeds[0] and speeds[1] else None
    ordered = [measured[name] for name in (URL, AGAINST) if name in measured]
    return [replace(level, speedup=speedup if level.server == URL else None) for level in ordered]


async def _inspect(client: Client, prompt: str, settings: LoadSettings) -> ServerInfo:
    """Find out a server's properties by sending a prompt twice, which also warms it up."""
    snapshots, answers = [], list[Answer]()
    for _ in range(2):
        snapshots.append(await client.metrics())
        answers.append(await client.ask(prompt, SamplingParams(max_new_tokens=PROBE_TOKENS)))
        if answers[-1].problem:
            raise UsageError(f"{client.url} does not answer a prompt ({answers[-1].problem}).")
    after = await client.metrics()
    counter, cached = cached_tokens(snapshots[1], after), answers[1].cached
    caches, how = None, "nothing shows it"
    if after is not None and after.caches is not None:
        caches, how = after.caches, "the label enable_prefix_caching of its metric vllm:cache_config_info"
    elif counter is not None:
        caches, how = counter[1] > 0, f"its metric {counter[0]} grew by {counter[1]:g} when a prompt was asked again"
    elif cached is not None:
        caches, how = cached > 0, f"{cached} cached tokens in the usage of a prompt asked again"
    if caches and not settings.allow_prefix_cache:
        raise UsageError(
            f"{client.url} caches prefixes ({how}), so its figures depend on what was asked before; {WITHOUT_CACHE}, "
            "or add --allow-prefix-cache."
        )
    return ServerInfo(client.url, await client.model(), None if after is None else after.engine, caches, how)


async def _compare(
    clients: Mapping[str, Client], sets: Sequence[PromptSet], params: SamplingParams, progress: Progress
) -> Equality:
    """Compare the greedy responses of both servers, one prompt at a time."""
    greedy = replace(params, temperature=0.0, seed=None)
    before = await clients[AGAINST].metrics()
    differences, done, count = list[Difference](), 0, sum(len(prompt_set.prompts) for prompt_set in sets)
    for prompt_set in sets:
        for number, prompt in enumerate(prompt_set.prompts, 1):
            first, second = [await client.ask(prompt, greedy) for client in clients.values()]
            for client, answer in zip(clients.values(), (first, second), strict=True):
                if answer.problem:
                    raise UsageError(
                        f"{client.url} does not answer prompt {number} of {prompt_set.name} ({answer.problem})."
                    )
            done += 1
            progress("the same answers", done, count)
            if (first.text, first.finish) != (second.text, second.finish):
                pairs = enumerate(zip(first.text, second.text, strict=False))
                at = next((i for i, (a, b) in pairs if a != b), min(len(first.text), len(second.text)))
                shown = (answer.text[at : at + SHOWN] for answer in (first, second))
                differences.append(Difference(prompt_set.name, number, at, *shown))
    if drafted(before, await clients[AGAINST].metrics()):
        raise UsageError(f"{clients[AGAINST].url} drafts, by its own metrics; start it with drafting off.")
    return Equality(count, count - len(differences), tuple(differences))


async def _level(
    client: Client, name: str, prompt_set: PromptSet, params: SamplingParams, concurrency: int, count: int
) -> tuple[LevelResults, list[str]]:
    """Measure one level of `count` requests. Return it with the problems of its requests."""
    numbers = iter(range(count))
    answers, idle = list[Answer](), list[float]()

    async def stream() -> None:
        for number in numbers:
            own = params if params.seed is None else replace(params, seed=params.seed + number)
            answers.append(await client.ask(prompt_set.prompts[number % len(prompt_set.prompts)], own))
        idle.append(time.perf_counter())

    before, began = await client.metrics(), time.perf_counter()
    streams = [asyncio.create_task(stream()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*streams)
    finally:  # the others end if one has failed
        for task in streams:
            task.cancel()
    accepted = acceptance(before, await client.metrics())
    problems = [answer.problem for answer in answers if answer.problem]
    level = LevelResults(
        server=name,
        prompt_set=prompt_set.name,
        temperature=params.temperature,
        concurrency=concurrency,
        requests=count,
        failed=len(problems),
        **speeds(answers, began, min(idle)),
        tau=accepted.tau,
        acceptance_by_position=accepted.by_position,
    )
    return level, problems


def speeds(answers: Sequence[Answer], began: float, busy_until: float) -> dict[str, Any]:
    """Return the fields of a `LevelResults` that measure time.

    Tokens count until `busy_until`, when the first of the concurrent streams has nothing left to send. A piece of text
    holds the same share of its response's tokens as of its characters.
    """
    tokens, firsts, between = 0.0, list[float](), list[float]()
    for answer in answers:
        size = sum(count for _, count in answer.pieces)
        if answer.problem or not size:
            continue
        tokens += answer.tokens * sum(count for moment, count in answer.pieces if moment <= busy_until) / size
        firsts.append(answer.pieces[0][0] - answer.sent)
        after_first = answer.tokens * (1 - answer.pieces[0][1] / size)
        if after_first >= 1:
            between.append((answer.pieces[-1][0] - answer.pieces[0][0]) / after_first)
    fields: dict[str, Any] = {"tokens_per_second": tokens / (busy_until - began) if tokens else None}
    for name, values in (("first", firsts), ("token", between)):
        for what, percent in (("median", 50), ("p95", 95)):
            fields[f"{name}_{what}"] = float(np.percentile(values, percent)) if values else None
    return fields
