"""A causal model that became a block-diffusion model, beside itself: what it answers, and how fast."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from benchmarks.diffusion.problems import Problem, number_in
from benchmarks.diffusion.settings import ConvertedSettings
from benchmarks.harness.records import Records, whole_lines
from blockdraft import Drafter, Engine, SamplingParams, Target
from blockdraft.data.settings import RowSettings
from blockdraft.diffusion.convert import convert
from blockdraft.diffusion.folder import load_model
from blockdraft.diffusion.model import DiffusionModel
from blockdraft.diffusion.sampler import Chunk, Sampler
from blockdraft.diffusion.settings import ConvertSettings, DiffusionRecipe, SampleSettings
from blockdraft.diffusion.text import read_texts
from blockdraft.diffusion.train import train
from blockdraft.engine import loops
from blockdraft.training import progress as training_progress

PLAIN, DRAFTED = "autoregressive", "drafted by "
TUNED = "tuned"  # folder of the fine-tuned model
SAVES = 10  # checkpoints of the fine-tune
Progress: TypeAlias = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        way: `PLAIN`, `DRAFTED` with the drafter, or a strategy of the converted model.
        new_tokens: Of the answer.
        counted: Tokens that `forwards` brought: all, but for the target's first one, which the prompt's forward brings.
        forwards: Of the target, or of the converted model, those over the prompt not counted.
        right, ended, looping: 1 or 0: has the result, ended by itself, runs in circles.
        text: As JSON.
    """

    KEY = ("way", "number")

    way: str
    number: int
    new_tokens: int
    counted: int
    forwards: int
    right: int
    ended: int
    looping: int
    text: str


def answers_of(out: Path) -> Records[Answer]:
    return Records(Answer, out / "answers.csv")


def write_answers(
    target: Target, problems: Sequence[Problem], path: Path, settings: ConvertedSettings, progress: Progress
) -> None:
    """Let the target answer what is left, greedily; answers that end by themselves and run in no circles are kept as
    rows {"prompt", "response"}."""
    lines = whole_lines(path)
    begin = json.loads(lines[-1])["number"] + 1 if lines else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with Engine(target, max_batch_size=settings.together) as engine:
        for first in range(begin, len(problems), settings.together):
            progress("answers to learn", first - begin, len(problems) - begin)
            part = problems[first : first + settings.together]
            found = engine.generate([each.prompt for each in part], SamplingParams(settings.new_tokens))
            rows = [
                {"number": number, "prompt": problem.prompt, "response": answer.text}
                for number, (problem, answer) in enumerate(zip(part, found, strict=True), first)
                if answer.finish_reason == "stop" and not loops(answer.token_ids) and answer.text.strip()
            ]
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))


def converted(
    target: Path | None, data: Path, settings: ConvertedSettings, out: Path, progress: Progress
) -> DiffusionModel:
    """The model, fine-tuned on these answers; where that was done before, it is loaded."""
    begun, tuned = out / "converted", out / TUNED
    if not begun.exists():
        convert(target, begun, ConvertSettings(settings.block_size))
    model = load_model(begun, "cpu", "float32")
    recipe = DiffusionRecipe(
        length=settings.tune_length,
        batch=settings.tune_batch,
        learning_rate=settings.tune_rate,
        low=settings.low,
        eval_every=0,
        save_every=math.ceil(settings.tune_steps / SAVES),
        keep=1,
    )
    texts = read_texts([str(data)], RowSettings(), model)
    report = training_progress.Progress(lambda stage, done, steps: progress(f"training, {stage}", done, steps))
    train(model, texts, settings.tune_steps, tuned, recipe, report)
    return load_model(tuned, "cpu", "float32")


def measure(
    target: Target,
    drafters: Mapping[str, Drafter],
    model: DiffusionModel,
    problems: Sequence[Problem],
    settings: ConvertedSettings,
    out: Path,
    progress: Progress,
) -> Records[Answer]:
    """Answer what is left, greedily, in each way.

    Args:
        drafters: Of the target, by name.
    """
    kept, tokens = answers_of(out), settings.new_tokens
    ways: dict[str, Callable[[Sequence[int]], list[Answer]]] = {}
    for way, drafter in {PLAIN: None, **{DRAFTED + name: drafter for name, drafter in drafters.items()}}.items():
        ways[way] = partial(_by_engine, way, Engine(target, drafter, settings.together), problems, tokens)
    for way in settings.ways:
        ways[way] = partial(_by_sampler, way, Sampler(model, SampleSettings(tokens, way)), problems)
    numbers = range(min(settings.asked, len(problems)))
    left = {way: [number for number in numbers if (way, number) not in kept.had] for way in ways}
    done, total = 0, sum(map(len, left.values()))
    for way, answer in ways.items():
        for begin in range(0, len(left[way]), settings.together):
            progress(f"problems, {way}", done, total)
            part = left[way][begin : begin + settings.together]
            kept.add(*answer(part))
            done += len(part)
    return kept


def _by_engine(
    way: str, engine: Engine, problems: Sequence[Problem], tokens: int, numbers: Sequence[int]
) -> list[Answer]:
    found = []
    together = engine.generate([problems[number].prompt for number in numbers], SamplingParams(tokens))
    for number, one in zip(numbers, together, strict=True):
        if one.failure is not None:
            raise one.failure
        cycles = one.stats.committed
        ended = one.finish_reason == "stop"
        found.append(_answer(way, number, problems, one.token_ids, one.text, ended, sum(cycles), len(cycles)))
    return found


def _by_sampler(way: str, sampler: Sampler, problems: Sequence[Problem], numbers: Sequence[int]) -> list[Answer]:
    chunks: dict[int, list[Chunk]] = {number: [] for number in numbers}
    for chunk in sampler.stream([problems[number].prompt for number in numbers]):
        chunks[numbers[chunk.row]].append(chunk)
    found = []
    for number, own in chunks.items():
        ids, text = [token for chunk in own for token in chunk.token_ids], "".join(chunk.text for chunk in own)
        ended = own[-1].finish_reason == "stop"
        found.append(_answer(way, number, problems, ids, text, ended, len(ids), own[-1].forwards))
    return found


def _answer(
    way: str,
    number: int,
    problems: Sequence[Problem],
    ids: Sequence[int],
    text: str,
    ended: bool,
    counted: int,
    forwards: int,
) -> Answer:
    right = number_in(text) == problems[number].result
    return Answer(way, number, len(ids), counted, forwards, int(right), int(ended), int(loops(ids)), json.dumps(text))
