"""Plain decoding of a GGUF file, beside llama.cpp on the same file:

    python -m benchmarks.files MODEL.gguf --llama build/peers/llama_cpp/build/llama_peer [--processor x86-64-v3]

Each round decodes a few prompts greedily and reads one of 512 tokens, ours and llama.cpp's in turns, one stream.
`make bench-peers` builds the program for this processor; for --processor it has to be built alike. llama.cpp's keys and
values are in float16, its default. `python -m benchmarks.start` measures memory and the time to a first token.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from benchmarks.harness.command import CORES, Parser, in_words
from benchmarks.harness.process import PeerProcess
from benchmarks.harness.report import table
from benchmarks.harness.turns import in_turns
from blockdraft.cpu import build
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import Target, load_target
from blockdraft.types import SamplingParams

QUESTIONS = (
    "What is gravity? Explain it to a child.",
    "Write a short story about a fox and a river.",
    "Write a Python function that returns the largest number in a list.",
)
PROMPT = 512  # tokens of the long prompt
OURS, THEIRS = "blockdraft", "llama.cpp"


class Answer(NamedTuple):
    """Seconds to the first token, and tokens/s after it."""

    first: float
    rate: float


Decode = Callable[[list[int], int], Answer]  # a prompt and the number of tokens to decode


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, prog="python -m benchmarks.files", threads=CORES)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--llama", type=Path, metavar="PROGRAM", required=True, help="llama_peer")
    parser.add_argument("--processor", default="native", help="as gcc calls it, for our kernels (native)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (64)")
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up (5)")
    given = parser.parse(words)
    for file in (given.model, given.llama):
        if not file.is_file():
            parser.error(f"There is no file {file}.")
    if given.tokens < 2 or given.rounds < 1:
        parser.error("--tokens must be at least 2 and --rounds at least 1.")
    return given


def prompts(target: Target) -> list[list[int]]:
    """Questions, as chats where the model has a template, and a long prompt, which comes last."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    found = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        if tokenizer.chat_template is None:
            found.append(list(tokenizer(question).input_ids))
        else:
            found.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    long = [token for each in found for token in each]
    return [*found, (long * (PROMPT // len(long) + 1))[:PROMPT]]


def ours(engine: Engine) -> Decode:
    def decode(prompt: list[int], tokens: int) -> Answer:
        [done] = engine.generate([prompt], SamplingParams(tokens, ignore_eos=True))
        stats = done.checked().stats
        return Answer(stats.prefill_seconds, stats.tokens_per_second)

    return decode


def theirs(peer: PeerProcess) -> Decode:
    def decode(prompt: list[int], tokens: int) -> Answer:
        found = peer.ask("decode", {"prompt": prompt, "max_new_tokens": tokens, "stops": []})
        seconds = found["decode_seconds"]
        return Answer(found["prefill_seconds"], (len(found["tokens"]) - 1) / seconds if seconds else 0.0)

    return decode


def report(found: dict[str, list[Answer]], longs: dict[str, list[float]]) -> str:
    """Medians, and medians of the ratios within a turn."""
    rates = {way: [each.rate for each in answers] for way, answers in found.items()}
    rows = [
        [way, f"{statistics.median(rates[way]):.1f}", f"{1000 * statistics.median(longs[way]):.0f}"] for way in rates
    ]
    more = [a / b for a, b in zip(rates[OURS], rates[THEIRS], strict=True)]
    sooner = [b / a for a, b in zip(longs[OURS], longs[THEIRS], strict=True)]
    told = [["times", f"{statistics.median(more):.2f}", f"{statistics.median(sooner):.2f}"]]
    return table(["", "tokens/s", f"ms to read {PROMPT} tokens"], rows + told)


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    settings = {"type": "f16", "model": str(options.model), "threads": options.threads, "max_length": 2 * PROMPT}
    with (
        in_words(),
        tempfile.TemporaryDirectory() as folder,
        patch.object(build, "NATIVE", f"-march={options.processor}"),
    ):
        target = load_target(options.model, device="cpu", threads=options.threads, compile="on")
        peer = PeerProcess([str(options.llama)], settings, options.threads, Path(folder) / "log", 600)
        with peer, Engine(target, load_drafter("none", target=target), 1) as engine:
            ways = {OURS: ours(engine), THEIRS: theirs(peer)}
            found: dict[str, list[Answer]] = {way: [] for way in ways}
            longs: dict[str, list[float]] = {way: [] for way in ways}
            *asked, long = prompts(target)
            tasks = [(prompt, options.tokens) for prompt in asked] + [(long, 1)]
            for repeat, (prompt, tokens), way in in_turns(tasks, list(ways), options.rounds + 1):
                answer = ways[way](prompt, tokens)
                if repeat and tokens > 1:
                    found[way].append(answer)
                elif repeat:
                    longs[way].append(answer.first)
    print(f"{options.model.name}, {target.running}, {options.processor}, {options.threads} threads, one stream")
    print(report(found, longs))


if __name__ == "__main__":
    main()
