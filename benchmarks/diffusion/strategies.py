"""Speed against quality: samples of the models of characters by each strategy, judged by an autoregressive model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.diffusion.settings import StrategySettings, TextSettings
from benchmarks.diffusion.text import AUTOREGRESSIVE, Corpus, TextRun, check_models, model_folder
from benchmarks.harness.records import Records
from blockdraft.diffusion.folder import load_model
from blockdraft.diffusion.likelihood import likelihood
from blockdraft.diffusion.model import DiffusionModel
from blockdraft.diffusion.sampler import Sampler
from blockdraft.diffusion.settings import LikelihoodSettings, SampleSettings
from blockdraft.diffusion.text import Tokens
from blockdraft.errors import UsageError

ITSELF = "the text itself"
GOLDEN = (5**0.5 - 1) / 2
ONE_BY_ONE = "left_to_right"  # all that blocks of one token leave to choose


@dataclass(frozen=True)
class Sample:
    """One sample.

    Attributes:
        model: `ITSELF` is what the held-out text goes on with, for comparison; it takes no forwards.
        seconds: To read what is given and write the sample, alone.
        bits: Per character, to the autoregressive model of another seed, if there is one.
        text: As JSON.
    """

    KEY = ("model", "seed", "strategy", "number")

    model: str
    seed: int
    strategy: str
    number: int
    new_tokens: int
    forwards: int
    seconds: float
    bits: float
    text: str


def samples_of(out: Path) -> Records[Sample]:
    return Records(Sample, out / "samples.csv")


def sample(
    corpus: Corpus,
    text: TextSettings,
    settings: StrategySettings,
    models: Path,
    runs: Sequence[TextRun],
    out: Path,
    progress: Callable[[str, int, int], None],
) -> Records[Sample]:
    """Draw the samples that are left, all ways in turns.

    Args:
        text: What the models were trained with.
        models: Where they lie.
        runs: Those that are there.

    Raises:
        UsageError: There is no autoregressive model, which judges, or none to sample from.
    """
    check_models(settings.sampled)
    if settings.given >= text.length:
        raise UsageError(f"given is {settings.given}, and rows have {text.length} characters; give fewer.")
    there = {(run.model, run.seed) for run in runs}
    judges = sorted(seed for model, seed in there if model == AUTOREGRESSIVE)
    if not judges:
        raise UsageError(f"There is no {AUTOREGRESSIVE} model, which judges the samples; measure text first.")
    kept, rows = samples_of(out), _rows(corpus, text.length, settings.samples)
    ways = [
        (model, seed, strategy)
        for seed in judges
        for model in (ITSELF, AUTOREGRESSIVE, *settings.sampled)
        for strategy in _strategies(model, settings)
        if model == ITSELF or (model, seed) in there
    ]
    steps = [(number, way) for number in range(len(rows)) for way in ways if (*way, number) not in kept.had]
    loaded: dict[tuple[str, int], DiffusionModel] = {}

    def model_of(name: str, seed: int) -> DiffusionModel:
        if (name, seed) not in loaded:
            loaded[name, seed] = load_model(model_folder(models, name, seed), "cpu", "float32")
        return loaded[name, seed]

    for done, (number, (name, seed, strategy)) in enumerate(steps):
        progress(f"{name}, {strategy}", done, len(steps))
        ids, given = rows[number].tolist(), settings.given
        forwards, seconds = 0, 0.0
        if name != ITSELF:
            how = SampleSettings(text.length - given, strategy, settings.temperature, seed=number, ignore_eos=True)
            sampler = Sampler(model_of(name, seed), how)
            began = time.perf_counter()
            chunks = list(sampler.stream([ids[:given]]))
            seconds, forwards = time.perf_counter() - began, chunks[-1].forwards
            ids = ids[:given] + [token for chunk in chunks for token in chunk.token_ids]
        judge = model_of(AUTOREGRESSIVE, judges[(judges.index(seed) + 1) % len(judges)])
        written, bits = json.dumps(corpus.tokenizer.decode(ids[given:])), _bits(judge, ids, given)
        kept.add(Sample(name, seed, strategy, number, len(ids) - given, forwards, seconds, bits, written))
    return kept


def _strategies(model: str, settings: StrategySettings) -> Sequence[str]:
    if model == ITSELF:
        return ("",)
    return (ONE_BY_ONE,) if model in (AUTOREGRESSIVE, "block 1", "block 1 clipped") else settings.strategies


def _rows(corpus: Corpus, length: int, count: int) -> list[torch.Tensor]:
    """Pieces of the held-out text, evenly spread; the first ones do not depend on the number."""
    text = corpus.held_out.ids
    if len(text) < length:
        raise UsageError(f"The held-out text has {len(text)} characters, and rows have {length}; give more text.")
    begins = [int(number * GOLDEN % 1 * (len(text) - length)) for number in range(count)]
    return [text[begin : begin + length] for begin in begins]


def _bits(judge: DiffusionModel, ids: Sequence[int], given: int) -> float:
    eligible = torch.arange(len(ids)) >= given
    tokens = Tokens(torch.tensor(ids, dtype=torch.int64), eligible)
    return likelihood(judge, [tokens], LikelihoodSettings(length=len(ids))).bits_per_token
