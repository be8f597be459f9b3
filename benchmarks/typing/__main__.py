"""Time completions of a line while somebody types, beside llama.cpp's server on the same file.

    python -m benchmarks.peers.environments llama_server
    python -m benchmarks.typing MODEL.gguf [--files FILES.jsonl] [--sessions 4] [--loads alone,chat,agent]

A session types the beginning of a line of code, a key every 150 ms. Each key sends the request of llama.vim and drops
the one before. After every second key the typist waits for the completion of the line; its time is measured. Sessions
run interleaved on both servers: alone, beside a chat about another file, and beside an agent whose prompt of 20,000
tokens is read meanwhile, where a short chat follows the line. Without llama-server, ours runs alone.
FILES.jsonl holds a file in each line, as {"text": ...}; by default this repository's files are used. Results go to
runs.csv, typing.md and typing.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.harness.command import CORES, ROOT, Parser, in_words, tell
from benchmarks.harness.interleaving import interleaved
from benchmarks.harness.records import Records
from benchmarks.harness.report import picture, table, write_files
from benchmarks.harness.sources import source_texts
from benchmarks.peers import environments
from benchmarks.server.client import Exchange, exchange, parse
from benchmarks.server.servers import HOST, Server, llama, ours

KEY_SECONDS = 0.15
KEYS, PAUSE = 12, 2  # keys of a session, and keys after which the typist waits
BEFORE, BEHIND = 1000, 300  # characters around the cursor that the editor sends
CHAT_TOKENS, CHAT_CHARACTERS = 2000, 6000  # answer and file of the chat
CONTEXT = 8192  # tokens of a request at llama.cpp's server
AGENT_TOKENS = 20_000  # of an agent's prompt, about as many as Claude Code sends
AGENT_READ = 8_000  # of them are read before the first key: reads of later tokens take longer
SHORT_CHAT, SHORT_TOKENS = "List twenty names of cities.", 60  # asked beside an agent, and its longest answer
OURS, THEIRS = "blockdraft", "llama-server"
ALONE, BESIDE, AGENT = "alone", "beside a chat", "beside an agent"
LOADS = {"alone": ALONE, "chat": BESIDE, "agent": AGENT}


@dataclass(frozen=True)
class Session:
    """A line that is typed.

    Attributes:
        before, behind: Lines before and behind it.
        line: The line, with its indentation.
        other: Text of another file, for the chat.
        project: Text of many files, for the agent.
    """

    before: str
    line: str
    behind: str
    other: str
    project: str

    @property
    def indent(self) -> int:
        return len(self.line) - len(self.line.lstrip())

    def request(self, keys: int) -> dict[str, object]:
        """Return llama.vim's request after some keys. Greedy, and for one line, so that both do the same work."""
        return {
            "id_slot": 0,
            "input_prefix": self.before,
            "input_suffix": f"\n{self.behind}",
            "input_extra": [],
            "prompt": self.line[: self.indent + keys],
            "n_predict": 128,
            "stop": ["\n"],
            "n_indent": self.indent,
            "top_k": 1,
            "top_p": 0.9,
            "samplers": ["top_k", "top_p", "infill"],
            "stream": False,
            "cache_prompt": True,
            "t_max_prompt_ms": 500,
            "t_max_predict_ms": 1000,
        }


@dataclass(frozen=True)
class Run:
    """A completion that the typist waited for.

    Attributes:
        load: What ran beside.
        keys: Keys of the line so far; 0 for the short chat beside an agent.
        seconds: From the key to the whole completion, or from the question to the whole answer.
        characters: Length of the completion, or tokens of the answer.
        early: Completions since the last one that came before the next key.
    """

    KEY: ClassVar[tuple[str, ...]] = ("model", "server", "load", "session", "keys")

    model: str
    server: str
    load: str
    session: int
    keys: int
    seconds: float
    characters: int
    early: int


def sessions_of(files: Path | None, count: int) -> list[Session]:
    """Return sessions of files that are long enough, the same in each run."""
    texts = source_texts(files)
    texts = [text for text in texts if len(text) > 3 * (BEFORE + BEHIND)]
    choose, sessions = random.Random(0), list[Session]()
    while len(sessions) < count:
        text, other = choose.sample(texts, 2)
        lines = text.splitlines()
        candidates = [i for i, line in enumerate(lines) if KEYS + 8 <= len(line.strip()) <= 72]
        at = choose.choice(candidates or [0])
        before, behind = "\n".join(lines[:at]), "\n".join(lines[at + 1 :])
        if not candidates or len(before) < BEFORE or len(behind) < BEHIND:
            continue
        before = before[before.find("\n", len(before) - BEFORE) + 1 :] + "\n"  # whole lines, as editors send them
        behind = behind[: behind.find("\n", BEHIND) + 1]
        project = "\n\n".join(choose.sample(texts, len(texts)))
        sessions.append(Session(before, lines[at], behind, other[:CHAT_CHARACTERS], project))
    return sessions


async def agent_prompt(server: Server, project: str) -> str:
    """Return a text of about `AGENT_TOKENS` tokens."""
    sample = project[:8000]
    body = json.dumps({"content": sample, "prompt": sample}).encode()
    count = len(parse(await exchange(HOST, server.port, "/tokenize", body)).json["tokens"])
    return project[: len(sample) * AGENT_TOKENS // count]


async def type_line(server: Server, session: Session) -> list[tuple[int, float, int, int]]:
    """Type a line. Return keys, seconds, characters and early completions of each pause."""

    async def complete(keys: int) -> tuple[float, int]:
        begin = time.monotonic()
        whole = await exchange(HOST, server.port, "/infill", json.dumps(session.request(keys)).encode())
        answer = parse(whole)
        if answer.status != 200:
            raise ValueError(f"/infill answered {answer.status}: {answer.body[:200]}")
        return whole.pieces[-1][0] - begin, len(answer.json["content"])

    waits, early = list[tuple[int, float, int, int]](), 0
    for keys in range(1, KEYS + 1):
        task = asyncio.ensure_future(complete(keys))
        if keys % PAUSE:
            await asyncio.sleep(KEY_SECONDS)
            early += task.done()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        else:
            waits.append((keys, *await task, early))
            early = 0
            await asyncio.sleep(KEY_SECONDS)
    return waits


async def ask(server: Server, content: str, max_tokens: int, slot: int) -> Exchange:
    """Ask in a chat, and return the streamed answer."""
    body = {
        "id_slot": slot,
        "stream": True,
        "stream_options": {"include_usage": True},
        "model": "",
        "temperature": 0,
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": content}],
    }
    return await exchange(HOST, server.port, "/v1/chat/completions", json.dumps(body).encode())


async def run_session(server: Server, session: Session, load: str) -> list[tuple[int, float, int, int]]:
    """Type a line beside other requests, and beside an agent have a short chat. Return what `Run` holds."""
    beside = None
    if load == BESIDE:
        beside = asyncio.ensure_future(
            ask(server, f"Explain each line of this file.\n\n{session.other}", CHAT_TOKENS, 1)
        )
    elif load == AGENT:
        prompt = await agent_prompt(server, session.project)
        beside = asyncio.ensure_future(ask(server, f"Explain these files.\n\n{prompt}", CHAT_TOKENS, 1))
    try:
        if beside is not None:
            await asyncio.sleep(1.0)
        while load == AGENT and beside is not None and not beside.done() and unread(server) > AGENT_TOKENS - AGENT_READ:
            await asyncio.sleep(0.5)
        runs = await type_line(server, session)
        if load == AGENT:
            begin = time.monotonic()
            answer = parse(await ask(server, SHORT_CHAT, SHORT_TOKENS, 0))
            seconds = answer.events[-1][0] - begin
            runs.append((0, seconds, answer.events[-1][1]["usage"]["completion_tokens"], 0))
        return runs
    finally:
        if beside is not None:
            if beside.done() and parse(beside.result()).status != 200:
                raise ValueError(f"the request beside failed: {parse(beside.result()).body[:200]}")
            beside.cancel()
            with suppress(asyncio.CancelledError):
                await beside
            while is_busy(server):
                await asyncio.sleep(0.1)


def unread(server: Server) -> float:
    """Return how many prompt tokens our server has yet to read; 0 for others, which do not tell."""
    lines = [line.split() for line in server.get("/metrics").decode().splitlines()]
    return sum(float(line[-1]) for line in lines if line and line[0].endswith("_prefill_tokens_left"))


def is_busy(server: Server) -> bool:
    """Return whether a server still works, as it may on a dropped request."""
    lines = [line.split() for line in server.get("/metrics").decode().splitlines()]
    return any(line[0].endswith(("_running", "requests_processing")) and float(line[-1]) > 0 for line in lines if line)


def report(runs: Sequence[Run], out: Path) -> None:
    """Write the table and the picture."""
    models, lines = sorted({run.model for run in runs}), list[list[str]]()
    with picture(out / "typing.png", columns=len(models), figsize=(5 * len(models), 4)) as (_, panels):
        for panel, model in zip(panels[0], models, strict=True):
            for load, style in ((ALONE, "-"), (BESIDE, "--"), (AGENT, ":")):
                for server, color in ((OURS, "C0"), (THEIRS, "C1")):
                    own = [run for run in runs if (run.model, run.server, run.load) == (model, server, load)]
                    chats = [run.characters / run.seconds for run in own if not run.keys]
                    own = [run for run in own if run.keys]
                    if len(own) < 2:
                        continue
                    seconds = sorted(run.seconds for run in own)
                    *cuts, last = statistics.quantiles(seconds, n=20, method="inclusive")
                    early = sum(run.early for run in own) / (len(own) * (PAUSE - 1))
                    chat = f"{min(chats):.1f}" if chats else "-"
                    times = [f"{cuts[9]:.2f}", f"{last:.2f}", f"{early:.0%}"]
                    lines.append([model, load, server, *times, chat, str(len(own))])
                    shares = [(i + 1) / len(seconds) for i in range(len(seconds))]
                    panel.step(seconds, shares, style, color=color, where="post", label=f"{server}, {load}")
            panel.set(
                title=model, xlabel="seconds to the completed line", ylabel="share of completions", xlim=(0, None)
            )
            panel.legend(fontsize="small")
    heads = ["model", "", "server", "p50, s", "p95, s", "before the next key", "short chat, tokens/s", "completions"]
    page = table(heads, lines, left=3)
    write_files(out, {"typing.md": f"{page}\n"})
    print(page)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, prog="python -m benchmarks.typing", out=ROOT / "build" / "typing", threads=CORES)
    parser.add_argument("model", type=Path, help="GGUF file of a model that fills in the middle")
    parser.add_argument("--files", type=Path, help="JSON lines of source files; by default those of this repository")
    parser.add_argument("--sessions", type=int, default=4, help="lines that are typed (4)")
    parser.add_argument("--loads", default=",".join(LOADS), help=f"what runs beside, of {', '.join(LOADS)} (all)")
    given = parser.parse(words)
    given.loads = given.loads.split(",")
    if unknown := set(given.loads) - set(LOADS):
        parser.error(f"--loads must be of {', '.join(LOADS)}, got {', '.join(sorted(unknown))}.")
    for path in (given.model, given.files):
        if path is not None and not path.is_file():
            parser.error(f"{path} is not a file.")
    if given.sessions < 1:
        parser.error(f"--sessions must be at least 1, got {given.sessions}.")
    return given


def main(words: Sequence[str] | None = None) -> None:
    given = arguments(words)
    with in_words(), ExitStack() as stack:
        sessions = sessions_of(given.files, given.sessions)
        records = Records(Run, given.out / "runs.csv")
        more = ["--batch-size", "1024", "--ubatch-size", "1024", "--cache-reuse", "256", "--metrics"]
        servers = {OURS: ours(given.model, "lookup", given.out / "ours.log", given.threads)}
        stack.callback(servers[OURS].close)
        if reason := environments.why_missing("llama_server"):
            tell(f"Without llama-server: {reason}")
        else:
            servers[THEIRS] = llama(given.model, None, given.out / "theirs.log", given.threads, 2, CONTEXT, more)
            stack.callback(servers[THEIRS].close)
        for server in servers.values():
            asyncio.run(type_line(server, Session("", "x" * KEYS, "", "", "")))  # warm-up
        ways = [(server, LOADS[load]) for load in given.loads for server in servers]
        for _, number, (name, load) in interleaved(range(given.sessions), ways, 1):
            if (given.model.stem, name, load, number, KEYS) in records.had:
                continue
            waits = asyncio.run(run_session(servers[name], sessions[number], load))
            records.add(*(Run(given.model.stem, name, load, number, *wait) for wait in waits))
            tell(f"{name}, {load}: {', '.join(f'{wait[1]:.2f}' for wait in waits)} s")
        report(records.all, given.out)


if __name__ == "__main__":
    main()
