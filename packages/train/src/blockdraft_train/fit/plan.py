"""Planner of a fit: from measured numbers to a plan. It measures and reads nothing itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from blockdraft.decode.step_time import block_tokens
from blockdraft.errors import counted
from blockdraft.nn.draft_config import default_target_layers
from blockdraft_train.complaints import Complaints
from blockdraft_train.data.hidden_states import size
from blockdraft_train.data.settings import LONGEST
from blockdraft_train.fit.facts import FitMachine, FitPlan, Speeds, TargetFacts, TargetMeasurements
from blockdraft_train.fit.settings import FitSettings
from blockdraft_train.variant import find_variant, fit_gains

Fields: TypeAlias = dict[str, Any]


class Default:
    """Numbers that plans are made of."""

    # Expected quality
    TAU = 2.3  # tau of a DFlash drafter after some hundred steps
    RATE_POWER = 0.25  # tau grows with this power of the training: four times the tokens give 1.41 times the tau
    # Time
    SAFETY = 0.8  # share of the hours that is planned; the rest is for a machine that gets busy
    ANSWERING = 0.4  # maximum share of the time for writing responses
    CALIBRATION = 40.0  # seconds
    BENCH_SHARE, BENCH_PROMPTS, BENCH_TOKENS = 0.05, 16, 128
    BENCH_RUNS = 12  # three methods, each with one warm-up run and three timed ones
    # Drafter
    LAYERS = 5  # maximum, as in arXiv 2602.06036
    SHORT_BLOCK, LONG_BLOCK = 8, 16
    LONG_TRAINING = 50_000_000  # tokens of training from which on long blocks pay off
    DRAFT_VOCAB = 8192  # tokens that a drafter can propose where the target's whole head is too slow
    HEAD, CPU_HEAD = 1.0, 0.5  # weights of that head over those of the draft layers, from which on it is too slow
    CPU_INNER = 4096  # inner size of an MLP from which on a CPU trains it too slowly
    # Responses
    FEWEST_ANSWERS = 64
    LONG_ANSWER = 512
    REPETITIVE, TEMPERATURE = 0.6, 0.7  # share of repetitive greedy responses from which on they are sampled, and how
    # Training
    EPOCHS, MAX_EPOCHS = 3, 15  # intended and maximum number of passes over the responses
    STEPS, LARGE_STEPS = 800, 200  # intended number of steps, and of steps whose size hardly matters for their duration
    FEWEST_STEPS = 50
    STEP_TOKENS = 65_536  # maximum number of tokens of a step
    PACKED = 0.85  # share of a sequence's tokens that belong to documents
    EVALUATIONS, EVAL_PROMPTS, EVAL_TOKENS = 6, 16, 64
    CHECKPOINTS = 2
    # Maximum shares of free space
    MEMORY, DISK, LOGITS = 0.4, 0.5, 0.1  # for hidden states in memory, for hidden states on disk, for logits


def target_layers(layers: int) -> tuple[int, ...]:
    """Return the target layers that a drafter reads: up to five, spread as in z-lab's drafters, or all of a few."""
    if layers < 4:
        return tuple(range(layers))
    return tuple(sorted({*default_target_layers(layers, min(5, max(layers - 3, 2)))}))


def reference(variant: str, target: TargetFacts, block_size: int = Default.SHORT_BLOCK) -> Fields:
    """Return recipe fields of the drafter's shape, and of its training as far as it does not depend on the time."""
    small, middling = target.hidden_size <= 512, target.hidden_size <= 2048
    kind = find_variant(variant)
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
        "draft_vocab": Default.DRAFT_VOCAB if kind.reducible and reduces(target) else None,
    }
    narrow = target.device == "cpu" and target.inner_size > Default.CPU_INNER
    fields |= kind.fit_fields(target.layers, target.hidden_size, narrow)
    return {name: value for name, value in fields.items() if value is not None}


def stored_target_layers(variant: str, fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the target layers that training reads: those of the drafter, and what the teacher's head reads."""
    kind = find_variant(variant)
    has_teacher = kind(kind.recipe_class(**fields)).needs_teacher
    return (*fields["target_layers"], layers) if has_teacher else tuple(fields["target_layers"])


def candidates(target: TargetFacts) -> list[str]:
    """Return the kinds of drafters to compare: where the target's head is too slow, those that can do without it."""
    kinds = {name: find_variant(name) for name in fit_gains()}
    return [name for name, kind in kinds.items() if (kind.reducible if reduces(target) else not kind.fit_reduced)]


def draft_layers(target: TargetFacts) -> int:
    return min(max(round(target.layers / 4), 1), Default.LAYERS)


def layer_weights(fields: Fields, target: TargetFacts) -> int:
    """Return the number of weights in the layers of a drafter, to which its training time is about proportional."""
    hidden = target.hidden_size
    inner = fields.get("intermediate_size") or target.inner_size or 3 * hidden
    return int(fields.get("layers", 1)) * hidden * (4 * hidden + 3 * inner)


def reduces(target: TargetFacts) -> bool:
    """Return whether a drafter with draft layers like the target's layers drafts part of the vocabulary only."""
    weights = layer_weights({"layers": draft_layers(target)}, target)
    most = Default.CPU_HEAD if target.device == "cpu" else Default.HEAD
    return target.vocab_size * target.hidden_size > most * weights and target.vocab_size >= 2 * Default.DRAFT_VOCAB


def anchors(length: int, block_size: int) -> int:
    """Return the number of blocks of a sequence that teach each of its tokens about twice."""
    return max(2 * length // block_size, 1)


def answer_length(settings: FitSettings, context: int) -> int:
    return settings.max_new_tokens or min(Default.LONG_ANSWER, context // 2)


def expected_speedup(variant: str, speeds: Mapping[str, Speeds]) -> float:
    """Return the expected tau over the cost of a step, at the variant's best block size.

    Two assumptions: draft tokens are correct independently of each other, and a variant that trains faster learns more.
    """
    rates = {name: speed.tokens[-1] / speed.seconds[-1] for name, speed in speeds.items()}
    learned = (rates[variant] / max(rates.values())) ** Default.RATE_POWER
    correct = 1 - 1 / max(Default.TAU * fit_gains()[variant] * float(learned), 1.01)
    return max(block_tokens(correct, size) / cost for size, cost in speeds[variant].step_costs.items())


@dataclass
class Planner:
    """Makes the plan of a fit. Each method decides one thing, after the methods before it, and adds its reasons.

    Args:
        available: Number of different prompts; None if the target writes them.
        start_seconds: Seconds from the start of a command to a loaded target.
        elapsed: Seconds that the fit has used so far.
    """

    settings: FitSettings
    target: TargetFacts
    machine: FitMachine
    measured: TargetMeasurements
    available: int | None
    start_seconds: float
    elapsed: float

    def __post_init__(self) -> None:
        measured = self.measured
        self.reasons: list[str] = []
        # Tokens of a document, and the seconds that its prompt and its response take.
        self.document = measured.prompt_tokens + measured.answer_tokens
        self.prompt_seconds = 1.5 * measured.prompt_tokens / measured.answer_rate if self.available is None else 0.0
        self.answer_seconds = measured.answer_tokens / measured.answer_rate
        self.max_new_tokens = answer_length(self.settings, self.target.context)

    def plan(self) -> FitPlan:
        """Return the plan.

        Raises:
            UsageError: Time, memory or disk do not suffice; it names all that is missing.
        """
        variant = self.choose_variant()
        temperature = self.choose_temperature()
        bench_prompts, bench_tokens = self.share_time()
        self.count_responses()
        self.place_hidden_states(stored_target_layers(variant, reference(variant, self.target), self.target.layers))
        self.size_steps()
        recipe = self.make_recipe(variant, temperature)
        self.check_needs(recipe)
        return FitPlan(
            variant=variant,
            recipe=recipe,
            answers=self.answers,
            held_out=self.held_out,
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            hidden_states=self.hidden_states,
            bench_prompts=bench_prompts,
            bench_tokens=bench_tokens,
            seconds={name: round(value, 1) for name, value in self.seconds.items() if value},
            disk=self.disk,
            memory=self.memory,
            reasons=tuple(self.reasons),
            batch_size=self.measured.batch_size,
            quantize=self.measured.quantize,
            stored_target_layers=self.stored_layers if self.hidden_states == "disk" else (),
        )

    def choose_variant(self) -> str:
        speeds = self.measured.speeds
        gains = {name: expected_speedup(name, speeds) for name in speeds}
        variant: str = self.settings.variant or max(gains, key=lambda name: gains[name])
        self.speed = speeds[variant]
        if self.settings.variant is None:
            listed = ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
            self.reasons.append(f"{variant}: speed-ups expected from the costs on this machine: {listed}")
        if gains[variant] < 1.05:
            self.reasons.append(
                "drafting costs about what it saves on this machine, so answers will hardly be faster here; they will "
                "be on a GPU, where a forward pass over several tokens costs about as much as one over a single token"
            )
        return variant

    def choose_temperature(self) -> float:
        if self.measured.quantize is not None:
            self.reasons.append(
                f"responses are written by the target quantized to {self.measured.quantize}, which is faster here; the "
                "drafter reads the hidden states of the target itself"
            )
        if self.settings.temperature is not None or self.measured.repetitive <= Default.REPETITIVE:
            return self.settings.temperature or 0.0
        self.reasons.append(
            f"responses at temperature {Default.TEMPERATURE:g}, since {100 * self.measured.repetitive:.0f} % of the "
            "greedy ones are repetitive"
        )
        return Default.TEMPERATURE

    def share_time(self) -> tuple[int, int]:
        """Reserve the time of all that does not grow with the number of responses and steps; the rest is `budget`.

        Returns:
            Number of prompts of the benchmark, and the maximum tokens of a response.
        """
        hours, start = self.settings.hours, self.start_seconds
        tokens = min(Default.BENCH_TOKENS, self.max_new_tokens)
        prompt = Default.BENCH_RUNS * self.measured.plain_seconds * tokens
        prompts = int(min(max(Default.BENCH_SHARE * 3600 * hours / prompt, 4), Default.BENCH_PROMPTS))
        evaluation = 2 + 2 * Default.EVAL_PROMPTS * Default.EVAL_TOKENS / self.measured.answer_rate
        self.seconds = {
            "prompts": start,
            "data": start,
            "hidden-states": 0.0,
            "train": 1.5 * start + Default.EVALUATIONS * evaluation,
            "calibrate": start + Default.CALIBRATION,
            "bench": start + prompts * prompt,
        }
        self.budget = Default.SAFETY * 3600 * hours - self.elapsed - sum(self.seconds.values())
        return prompts, tokens

    def count_responses(self) -> None:
        self.written = self.prompt_seconds + self.answer_seconds
        speed, read = self.speed, self.document / self.measured.read_rate
        learned = Default.EPOCHS * self.document / Default.PACKED * speed.seconds[-1] / speed.tokens[-1]
        self.document_seconds = self.written + read + learned
        answers = int(min(self.budget / self.document_seconds, Default.ANSWERING * self.budget / self.written))
        answers = self.settings.answers or max(answers, 0)
        self.held_out = Default.EVAL_PROMPTS
        if self.available is not None:
            self.held_out = min(Default.EVAL_PROMPTS, max(self.available // 10, 1))
            if answers > self.available - self.held_out:
                self.reasons.append(f"all {self.available} prompts of the data are used; more make a better drafter")
            answers = min(answers, self.available - self.held_out)
        self.answers = answers
        self.tokens = max(answers, 1.0) * self.document

    def place_hidden_states(self, layers: tuple[int, ...]) -> None:
        self.stored_layers = layers
        self.state_bytes = int(2 * self.tokens * len(layers) * self.target.hidden_size)
        reading = self.tokens / self.measured.read_rate
        self.hidden_states: str | None = None
        if self.state_bytes <= Default.MEMORY * self.machine.memory:
            self.hidden_states = "memory"
            self.seconds["train"] += reading
        elif self.state_bytes <= Default.DISK * self.machine.disk:
            self.hidden_states, self.seconds["hidden-states"] = "disk", self.start_seconds + reading
        else:
            reading = 0.0
            self.reasons.append(
                f"hidden states would take {size(self.state_bytes)}, so they are computed in every step and not kept"
            )
        fixed = reading + (self.start_seconds if self.hidden_states == "disk" else 0.0)
        self.training_budget = self.budget - self.answers * self.written - fixed

    def size_steps(self) -> None:
        """Choose length and number of the sequences of a step, and the number of steps.

        A step's duration grows with the length of its sequences, so they are just long enough to cut few documents.
        Their number leaves time for some hundred steps.
        """
        self.length = min(self.target.context, LONGEST, max(256, 64 * math.ceil(self.measured.long_document / 64)))
        asked, left = self.settings.steps, self.training_budget
        wanted = asked or Default.STEPS
        all_epochs = Default.MAX_EPOCHS * self.tokens
        most_rows = min(Default.STEP_TOKENS / self.length, all_epochs / Default.PACKED / self.length / wanted)
        rows = 1
        while 2 * rows <= most_rows:
            step = self.step_seconds(2 * rows)
            # Part of a step's duration, such as the optimizer's, does not depend on its size.
            cheap = asked is None and step < 1.5 * self.step_seconds(rows) and step * Default.LARGE_STEPS <= left
            if step * wanted > left and not cheap:
                break
            rows *= 2
        self.rows, self.learned = rows, rows * self.length * Default.PACKED
        self.steps = asked or max(int(left / self.step_seconds(rows)), 0)
        most = max(math.ceil(all_epochs / self.learned), 1)
        if asked is None and self.steps > most:
            self.steps = most
            self.reasons.append(
                f"training ends after {Default.MAX_EPOCHS} passes over the responses, before the time is up"
            )
        self.seconds["prompts"] += self.answers * self.prompt_seconds
        self.seconds["data"] += self.answers * self.answer_seconds
        self.seconds["train"] += self.steps * self.step_seconds(rows)

    def step_seconds(self, rows: int) -> float:
        tokens = rows * self.length
        return self.speed.step(tokens) + (0.0 if self.hidden_states else tokens / self.measured.read_rate)

    def make_recipe(self, variant: str, temperature: float) -> Fields:
        target, steps = self.target, self.steps
        is_long = steps * self.learned >= Default.LONG_TRAINING and target.best_block_size is None
        recipe = reference(variant, target, Default.LONG_BLOCK if is_long else Default.SHORT_BLOCK)
        self.explain(recipe, is_long)
        blocks = anchors(self.length, recipe["block_size"])
        # Bytes of a block's logits, their gradients and softmax.
        self.logit_bytes = 16 * recipe["block_size"] * recipe.get("draft_vocab", target.vocab_size)
        chunk = int(Default.LOGITS * self.machine.device_memory / self.logit_bytes)
        return recipe | {
            "length": self.length,
            "batch": self.rows,
            "anchors": blocks,
            "steps": steps,
            "held_out": max(min(32, self.answers // 20), 1),
            "seed": self.settings.seed,
            "chunk": max(min(self.rows * blocks, chunk), 1),
            "eval_every": max(math.ceil(steps / Default.EVALUATIONS), 1),
            "eval_prompts": Default.EVAL_PROMPTS,
            "eval_tokens": min(Default.EVAL_TOKENS, self.max_new_tokens),
            "eval_temperature": temperature,
            "keep": Default.CHECKPOINTS,
        }

    def explain(self, recipe: Fields, is_long: bool) -> None:
        """Add the reasons for the drafter's shape."""
        target = self.target
        if not is_long:
            self.reasons.append(f"blocks of {recipe['block_size']}: longer ones pay off after longer training only")
        if vocabulary := recipe.get("draft_vocab"):
            self.reasons.append(
                f"the drafter proposes the {vocabulary} most frequent of {target.vocab_size} tokens, since the "
                "target's whole head would slow down the draft layers"
            )
        elif reduces(target):
            self.reasons.append("the target's head slows down the draft layers; --variant dflash would avoid that")
        if width := recipe.get("intermediate_size"):
            self.reasons.append(f"an MLP of {width} for the target's {target.inner_size}, which a CPU trains faster")
        if "layers" in recipe:
            layers = counted(recipe["layers"], "draft layer")
            self.reasons.append(f"{layers} for the target's {target.layers}: a quarter of them, at most 5")
        else:
            self.reasons.append(
                "the drafter starts as the target's last layer, and learns its first draft token before the others, "
                "which gains most in little time"
            )
        self.reasons.append(
            f"{counted(self.answers, 'response')} and {counted(self.steps, 'step')} of {self.rows} x {self.length} "
            f"tokens: {self.steps * self.learned / self.tokens:.1f} passes over the responses"
        )

    def check_needs(self, recipe: Fields) -> None:
        """Compute the need of disk and memory, and raise a UsageError that names everything that does not suffice."""
        settings, machine, target, parameters = self.settings, self.machine, self.target, self.speed.parameters
        # A checkpoint holds weights and two moments in float32. One more than are kept exists while it is written.
        self.disk = 12 * parameters * (Default.CHECKPOINTS + 2) + 8 * int(self.answers * self.document)
        self.memory = target.weight_bytes + 16 * parameters + self.logit_bytes * recipe["chunk"]
        self.disk += self.state_bytes * (self.hidden_states == "disk")
        self.memory += self.state_bytes * (self.hidden_states == "memory")
        too_few_answers = self.answers < Default.FEWEST_ANSWERS and settings.answers is None
        too_few_steps = self.steps < Default.FEWEST_STEPS and settings.steps is None
        complaints = Complaints()
        if self.available is not None and self.available < Default.FEWEST_ANSWERS and settings.answers is None:
            complaints.messages.append(
                f"The data hold {self.available} different prompts; add more, some hundred are needed."
            )
        elif too_few_answers or too_few_steps:
            complaints.messages.append(
                f"{settings.hours:g} hours leave time for {self.answers} responses and {self.steps} training steps, "
                f"which teach a drafter nothing; --hours {math.ceil(100 * self.fewest_hours()) / 100:g} is about the "
                "least."
            )
        needs = [("disk", self.disk, machine.disk)]
        if target.device == "cpu":
            needs.append(("memory", self.memory, machine.memory + target.weight_bytes))  # the target is loaded
        for what, need, room in needs:
            if need > room:
                complaints.messages.append(
                    f"The fit needs {size(need)} of {what} and {size(room)} are free; free some."
                )
        complaints.check()

    def fewest_hours(self) -> float:
        """Return the hours of the fewest steps, and of the responses that these need within their share of the time."""
        fewest = math.ceil(Default.FEWEST_STEPS * self.learned / (Default.MAX_EPOCHS * self.document))
        fewest = max(Default.FEWEST_ANSWERS, fewest)
        training = Default.FEWEST_STEPS * self.step_seconds(self.rows)
        per_response = max(self.document_seconds, self.written / Default.ANSWERING)
        fixed = 3600 * Default.SAFETY * self.settings.hours - self.budget
        return (fixed + max(fewest * per_response, fewest * self.written + training)) / Default.SAFETY / 3600
