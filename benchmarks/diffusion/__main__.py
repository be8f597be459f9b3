"""Costs and gains of block-diffusion models: `make bench-diffusion`, or `python -m benchmarks.diffusion [WHAT]`.

text        Models of characters of --text, of one size and trained on equally many characters: bits per held-out
            character by block size, from autoregressive to one block for the whole row, with and without clipping.
strategies  Samples of these models by each strategy: tokens per forward and per second, and what an autoregressive
            model thinks of them.
convert     --target becomes a block-diffusion model, is fine-tuned on its own answers (or on --data) and answers
            problems: right answers and tokens per forward, beside the target itself, plain and drafted for.
all         One after the other; this is the default.

Results are kept at once, and an interrupted run resumes; --anew forgets them. Written to --out: a folder for each part,
with runs.csv, samples.csv and answers.csv, and diffusion.md and diffusion.png of them all.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.diffusion import report
from benchmarks.diffusion.converted import (
    ASKED_SEED,
    LEARNED_SEED,
    TUNED,
    answers_of,
    converted,
    measure,
    own_problems,
    read_problems,
    write_answers,
)
from benchmarks.diffusion.settings import QUICK, ConvertedSettings, StrategySettings, TextSettings
from benchmarks.diffusion.strategies import sample, samples_of
from benchmarks.diffusion.text import Corpus, compare, text_runs
from benchmarks.harness.command import CORES, ROOT, Parser, add_settings, in_words, keep_settings, read_options
from benchmarks.harness.command import digest as hash_of
from blockdraft import Drafter, load_drafter, load_target
from blockdraft.cli import display
from blockdraft.cli.target import quiet
from blockdraft.errors import UsageError

TEXT, STRATEGIES, CONVERT = PARTS = ("text", "strategies", "convert")
SETTINGS = {TEXT: TextSettings, STRATEGIES: StrategySettings, CONVERT: ConvertedSettings}
# Amounts, which may grow between runs; figures of other settings must not be mixed.
MAY_GROW = {"models", "seeds", "sampled", "strategies", "samples", "ways", "together"}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, quick=QUICK, resumes=True, threads=CORES)
    add = parser.add_argument
    add("what", nargs="?", choices=(*PARTS, "all"), default="all")
    add("--text", type=Path, metavar="FILE", help="what characters are learned from, such as tinyshakespeare.txt")
    add("--target", type=Path, metavar="DIR", help="a causal model to convert; by default the bundled target")
    add("--drafter", metavar="DIR", help="of that target, for comparison; by default the bundled one for its target")
    add("--data", type=Path, metavar="FILE", help="answers to learn, as `blockdraft data` takes them")
    form = 'problems in GSM8K\'s form, {"question", "answer"} a line; by default those that recipes/tiny makes'
    add("--problems", type=Path, metavar="FILE", help=form)
    add("--out", type=Path, help="(build/diffusion, or build/diffusion-quick)")
    for part, kind in SETTINGS.items():
        add_settings(parser, kind, part)
    given = parser.parse(words)
    given.out = given.out or ROOT / "build" / ("diffusion-quick" if given.quick else "diffusion")
    return given


def fixed(settings: Any, given: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Settings that all figures of a part share."""
    values = {name: value for name, value in asdict(settings).items() if name not in MAY_GROW}
    return values | {"quick": given.quick} | more


def digest(path: Path | None) -> str | None:
    return hash_of(path) if path is not None and path.is_file() else None


def run_text(given: argparse.Namespace, out: Path) -> None:
    settings = read_options(TextSettings, given)
    corpus = _corpus(given, settings)
    keep_settings(out, fixed(settings, given, text=digest(given.text)))
    with display.progress("steps") as progress:
        compare(corpus, settings, out, progress)


def run_strategies(given: argparse.Namespace, out: Path) -> None:
    text, settings = read_options(TextSettings, given), read_options(StrategySettings, given)
    corpus, models = _corpus(given, text), out.parent / TEXT
    keep_settings(models, fixed(text, given, text=digest(given.text)))
    keep_settings(out, fixed(settings, given, threads=given.threads))
    with display.progress("samples") as progress:
        sample(corpus, text, settings, models, text_runs(models).all, out, progress)


def _corpus(given: argparse.Namespace, settings: TextSettings) -> Corpus:
    if given.text is None:
        raise UsageError("There is no text to learn; give one by --text FILE, such as tinyshakespeare.txt.")
    return Corpus(given.text, settings.held_out)


def run_convert(given: argparse.Namespace, out: Path) -> None:
    settings = read_options(ConvertedSettings, given)
    sources = {"data": digest(given.data), "problems": digest(given.problems), "target": str(given.target)}
    keep_settings(out, fixed(settings, given, **sources))
    asked = read_problems(given.problems) if given.problems else own_problems(settings.asked, ASKED_SEED)
    target, data = load_target(given.target), given.data
    with display.progress("done") as progress:
        if data is None:
            data = out / "answers.jsonl"
            write_answers(target, own_problems(settings.written, LEARNED_SEED, asked), data, settings, progress)
        model = converted(given.target, data, settings, out, progress)
        drafters: dict[str, Drafter] = {}
        if given.drafter or given.target is None:
            name = Path(given.drafter).name if given.drafter else "DFlash"
            drafters[name] = load_drafter(given.drafter, target=target)
        drafters["the converted model"] = load_drafter(out / TUNED, target=target)
        measure(target, drafters, model, asked, settings, out, progress)


def run(given: argparse.Namespace) -> None:
    torch.set_num_threads(given.threads)
    for part in PARTS if given.what == "all" else (given.what,):
        if given.anew:
            for old in (TEXT, STRATEGIES) if part == TEXT else (part,):  # samples are of the models
                shutil.rmtree(given.out / old, ignore_errors=True)
        {TEXT: run_text, STRATEGIES: run_strategies, CONVERT: run_convert}[part](given, given.out / part)
        write(given.out, given.quick)


def write(out: Path, quick: bool) -> None:
    """Write tables and picture of all results."""
    runs, samples, answers = text_runs(out / TEXT), samples_of(out / STRATEGIES), answers_of(out / CONVERT)
    found = report.Found(runs.all, samples.all, answers.all, quick)
    page = report.page(found)
    (out / "diffusion.md").write_text(page, encoding="utf-8")
    report.draw(found, out / "diffusion.png")
    print(page)


def main() -> None:
    quiet()
    with in_words():
        run(arguments())


if __name__ == "__main__":
    main()
