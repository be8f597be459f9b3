"""What block-diffusion models cost and bring: `make bench-diffusion`, or `python -m benchmarks.diffusion [WHAT]`.

text        Models of characters of --text, of one size and trained on equally many characters: bits per held-out
            character by block size, from autoregressive to one block for the whole row, with and without clipping.
strategies  Samples of these models by each strategy: tokens per forward and per second, and what an autoregressive
            model thinks of them.
convert     --target becomes a block-diffusion model, is fine-tuned on its own answers (or on --data) and answers
            problems: right answers and tokens per forward, beside the target itself, plain and drafted for.
all         One after the other; this is the default.

What is measured is kept at once, and the same command goes on where it was; --anew forgets it. Written to --out: a
folder for each part, with runs.csv, samples.csv and answers.csv, and diffusion.md and diffusion.png of them all.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from benchmarks.diffusion import picture, report
from benchmarks.diffusion.characters import Corpus
from benchmarks.diffusion.converted import TUNED, answers_of, converted, measure, write_answers
from benchmarks.diffusion.problems import ASKED_SEED, LEARNED_SEED, own_problems, read_problems
from benchmarks.diffusion.settings import QUICK, ConvertedSettings, StrategySettings, TextSettings
from benchmarks.diffusion.strategies import sample, samples_of
from benchmarks.diffusion.text import compare, text_runs
from benchmarks.harness.command import in_words, keep_settings
from blockdraft import Drafter, load_drafter, load_target
from blockdraft.cli import display, loading
from blockdraft.errors import UsageError
from blockdraft.settings import explain, read_settings

ROOT = Path(__file__).parents[2]
TEXT, STRATEGIES, CONVERT = PARTS = ("text", "strategies", "convert")
KINDS = {TEXT: TextSettings, STRATEGIES: StrategySettings, CONVERT: ConvertedSettings}
# How much is measured, which may grow; figures of other settings are not to be mixed.
MAY_GROW = {"models", "seeds", "sampled", "strategies", "samples", "ways", "together"}
S = TypeVar("S")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", nargs="?", choices=(*PARTS, "all"), default="all")
    add("--text", type=Path, metavar="FILE", help="what characters are learned from, such as tinyshakespeare.txt")
    add("--target", type=Path, metavar="DIR", help="a causal model to convert; by default the bundled target")
    add("--drafter", metavar="DIR", help="of that target, for comparison; by default the bundled one for its target")
    add("--data", type=Path, metavar="FILE", help="answers to learn, as `blockdraft data` takes them")
    add(
        "--problems",
        type=Path,
        metavar="FILE",
        help='problems in GSM8K\'s form, {"question", "answer"} a line; by default those that recipes/tiny makes',
    )
    add("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    add("--quick", action="store_true", help="some minutes, to see that all works; the figures say nothing")
    add("--anew", action="store_true", help="forget what was measured before")
    add("--out", type=Path, help="(build/diffusion, or build/diffusion-quick)")
    for part, kind in KINDS.items():
        group = parser.add_argument_group(part)
        for field in fields(kind):
            default = getattr(kind(), field.name)
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            told = explain(kind, field.name).replace("%", "%%")
            group.add_argument(f"--{field.name.replace('_', '-')}", metavar="VALUE", help=f"{told} ({shown})")
    given = parser.parse_args(words)
    given.out = given.out or ROOT / "build" / ("diffusion-quick" if given.quick else "diffusion")
    return given


def settings_of(kind: type[S], given: argparse.Namespace) -> S:
    named = {field.name: getattr(given, field.name) for field in fields(kind)}  # type: ignore[arg-type]
    chosen = {name: value for name, value in named.items() if value is not None}
    return read_settings(kind, flags={**(QUICK[kind] if given.quick else {}), **chosen})


def fixed(settings: Any, given: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What all figures of a part have in common."""
    return (
        {name: value for name, value in asdict(settings).items() if name not in MAY_GROW}
        | {"quick": given.quick}
        | more
    )


def digest(path: Path | None) -> str | None:
    return None if path is None or not path.is_file() else hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def run_text(given: argparse.Namespace, out: Path) -> None:
    settings = settings_of(TextSettings, given)
    corpus = _corpus(given, settings)
    keep_settings(out, fixed(settings, given, text=digest(given.text)))
    with display.progress("steps") as progress:
        compare(corpus, settings, out, progress)


def run_strategies(given: argparse.Namespace, out: Path) -> None:
    text, settings = settings_of(TextSettings, given), settings_of(StrategySettings, given)
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
    settings = settings_of(ConvertedSettings, given)
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


RUN = {TEXT: run_text, STRATEGIES: run_strategies, CONVERT: run_convert}


def run(given: argparse.Namespace) -> None:
    torch.set_num_threads(given.threads)
    for part in PARTS if given.what == "all" else (given.what,):
        if given.anew:
            for old in (TEXT, STRATEGIES) if part == TEXT else (part,):  # samples are of the models
                shutil.rmtree(given.out / old, ignore_errors=True)
        RUN[part](given, given.out / part)
        write(given.out, given.quick)


def write(out: Path, quick: bool) -> None:
    """Tables and picture of all that is there."""
    runs, samples, answers = text_runs(out / TEXT), samples_of(out / STRATEGIES), answers_of(out / CONVERT)
    found = report.Found(runs.all, samples.all, answers.all, quick)
    page = report.page(found)
    (out / "diffusion.md").write_text(page, encoding="utf-8")
    picture.draw(found, out / "diffusion.png")
    print(page)


def main() -> None:
    loading.quiet()
    with in_words():
        run(arguments())


if __name__ == "__main__":
    main()
