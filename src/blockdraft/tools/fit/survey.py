"""Survey for a fit: properties of target and machine, and the speeds of answers, features, training and drafting.

Speeds are medians of several short runs of the same code that the fit runs.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from blockdraft.data.documents import Document, TokenData, read_data, tokenizer_fingerprint
from blockdraft.data.settings import DataSettings
from blockdraft.data.taps import tapped_features
from blockdraft.data.writer import DataWriter
from blockdraft.drafters import load_drafter
from blockdraft.engine import Completion, Engine, loops
from blockdraft.engine.adaptive.calibrate import Probe
from blockdraft.engine.text import encode
from blockdraft.machine import free_bytes, wait_for
from blockdraft.targets import Target
from blockdraft.tools.fit.plan import Machine, Measured, Speeds, TargetFacts, anchors, reference
from blockdraft.training.devices import make_accelerator
from blockdraft.training.progress import Progress, run_folder
from blockdraft.training.trainer import train
from blockdraft.training.variant import find_variant
from blockdraft.types import SamplingParams

RUNS = 3  # of which the median counts
ANSWER_TOKENS = 256  # of an answer at most while measuring
SHARE = 0.05  # of the hours that measuring the answers may take
STEPS = 3  # training steps that are timed in each run
ROWS = (1, 4)  # of such a step
BLOCKS = (2, 4, 8)
CYCLES = 15
LONG = 0.98  # share of the documents that are no longer than a long one
CONTEXT = 64  # tokens before the cycles that are timed


class Clock:
    """When a run said that something was done."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        if done:
            self.moments.append(time.perf_counter())


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
) -> Measured:
    """How fast the target answers these prompts and drafters for it are trained and draft, on this machine.

    Args:
        prompts: As the engine takes them; the more of them, the better lengths are known.
        hours: Of the whole fit; measuring takes a small share of it.
        max_new_tokens: Of an answer later.
        folder: For data and drafters that are made to be measured; who calls deletes it.
    """
    answers, rate = _answers(target, prompts, hours, max_new_tokens)
    # What was cut here may go on later, nobody knows how far.
    full = [max_new_tokens if cut else len(ids) for _, ids, cut in answers]
    note(f"answers: {rate:.0f} tokens/s, {statistics.mean(full):.0f} tokens each")
    data = _documents(folder / "data", target, answers)
    reading = _read_rate(target, data)
    speeds, plain = _speeds(variants, target, data, folder)
    for name, one in speeds.items():
        note(
            f"{name}: a training step of {one.tokens[-1]} tokens {one.seconds[-1]:.2f} s, "
            f"a cycle {' '.join(f'{r:.2f}' for r in one.cycles.values())} times a plain one "
            f"in blocks of {', '.join(map(str, one.cycles))}"
        )
    return Measured(
        prompt_tokens=statistics.mean(len(prompt) for prompt, _, _ in answers),
        long_document=sorted(len(prompt) + more for (prompt, _, _), more in zip(answers, full, strict=True))[
            int(LONG * len(answers))
        ],
        answer_tokens=statistics.mean(full),
        looping=statistics.mean(loops(ids) for _, ids, _ in answers),
        answer_rate=rate,
        plain_seconds=plain,
        read_rate=reading,
        speeds=speeds,
    )


def _answers(
    target: Target, prompts: Sequence[Any], hours: float, max_new_tokens: int
) -> tuple[list[tuple[list[int], list[int], bool]], float]:
    """Prompts with the tokens of their answers and whether they were cut here, and tokens/s; from several runs."""
    engine = Engine(target, load_drafter("none", target=target), max_batch_size=DataSettings.batch_size)
    ids = [encode(prompt, target) for prompt in prompts]
    ids = [each for each in ids if len(each) + 16 < target.max_context]
    size = min(DataSettings.batch_size, len(ids))

    def run(begin: int, tokens: int) -> tuple[list[Completion], float]:
        chosen = [ids[(begin + i) % len(ids)] for i in range(size)]
        params = [SamplingParams(max_new_tokens=min(tokens, target.max_context - len(one))) for one in chosen]
        began = time.perf_counter()
        found = [completion.checked() for completion in engine.generate(chosen, params)]
        return found, sum(len(one.token_ids) for one in found) / (time.perf_counter() - began)

    with engine:
        run(0, 8)  # memory, compiled code
        _, first = run(0, 16)
        tokens = int(SHARE * 3600 * hours * first / (RUNS * size))
        tokens = max(16, min(tokens, ANSWER_TOKENS, max_new_tokens))
        answers, rates = [], []
        for number in range(RUNS):
            found, rate = run(number * size, tokens)
            rates.append(rate)
            for i, one in enumerate(found):
                cut = one.finish_reason == "length" and tokens < max_new_tokens
                answers.append((ids[(number * size + i) % len(ids)], one.token_ids, cut))
    return answers, statistics.median(rates)


def _documents(folder: Path, target: Target, answers: Sequence[tuple[list[int], list[int], bool]]) -> TokenData:
    assert target.tokenizer is not None
    writer = DataWriter(folder, {"tokenizer": tokenizer_fingerprint(target.tokenizer)})
    writer.begin()
    for row, (prompt, answer, _) in enumerate(answers):
        supervised = torch.arange(len(prompt) + len(answer)) >= len(prompt)
        writer.add(row, [Document(torch.tensor(prompt + answer), supervised)])
    writer.finish()
    return read_data(folder)


def _read_rate(target: Target, data: TokenData) -> float:
    """Tokens/s of which the target makes features."""
    tokens = [data[i].tokens for i in range(min(len(data), 8))]
    rates = []
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        tapped_features(target, [0], tokens)
        wait_for(target.device)
        rates.append(sum(map(len, tokens)) / (time.perf_counter() - began))
    return statistics.median(rates[1:])


def _speeds(variants: Sequence[str], target: Target, data: TokenData, folder: Path) -> tuple[dict[str, Speeds], float]:
    """Speeds of each variant, of a drafter that has learned nothing yet, which takes as long; and seconds of a plain
    cycle. All take turns, so that what else the machine does falls on all alike."""
    length = min(target.max_context, max(data.lengths) + 64)
    steps: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in variants for rows in ROWS}
    for turn in range(RUNS):
        for (name, rows), seconds in steps.items():
            seconds += _step_seconds(name, rows, length, target, data, folder / f"{name}-{rows}-{turn}")
    drafters = {name: load_drafter(folder / f"{name}-{ROWS[-1]}-0", target=target) for name in variants}
    probes = {name: Probe(target, drafter) for name, drafter in drafters.items()}
    cycles: dict[tuple[str, int], list[float]] = {(name, size): [] for name in variants for size in BLOCKS}
    plain: list[float] = []
    for _ in range(RUNS):
        now = _cycle_seconds(probes[variants[0]], 0)
        plain.append(now)
        for (name, size), ratios in cycles.items():
            ratios.append(_cycle_seconds(probes[name], size - 1) / now)
    found = {}
    for name, drafter in drafters.items():
        times = tuple(statistics.median(steps[name, rows]) for rows in ROWS)
        costs = {size: statistics.median(cycles[name, size]) for size in BLOCKS}
        network: torch.nn.Module = drafter.network  # type: ignore[attr-defined]  # of all variants that are trained
        parameters = sum(weight.numel() for weight in network.state_dict().values())
        found[name] = Speeds(tuple(rows * length for rows in ROWS), times, costs, parameters)
    return found, statistics.median(plain)


def _step_seconds(variant: str, rows: int, length: int, target: Target, data: TokenData, out: Path) -> list[float]:
    """What some training steps take; `out` gets the drafter."""
    chosen = reference(variant, target_facts(target))
    blocks = anchors(length, chosen["block_size"])
    fields = {**chosen, "length": length, "batch": rows, "anchors": blocks, "held_out": 1, "chunk": rows * blocks}
    fields |= {"steps": STEPS + 2, "features": "memory", "trackers": ()}
    fields |= {"eval_every": 0, "eval_prompts": 0, "save_every": 0}
    recipe = find_variant(variant).recipe_class(**fields)
    accelerator = make_accelerator(recipe, out, "cpu" if target.device.type == "cpu" else None)
    clock = Clock()
    train(variant, target, data, out, recipe, accelerator, progress=Progress(clock))
    shutil.rmtree(run_folder(out))  # the checkpoint, which is large
    ended = clock.moments[-STEPS - 2 : -1]  # the first step warms up, the last one writes the drafter
    return [after - before for before, after in pairwise(ended)]


def _cycle_seconds(probe: Probe, guesses: int) -> float:
    context = min(CONTEXT, probe.target.max_context // 4)
    return statistics.median(took for _, took in probe(1, context, guesses, False, CYCLES)[2:])
