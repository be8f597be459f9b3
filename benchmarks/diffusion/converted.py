"""A causal model that became a block-diffusion model, beside itself: what it answers to word problems, and how fast."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.diffusion.settings import ConvertedSettings
from benchmarks.harness.process import Progress
from benchmarks.harness.records import Records, whole_lines
from blockdraft import Drafter, Engine, SamplingParams, Target
from blockdraft.data.settings import RecordSettings
from blockdraft.diffusion.create import convert
from blockdraft.diffusion.folder import load_model
from blockdraft.diffusion.model import DiffusionModel
from blockdraft.diffusion.sampler import Chunk, Sampler
from blockdraft.diffusion.settings import ConvertSettings, DiffusionRecipe, SampleSettings
from blockdraft.diffusion.text import read_texts
from blockdraft.diffusion.train import train
from blockdraft.engine import loops
from blockdraft.errors import UsageError
from blockdraft.training import progress as training_progress
from blockdraft.types import Drafting

PLAIN, DRAFTED = "autoregressive", "drafted by "
TUNED = "tuned"  # folder of the fine-tuned model
SAVES = 10  # checkpoints of the fine-tune
# The request that the bundled target was trained with, as in recipes/tiny.
REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ASKED_SEED, LEARNED_SEED = 20_000_003, 20_000_033  # no corpus of recipes/tiny uses these
FORM = '{"question": "text", "answer": "text"}'


@dataclass(frozen=True)
class Problem:
    prompt: str
    result: str


def number_in(answer: str) -> str:
    """Content of an answer's last box, or else what follows "####", as in GSM8K; "" where there is neither."""
    _, mark, rest = answer.rpartition("\\boxed{")
    found = rest.partition("}")[0] if mark else answer.rpartition("####")[2] if "####" in answer else ""
    return found.strip().replace(",", "").replace("$", "")


def read_problems(path: Path) -> list[Problem]:
    """Problems of a file in the form of GSM8K, lines {"question", "answer"}.

    Raises:
        UsageError: It cannot be read, or a line is of another form or has no result.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); --problems takes JSON lines.") from error
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            problem = Problem(values["question"] + REQUEST, number_in(values["answer"]))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}, line {number}, is not of the form {FORM} ({error!r}).") from error
        if not problem.result:
            told = f'{path}, line {number}: the answer has neither a \boxed{{}} nor "####" before its result.'
            raise UsageError(told)
        found.append(problem)
    if not found:
        raise UsageError(f"{path} holds no problem.")
    return found


def own_problems(count: int, seed: int, known: Collection[Problem] = ()) -> list[Problem]:
    """Distinct problems of recipes/tiny, none of them known."""
    recipes = str(Path(__file__).parents[2] / "recipes" / "tiny")
    if recipes not in sys.path:
        sys.path.insert(0, recipes)
    from word_problems import word_problem

    rng, found = random.Random(seed), dict.fromkeys(known)
    while len(found) < len(known) + count:
        question, answer = word_problem(rng)
        found.setdefault(Problem(question + REQUEST, number_in(answer)))
    return list(found)[len(known) :]


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
    """The model, fine-tuned on these answers, or loaded where an earlier run did that."""
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
    texts = read_texts([str(data)], RecordSettings(), model)
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
        ways[way] = partial(
            _by_engine, way, Engine(target, drafter, settings.together, Drafting(None)), problems, tokens
        )
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
        cycles, ended = one.stats.committed, one.finish_reason == "stop"
        counts = {"counted": sum(cycles), "forwards": len(cycles), "ended": int(ended)}
        found.append(_answer(way, number, problems[number], one.token_ids, one.text, **counts))
    return found


def _by_sampler(way: str, sampler: Sampler, problems: Sequence[Problem], numbers: Sequence[int]) -> list[Answer]:
    chunks: dict[int, list[Chunk]] = {number: [] for number in numbers}
    for chunk in sampler.stream([problems[number].prompt for number in numbers]):
        chunks[numbers[chunk.row]].append(chunk)
    found = []
    for number, own in chunks.items():
        ids, text = [token for chunk in own for token in chunk.token_ids], "".join(chunk.text for chunk in own)
        ended = own[-1].finish_reason == "stop"
        counts = {"counted": len(ids), "forwards": own[-1].forwards, "ended": int(ended)}
        found.append(_answer(way, number, problems[number], ids, text, **counts))
    return found


def _answer(way: str, number: int, problem: Problem, ids: Sequence[int], text: str, **counts: int) -> Answer:
    right = number_in(text) == problem.result
    told = {"right": int(right), "looping": int(loops(ids)), "text": json.dumps(text)}
    return Answer(way=way, number=number, new_tokens=len(ids), **counts, **told)
