"""Survey for a fit: properties of target and machine, and speeds of responses, hidden states, training and drafting.

Speeds are medians of a few short runs of the code that the fit runs. Each phase of the survey has a share of its time.
It measures once in any case, and again while its time lasts.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from blockdraft.drafters import Drafter, load_drafter
from blockdraft.engine import Engine, loops
from blockdraft.engine.adaptive.costs import Probe
from blockdraft.engine.text import encode
from blockdraft.errors import UsageError
from blockdraft.machine import free_bytes
from blockdraft.targets import Target
from blockdraft.timing import telling
from blockdraft.types import Quantize, SamplingParams
from blockdraft_train.data.documents import Document, TokenData, read_data
from blockdraft_train.data.hidden_states import plan_hidden_states
from blockdraft_train.data.loops import before_loop
from blockdraft_train.data.responders import CHECKED_TOKENS
from blockdraft_train.data.settings import HiddenStateSettings
from blockdraft_train.data.target_layers import target_hidden_states
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter
from blockdraft_train.devices import make_accelerator
from blockdraft_train.fit.facts import FitMachine, Speeds, TargetFacts, TargetMeasurements, duration
from blockdraft_train.fit.plan import anchors, layer_weights, reference, stored_target_layers
from blockdraft_train.job import TrainingJob
from blockdraft_train.trainer import Trainer
from blockdraft_train.variant import find_variant

SHARE, MAX_SECONDS = 0.1, 240.0  # of the hours, and at most, that the survey takes
ANSWERS, STATES, STEPS = 0.35, 0.5, 0.8  # shares of the survey after which responses, hidden states, steps are measured
BATCHES = (8, 16, 32, 64)  # batch sizes to try
TRIED_TOKENS = 16  # of each response while batch sizes are tried
ANSWER_TOKENS = 384  # maximum length of a measured response
SAMPLED = 32  # responses that tell how long responses are
WRITER_QUANTIZE: Quantize = "int8"  # how the target is quantized that may write the responses
FASTER = 1.2  # speed-up from which on the quantized target writes the responses
RUNS = 3  # maximum number of runs of which the median counts
ROWS = (1, 4)  # sizes of training steps, in sequences
SHORT = 128  # maximum tokens of a prompt, and of a response, that slow targets are trained on
BLOCKS = (2, 4, 8)
PROBED = 9  # decoding steps of a run, of which the first two do not count
LONG = 0.98  # share of the documents that are no longer than a long one
CONTEXT = 64  # tokens before the decoding steps that are timed


def repeats(end: float) -> Iterator[int]:
    """Count repetitions of a measurement: one in any case, and up to `RUNS` that end before the time `end`."""
    for number in range(RUNS):
        start = time.monotonic()
        yield number
        now = time.monotonic()
        if now + (now - start) > end:
            return


@dataclass(frozen=True)
class SampledResponses:
    """Responses to some prompts.

    Attributes:
        prompts, responses: Token ids. Responses are cut where they become repetitive.
        lengths: Lengths of the responses as the fit would write them; those that were cut here may go on.
        repetitive: Share of the responses that are repetitive.
        batch_size: Fastest batch size.
        rate: Tokens/s of responses, without repetitions.
        quantize: How the target that wrote them is quantized; None is not at all.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    lengths: list[int]
    repetitive: float
    batch_size: int
    rate: float
    quantize: Quantize | None


def target_facts(target: Target) -> TargetFacts:
    return TargetFacts(
        layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        context=target.max_context,
        chats=target.tokenizer is not None and target.tokenizer.chat_template is not None,
        weight_bytes=target.weight_bytes(),
        running=target.running,
        device=target.device.type,
        best_block_size=target.best_block_size,
        inner_size=int(target.shape.get("intermediate_size") or 0),
    )


def machine(target: Target, out: Path) -> FitMachine:
    disk = next(parent for parent in [out.absolute(), *out.absolute().parents] if parent.exists())
    return FitMachine(
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=free_bytes(torch.device("cpu")),
        device_memory=free_bytes(target.device),
        disk=shutil.disk_usage(disk).free,
    )


def may_be_quantized(target: Target) -> bool:
    """Return whether quantization may make this target faster: it is compiled for a CPU, in 16 bits or more."""
    is_compiled = target.device.type == "cpu" and target.is_compiled
    return is_compiled and not getattr(target, "bits", None)


def age() -> float:
    """Return the seconds since this process started."""
    return max(time.time() - psutil.Process().create_time(), 0.0)


def measure(
    target: Target,
    facts: TargetFacts,
    prompts: Sequence[Any],
    hours: float,
    max_new_tokens: int,
    variants: Sequence[str],
    folder: Path,
    note: Callable[[str], None],
    load_quantized: Callable[[], Target] | None = None,
) -> TargetMeasurements:
    """Measure how fast the target answers these prompts here, and how fast drafters for it train and draft.

    Args:
        prompts: Prompts as the engine takes them. With more of them, the length of responses is better known.
        hours: Time of the whole fit. The survey takes `SHARE` of it, and `MAX_SECONDS` at most, unless a single
            measurement takes longer.
        max_new_tokens: Maximum length of a response of the fit.
        variants: Kinds of drafters to compare.
        folder: Folder for temporary data and drafters, which the caller deletes.
        load_quantized: Loads the target quantized by `WRITER_QUANTIZE`, which may write the responses; None does not
            try that.
    """
    start, seconds = time.monotonic(), min(SHARE * 3600 * hours, MAX_SECONDS)

    def stage(what: str) -> AbstractContextManager[None]:
        def text() -> str:
            left = start + seconds - time.monotonic()
            return f"{what} (about {duration(left)} left to measure)" if left > 1 else what

        return telling(note, text)

    with stage("Answering some prompts"):
        sample = _responses(target, prompts, ANSWERS * seconds, max_new_tokens, load_quantized)
    mean = statistics.mean(sample.lengths)
    writer = "" if sample.quantize is None else f", by the target in {sample.quantize}"
    note(f"responses: {sample.rate:.0f} tokens/s, {sample.batch_size} at a time, {mean:.0f} tokens each{writer}")
    data = _documents(folder / "data", target, sample, (STATES - ANSWERS) * seconds)
    shapes = {name: reference(name, facts) for name in variants}
    weights = {name: layer_weights(shape, facts) for name, shape in shapes.items()}
    # The smallest kind comes first, so that a slow target's time is not spent on a kind of many layers.
    shapes = dict(sorted(shapes.items(), key=lambda item: weights[item[0]]))
    with stage("Computing the target's hidden states of these responses, once for all drafters"):
        layers = {i for name, shape in shapes.items() for i in stored_target_layers(name, shape, target.num_layers)}
        read_rate = _read_rate(target, data, tuple(sorted(layers)), folder / "hidden_states")
    note(f"hidden states: {read_rate:.0f} tokens/s")
    length = min(target.max_context, max(data.lengths) + 64)
    steps, drafters, parameters = dict[str, dict[int, float]](), dict[str, Drafter](), dict[str, int]()
    for name, shape in shapes.items():
        left = start + STEPS * seconds - time.monotonic()
        if left < max(
            (weights[name] / weights[n] * sum(took.values()) for n, took in steps.items()), default=-math.inf
        ):
            note(f"{name} is left out, since the time for measuring is up; --variant {name} would take it")
            continue
        with stage(f"Timing training steps of {name}"):
            trainer = _trainer(name, shape, length, target, data, folder / "hidden_states", folder / name)
            steps[name] = _step_seconds(trainer, time.monotonic() + left / (len(shapes) - len(steps)))
            parameters[name] = sum(weight.numel() for weight in trainer.module.parameters())
            trainer.write(folder / name / "drafter")
            drafters[name] = load_drafter(folder / name / "drafter", target=target)
            del trainer
        times = ", ".join(f"{took:.2f} s of {rows * length} tokens" for rows, took in steps[name].items())
        note(f"{name}: training steps take {times}")
    with stage("Timing decoding steps"):
        step_costs, plain_seconds = _step_costs(target, drafters, start + seconds)
    for name, costs in step_costs.items():
        listed = ", ".join(f"{cost:.2f} with blocks of {size}" for size, cost in costs.items())
        note(f"{name}: drafted steps take, over a plain one, {listed}")
    documents = sorted(len(prompt) + more for prompt, more in zip(sample.prompts, sample.lengths, strict=True))
    return TargetMeasurements(
        prompt_tokens=statistics.mean(map(len, sample.prompts)),
        long_document=documents[int(LONG * len(documents))],
        answer_tokens=mean,
        repetitive=sample.repetitive,
        answer_rate=sample.rate,
        plain_seconds=plain_seconds,
        read_rate=read_rate,
        speeds={
            name: Speeds(
                tokens=tuple(rows * length for rows in times),
                seconds=tuple(times.values()),
                step_costs=step_costs[name],
                parameters=parameters[name],
            )
            for name, times in steps.items()
        },
        batch_size=sample.batch_size,
        quantize=sample.quantize,
    )


def _responses(
    target: Target,
    prompts: Sequence[Any],
    seconds: float,
    max_new_tokens: int,
    load_quantized: Callable[[], Target] | None = None,
) -> SampledResponses:
    """Find the fastest batch size and precision, and write at least one batch of responses with them."""
    start = time.monotonic()
    ids = [encode(prompt, target) for prompt in prompts]
    ids = [prompt for prompt in ids if len(prompt) + TRIED_TOKENS < target.max_context]
    usual = min(ANSWER_TOKENS, max_new_tokens)
    _respond(target, ids, 1, 1, 4, usual)  # compiles and allocates
    rates, tried = dict[int, float](), dict[int, list[tuple[list[int], list[int], bool]]]()
    for size in BATCHES:
        tried[size], rates[size], prefill = _respond(target, ids, size, size, TRIED_TOKENS, usual)
        # Stop where larger batches are no longer faster, or where there is no time to try.
        is_slower = rates[size] < 1.05 * max([0.0, *(rate for other, rate in rates.items() if other != size)])
        if is_slower or time.monotonic() - start > seconds / 3:
            break
    batch_size = max(rates, key=lambda size: rates[size])
    written, rate = tried[batch_size], rates[batch_size]
    quantize: Quantize | None = None
    if load_quantized is not None and time.monotonic() - start < seconds / 2:
        with contextlib.suppress(UsageError):  # it cannot be quantized
            other = load_quantized()
            faster, faster_rate, faster_prefill = _respond(other, ids, batch_size, batch_size, TRIED_TOKENS, usual)
            if faster_rate > FASTER * rate:
                target, written, rate, prefill = other, faster, faster_rate, faster_prefill
                quantize = WRITER_QUANTIZE
    count = max(min(SAMPLED, len(ids)), batch_size)
    left = max(seconds - (time.monotonic() - start) - count * prefill, 0.0)
    tokens = min(int(left * rate / count), ANSWER_TOKENS, max_new_tokens)
    if tokens > TRIED_TOKENS:
        written, rate, _ = _respond(target, ids, batch_size, count, tokens, usual)
    useful, looped = zip(*(before_loop(response) for _, response, _ in written), strict=True)
    # A repetitive response ends where the repetition is noticed. One that was cut here may be as long as allowed.
    full = [max_new_tokens if cut else len(response) for _, response, cut in written]
    lengths = [len(response) if loop else n for response, loop, n in zip(useful, looped, full, strict=True)]
    spent = [_noticed(response) if loop else n for (_, response, _), loop, n in zip(written, looped, full, strict=True)]
    return SampledResponses(
        prompts=[prompt for prompt, _, _ in written],
        responses=[response or whole for response, (_, whole, _) in zip(useful, written, strict=True)],
        lengths=lengths,
        repetitive=statistics.mean(looped),
        batch_size=batch_size,
        rate=rate * max(sum(lengths), 1) / sum(spent),
        quantize=quantize,
    )


def _respond(
    target: Target, ids: Sequence[list[int]], batch_size: int, count: int, tokens: int, usual: int
) -> tuple[list[tuple[list[int], list[int], bool]], float, float]:
    """Write `count` responses.

    Returns:
        Prompts, responses, and whether these were cut at `tokens` tokens; tokens/s of responses that are cut at `usual`
        tokens instead, of which prefill takes a smaller share; and the seconds of prefill per response.
    """
    prompts = [ids[i % len(ids)] for i in range(count)]
    params = [SamplingParams(max_new_tokens=min(tokens, target.max_context - len(prompt))) for prompt in prompts]
    with Engine(target, load_drafter("none", target=target), max_batch_size=batch_size) as engine:
        start = time.perf_counter()
        completions = [completion.checked() for completion in engine.generate(prompts, params)]
        seconds = time.perf_counter() - start
    prefill, more = sum(completion.stats.read_seconds for completion in completions), max(usual / tokens, 1.0)
    made = sum(len(completion.token_ids) for completion in completions)
    rate = more * made / (prefill + more * max(seconds - prefill, 0.0))
    written = [(completion.token_ids, completion.finish_reason == "length") for completion in completions]
    answered = [(prompt, response, cut) for prompt, (response, cut) in zip(prompts, written, strict=True)]
    return answered, rate, prefill / count


def _noticed(response: list[int]) -> int:
    """Return the number of tokens after which `EngineResponder` notices that a response is repetitive."""
    places = range(CHECKED_TOKENS, len(response), CHECKED_TOKENS)
    return next((place for place in places if loops(response[:place])), len(response))


def _documents(folder: Path, target: Target, sample: SampledResponses, seconds: float) -> TokenData:
    """Write the responses as training data.

    If the target is too slow to read all of them in this time, documents are shortened and only as many taken as a
    training step needs.
    """
    assert target.tokenizer is not None
    pairs = list(zip(sample.prompts, sample.responses, strict=True))
    most = max(int(seconds * sample.rate), 2 * SHORT * (ROWS[-1] + 1))
    if sum(len(prompt) + len(response) for prompt, response in pairs) > most:
        pairs = [(prompt[-SHORT:], response[:SHORT]) for prompt, response in pairs]
    writer = DataWriter(folder, {"tokenizer": tokenizer_fingerprint(target.tokenizer)})
    writer.begin()
    for record, (prompt, response) in enumerate(pairs):
        if most > 0:
            supervised = torch.arange(len(prompt) + len(response)) >= len(prompt)
            writer.add(record, [Document(torch.tensor(prompt + response), supervised)])
        most -= len(prompt) + len(response)
    writer.finish()
    return read_data(folder)


def _read_rate(target: Target, data: TokenData, layers: tuple[int, ...], folder: Path) -> float:
    """Store the hidden states of the data, and return the tokens/s."""
    target_hidden_states(target, layers, [data[0].tokens[:16]])  # compiles and allocates
    start = time.perf_counter()
    plan_hidden_states(folder, target, data, layers, HiddenStateSettings()).write()
    return sum(data.lengths) / (time.perf_counter() - start)


def _trainer(
    variant: str, shape: dict[str, Any], length: int, target: Target, data: TokenData, hidden_states: Path, folder: Path
) -> Trainer:
    """Return a trainer of a drafter of this shape, which saves and measures nothing."""
    blocks = anchors(length, shape["block_size"])
    fields = {**shape, "length": length, "batch": ROWS[-1], "anchors": blocks, "held_out": 1}
    fields |= {"chunk": ROWS[-1] * blocks, "steps": 1, "hidden_states": str(hidden_states), "trackers": ()}
    fields |= {"alone": 0.0} if "alone" in fields else {}  # steps of whole blocks, which take longer
    recipe = find_variant(variant).recipe_class(**fields)
    accelerator = make_accelerator(recipe, folder, "cpu" if target.device.type == "cpu" else None)
    return Trainer(TrainingJob(variant, target, data, folder / "run", recipe, accelerator))


def _step_seconds(trainer: Trainer, end: float) -> dict[int, float]:
    """Return the seconds of a training step by its number of sequences."""
    first = trainer.timed_step(ROWS[0])  # compiles and allocates
    if time.monotonic() > end:  # no time for more; a step takes at most in proportion to its sequences
        return {rows: first * rows / ROWS[0] for rows in ROWS}
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in repeats(end):
        for rows, measured in times.items():
            measured.append(trainer.timed_step(rows))
    return {rows: statistics.median(measured) for rows, measured in times.items()}


def _step_costs(target: Target, drafters: dict[str, Drafter], end: float) -> tuple[dict[str, dict[int, float]], float]:
    """Time decoding steps, interleaved, so that other load of the machine affects all drafters alike.

    Returns:
        Time of a drafted step over that of a plain one, by drafter and block size; and seconds of a plain step.
    """
    probes = {name: Probe(target, drafter) for name, drafter in drafters.items()}
    ratios: dict[str, dict[int, list[float]]] = {name: {size: [] for size in BLOCKS} for name in probes}
    plain: list[float] = []
    for _ in repeats(end):
        plain.append(_decoding_seconds(next(iter(probes.values())), 0))
        for name, sizes in ratios.items():
            for size, measured in sizes.items():
                measured.append(_decoding_seconds(probes[name], size - 1) / plain[-1])
    medians = {
        name: {size: statistics.median(measured) for size, measured in sizes.items()} for name, sizes in ratios.items()
    }
    return medians, statistics.median(plain)


def _decoding_seconds(probe: Probe, num_draft_tokens: int) -> float:
    context = min(CONTEXT, probe.target.max_context // 4)
    return statistics.median(took for _, took in probe(1, context, num_draft_tokens, False, PROBED)[2:])
