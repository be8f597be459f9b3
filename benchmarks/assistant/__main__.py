"""Time a coding assistant's requests, beside llama.cpp's server on the same file.

    python -m benchmarks.peers.environments llama_server
    python -m benchmarks.assistant MODEL.gguf [--files FILES.jsonl] [--count 3] [--out build/assistant]

The requests: return a file of 60 to 85 lines with one name changed, fill in a JSON schema of twenty fields, write tests
for a function, write the commit message of a diff. All are greedy chats over HTTP, one at a time, interleaved over
blockdraft (drafting; plain; edits also with the file as `prediction`) and llama-server (plain; each of its kinds of
n-gram drafts; with a smaller model). No server reuses prompts, and blockdraft's texts are compared with its plain ones.
FILES.jsonl holds a file in each line, as {"text": ...}; by default this repository's files are used. Results go to
runs.csv, assistant.md and assistant.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.assistant.tasks import JSON, KINDS, TESTS, Task, make_tasks
from benchmarks.harness.command import CORES, ROOT, Parser, digest, in_words, keep_settings, listed, tell
from benchmarks.harness.interleaving import groups, interleaved, median
from benchmarks.harness.process import PeerError
from benchmarks.harness.records import Records
from benchmarks.harness.report import number, picture, spread, table, write_files
from benchmarks.harness.sources import source_texts
from benchmarks.peers import environments
from benchmarks.server.client import CHAT, exchange, parse, streamed
from benchmarks.server.servers import HOST, Server, llama, ours

PLAIN, DRAFTED, PREDICTED = "blockdraft plain", "blockdraft", "blockdraft prediction"
LLAMA, DRAFT_MODEL = "llama-server", "draft model"
SPECULATORS = {  # options of llama-server
    "plain": (),
    **{
        kind: ("--spec-type", kind)
        for kind in ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
    },
    # Shorter drafts than its defaults, which suit GPUs.
    "ngram-simple-4-16": (
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "16"),
    ),
}
CONTEXT = 4096  # tokens of a request at llama.cpp's server
WARM_UP = 48  # tokens


@dataclass(frozen=True)
class Run:
    """A request and its answer.

    Attributes:
        tokens: Of the answer.
        first: Seconds to the first piece of text.
        seconds: Seconds to the whole answer.
        later_tokens: Tokens that came after the first piece.
        text: Digest of the answer.
    """

    KEY: ClassVar[tuple[str, ...]] = ("kind", "name", "way")

    kind: str
    name: int
    way: str
    tokens: int
    first: float
    seconds: float
    later_tokens: float
    text: str

    @property
    def rate(self) -> float:
        """Tokens per second after the first piece of text."""
        return self.later_tokens / max(self.seconds - self.first, 1e-9)


def body(task: Task, way: str) -> dict[str, Any]:
    """Return the request of a task."""
    fields = {"model": "", "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **task.fields}
    if way.startswith(LLAMA):
        fields["cache_prompt"] = False
    if way == PLAIN:
        fields["speculation"] = {"enabled": False}
    if way == PREDICTED:
        fields["prediction"] = {"type": "content", "content": task.prediction}
    return fields


def ask(server: Server, task: Task, way: str) -> Run:
    """Send a request and read its answer. Raises PeerError if it is not whole."""
    # blockdraft also drafts from earlier outputs to the same key.
    headers = {"Authorization": f"Bearer {way} {task.kind} {task.name}"}
    whole = asyncio.run(exchange(HOST, server.port, CHAT, json.dumps(body(task, way)).encode(), headers))
    heard = streamed(0, whole.sent, whole.sent, parse(whole))
    if problem := whole.error or heard.problem:
        raise PeerError(f"{way}: {problem}")
    characters = sum(amount for _, amount in heard.times)
    later = heard.tokens * (1 - heard.times[0][1] / characters)
    first, last = heard.times[0][0], heard.times[-1][0]
    return Run(task.kind, task.name, way, heard.tokens, first, last, later, digest(heard.text))


def takes(task: Task, way: str) -> bool:
    return way != PREDICTED or bool(task.prediction)


def fastest(runs: Iterable[Run]) -> str | None:
    """Return llama-server's way with the most tokens per second."""
    ways = groups((run for run in runs if run.way.startswith(LLAMA)), lambda run: run.way)
    return max(ways, key=lambda way: median(run.rate for run in ways[way]) or 0.0, default=None)


def lines(runs: Sequence[Run], kind: str) -> list[list[str]]:
    """Return the table's lines of one kind of request."""
    by_way = {way: {run.name: run for run in own} for way, own in groups(runs, lambda run: run.way).items()}
    best = by_way.get(fastest(runs) or "", {})
    plain, result = by_way.get(PLAIN, {}), list[list[str]]()
    for way, own in sorted(by_way.items()):
        others = {} if way.startswith(LLAMA) else best
        faster = [run.rate / others[name].rate for name, run in own.items() if name in others]
        sooner = [others[name].seconds / run.seconds for name, run in own.items() if name in others]
        same = [run.text == plain[name].text for name, run in own.items() if name in plain]
        cells = [
            f"{median(run.tokens for run in own.values()):.0f}",
            number(median(run.first for run in own.values())),
            number(median(run.seconds for run in own.values())),
            spread((run.rate for run in own.values()), 1),
            spread(faster),
            spread(sooner),
            "" if way.startswith(LLAMA) else f"{sum(same)} of {len(same)}",
        ]
        result.append([kind, f"**{way}**" if own is best else way, *cells])
    return result


def report(runs: Sequence[Run], out: Path) -> None:
    """Write the table and the picture."""
    header = ["", "", "tokens", "first, s", "whole, s", "tokens/s", "x llama.cpp", "x sooner", "same as plain"]
    by_kind = groups(runs, lambda run: run.kind)
    page = table(header, [line for kind in by_kind for line in lines(by_kind[kind], kind)], left=2)
    with picture(out / "assistant.png", figsize=(9, 4)) as (_, panels):
        panel, width = panels[0][0], 0.16
        bars = (PLAIN, DRAFTED, PREDICTED, f"{LLAMA} plain", f"{LLAMA} at its fastest")
        for i, bar in enumerate(bars):
            places, heights = [], []
            for place, own in enumerate(by_kind.values()):
                way = fastest(own) if bar == bars[-1] else bar
                rate = median(run.rate for run in own if run.way == way)
                if rate is not None:
                    places.append(place + (i - 2) * width)
                    heights.append(rate)
            panel.bar(places, heights, width, label=bar, color=("C7", "C0", "C2", "C3", "C1")[i])
        panel.set_xticks(range(len(by_kind)), list(by_kind))
        panel.set(ylabel="tokens per second")
        panel.legend(fontsize="small")
    write_files(out, {"assistant.md": f"{page}\n"})
    print(page)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        __doc__, prog="python -m benchmarks.assistant", out=ROOT / "build" / "assistant", threads=CORES, resumes=True
    )
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--files", type=Path, help="JSON lines of source files; by default those of this repository")
    parser.add_argument("--count", type=int, default=3, help="requests of each kind (3)")
    parser.add_argument("--kinds", type=listed(known=KINDS), default=list(KINDS), help=f"({','.join(KINDS)})")
    kinds = list(SPECULATORS)
    parser.add_argument("--llama", type=listed(known=kinds), default=kinds, help=f"({','.join(kinds)})")
    parser.add_argument("--drafter", help="of blockdraft; by default the one that `blockdraft serve` chooses")
    parser.add_argument(
        "--draft-model", type=Path, help="GGUF file of a smaller model, with which llama-server drafts too"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="stop then; the same command goes on from there")
    given = parser.parse(words)
    for path in (given.model, given.files, given.draft_model):
        if path is not None and not path.is_file():
            parser.error(f"{path} is not a file.")
    if given.count < 1:
        parser.error(f"--count must be at least 1, got {given.count}.")
    return given


def main(words: Sequence[str] | None = None) -> None:
    given, began = arguments(words), time.monotonic()
    with in_words(), ExitStack() as stack:
        texts = source_texts(given.files)
        tasks = make_tasks(texts, given.count, given.kinds)
        measured = {"model": given.model.name, "files": digest(texts), "threads": given.threads}
        measured |= {"drafter": given.drafter or "default"}
        keep_settings(given.out, measured, given.anew)
        records = Records(Run, given.out / "runs.csv")
        own_ways, servers = [PLAIN, DRAFTED, PREDICTED], dict[str, Server]()
        more = ["--prefix-tokens", "0", "--no-stored-prefixes"]
        server = ours(given.model, given.drafter, given.out / "ours.log", given.threads, more)
        stack.callback(server.close)
        servers |= dict.fromkeys(own_ways, server)
        if reason := environments.why_missing("llama_server"):
            tell(f"Without llama-server: {reason}")
        else:
            kinds = {kind: SPECULATORS[kind] for kind in given.llama}
            if given.draft_model is not None:
                kinds[DRAFT_MODEL] = ("--model-draft", str(given.draft_model), "--spec-type", "draft-simple")
            for kind, options in kinds.items():
                log = given.out / f"llama-{kind.replace(' ', '-')}.log"
                servers[f"{LLAMA} {kind}"] = llama(given.model, None, log, given.threads, 1, CONTEXT, options)
                stack.callback(servers[f"{LLAMA} {kind}"].close)
        for warm_up, way in product(make_tasks(texts, 1, [TESTS, JSON]), servers.keys() - {PLAIN, PREDICTED}):
            warm_up.fields["max_tokens"] = WARM_UP
            ask(servers[way], warm_up, way)
        for _, task, way in interleaved(tasks, list(servers), 1, takes):
            if (task.kind, task.name, way) in records.had:
                continue
            if time.monotonic() - began > 60 * given.minutes:
                tell("The time is up; the same command goes on from here.")
                break
            run = ask(servers[way], task, way)
            records.add(run)
            tell(f"{task.kind} {task.name}, {way}: {run.tokens} tokens, {run.seconds:.2f} s, {run.rate:.1f} tokens/s")
        report(records.all, given.out)


if __name__ == "__main__":
    main()
