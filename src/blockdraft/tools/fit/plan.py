"""From what there is to what is done: numbers in, a plan out. Nothing here measures or reads anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from blockdraft.data.features import size
from blockdraft.data.settings import LONGEST
from blockdraft.errors import Complaints, counted
from blockdraft.nn.draft_config import default_taps
from blockdraft.tools.fit.settings import FitSettings
from blockdraft.training.variant import find_variant, fit_gains

Fields: TypeAlias = dict[str, Any]

EXPECTED_TAU = 2.3  # of a DFlash drafter after some hundred steps
RATE_POWER = 0.25  # four times the training makes 1.43 times the tau
MOST_LAYERS = 5  # the paper's (arXiv 2602.06036)
SHORT_BLOCK, LONG_BLOCK = 8, 16

SAFETY = 0.8  # share of the hours that is planned; machines have other things to do at times
EPOCHS, MOST_EPOCHS = 3, 15  # passes over the answers that are aimed at, and after which there is little to learn
ANSWERING = 0.4  # most of the time that answers may take
STEPS = 800  # that are aimed at; where there is time for more, they become larger
MOST_TOKENS = 65_536  # of a step
LONG_TRAINING = 50_000_000  # tokens after which a drafter has a use for long blocks
FEWEST_ANSWERS, FEWEST_STEPS = 64, 50
LONG_ANSWER = 512
PACKED = 0.85  # share of a row that documents fill
LOOPING, LOOP_TEMPERATURE = 0.2, 0.7
MEMORY, DISK, LOGITS = 0.4, 0.5, 0.1  # most of what is free that features, files and logits may take
CALIBRATION = 40.0  # seconds
BENCH_SHARE, BENCH_PROMPTS, BENCH_TOKENS = 0.05, 16, 128
BENCH_RUNS = 12  # three methods, three times and once to warm up
EVALUATIONS, EVAL_PROMPTS, EVAL_TOKENS = 6, 16, 64
SAVE_SECONDS = 30.0
KEPT = 2  # checkpoints
KEPT_STATES = {
    None: "computed anew in every step",
    "memory": "computed once, kept in memory",
    "disk": "computed once, kept on disk",
}


@dataclass(frozen=True)
class TargetFacts:
    """Attributes:
    context: Tokens of a row at most.
    chats: Whether it has a chat template.
    weight_bytes: As it is loaded.
    running: How it is run, in words.
    best_block_size: See `Target`.
    """

    layers: int
    hidden_size: int
    vocab_size: int
    context: int
    chats: bool
    weight_bytes: int
    running: str
    best_block_size: int | None = None


@dataclass(frozen=True)
class Machine:
    """Attributes:
    device: "cpu", "cuda" or "mps".
    memory, device_memory, disk: Bytes that are free.
    """

    device: str
    cpus: int
    memory: int
    device_memory: int
    disk: int


@dataclass(frozen=True)
class Speeds:
    """Of one variant, in the shape that `reference` gives it.

    Attributes:
        tokens, seconds: Two sizes of training steps and what they take.
        cycles: What a cycle takes, in plain ones, by block size.
        parameters: Of the drafter.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    cycles: Mapping[int, float]
    parameters: int

    def step(self, tokens: int) -> float:
        """Seconds of a training step of so many tokens: a fixed part and one that grows."""
        slope = max((self.seconds[-1] - self.seconds[0]) / (self.tokens[-1] - self.tokens[0]), 0.0)
        slope = max(slope, 0.5 * self.seconds[-1] / self.tokens[-1])  # two times that are alike say little
        return max(self.seconds[-1] + slope * (tokens - self.tokens[-1]), 0.2 * self.seconds[0])


@dataclass(frozen=True)
class Measured:
    """Attributes:
    prompt_tokens, answer_tokens: Of a prompt and an answer on average.
    long_document: Tokens of a prompt with its answer that few have more than.
    looping: Share of greedy answers that run in circles.
    answer_rate: Tokens/s that the target writes, many answers at a time.
    plain_seconds: Of a token of one answer alone.
    read_rate: Tokens/s of which the target makes features.
    speeds: By variant.
    """

    prompt_tokens: float
    long_document: int
    answer_tokens: float
    looping: float
    answer_rate: float
    plain_seconds: float
    read_rate: float
    speeds: Mapping[str, Speeds]


@dataclass(frozen=True)
class Plan:
    """What a fit does. All numbers are fixed, so that one that was interrupted ends as any other.

    Attributes:
        recipe: Fields of the variant's recipe.
        answers, held_out: Prompts that the target answers, and those that are kept apart.
        features: "memory", "disk", or None, which runs the target in the loop.
        seconds: What each step is expected to take, in their order.
        disk, memory: Bytes, about.
        reasons: Why it is so, a sentence each.
    """

    variant: str
    recipe: Fields
    answers: int
    held_out: int
    max_new_tokens: int
    temperature: float
    features: str | None
    bench_prompts: int
    bench_tokens: int
    seconds: dict[str, float]
    disk: int
    memory: int
    reasons: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def taps(layers: int) -> tuple[int, ...]:
    """Target layers that a drafter reads: up to five as in z-lab's drafters, and all of a target of few."""
    if layers < 4:
        return tuple(range(layers))
    return tuple(sorted({*default_taps(layers, min(5, max(layers - 3, 2)))}))


def reference(variant: str, target: TargetFacts, block_size: int = SHORT_BLOCK) -> Fields:
    """The drafter's shape and how it learns, whatever the time."""
    small, middling = target.hidden_size <= 512, target.hidden_size <= 2048
    fields: Fields = {
        "layers": min(max(round(target.layers / 4), 1), MOST_LAYERS),
        "taps": taps(target.layers),
        "block_size": block_size,
        "objective": {"dpace": 1.0},
        "optimizer": "muon",
        "learning_rate": 3e-3 if small else 1e-3 if middling else 6e-4,
        "muon_learning_rate": 0.02,
        "schedule": "wsd",
        "warmup": 0.03,
    }
    return fields | find_variant(variant).fit_fields(target.hidden_size)


def anchors(length: int, block_size: int) -> int:
    """Blocks of a row that teach each of its tokens about twice."""
    return max(2 * length // block_size, 1)


def expected_speedup(variant: str, speeds: Mapping[str, Speeds]) -> float:
    """Tau over the cost of a cycle, in the block size that is best for it.

    Guesses are taken to be right independently of each other, and what is trained faster to learn more.
    """

    def pace(name: str) -> float:
        return speeds[name].tokens[-1] / speeds[name].seconds[-1]

    learned = (pace(variant) / max(map(pace, speeds))) ** RATE_POWER
    tau = max(EXPECTED_TAU * fit_gains()[variant] * float(learned), 1.01)
    right = 1 - 1 / tau
    return max((1 - right**size) / (1 - right) / cost for size, cost in speeds[variant].cycles.items())


def answer_length(settings: FitSettings, context: int) -> int:
    """Tokens after which an answer is cut."""
    return settings.max_new_tokens or min(LONG_ANSWER, context // 2)


def make_plan(
    settings: FitSettings,
    target: TargetFacts,
    machine: Machine,
    measured: Measured,
    available: int | None,
    start_seconds: float,
    elapsed: float,
) -> Plan:
    """Plan a fit.

    Args:
        available: Different prompts that there are; None where the target writes them.
        start_seconds: From the start of a command to a loaded target.
        elapsed: Seconds that are used up already.

    Raises:
        ValueError: Time, memory or disk do not suffice; all reasons together.
    """
    reasons: list[str] = []
    variant = _variant(settings, measured, reasons)
    speed = measured.speeds[variant]
    tokens, temperature = answer_length(settings, target.context), _temperature(settings, measured, reasons)
    lost = measured.looping / (3 if temperature else 1)
    bench_tokens = min(BENCH_TOKENS, tokens)
    bench_each = BENCH_RUNS * measured.plain_seconds * bench_tokens
    bench_prompts = int(min(max(BENCH_SHARE * 3600 * settings.hours / bench_each, 4), BENCH_PROMPTS))
    seconds = {
        "prompts": start_seconds,
        "data": start_seconds,
        "features": 0.0,
        "train": 1.5 * start_seconds + EVALUATIONS * (2 + 2 * EVAL_PROMPTS * EVAL_TOKENS / measured.answer_rate),
        "calibrate": start_seconds + CALIBRATION,
        "bench": start_seconds + bench_prompts * bench_each,
    }
    budget = SAFETY * 3600 * settings.hours - elapsed - sum(seconds.values())

    document = measured.prompt_tokens + measured.answer_tokens
    prompt_seconds = 0.0 if available is not None else 1.5 * measured.prompt_tokens / measured.answer_rate
    answer_seconds, read_seconds = measured.answer_tokens / measured.answer_rate, document / measured.read_rate
    written = prompt_seconds + answer_seconds
    learn_seconds = EPOCHS * document / PACKED * speed.seconds[-1] / speed.tokens[-1]
    answers = int(min(budget / (written + read_seconds + learn_seconds), ANSWERING * budget / written))
    answers = settings.answers or max(answers, 0)
    held_out = EVAL_PROMPTS
    if available is not None:
        held_out = min(EVAL_PROMPTS, max(available // 10, 1))
        if answers > available - held_out:
            reasons.append(f"all {available} prompts that the data hold; more would make a better drafter")
        answers = min(answers, available - held_out)
    kept = max(answers * (1 - lost), 1.0) * document  # tokens

    drafter = reference(variant, target)
    feature_bytes = int(2 * kept * len(drafter["taps"]) * target.hidden_size)
    features = "memory" if feature_bytes <= MEMORY * machine.memory else None
    if features is None and feature_bytes <= DISK * machine.disk:
        features, seconds["features"] = "disk", start_seconds + kept / measured.read_rate
    if features is None:
        reasons.append(f"features take {size(feature_bytes)}, so they are not kept but computed in every step")
    used = answers * written + seconds["features"] + (kept / measured.read_rate if features == "memory" else 0.0)

    # Rows so long that few documents are cut, since what a step takes grows with them, and so many of them in a step
    # that there are some hundred steps.
    length = min(target.context, LONGEST, max(256, 64 * math.ceil(measured.long_document / 64)))

    def step_seconds(rows: int) -> float:
        return speed.step(rows * length) + (0.0 if features else rows * length / measured.read_rate)

    rows, wanted = 1, settings.steps or STEPS
    most_rows = min(MOST_TOKENS / length, MOST_EPOCHS * kept / PACKED / length / wanted)
    while 2 * rows <= most_rows and step_seconds(2 * rows) * wanted <= budget - used:
        rows *= 2
    step, learned = step_seconds(rows), rows * length * PACKED
    steps = settings.steps or max(int((budget - used) / step), 0)
    most = max(math.ceil(MOST_EPOCHS * kept / learned), 1)
    if settings.steps is None and steps > most:
        steps = most
        reasons.append(f"training ends after {MOST_EPOCHS} passes over the answers, before the time is up")
    block_size = SHORT_BLOCK
    if steps * learned >= LONG_TRAINING and target.best_block_size is None:
        block_size = LONG_BLOCK
    else:
        reasons.append(f"blocks of {SHORT_BLOCK}: after so little training longer ones bring nothing")
    recipe = reference(variant, target, block_size)
    reasons.append(
        f"{counted(recipe['layers'], 'draft layer')} for the target's {target.layers}: a quarter of them, at most 5"
    )
    reasons.append(
        f"{counted(answers, 'answer')} and {counted(steps, 'step')} of {rows} x {length} tokens: "
        f"{steps * learned / kept:.1f} passes over the answers"
    )

    seconds["prompts"] += answers * prompt_seconds
    seconds["data"] += answers * answer_seconds
    seconds["train"] += steps * step + (kept / measured.read_rate if features == "memory" else 0.0)
    blocks = rows * anchors(length, block_size)
    logits = 16 * block_size * target.vocab_size  # of a block, with their gradients and what the softmax keeps
    chunk = max(min(blocks, int(LOGITS * machine.device_memory / logits)), 1)
    recipe |= {
        "length": length,
        "batch": rows,
        "anchors": anchors(length, block_size),
        "steps": steps,
        "held_out": max(min(32, answers // 20), 1),
        "seed": settings.seed,
        "chunk": chunk,
        "eval_every": max(math.ceil(steps / EVALUATIONS), 1),
        "eval_prompts": EVAL_PROMPTS,
        "eval_tokens": min(EVAL_TOKENS, tokens),
        "eval_temperature": temperature,
        "save_every": max(int(SAVE_SECONDS / step), 1),
        "keep": KEPT,
    }
    # Checkpoints have weights and two moments in float32, and one more exists while it is written.
    disk = 12 * speed.parameters * (KEPT + 2) + 8 * int(answers * document)
    memory = target.weight_bytes + 16 * speed.parameters + logits * chunk
    disk, memory = disk + feature_bytes * (features == "disk"), memory + feature_bytes * (features == "memory")

    # So few answers as suffice for so few steps, in as much of the time as answers may take.
    few = max(FEWEST_ANSWERS, math.ceil(FEWEST_STEPS * learned / (MOST_EPOCHS * (1 - lost) * document)))
    each = max(written + read_seconds + learn_seconds, written / ANSWERING)
    least = (
        (3600 * SAFETY * settings.hours - budget + max(few * each, few * written + FEWEST_STEPS * step)) / SAFETY / 3600
    )
    _check(settings, machine, target, answers, steps, available, least, disk, memory)
    expected = {name: round(value, 1) for name, value in seconds.items() if value}
    return Plan(
        variant, recipe, answers, held_out, tokens, temperature, features, bench_prompts, bench_tokens, expected,
        disk, memory, tuple(reasons),
    )  # fmt: skip


def _variant(settings: FitSettings, measured: Measured, reasons: list[str]) -> str:
    worth = {name: expected_speedup(name, measured.speeds) for name in measured.speeds}
    best: str = settings.variant or max(worth, key=lambda name: worth[name])
    if settings.variant is None:
        told = ", ".join(f"{name} {value:.2f}" for name, value in worth.items())
        reasons.append(f"{best}: from what guesses bring and cost here, speed-ups of about {told} are expected")
    if worth[best] < 1.05:
        reasons.append(
            "on this machine guesses cost about what they bring, so answers will hardly come faster here; where a "
            "forward of some tokens costs about as much as one of one, such as on a GPU, they will"
        )
    return best


def _temperature(settings: FitSettings, measured: Measured, reasons: list[str]) -> float:
    if settings.temperature is not None:
        return settings.temperature
    if measured.looping <= LOOPING:
        return 0.0
    share = f"{100 * measured.looping:.0f} %"
    reasons.append(f"answers at temperature {LOOP_TEMPERATURE:g}, since {share} of the greedy ones run in circles")
    return LOOP_TEMPERATURE


def _check(
    settings: FitSettings,
    machine: Machine,
    target: TargetFacts,
    answers: int,
    steps: int,
    available: int | None,
    least: float,
    disk: int,
    memory: int,
) -> None:
    complaints = Complaints()
    if available is not None and available < FEWEST_ANSWERS and settings.answers is None:
        complaints.messages.append(f"The data hold {available} different prompts; add some, there should be hundreds.")
    elif (answers < FEWEST_ANSWERS and settings.answers is None) or (steps < FEWEST_STEPS and settings.steps is None):
        complaints.messages.append(
            f"{settings.hours:g} hours leave time for {answers} answers and {steps} training steps, which teach "
            f"nothing; --hours {math.ceil(100 * least) / 100:g} is about the least."
        )
    if disk > machine.disk:
        complaints.messages.append(f"It takes {size(disk)} of disk and {size(machine.disk)} are free; free some.")
    if machine.device == "cpu" and memory > machine.memory + target.weight_bytes:  # the target is loaded by now
        complaints.messages.append(f"It takes {size(memory)} of memory and {size(machine.memory)} are free; free some.")
    complaints.check()


def show(plan: Plan, target: TargetFacts, machine: Machine, sources: Sequence[str], hours: float) -> list[str]:
    """The plan in lines for people."""
    recipe, template = plan.recipe, "with" if target.chats else "without"
    own = "the target writes them itself; name some of your own with --data"
    return [
        f"target: {counted(target.layers, 'layer')}, hidden size {target.hidden_size}, {target.vocab_size} tokens, "
        f"context of {target.context}, {template} chat template, {target.running}",
        f"machine: {machine.device}, {machine.cpus} cores, {size(machine.memory)} of memory and {size(machine.disk)} "
        "of disk free",
        f"prompts: {', '.join(sources) or own}",
        f"drafter: {plan.variant}, {counted(recipe['layers'], 'layer')}, taps {','.join(map(str, recipe['taps']))}, "
        f"blocks of {recipe['block_size']}",
        f"hidden states: {KEPT_STATES[plan.features]}",
        f"needs: about {size(plan.memory)} of memory, {size(plan.disk)} of disk",
        *(f"why: {reason}" for reason in plan.reasons),
        *(f"step {name}: about {duration(seconds)}" for name, seconds in plan.seconds.items()),
        f"in all: about {duration(sum(plan.seconds.values()))} from here, of {hours:g} h",
    ]


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
