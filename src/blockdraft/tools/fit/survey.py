"""Survey for a fit: properties of target and machine, and the speeds of answers, features, training and drafting.

Speeds are medians of few short runs of the same code that the fit runs. Each phase of the survey has a share of its
time: it makes one measurement in any case, and more while its time lasts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from blockdraft.data.answerers import CHECKED_TOKENS
from blockdraft.data.documents import Document, TokenData, read_data, tokenizer_fingerprint
from blockdraft.data.hidden_states import plan_hidden_states
from blockdraft.data.loops import before_loop
from blockdraft.data.settings import HiddenStateSettings
from blockdraft.data.target_layers import target_hidden_states
from blockdraft.data.writer import DataWriter
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.engine import Engine, loops
from blockdraft.engine.adaptive.costs import Probe
from blockdraft.engine.text import encode
from blockdraft.errors import UsageError
from blockdraft.formats import read_drafter
from blockdraft.machine import free_bytes
from blockdraft.targets import Target
from blockdraft.timing import telling
from blockdraft.tools.fit.plan import Machine, Measured, Speeds, TargetFacts, anchors, reference, stored_target_layers
from blockdraft.training.devices import make_accelerator
from blockdraft.training.trainer import Trainer, measuring
from blockdraft.training.variant import find_variant
from blockdraft.types import Quantize, SamplingParams

SHARE, MOST_SECONDS = 0.1, 300.0  # of the hours, and at most, that the survey takes
ANSWERS, STEPS, CYCLES = 0.5, 0.35, 0.15  # shares of the survey
BATCHES = (8, 16, 32, 64)  # numbers of answers at a time that are tried
TRIED_TOKENS = 16  # of each answer while they are tried
ANSWER_TOKENS = 384  # maximum length of an answer while measuring
SAMPLED = 32  # number of answers that tell how long answers are
ROUNDED: Quantize = "int8"  # how a target is rounded whose answers take less time then
FASTER = 1.2  # times the speed from which on the rounded target writes the answers
RUNS = 3  # maximum number of runs of which the median counts
ROWS = (1, 4)  # sizes of training steps, in rows
BLOCKS = (2, 4, 8)
PROBED = 15  # cycles of a run
LONG = 0.98  # share of the documents that are no longer than a long one
CONTEXT = 64  # tokens before the cycles that are timed


class Repeats:
    """Repetitions of a measurement: one in any case, and up to `RUNS` while these seconds last."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __iter__(self) -> Iterator[int]:
        for number in range(RUNS):
            began = time.monotonic()
            yield number
            now = time.monotonic()
            if now + (now - began) > self._end:
                return


@dataclass(frozen=True)
class Answers:
    """Answers to some prompts.

    Attributes:
        prompts, answers: Token ids. Answers are kept up to where they begin to loop.
        lengths: Lengths of the answers as the fit would write them; those that were cut here may go on.
        looping: Share of the answers that loop.
        batch_size: Number of answers at a time that is fastest.
        rate: Tokens/s of answers that are kept.
        quantize: How the target was rounded that wrote them; None is not at all.
    """

    prompts: list[list[int]]
    answers: list[list[int]]
    lengths: list[int]
    looping: float
    batch_size: int
    rate: float
    quantize: Quantize | None


def target_facts(target: Target) -> TargetFacts:
    sizes = [weight.numel() * weight.element_size() for _, weight in target.named_weights()]
    return TargetFacts(
        layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        context=target.max_context,
        chats=target.tokenizer is not None and target.tokenizer.chat_template is not None,
        weight_bytes=sum(sizes),
        running=target.running,
        best_block_size=target.best_block_size,
        inner_size=int(target.shape.get("intermediate_size") or 0),
    )


def machine(target: Target, out: Path) -> Machine:
    disk = next(parent for parent in [out.absolute(), *out.absolute().parents] if parent.exists())
    return Machine(
        device=target.device.type,
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=free_bytes(torch.device("cpu")),
        device_memory=free_bytes(target.device),
        disk=shutil.disk_usage(disk).free,
    )


def may_be_rounded(target: Target) -> bool:
    """Whether products of this target may take less time in few bits: it is compiled for a CPU, in 16 bits or more."""
    return (
        target.device.type == "cpu"
        and getattr(target, "compiled", None) is not None
        and not getattr(target, "bits", None)
    )


def age() -> float:
    """Seconds since this process began."""
    return max(time.time() - psutil.Process().create_time(), 0.0)


def measure(
    target: Target,
    prompts: Sequence[Any],
    hours: float,
    max_new_tokens: int,
    variants: Sequence[str],
    folder: Path,
    note: Callable[[str], None],
    rounded: Callable[[], Target] | None = None,
) -> Measured:
    """Measure how fast the target answers these prompts, and how fast drafters for it are trained and draft, on this
    machine.

    Args:
        prompts: Prompts as the engine takes them. More of them make the lengths of answers surer.
        hours: Time of the whole fit; measuring takes `SHARE` of it, and `MOST_SECONDS` at most, except where a single
            measurement takes longer.
        max_new_tokens: Maximum length of an answer of the fit.
        variants: Kinds of drafters to compare.
        folder: Folder for temporary data and drafters, which the caller deletes.
        rounded: Loads the target rounded by `ROUNDED`, which may write the answers; None does not try that.
    """
    seconds, began = min(SHARE * 3600 * hours, MOST_SECONDS), time.monotonic()
    with telling(note, "Answering some prompts"):
        found = _answers(target, prompts, ANSWERS * seconds, max_new_tokens, rounded)
    mean = statistics.mean(found.lengths)
    how = "" if found.quantize is None else f", by the target in {found.quantize}"
    note(f"answers: {found.rate:.0f} tokens/s, {found.batch_size} at a time, {mean:.0f} tokens each{how}")
    data = _documents(folder / "data", target, found)
    shapes = {name: reference(name, target_facts(target)) for name in variants}
    with telling(note, "Computing the target's features of these answers, once for all drafters"):
        target_layers = sorted(
            {
                target_layer
                for name, shape in shapes.items()
                for target_layer in stored_target_layers(name, shape, target.num_layers)
            }
        )
        rate = _hidden_states(target, data, tuple(target_layers), folder / "hidden_states")
    note(f"features: {rate:.0f} tokens/s")
    length = min(target.max_context, max(data.lengths) + 64)
    steps, drafters = dict[str, dict[int, float]](), dict[str, Drafter]()
    for name, shape in shapes.items():
        if steps and time.monotonic() - began > (ANSWERS + STEPS) * seconds:
            note(f"{name} is left out, since the time for measuring is up; --variant {name} would take it")
            continue
        with telling(note, f"Timing training steps of {name}"):
            trainer = _trainer(name, shape, length, target, data, folder / "hidden_states", folder / name)
            steps[name] = _step_seconds(trainer, STEPS * seconds / len(shapes))
            trainer.write(folder / name / "drafter")
            drafters[name] = load_drafter(folder / name / "drafter", target=target)
            del trainer
        times = ", ".join(f"{took:.2f} s of {rows * length} tokens" for rows, took in steps[name].items())
        note(f"{name}: training steps take {times}")
    with telling(note, "Timing cycles of drafting"):
        cycles, plain = _cycles(target, drafters, CYCLES * seconds)
    speeds = {}
    for name, costs in cycles.items():
        told = ", ".join(f"{cost:.2f} with blocks of {size}" for size, cost in costs.items())
        note(f"{name}: cycles take, over a plain one, {told}")
        vocabulary = target.tokenizer.get_vocab() if target.tokenizer else None
        weights = read_drafter(folder / name / "drafter", vocabulary, target.num_layers).tensors
        speeds[name] = Speeds(
            tokens=tuple(rows * length for rows in steps[name]),
            seconds=tuple(steps[name].values()),
            cycles=costs,
            parameters=sum(weight.numel() for weight in weights.values()),
        )
    lengths = sorted(len(prompt) + more for prompt, more in zip(found.prompts, found.lengths, strict=True))
    return Measured(
        prompt_tokens=statistics.mean(map(len, found.prompts)),
        long_document=lengths[int(LONG * len(lengths))],
        answer_tokens=mean,
        looping=found.looping,
        answer_rate=found.rate,
        plain_seconds=plain,
        read_rate=rate,
        speeds=speeds,
        batch_size=found.batch_size,
        quantize=found.quantize,
    )


def _answers(
    target: Target,
    prompts: Sequence[Any],
    seconds: float,
    max_new_tokens: int,
    rounded: Callable[[], Target] | None = None,
) -> Answers:
    """Find the fastest number of answers at a time, and precision, and write as many answers."""
    began = time.monotonic()
    ids = [encode(prompt, target) for prompt in prompts]
    ids = [each for each in ids if len(each) + TRIED_TOKENS < target.max_context]
    rates = dict[int, float]()
    with Engine(target, load_drafter("none", target=target), max_batch_size=1) as engine:
        engine.generate(ids[:1], SamplingParams(max_new_tokens=4))  # compiles and allocates
    for size in BATCHES:
        _, rates[size] = _answer(target, ids, size, size, TRIED_TOKENS)
        # More at a time do not pay any longer, or there is no time to try.
        if rates[size] < 1.05 * max([0.0, *(rates[one] for one in rates if one != size)]):
            break
        if size >= len(ids) or time.monotonic() - began > seconds / 3:
            break
    best = max(rates, key=lambda size: rates[size])
    fastest = rates[best]
    quantize: Quantize | None = None
    if rounded is not None and time.monotonic() - began < seconds / 2:
        with contextlib.suppress(UsageError):  # it cannot be rounded
            other = rounded()
            _, rate = _answer(other, ids, best, best, TRIED_TOKENS)
            if rate > FASTER * fastest:
                target, fastest, quantize = other, rate, ROUNDED
    left = max(seconds - (time.monotonic() - began), 0.0)
    count = min(max(SAMPLED, best), len(ids))
    tokens = int(left * fastest / count)
    tokens = max(TRIED_TOKENS, min(tokens, ANSWER_TOKENS, max_new_tokens))
    written, rate = _answer(target, ids, best, count, tokens)
    kept, looped = zip(*(before_loop(answer) for _, answer, _ in written), strict=True)
    # A looping answer ends where the loop is found; one that was cut here may go on, nobody knows how far.
    full = [max_new_tokens if cut else len(answer) for _, answer, cut in written]
    lengths = [len(k) if loop else n for k, loop, n in zip(kept, looped, full, strict=True)]
    spent = [_found_to_loop(w[1]) if loop else n for w, loop, n in zip(written, looped, full, strict=True)]
    return Answers(
        prompts=[prompt for prompt, _, _ in written],
        answers=[answer or w[1] for answer, w in zip(kept, written, strict=True)],
        lengths=lengths,
        looping=statistics.mean(looped),
        batch_size=best,
        rate=rate * max(sum(lengths), 1) / sum(spent),
        quantize=quantize,
    )


def _answer(
    target: Target, ids: Sequence[list[int]], size: int, count: int, tokens: int
) -> tuple[list[tuple[list[int], list[int], bool]], float]:
    """Write `count` answers, `size` at a time.

    Returns:
        Prompts with the tokens of their answers and whether they were cut at `tokens` tokens; and tokens/s.
    """
    chosen = [ids[i % len(ids)] for i in range(count)]
    params = [SamplingParams(max_new_tokens=min(tokens, target.max_context - len(one))) for one in chosen]
    with Engine(target, load_drafter("none", target=target), max_batch_size=size) as engine:
        began = time.perf_counter()
        found = [completion.checked() for completion in engine.generate(chosen, params)]
        rate = sum(len(one.token_ids) for one in found) / (time.perf_counter() - began)
    ends = [one.finish_reason == "length" for one in found]
    return [(p, one.token_ids, cut) for p, one, cut in zip(chosen, found, ends, strict=True)], rate


def _found_to_loop(answer: list[int]) -> int:
    """Number of tokens after which `EngineAnswerer` finds that a looping answer loops."""
    places = range(CHECKED_TOKENS, len(answer), CHECKED_TOKENS)
    return next((place for place in places if loops(answer[:place])), len(answer))


def _documents(folder: Path, target: Target, found: Answers) -> TokenData:
    assert target.tokenizer is not None
    writer = DataWriter(folder, {"tokenizer": tokenizer_fingerprint(target.tokenizer)})
    writer.begin()
    for record, (prompt, answer) in enumerate(zip(found.prompts, found.answers, strict=True)):
        supervised = torch.arange(len(prompt) + len(answer)) >= len(prompt)
        writer.add(record, [Document(torch.tensor(prompt + answer), supervised)])
    writer.finish()
    return read_data(folder)


def _hidden_states(target: Target, data: TokenData, target_layers: tuple[int, ...], folder: Path) -> float:
    """Write the features of the data, and return the tokens/s."""
    target_hidden_states(target, target_layers, [data[0].tokens[:16]])  # compiles and allocates
    began = time.perf_counter()
    plan_hidden_states(folder, target, data, target_layers, HiddenStateSettings()).write()
    return sum(data.lengths) / (time.perf_counter() - began)


def _trainer(
    variant: str, shape: dict[str, Any], length: int, target: Target, data: TokenData, hidden_states: Path, folder: Path
) -> Trainer:
    """A trainer of a drafter of this shape, which saves and measures nothing."""
    blocks = anchors(length, shape["block_size"])
    fields = {**shape, "length": length, "batch": ROWS[-1], "anchors": blocks, "held_out": 1}
    fields |= {"chunk": ROWS[-1] * blocks, "steps": 1, "hidden_states": str(hidden_states), "trackers": ()}
    fields |= {"alone": 0.0} if "alone" in fields else {}  # steps of whole blocks, which take longer
    recipe = find_variant(variant).recipe_class(**fields)
    accelerator = make_accelerator(recipe, folder, "cpu" if target.device.type == "cpu" else None)
    return measuring(variant, target, data, folder / "run", recipe, accelerator)


def _step_seconds(trainer: Trainer, seconds: float) -> dict[int, float]:
    """Seconds of a training step by its number of rows."""
    took: dict[int, list[float]] = {rows: [] for rows in ROWS}
    first = trainer.timed_step(ROWS[0])  # compiles and allocates
    if first > seconds:  # no time for more; a step takes at most in proportion to its rows
        return {rows: first * rows / ROWS[0] for rows in ROWS}
    for _ in Repeats(seconds):
        for rows, times in took.items():
            times.append(trainer.timed_step(rows))
    return {rows: statistics.median(times) for rows, times in took.items()}


def _cycles(target: Target, drafters: dict[str, Drafter], seconds: float) -> tuple[dict[str, dict[int, float]], float]:
    """Seconds of a cycle over those of a plain one, by drafter and block size; and seconds of a plain cycle. All take
    turns, so that other load of the machine falls on all alike."""
    probes = {name: Probe(target, drafter) for name, drafter in drafters.items()}
    ratios: dict[str, dict[int, list[float]]] = {name: {size: [] for size in BLOCKS} for name in probes}
    plain: list[float] = []
    for _ in Repeats(seconds):
        now = _cycle_seconds(next(iter(probes.values())), 0)
        plain.append(now)
        for name, sizes in ratios.items():
            for size, found in sizes.items():
                found.append(_cycle_seconds(probes[name], size - 1) / now)
    medians = {
        name: {size: statistics.median(found) for size, found in sizes.items()} for name, sizes in ratios.items()
    }
    return medians, statistics.median(plain)


def _cycle_seconds(probe: Probe, draft_tokens: int) -> float:
    context = min(CONTEXT, probe.target.max_context // 4)
    return statistics.median(took for _, took in probe(1, context, draft_tokens, False, PROBED)[2:])
