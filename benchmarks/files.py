"""Benchmark decoding of a GGUF file, beside llama.cpp on the same file.

    python -m benchmarks.files MODEL.gguf --llama build/peers/llama_cpp/build/llama_peer [--processor x86-64-v3]
    python -m benchmarks.files MODEL.gguf --llama PROGRAM --drafter DRAFTER.gguf --prompts FILE --limit 4 --tokens 96

Each round decodes a few prompts greedily and prefills one of 512 tokens. Our runs and llama.cpp's are interleaved, one
sequence at a time. With a drafter, both also draft: with it, and by lookup in the text alone. Prompts with repetitive
outputs are left out. `make bench-peers` builds llama.cpp's program for this processor; build it the same way for
--processor. llama.cpp's KV cache is float16, its default. `python -m benchmarks.start` measures memory and the time to
the first token.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.harness.command import CORES, Parser, in_words
from benchmarks.harness.interleaving import interleaved
from benchmarks.harness.process import PeerError, PeerProcess
from benchmarks.harness.report import table

from blockdraft.cli.display import progress
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine, loops
from blockdraft.engine.text import encode
from blockdraft.evaluation.prompts import read_prompt_sets
from blockdraft.formats.gguf import open_gguf
from blockdraft.kernels.cpu import build
from blockdraft.targets import Target, load_target
from blockdraft.types import SamplingParams

QUESTIONS = (
    "What is gravity? Explain it to a child.",
    "Write a short story about a fox and a river.",
    "Write a Python function that returns the largest number in a list.",
)
PROMPT = 512  # tokens of the long prompt
DRAFT_CHOICE = (1, 2, 3)  # of llama.cpp's drafts; 3 is its default
OURS, THEIRS = "blockdraft", "llama.cpp"


class Answer(NamedTuple):
    """Seconds to the first token and after it, tokens after it, and forwards of the target that made these."""

    first: float
    seconds: float
    tokens: int
    forwards: int


Decode = Callable[[list[int], int], Answer]  # a prompt and the most tokens to decode


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, prog="python -m benchmarks.files", threads=CORES)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--llama", type=Path, metavar="PROGRAM", required=True, help="llama_peer")
    parser.add_argument("--drafter", type=Path, metavar="FILE", help="GGUF file of a drafter, to draft with too")
    parser.add_argument("--prompts", type=Path, action="append", metavar="FILE", help="as for `blockdraft bench`")
    parser.add_argument("--limit", type=int, help="prompts taken of each file")
    parser.add_argument("--processor", default="native", help="as gcc calls it, for our kernels (native)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (64)")
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up (5)")
    given = parser.parse(words)
    for file in (given.model, given.llama, given.drafter):
        if file is not None and not file.is_file():
            parser.error(f"There is no file {file}.")
    if given.limit is not None and not given.prompts:
        parser.error(f"--limit is {given.limit}, which goes with --prompts; leave it out.")
    if given.tokens < 2 or given.rounds < 1:
        parser.error("--tokens must be at least 2 and --rounds at least 1.")
    return given


def prompts(target: Target, files: Sequence[Path] | None = None, limit: int | None = None) -> list[list[int]]:
    """Return the token ids of the prompts, or of a few questions, and of a long prompt at the end."""
    asked = [prompt for one in read_prompt_sets(files, limit) for prompt in one.prompts] if files else QUESTIONS
    found = [encode(prompt, target) for prompt in asked]
    long = [token for each in found for token in each]
    return [*found, (long * (PROMPT // len(long) + 1))[:PROMPT]]


def ours(engine: Engine) -> Decode:
    def decode(prompt: list[int], tokens: int) -> Answer:
        [done] = engine.generate([prompt], SamplingParams(tokens))
        stats = done.checked().stats
        return Answer(stats.prefill_seconds, stats.total_seconds, sum(stats.committed), len(stats.committed))

    return decode


def theirs(peer: PeerProcess, stops: Sequence[int]) -> Decode:
    def decode(prompt: list[int], tokens: int) -> Answer:
        found = peer.ask("decode", {"prompt": prompt, "max_new_tokens": tokens, "stops": list(stops)})
        later = len(found["tokens"]) - found["first"]
        return Answer(found["prefill_seconds"], found["decode_seconds"], later, found["steps"])

    return decode


@contextmanager
def named(way: str) -> Iterator[None]:
    """Say in errors of llama.cpp which way failed."""
    try:
        yield
    except PeerError as error:
        raise PeerError(f"{way}: {error}") from error


def their_ways(drafter: Path | None) -> dict[str, dict[str, Any]]:
    """Return the settings that each decoding method of llama.cpp adds to `llama_peer`."""
    if drafter is None:
        return {THEIRS: {}}
    found: dict[str, dict[str, Any]] = {THEIRS: {}}
    for name in ("ngram-simple", "ngram-cache"):
        found[f"{THEIRS} {name}"] = {"speculator": name, "draft": None, "draft_tokens": None}
    speculator = f"draft-{open_gguf(drafter).metadata['general.architecture']}"
    for count in DRAFT_CHOICE:
        way = {"speculator": speculator, "draft": str(drafter), "draft_tokens": count}
        found[f"{THEIRS} {speculator}:{count}"] = way
    return found


def our_ways(target: Target, drafter: Path | None) -> dict[str, Engine]:
    """Return the engines of our decoding methods."""
    named = {OURS: "none"}
    if drafter is not None:
        named |= {f"{OURS} drafter": str(drafter), f"{OURS} lookup+drafter": f"lookup+{drafter}"}
    return {way: Engine(target, load_drafter(name, target=target), 1) for way, name in named.items()}


def usable(plain: Engine, asked: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Return the prompts with outputs to time that are not repetitive. Raises ValueError if there are none."""
    answers = [answer.token_ids for answer in plain.generate(asked, SamplingParams(tokens))]
    kept = [prompt for prompt, ids in zip(asked, answers, strict=True) if len(ids) > 2 and not loops(ids)]
    if not kept:
        raise ValueError(
            f"All {len(asked)} prompts are answered in a loop or with a word; give others, or another number of tokens "
            f"than {tokens}."
        )
    return kept


def report(found: dict[str, list[list[Answer]]], longs: dict[str, list[float]]) -> str:
    """Return the figures of each method: responses by repeat, and the prefill time of the long prompt."""
    rates = {
        way: [sum(each.tokens for each in one) / (sum(each.seconds for each in one) or 1.0) for one in rounds]
        for way, rounds in found.items()
    }
    if silent := [way for way, own in rates.items() if not all(own)]:
        raise ValueError(f"{silent[0]} answered all prompts of a round with one token; give other prompts.")
    rows = []
    for way, own in rates.items():
        answers = [each for one in found[way] for each in one]
        times = statistics.median(a / b for a, b in zip(own, rates[THEIRS], strict=True))
        sooner = statistics.median(b / a for a, b in zip(longs[way], longs[THEIRS], strict=True))
        tau = sum(each.tokens for each in answers) / sum(each.forwards for each in answers)
        speed = f"{statistics.median(own):.1f}", f"{min(own):.1f}-{max(own):.1f}", f"{times:.2f}", f"{tau:.2f}"
        rows.append([way, *speed, f"{1000 * statistics.median(longs[way]):.0f}", f"{sooner:.2f}"])
    header = ["", "tokens/s", "range", "times llama.cpp", "tau", f"ms to read {PROMPT} tokens", "times llama.cpp"]
    best = [
        max((way for way in rates if way.startswith(whose)), key=lambda way: statistics.median(rates[way]))
        for whose in (OURS, THEIRS)
    ]
    over = statistics.median(a / b for a, b in zip(*(rates[way] for way in best), strict=True))
    told = (
        f"tau: tokens per target forward pass. We draft as far as it pays (auto); {THEIRS} drafts as many tokens "
        "as stand behind the colon."
    )
    return f"{table(header, rows)}\n\n{told}\nFastest: {' over '.join(best)}: {over:.2f} times"


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    settings = {"type": "f16", "model": str(options.model), "threads": options.threads}
    with (
        in_words(resumes=False),
        ExitStack() as stack,
        patch.object(build, "NATIVE", f"-march={options.processor}"),
    ):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target = load_target(options.model, device="cpu", threads=options.threads, compile="on")
        *asked, long = prompts(target, options.prompts, options.limit)
        settings["max_length"] = max(map(len, (*asked, long))) + options.tokens + 64  # some speculators look ahead
        ways: dict[str, Decode] = {}
        engines = our_ways(target, options.drafter)
        for way, engine in engines.items():
            ways[way] = ours(stack.enter_context(engine))
        for way, more in their_ways(options.drafter).items():
            log = folder / way.replace(" ", "-")
            with named(way):
                peer = PeerProcess([str(options.llama)], settings | more, options.threads, log, 600)
            ways[way] = theirs(stack.enter_context(peer), sorted(target.eos_token_ids))
        kept = usable(engines[OURS], asked, options.tokens)
        tasks = [(prompt, options.tokens) for prompt in kept] + [(long, 1)]
        found: dict[str, list[list[Answer]]] = {way: [[] for _ in range(options.rounds)] for way in ways}
        longs: dict[str, list[float]] = {way: [] for way in ways}
        with progress("answers") as shown:
            for done, (repeat, (prompt, tokens), way) in enumerate(interleaved(tasks, list(ways), options.rounds + 1)):
                with named(way):
                    answer = ways[way](prompt, tokens)
                shown("decoding", done + 1, len(tasks) * len(ways) * (options.rounds + 1))
                if repeat and tokens > 1:
                    found[way][repeat - 1].append(answer)
                elif repeat:
                    longs[way].append(answer.first)
    print(f"{options.model.name}, {target.running}, for the processor {options.processor}, {options.threads} threads")
    print(f"{len(kept)} of {len(asked)} prompts, up to {options.tokens} tokens, {options.rounds} rounds\n")
    print(report(found, longs))


if __name__ == "__main__":
    main()
