"""Planner of a fit: from measured numbers to a plan. It measures and reads nothing itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from blockdraft.data.hidden_states import size
from blockdraft.data.settings import LONGEST, DataSettings
from blockdraft.errors import Complaints, counted
from blockdraft.nn.draft_config import default_target_layers
from blockdraft.tools.fit.settings import FitSettings
from blockdraft.training.variant import find_variant, fit_gains
from blockdraft.types import Quantize

Fields: TypeAlias = dict[str, Any]

EXPECTED_TAU = 2.3  # tau of a DFlash drafter after some hundred steps
RATE_POWER = 0.25  # tau grows with this power of the training: four times the tokens give 1.41 times the tau
MOST_LAYERS = 5  # as in arXiv 2602.06036
SHORT_BLOCK, LONG_BLOCK = 8, 16

SAFETY = 0.8  # share of the hours that is planned; the rest is for a machine that gets busy
EPOCHS, MOST_EPOCHS = 3, 15  # intended and maximum number of passes over the answers
ANSWERING = 0.4  # maximum share of the time for writing answers
STEPS, LARGE_STEPS = 800, 200  # intended number of steps, and of steps whose size hardly matters for their duration
MOST_TOKENS = 65_536  # maximum number of tokens of a step
LONG_TRAINING = 50_000_000  # tokens of training from which on long blocks pay
FEWEST_ANSWERS, FEWEST_STEPS = 64, 50
LONG_ANSWER = 512
PACKED = 0.85  # share of a row's tokens that belong to documents
LOOPING, LOOP_TEMPERATURE = 0.6, 0.7  # share of greedy answers that loop from which on they are sampled, and how
MEMORY, DISK, LOGITS = 0.4, 0.5, 0.1  # maximum shares of free space for features, files and logits
CALIBRATION = 40.0  # seconds
BENCH_SHARE, BENCH_PROMPTS, BENCH_TOKENS = 0.05, 16, 128
BENCH_RUNS = 12  # three methods, each with one warm-up run and three timed ones
EVALUATIONS, EVAL_PROMPTS, EVAL_TOKENS = 6, 16, 64
DRAFT_VOCAB = 8192  # tokens that a drafter can guess where the target's head costs more than its layers
KEPT = 2  # number of checkpoints
KEPT_STATES = {
    None: "computed anew in every step",
    "memory": "computed once, kept in memory",
    "disk": "computed once, kept on disk",
}


@dataclass(frozen=True)
class TargetFacts:
    """Properties of the target.

    Attributes:
        context: Maximum number of tokens of a sequence.
        chats: Whether it has a chat template.
        weight_bytes: Size of the loaded weights.
        running: Backend and kernels, in words.
        best_block_size: As in `Target`.
        inner_size: Inner size of the layers' MLP; 0 is unknown.
    """

    layers: int
    hidden_size: int
    vocab_size: int
    context: int
    chats: bool
    weight_bytes: int
    running: str
    best_block_size: int | None = None
    inner_size: int = 0


@dataclass(frozen=True)
class Machine:
    """Properties of the machine.

    Attributes:
        device: "cpu", "cuda" or "mps".
        memory, device_memory, disk: Free bytes.
    """

    device: str
    cpus: int
    memory: int
    device_memory: int
    disk: int


@dataclass(frozen=True)
class Speeds:
    """Speeds of a drafter of one variant, in the shape that `reference` gives it.

    Attributes:
        tokens, seconds: Two sizes of training steps, in tokens, and their durations.
        cycles: Duration of a cycle over that of a plain one, by block size.
        parameters: Number of the drafter's parameters.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    cycles: Mapping[int, float]
    parameters: int

    def step(self, tokens: int) -> float:
        """Seconds of a training step of `tokens` tokens: a fixed part and one in proportion to the tokens."""
        slope = max((self.seconds[-1] - self.seconds[0]) / (self.tokens[-1] - self.tokens[0]), 0.0)
        slope = max(slope, 0.5 * self.seconds[-1] / self.tokens[-1])  # two similar times do not give a slope
        return max(self.seconds[-1] + slope * (tokens - self.tokens[-1]), 0.2 * self.seconds[0])


@dataclass(frozen=True)
class Measured:
    """Measurements of the target on the machine.

    Attributes:
        prompt_tokens, answer_tokens: Mean lengths of a prompt and of an answer.
        long_document: Length of a prompt with its answer that few exceed.
        looping: Share of greedy answers that loop.
        answer_rate: Tokens/s of answers, `batch_size` at a time, loops left out.
        plain_seconds: Seconds of a token of one answer alone, without a drafter.
        read_rate: Tokens/s of features.
        speeds: Speeds by variant.
        batch_size: Number of answers at a time that is fastest.
        quantize: How the target is rounded for writing answers faster; None is not at all.
    """

    prompt_tokens: float
    long_document: int
    answer_tokens: float
    looping: float
    answer_rate: float
    plain_seconds: float
    read_rate: float
    speeds: Mapping[str, Speeds]
    batch_size: int = DataSettings.batch_size
    quantize: Quantize | None = None


@dataclass(frozen=True)
class Plan:
    """Plan of a fit. It fixes all numbers, so that an interrupted fit ends like any other.

    Attributes:
        recipe: Fields of the variant's recipe.
        answers, held_out: Number of prompts that the target answers, and of those that are kept apart.
        hidden_states: Place of the features: "memory", "disk", or None, which runs the target in each training step.
        stored_target_layers: Layers whose outputs are stored, if they are stored on the disk; empty is the taps of the
            recipe.
        seconds: Expected duration of each step, in the order of the steps.
        disk, memory: Approximate need in bytes.
        reasons: Reasons for the choices, a sentence each.
        batch_size: Number of answers that are written at a time.
        quantize: How the target is rounded that writes the answers; None is not at all.
    """

    variant: str
    recipe: Fields
    answers: int
    held_out: int
    max_new_tokens: int
    temperature: float
    hidden_states: str | None
    bench_prompts: int
    bench_tokens: int
    seconds: dict[str, float]
    disk: int
    memory: int
    reasons: tuple[str, ...]
    batch_size: int = DataSettings.batch_size
    quantize: Quantize | None = None
    stored_target_layers: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def target_layers(layers: int) -> tuple[int, ...]:
    """Target layers that a drafter reads: up to five, spread as in z-lab's drafters, or all if the target has few."""
    if layers < 4:
        return tuple(range(layers))
    return tuple(sorted({*default_target_layers(layers, min(5, max(layers - 3, 2)))}))


def reference(variant: str, target: TargetFacts, block_size: int = SHORT_BLOCK) -> Fields:
    """Recipe fields of the drafter's shape and of its training that do not depend on the time."""
    small, middling = target.hidden_size <= 512, target.hidden_size <= 2048
    fields: Fields = {
        "layers": draft_layers(target),
        "target_layers": target_layers(target.layers),
        "block_size": block_size,
        "objective": {"dpace": 1.0},
        "optimizer": "muon",
        "learning_rate": 3e-3 if small else 1e-3 if middling else 6e-4,
        "muon_learning_rate": 0.02,
        "schedule": "wsd",
        "warmup": 0.03,
    }
    if find_variant(variant).reducible and reduces(target, fields["layers"]):
        fields["draft_vocab"] = DRAFT_VOCAB
    fields |= find_variant(variant).fit_fields(target.layers, target.hidden_size)
    return {name: value for name, value in fields.items() if value is not None}


def stored_target_layers(variant: str, fields: Fields, layers: int) -> tuple[int, ...]:
    """Outputs of the target that training with these fields reads: the taps, and what the teacher's head reads."""
    kind = find_variant(variant)
    taught = kind(kind.recipe_class(**fields)).needs_teacher
    return (*fields["target_layers"], layers) if taught else tuple(fields["target_layers"])


def candidates(target: TargetFacts) -> list[str]:
    """Kinds of drafters to compare: those that can do without most of the target's head where it costs most."""
    reduced = reduces(target, draft_layers(target))
    kinds = {name: find_variant(name) for name in fit_gains()}
    return [name for name, kind in kinds.items() if (kind.reducible if reduced else not kind.fit_reduced)]


def draft_layers(target: TargetFacts) -> int:
    return min(max(round(target.layers / 4), 1), MOST_LAYERS)


def reduces(target: TargetFacts, layers: int) -> bool:
    """Whether the target's head has more weights than so many draft layers, which have the shape of the target's."""
    inner = target.inner_size or 3 * target.hidden_size
    weights = layers * target.hidden_size * (4 * target.hidden_size + 3 * inner)
    return target.vocab_size * target.hidden_size > weights and target.vocab_size >= 2 * DRAFT_VOCAB


def anchors(length: int, block_size: int) -> int:
    """Number of blocks of a row that teach each of its tokens about twice."""
    return max(2 * length // block_size, 1)


def expected_speedup(variant: str, speeds: Mapping[str, Speeds]) -> float:
    """Expected tau over the cost of a cycle, at the variant's best block size.

    Two assumptions: guesses are right independently of each other, and a variant that trains faster learns more.
    """

    def pace(name: str) -> float:
        return speeds[name].tokens[-1] / speeds[name].seconds[-1]

    learned = (pace(variant) / max(map(pace, speeds))) ** RATE_POWER
    tau = max(EXPECTED_TAU * fit_gains()[variant] * float(learned), 1.01)
    right = 1 - 1 / tau
    return max((1 - right**size) / (1 - right) / cost for size, cost in speeds[variant].cycles.items())


def answer_length(settings: FitSettings, context: int) -> int:
    """Maximum number of tokens of an answer."""
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
        available: Number of different prompts; None if the target writes them.
        start_seconds: Seconds from the start of a command to a loaded target.
        elapsed: Seconds that the fit has used so far.

    Raises:
        UsageError: Time, memory or disk do not suffice; all faults together.
    """
    reasons: list[str] = []
    variant = _variant(settings, measured, reasons)
    speed = measured.speeds[variant]
    tokens, temperature = answer_length(settings, target.context), _temperature(settings, measured, reasons)
    if measured.quantize is not None:
        reasons.append(
            f"answers are written by the target rounded to {measured.quantize}, which is faster here; the drafter "
            "reads the hidden states of the target itself"
        )
    bench_tokens = min(BENCH_TOKENS, tokens)
    bench_each = BENCH_RUNS * measured.plain_seconds * bench_tokens
    bench_prompts = int(min(max(BENCH_SHARE * 3600 * settings.hours / bench_each, 4), BENCH_PROMPTS))
    seconds = {
        "prompts": start_seconds,
        "data": start_seconds,
        "hidden_states": 0.0,
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
            reasons.append(f"all {available} prompts in the data are used; more would make a better drafter")
        answers = min(answers, available - held_out)
    kept = max(answers, 1.0) * document  # tokens

    drafter = reference(variant, target)
    read = stored_target_layers(variant, drafter, target.layers)
    hidden_state_bytes = int(2 * kept * len(read) * target.hidden_size)
    hidden_states = "memory" if hidden_state_bytes <= MEMORY * machine.memory else None
    if hidden_states is None and hidden_state_bytes <= DISK * machine.disk:
        hidden_states, seconds["hidden_states"] = "disk", start_seconds + kept / measured.read_rate
    if hidden_states is None:
        reasons.append(
            f"features would take {size(hidden_state_bytes)}, so they are computed in every step and not kept"
        )
    used = (
        answers * written + seconds["hidden_states"] + (kept / measured.read_rate if hidden_states == "memory" else 0.0)
    )

    # A step's duration grows with the length of its rows, so they are just long enough to cut few documents. Their
    # number leaves time for some hundred steps.
    length = min(target.context, LONGEST, max(256, 64 * math.ceil(measured.long_document / 64)))

    def step_seconds(rows: int) -> float:
        return speed.step(rows * length) + (0.0 if hidden_states else rows * length / measured.read_rate)

    rows, wanted = 1, settings.steps or STEPS
    most_rows = min(MOST_TOKENS / length, MOST_EPOCHS * kept / PACKED / length / wanted)
    while 2 * rows <= most_rows:
        step, left = step_seconds(2 * rows), budget - used
        # Part of a step's duration, such as the optimizer's, does not depend on its size.
        cheap = settings.steps is None and step < 1.5 * step_seconds(rows) and step * LARGE_STEPS <= left
        if step * wanted > left and not cheap:
            break
        rows *= 2
    step, learned = step_seconds(rows), rows * length * PACKED
    steps = settings.steps or max(int((budget - used) / step), 0)
    most = max(math.ceil(MOST_EPOCHS * kept / learned), 1)
    if settings.steps is None and steps > most:
        steps = most
        reasons.append(f"training ends after {MOST_EPOCHS} passes over the answers, before the time is up")
    long = steps * learned >= LONG_TRAINING and target.best_block_size is None
    recipe = reference(variant, target, LONG_BLOCK if long else SHORT_BLOCK)
    block_size = recipe["block_size"]
    if not long:
        reasons.append(f"blocks of {block_size}: longer ones pay after longer training only")
    if vocabulary := recipe.get("draft_vocab"):
        reasons.append(
            f"the drafter guesses among the {vocabulary} most frequent of {target.vocab_size} tokens, since the "
            "target's head would cost more than the draft layers"
        )
    elif reduces(target, draft_layers(target)):
        reasons.append("the target's head costs more than the draft layers, which --variant dflash would mend")
    if "layers" in recipe:
        reasons.append(
            f"{counted(recipe['layers'], 'draft layer')} for the target's {target.layers}: a quarter of them, at most 5"
        )
    else:
        reasons.append(
            "the drafter begins as the target's last layer, and learns its first guess before the others: little time "
            "brings most so"
        )
    reasons.append(
        f"{counted(answers, 'answer')} and {counted(steps, 'step')} of {rows} x {length} tokens: "
        f"{steps * learned / kept:.1f} passes over the answers"
    )

    seconds["prompts"] += answers * prompt_seconds
    seconds["data"] += answers * answer_seconds
    seconds["train"] += steps * step + (kept / measured.read_rate if hidden_states == "memory" else 0.0)
    blocks = rows * anchors(length, block_size)
    logits = 16 * block_size * target.vocab_size  # bytes of a block's logits, their gradients and softmax
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
        "keep": KEPT,
    }
    # A checkpoint holds weights and two moments in float32. One more than are kept exists while it is written.
    disk = 12 * speed.parameters * (KEPT + 2) + 8 * int(answers * document)
    memory = target.weight_bytes + 16 * speed.parameters + logits * chunk
    disk, memory = (
        disk + hidden_state_bytes * (hidden_states == "disk"),
        memory + hidden_state_bytes * (hidden_states == "memory"),
    )

    # The fewest steps need the fewest answers, written within the answers' share of the time.
    few = max(FEWEST_ANSWERS, math.ceil(FEWEST_STEPS * learned / (MOST_EPOCHS * document)))
    each = max(written + read_seconds + learn_seconds, written / ANSWERING)
    least = (
        (3600 * SAFETY * settings.hours - budget + max(few * each, few * written + FEWEST_STEPS * step)) / SAFETY / 3600
    )
    _check(
        settings=settings,
        machine=machine,
        target=target,
        answers=answers,
        steps=steps,
        available=available,
        least=least,
        disk=disk,
        memory=memory,
    )
    expected = {name: round(value, 1) for name, value in seconds.items() if value}
    return Plan(
        variant=variant,
        recipe=recipe,
        answers=answers,
        held_out=held_out,
        max_new_tokens=tokens,
        temperature=temperature,
        hidden_states=hidden_states,
        bench_prompts=bench_prompts,
        bench_tokens=bench_tokens,
        seconds=expected,
        disk=disk,
        memory=memory,
        reasons=tuple(reasons),
        batch_size=measured.batch_size,
        quantize=measured.quantize,
        stored_target_layers=read if hidden_states == "disk" else (),
    )


def _variant(settings: FitSettings, measured: Measured, reasons: list[str]) -> str:
    worth = {name: expected_speedup(name, measured.speeds) for name in measured.speeds}
    best: str = settings.variant or max(worth, key=lambda name: worth[name])
    if settings.variant is None:
        told = ", ".join(f"{name} {value:.2f}" for name, value in worth.items())
        reasons.append(f"{best}: speed-ups expected from the costs on this machine: {told}")
    if worth[best] < 1.05:
        reasons.append(
            "guesses cost about what they save on this machine, so answers will hardly be faster here; they will be "
            "on a GPU, where a forward of several tokens costs about as much as one of a single token"
        )
    return best


def _temperature(settings: FitSettings, measured: Measured, reasons: list[str]) -> float:
    if settings.temperature is not None:
        return settings.temperature
    if measured.looping <= LOOPING:
        return 0.0
    share = f"{100 * measured.looping:.0f} %"
    reasons.append(f"answers at temperature {LOOP_TEMPERATURE:g}, since {share} of the greedy ones loop")
    return LOOP_TEMPERATURE


def _check(
    *,
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
        complaints.messages.append(f"The data hold {available} different prompts; add more, some hundred are needed.")
    elif (answers < FEWEST_ANSWERS and settings.answers is None) or (steps < FEWEST_STEPS and settings.steps is None):
        complaints.messages.append(
            f"{settings.hours:g} hours leave time for {answers} answers and {steps} training steps, which teach a "
            f"drafter nothing; --hours {math.ceil(100 * least) / 100:g} is about the least."
        )
    if disk > machine.disk:
        complaints.messages.append(f"The fit needs {size(disk)} of disk and {size(machine.disk)} are free; free some.")
    if machine.device == "cpu" and memory > machine.memory + target.weight_bytes:  # the target is loaded by now
        complaints.messages.append(
            f"The fit needs {size(memory)} of memory and {size(machine.memory)} are free; free some."
        )
    complaints.check()


def show(plan: Plan, target: TargetFacts, machine: Machine, sources: Sequence[str], hours: float) -> list[str]:
    """The plan as lines of text."""
    recipe, template = plan.recipe, "with" if target.chats else "without"
    layers = counted(recipe.get("layers", 1), "layer")
    own = "the target writes them itself; name some of your own with --data"
    return [
        f"target: {counted(target.layers, 'layer')}, hidden size {target.hidden_size}, {target.vocab_size} tokens, "
        f"context of {target.context}, {template} chat template, {target.running}",
        f"machine: {machine.device}, {machine.cpus} cores, {size(machine.memory)} of memory and {size(machine.disk)} "
        "of disk free",
        f"prompts: {', '.join(sources) or own}",
        f"drafter: {plan.variant}, {layers}, taps {','.join(map(str, recipe['target_layers']))}, "
        f"blocks of {recipe['block_size']}",
        f"features: {KEPT_STATES[plan.hidden_states]}",
        f"needs: about {size(plan.memory)} of memory, {size(plan.disk)} of disk",
        *(f"why: {reason}" for reason in plan.reasons),
        *(f"step {name}: about {duration(seconds)}" for name, seconds in plan.seconds.items()),
        f"in all: about {duration(sum(plan.seconds.values()))} from here, of {hours:g} h",
    ]


def duration(seconds: float) -> str:
    """A duration as text."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
