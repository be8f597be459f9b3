"""Measurement of a server under load, or of two in turns, with a comparison of their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blockdraft.errors import UsageError
from blockdraft.evaluation.prompts import PromptSet
from blockdraft.evaluation.servers.client import Answer, Client
from blockdraft.evaluation.servers.metrics import acceptance, cached_tokens, drafted
from blockdraft.evaluation.settings import LoadSettings
from blockdraft.types import SamplingParams

URL, AGAINST = "url", "against"
ROUNDS = 4  # least requests of a level, in multiples of its concurrency
PROBE_TOKENS = 8  # of the answers that show whether a server caches prefixes
SHOWN = 60  # characters shown of answers that differ
WITHOUT_CACHE = (
    "start it with --no-enable-prefix-caching (vLLM), --disable-radix-cache (SGLang), --no-cache-prompt --cache-ram 0 "
    "(llama.cpp) or --prefix-tokens 0 (blockdraft serve)"
)

# Callback of the present stage, requests answered so far, and requests to answer.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Server:
    """Address of a server, and how requests are sent to it; fields as in `Client`."""

    url: str
    model: str | None = None
    key: str | None = None
    raw: bool = False

    def client(self, silence: float) -> Client:
        return Client(self.url, self.model, self.key, self.raw, silence)


@dataclass(frozen=True)
class ServerInfo:
    """Properties of a server.

    Attributes:
        url: Its address.
        model: Name of its model.
        engine: Engine, recognized by the names of its metrics; None if it is unknown.
        prefix_caching: Whether the server caches prefixes of prompts; None if that cannot be seen.
        seen_by: Evidence of that, in words.
    """

    url: str
    model: str
    engine: str | None
    prefix_caching: bool | None
    seen_by: str


@dataclass(frozen=True)
class Difference:
    """A prompt that two servers answer differently.

    Attributes:
        prompt_set: Name of its set.
        prompt: Number of the prompt in its set, counted from 1.
        at: Number of characters that both answers begin with.
        text, other: Next characters of the first and of the second server's answer.
    """

    prompt_set: str
    prompt: int
    at: int
    text: str
    other: str


@dataclass(frozen=True)
class Equality:
    """Comparison of two servers' greedy answers, made one request at a time."""

    prompts: int
    identical: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Level:
    """Results of one prompt set at one temperature and one concurrency. Figures without any data are None.

    Attributes:
        server: "url" or "against", as in the options.
        prompt_set: Name of the set.
        temperature: Temperature of the requests.
        concurrency: Requests at a time.
        requests: Number of requests.
        failed: Requests without a whole answer, which count in nothing else.
        tokens_per_second: Tokens of all requests together, during the time with full concurrency.
        first_median, first_p95: Seconds from sending a request to the first piece of its answer.
        token_median, token_p95: Mean seconds between an answer's tokens after its first piece, over answers.
        tau: Tokens of a cycle; None if the server does not count them.
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
class Measured:
    """Results of a measurement.

    Attributes:
        servers: Servers by "url" and, if there is a second one, "against".
        equality: Comparison of two servers' answers; None for one server.
        levels: Results by level.
        problems: Failures of requests, each once.
        stopped: Reason why the last levels are missing; empty if none is.
    """

    servers: dict[str, ServerInfo]
    equality: Equality | None
    levels: tuple[Level, ...]
    problems: tuple[str, ...]
    stopped: str = ""


def measure(
    servers: Sequence[Server],
    sets: Sequence[PromptSet],
    params: Sequence[SamplingParams],
    settings: LoadSettings,
    progress: Progress = lambda stage, done, total: None,
) -> Measured:
    """Measure a server under load, or two in turns.

    Args:
        servers: One server, or two of the same model, of which the second does not draft.
        params: Sampling of each series of levels, which differ in temperature. Request i has the seed `seed` + i.

    Returns:
        Results of all levels; if a server dies or hangs after the first one, of the levels before, with `stopped`.

    Raises:
        UsageError: A server cannot be reached or does not answer, caches prefixes although that is not allowed, or the
            second one drafts.
    """
    return asyncio.run(_measure(dict(zip((URL, AGAINST), servers, strict=False)), sets, params, settings, progress))


async def _measure(
    servers: Mapping[str, Server],
    sets: Sequence[PromptSet],
    params: Sequence[SamplingParams],
    settings: LoadSettings,
    progress: Progress,
) -> Measured:
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(server.client(settings.silence)) for name, server in servers.items()
        }
        longest = max((prompt for one in sets for prompt in one.prompts), key=len)
        inspected = {name: await _inspect(client, longest, settings) for name, client in clients.items()}
        equality = await _compare(clients, sets, params[0], progress) if AGAINST in clients else None
        plan = [(one, how, n) for one in sets for how in params for n in settings.concurrency]
        total = len(clients) * sum(_requests(one, n, settings) for one, _, n in plan)
        levels, problems, done, stopped = list[Level](), dict[str, None](), 0, ""
        for number, (one, how, n) in enumerate(plan):
            found = dict[str, Level]()
            names = list(clients)[:: 1 if number % 2 == 0 else -1]  # servers begin in turns
            for name in names:
                count = _requests(one, n, settings)
                stage = f"{one.name}, temperature {how.temperature:g}, {n} at a time"
                progress(stage, done, total)
                try:
                    found[name], wrong = await _level(clients[name], name, one, how, n, count)
                except UsageError as error:
                    if not levels and not found:
                        raise
                    stopped = f"{error} This was at {stage}."
                    break
                done += count
                progress(stage, done, total)
                problems.update(dict.fromkeys(wrong))
            levels += _with_speedup(found)
            if stopped:
                break
    return Measured(
        servers=inspected,
        equality=equality,
        levels=tuple(levels),
        problems=tuple(problems),
        stopped=stopped,
    )


def _requests(one: PromptSet, at_once: int, settings: LoadSettings) -> int:
    return max(settings.requests or max(len(one.prompts), ROUNDS * at_once), at_once)


def _with_speedup(found: Mapping[str, Level]) -> list[Level]:
    own, other = (found[name].tokens_per_second if name in found else None for name in (URL, AGAINST))
    speedup = own / other if own and other else None
    return [replace(found[name], speedup=speedup if name == URL else None) for name in (URL, AGAINST) if name in found]


async def _inspect(client: Client, prompt: str, settings: LoadSettings) -> ServerInfo:
    """Properties of a server, found by sending a prompt twice, which also warms the server up."""
    short = SamplingParams(max_new_tokens=PROBE_TOKENS)
    snapshots, answers = [], list[Answer]()
    for _ in range(2):
        snapshots.append(await client.metrics())
        answers.append(await client.ask(prompt, short))
        if answers[-1].problem:
            raise UsageError(f"{client.url} does not answer a prompt ({answers[-1].problem}).")
    after = await client.metrics()
    counter, told = cached_tokens(snapshots[1], after), answers[1].cached
    on: bool | None
    if after is not None and after.caches is not None:
        on, how = after.caches, "the label enable_prefix_caching of its metric vllm:cache_config_info"
    elif counter is not None:
        on, how = counter[1] > 0, f"its metric {counter[0]} grew by {counter[1]:g} when a prompt was asked again"
    else:
        on, how = (None if told is None else told > 0), f"{told} cached tokens in the usage of a prompt asked again"
    if on and not settings.allow_prefix_cache:
        raise UsageError(
            f"{client.url} caches prefixes ({how}), so its figures depend on what was asked before; {WITHOUT_CACHE}, "
            "or add --allow-prefix-cache."
        )
    engine = None if after is None else after.engine
    return ServerInfo(
        url=client.url,
        model=await client.model(),
        engine=engine,
        prefix_caching=on,
        seen_by=how if on is not None else "nothing shows it",
    )


async def _compare(
    clients: Mapping[str, Client], sets: Sequence[PromptSet], params: SamplingParams, progress: Progress
) -> Equality:
    """Compare the greedy answers of both servers, one prompt at a time."""
    greedy = replace(params, temperature=0.0, seed=None)
    before = await clients[AGAINST].metrics()
    differences, count = list[Difference](), sum(len(one.prompts) for one in sets)
    done = 0
    for one in sets:
        for number, prompt in enumerate(one.prompts, 1):
            answers = [await client.ask(prompt, greedy) for client in clients.values()]
            for client, answer in zip(clients.values(), answers, strict=True):
                if answer.problem:
                    raise UsageError(f"{client.url} does not answer prompt {number} of {one.name} ({answer.problem}).")
            done += 1
            progress("the same answers", done, count)
            first, second = answers
            if (first.text, first.finish) != (second.text, second.finish):
                pairs = enumerate(zip(first.text, second.text, strict=False))
                at = next((i for i, (a, b) in pairs if a != b), min(len(first.text), len(second.text)))
                texts = (each.text[at : at + SHOWN] for each in answers)
                differences.append(Difference(one.name, number, at, *texts))
    if drafted(before, await clients[AGAINST].metrics()):
        raise UsageError(f"{clients[AGAINST].url} drafts, by its own metrics; start it with drafting off.")
    return Equality(count, count - len(differences), tuple(differences))


async def _level(
    client: Client, name: str, one: PromptSet, params: SamplingParams, at_once: int, count: int
) -> tuple[Level, list[str]]:
    """Measure one level.

    Args:
        at_once: Requests at a time.
        count: Number of requests.

    Returns:
        The level, and the problems of its requests.
    """
    numbers = iter(range(count))
    answers, idle = list[Answer](), list[float]()

    async def stream() -> None:
        for number in numbers:
            own = params if params.seed is None else replace(params, seed=params.seed + number)
            answers.append(await client.ask(one.prompts[number % len(one.prompts)], own))
        idle.append(time.perf_counter())

    before, began = await client.metrics(), time.perf_counter()
    streams = [asyncio.create_task(stream()) for _ in range(at_once)]
    try:
        await asyncio.gather(*streams)
    finally:  # the others end if one has failed
        for each in streams:
            each.cancel()
    found = acceptance(before, await client.metrics())
    problems = [each.problem for each in answers if each.problem]
    level = Level(
        server=name,
        prompt_set=one.name,
        temperature=params.temperature,
        concurrency=at_once,
        requests=count,
        failed=len(problems),
        **speeds(answers, began, min(idle)),
        tau=found.tau,
        acceptance_by_position=found.by_position,
    )
    return level, problems


def speeds(answers: Sequence[Answer], began: float, busy_until: float) -> dict[str, Any]:
    """Fields of a `Level` about time. Tokens count until `busy_until`, when the first of the concurrent streams has
    nothing left to send. A piece of text holds the same share of its answer's tokens as of its characters."""
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
    spread = {"first": firsts, "token": between}
    found = {f"{name}_{what}": _middle(values, share) for name, values in spread.items() for what, share in SHARES}
    return found | {"tokens_per_second": tokens / (busy_until - began) if tokens else None}


SHARES = (("median", 50), ("p95", 95))


def _middle(values: list[float], share: int) -> float | None:
    return float(np.percentile(values, share)) if values else None
