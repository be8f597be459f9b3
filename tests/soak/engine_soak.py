"""One engine under load and faults for a long time.

The bundled pair serves 16 requests at a time from several threads: chats that continue each other, prompts of random
length, and cancellations. Target, drafter and tokenizer raise at random, and logits become NaN. Every greedy output
that ends well must be a prefix of plain decoding. At the end, memory must not have grown, all outputs must be right
without faults, and no thread may be left.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from typing import Any

import psutil
from benchmarks.harness.command import PROMPTS
from soak_faults import Faults, FaultyDrafter, FaultyTarget
from soak_load import Load, known_answers, outcome
from soak_report import SHORTEST_MINUTES, Sample, grown_too_much, growth

from blockdraft import Drafting, Engine, SamplingParams, load_drafter, load_target

MAX_OFF = 0.10  # of the engine's own figure for its memory


def soak(
    minutes: float, at_a_time: int = 16, share: float = 0.002, tokens: int = 96, chats: int = 8, turns: int = 3,
    threads: int = 4, tree_budget: Any = 16, patience: float = 120.0,
) -> tuple[dict[str, Any], list[Sample], list[str]]:  # fmt: skip
    """Run it.

    Args:
        share: Of the calls of each part that fail.
        patience: Seconds after which a request counts as hung.

    Returns:
        Numbers to show, samples over time, and what does not hold.
    """
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()][:chats]
    target = load_target("bundled", compile="on")  # waits for the compiler
    with Engine(target, load_drafter("none", target=target), 1) as plain:
        known = known_answers(plain, texts, turns, tokens)
    gc.collect()
    before, process = set(threading.enumerate()), psutil.Process()
    faults = Faults(share)
    drafter: Any = FaultyDrafter(load_drafter(target=target), faults)
    base = process.memory_info().rss
    faulty: Any = FaultyTarget(target, faults)
    engine = Engine(faulty, drafter, at_a_time, Drafting(tree_budget=tree_budget), prefix_tokens=20_000)
    load = Load(engine, known, at_a_time, threads, patience)
    began, samples = time.monotonic(), list[Sample]()
    load.start(60 * minutes)
    while load.running:
        samples.append(Sample(time.monotonic() - began, process.memory_info().rss, load.tally.open, load.tally.tokens))
        if len(samples) % 60 == 0:
            done = f"{samples[-1].seconds / 60:.1f} of {minutes:g} minutes"
            print(f"{done}: {dict(load.tally.outcomes)}, {samples[-1].resident / 2**20:.0f} MiB", flush=True)
        time.sleep(min(1.0, minutes))
    faults.share = 0.0
    calm = SamplingParams(tokens, ignore_eos=True)
    last = [outcome(engine.submit(each.prompt, calm), patience) for each in known]
    late = [each for each, found in zip(known, last, strict=True) if found is None or found.token_ids != each.answer]
    planned, peak = engine.memory_bytes(), max(sample.resident for sample in samples) - base
    engine.close()
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    tally = load.tally
    summary = {
        "minutes": samples[-1].seconds / 60,
        "requests": sum(tally.outcomes.values()),
        "outcomes": dict(tally.outcomes),
        "faults": dict(faults.counts),
        "tokens": tally.tokens,
        "peak above the loaded pair, MiB": peak / 2**20,
        "the engine's own figure, MiB": planned / 2**20,
        "memory growth after the warm-up": growth(samples),
        "threads left": len(left),
    }
    own_figure = f"the peak of {peak >> 20} MiB is above the engine's own figure of {planned >> 20} MiB"
    wrong = {
        f"{tally.outcomes['hung']} requests did not end": tally.outcomes["hung"],
        "no request ended well": not tally.outcomes["length"],
        f"{len(late)} answers are wrong after the faults were switched off": late,
        f"threads are left: {left}": left,
        own_figure: minutes >= SHORTEST_MINUTES and peak > (1 + MAX_OFF) * planned,  # else it is the warm-up's
    }
    failures = [f"a wrong answer: {text}" for text in tally.wrong[:5]]
    failures += [text for text, is_so in wrong.items() if is_so]
    return summary, samples, failures + grown_too_much(samples, minutes)
