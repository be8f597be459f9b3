"""Servers under load, one or two in turns, and whether they say the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from blockdraft.errors import UsageError
from blockdraft.evaluation.prompts import PromptSet
from blockdraft.evaluation.servers.client import Client, Heard
from blockdraft.evaluation.servers.figures import Level, speeds
from blockdraft.evaluation.servers.metrics import acceptance, cached_tokens, drafted
from blockdraft.evaluation.servers.settings import LoadSettings
from blockdraft.types import SamplingParams

URL, AGAINST = "url", "against"
ROUNDS = 4  # requests of a level over those under way, at least
PROBE_TOKENS = 8  # of the answers that tell whether a server caches prefixes
SHOWN = 60  # characters of answers that differ
WITHOUT_CACHE = (
    "start it with --no-enable-prefix-caching (vLLM), --disable-radix-cache (SGLang), --no-cache-prompt --cache-ram 0 "
    "(llama.cpp) or --prefix-tokens 0 (blockdraft serve)"
)

# Told what is going on, requests answered so far, and requests to answer.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Place:
    """Where a server is, and how it is asked; as in `Client`."""

    url: str
    model: str | None = None
    key: str | None = None
    raw: bool = False

    def client(self, silence: float) -> Client:
        return Client(self.url, self.model, self.key, self.raw, silence)


@dataclass(frozen=True)
class About:
    """What is known of a server.

    Attributes:
        engine: By the names of its metrics; None where it shows none that are known.
        prefix_caching: Whether a prompt that was asked twice was read twice; None where that cannot be seen.
        seen_by: How that was seen, in words.
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
        prompt: Its place in the set, from 1 on.
        at: Characters that both answers begin with.
        text, other: What follows there, on the first and on the second server, cut.
    """

    prompt_set: str
    prompt: int
    at: int
    text: str
    other: str


@dataclass(frozen=True)
class Equality:
    """Greedy answers of two servers, one request at a time."""

    prompts: int
    identical: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Measured:
    """Attributes:
    servers: By "url" and, where there is a second one, "against".
    problems: What went wrong with requests, each once.
    stopped: Why the last levels are missing; empty where none is.
    """

    servers: dict[str, About]
    equality: Equality | None
    levels: tuple[Level, ...]
    problems: tuple[str, ...]
    stopped: str = ""


def measure(
    places: Sequence[Place],
    sets: Sequence[PromptSet],
    params: Sequence[SamplingParams],
    settings: LoadSettings,
    progress: Progress = lambda stage, done, total: None,
) -> Measured:
    """Put a server under load, or two in turns.

    Args:
        places: One server, or two of the same model, of which the second does not draft.
        params: A series of levels each; they differ in temperature. Request i is sent with `seed` + i.

    Returns:
        Where a server dies or hangs behind the first level, the levels before that, and `stopped`.

    Raises:
        ValueError: A server cannot be reached or does not answer, keeps prefixes though that is not allowed, or the
            second one drafts.
    """
    return asyncio.run(_measure(dict(zip((URL, AGAINST), places, strict=False)), sets, params, settings, progress))


async def _measure(
    places: Mapping[str, Place],
    sets: Sequence[PromptSet],
    params: Sequence[SamplingParams],
    settings: LoadSettings,
    progress: Progress,
) -> Measured:
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(place.client(settings.silence)) for name, place in places.items()
        }
        longest = max((prompt for one in sets for prompt in one.prompts), key=len)
        servers = {name: await _about(client, longest, settings) for name, client in clients.items()}
        equality = await _compare(clients, sets, params[0], progress) if AGAINST in clients else None
        plan = [(one, how, n) for one in sets for how in params for n in settings.concurrency]
        total = len(clients) * sum(_requests(one, n, settings) for one, _, n in plan)
        levels, problems, done, stopped = list[Level](), dict[str, None](), 0, ""
        for number, (one, how, n) in enumerate(plan):
            found = dict[str, Level]()
            names = list(clients)[:: 1 if number % 2 == 0 else -1]  # another one begins
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
    return Measured(servers, equality, tuple(levels), tuple(problems), stopped)


def _requests(one: PromptSet, at_once: int, settings: LoadSettings) -> int:
    return max(settings.requests or max(len(one.prompts), ROUNDS * at_once), at_once)


def _with_speedup(found: Mapping[str, Level]) -> list[Level]:
    own, other = (found[name].tokens_per_second if name in found else None for name in (URL, AGAINST))
    speedup = own / other if own and other else None
    return [replace(found[name], speedup=speedup if name == URL else None) for name in (URL, AGAINST) if name in found]


async def _about(client: Client, prompt: str, settings: LoadSettings) -> About:
    """Ask a prompt twice, which warms the server up too, and see whether the second time it was read."""
    short = SamplingParams(max_new_tokens=PROBE_TOKENS)
    snapshots, heard = [], list[Heard]()
    for _ in range(2):
        snapshots.append(await client.metrics())
        heard.append(await client.ask(prompt, short))
        if heard[-1].problem:
            raise UsageError(f"{client.url} does not answer a prompt ({heard[-1].problem}).")
    after = await client.metrics()
    counter, told = cached_tokens(snapshots[1], after), heard[1].cached
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
    return About(client.url, await client.model(), engine, on, how if on is not None else "nothing shows it")


async def _compare(
    clients: Mapping[str, Client], sets: Sequence[PromptSet], params: SamplingParams, progress: Progress
) -> Equality:
    """Ask both servers each prompt greedily, one at a time."""
    greedy = replace(params, temperature=0.0, seed=None)
    before = await clients[AGAINST].metrics()
    differences, count = list[Difference](), sum(len(one.prompts) for one in sets)
    done = 0
    for one in sets:
        for number, prompt in enumerate(one.prompts, 1):
            answers = [await client.ask(prompt, greedy) for client in clients.values()]
            for client, heard in zip(clients.values(), answers, strict=True):
                if heard.problem:
                    raise UsageError(f"{client.url} does not answer prompt {number} of {one.name} ({heard.problem}).")
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
    """Keep so many requests under way until `count` are answered."""
    numbers = iter(range(count))
    heard, idle = list[Heard](), list[float]()

    async def stream() -> None:
        for number in numbers:
            own = params if params.seed is None else replace(params, seed=params.seed + number)
            heard.append(await client.ask(one.prompts[number % len(one.prompts)], own))
        idle.append(time.perf_counter())

    before, began = await client.metrics(), time.perf_counter()
    streams = [asyncio.create_task(stream()) for _ in range(at_once)]
    try:
        await asyncio.gather(*streams)
    finally:  # where one has failed, the others need not go on
        for each in streams:
            each.cancel()
    found = acceptance(before, await client.metrics())
    problems = [each.problem for each in heard if each.problem]
    level = Level(
        server=name,
        prompt_set=one.name,
        temperature=params.temperature,
        concurrency=at_once,
        requests=count,
        failed=len(problems),
        **speeds(heard, began, min(idle)),
        tau=found.tau,
        acceptance_by_position=found.by_position,
    )
    return level, problems
