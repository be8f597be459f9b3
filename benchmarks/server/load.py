"""The load: ways take turns at each number of streams, and every answer is compared with plain decoding."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.command import digest, tell
from benchmarks.harness.interleaving import interleaved
from benchmarks.harness.process import PeerError, PeerProcess, peak_bytes
from benchmarks.harness.records import Records
from benchmarks.peers import environments
from benchmarks.peers.adapters.llama_cpp import Failed, as_gguf
from benchmarks.server import chats
from benchmarks.server.client import Figures, Heard, figures
from benchmarks.server.servers import HOST, Server, llama, ours
from benchmarks.sizes.pairs import parameters
from benchmarks.sizes.widen import DRAFTER, TARGET, widen
from pydantic import Field

from blockdraft.settings import Count, Layers, Natural, Texts, settings

SERVER, PLAIN, ENGINE = "server", "server-plain", "engine"  # ours with drafting and without, and no server at all
LLAMA, LLAMA_DRAFTS = "llama-server", "llama-server-drafting"
WAYS = (SERVER, PLAIN, ENGINE, LLAMA, LLAMA_DRAFTS)
EXACT = (SERVER, PLAIN, ENGINE)  # ways whose answers must be those of plain decoding
MODEL = "target"  # as our server names it
LENGTH = 640  # tokens that the longest request has room for
RAMP = 0.25  # share of a load before anything counts


@settings
class LoadSettings:
    """Settings of the load."""

    widths: Layers = Field((1, 4), description="How many times as wide as the bundled pair; 4 has 75 M parameters.")
    streams: Layers = Field((1, 4, 16, 64), description="Requests at a time.")
    ways: Texts = Field(WAYS, description="Servers, and the engine without one.")
    repeats: Count = Field(3, description="How often each way is measured at each number of streams.")
    seconds: float = Field(24.0, description="Time in which streams send requests; a quarter of it warms up.")
    requests: Count = Field(96, description="Different ones that are asked interleaved.")
    batch: Count = Field(64, description="Requests that a server decodes together at most.")
    prefix_tokens: Natural = Field(4096, description="Tokens of ended requests that our server and engine remember.")
    dtype: str = Field("bfloat16", description="Of weights and arithmetic.")
    threads: Count = Field(2, description="Of each server.")


@dataclass(frozen=True)
class Run:
    """One load of one way.

    Attributes:
        width: How many times as wide as the bundled pair.
        streams: Requests at a time.
        requests: Those whose latencies are in the medians; these are as in `Figures`.
        unequal: Answers that are not those decoded plainly and alone.
        problems: Answers that broke off, failed, or had a form that is not right.
        peak_bytes: Most memory that its process has had.
    """

    KEY = ("width", "way", "streams", "repeat")

    width: int
    parameters: int
    way: str
    streams: int
    repeat: int
    seconds: float
    tokens_per_second: float
    requests: int
    first_median: float
    first_p95: float
    token_median: float
    token_p95: float
    piece_median: float
    piece_p95: float
    answers: int
    unequal: int
    problems: int
    peak_bytes: int


def peer(module: str, given: Mapping[str, Any], out: Path, patience: float = 3600.0) -> PeerProcess:
    """Start a module of this folder as a process that speaks the protocol of the peers."""
    command = [sys.executable, "-m", f"benchmarks.server.{module}"]
    return PeerProcess(command, given, given.get("threads", 1), out / "logs" / f"{module}.log", patience)


class Ways(ExitStack):
    """Everything that is loaded for a pair of some width, for `with`.

    Args:
        folder: For the pair, and for files of llama.cpp's.

    Attributes:
        missing: Why ways cannot be had.
        requests, known: Requests and their responses, decoded plainly and alone. Repetitive outputs, which are easy to
            predict, are left out.
    """

    def __init__(self, width: int, how: LoadSettings, ways: Sequence[str], out: Path, folder: Path) -> None:
        super().__init__()
        self.width, self.how, self.out, self.folder = width, how, out, folder
        self.target, self.drafter = (widen(source, folder / source.name, width) for source in (TARGET, DRAFTER))
        self.missing: dict[str, str] = {}
        self.servers: dict[str, Server] = {}
        self.streams: dict[str, PeerProcess] = {}
        try:
            pair = {"target": str(self.target), "drafter": str(self.drafter)}
            chosen = {name: getattr(how, name) for name in ("dtype", "batch", "prefix_tokens", "threads")}
            self.alone = self.enter_context(peer("offline", pair | chosen, out))
            self.requests, self.known = self._known_answers()
            for way in ways:
                if way != ENGINE:
                    try:
                        self.start(way)
                    except PeerError as error:
                        self.missing[way] = str(error)
        except BaseException:
            self.close()
            raise

    def _known_answers(self) -> tuple[list[Any], list[Any]]:
        asked = chats.make(self.how.requests)
        path = self.out / f"known-{self.width}-{digest([asked, self.how.dtype, self.width])}.json"
        if not path.exists():
            tell(f"width {self.width}: decoding {len(asked)} answers plainly")
            path.write_text(json.dumps(self.alone.ask("known", {"requests": asked})["known"]), encoding="utf-8")
        known = json.loads(path.read_text(encoding="utf-8"))
        kept = [i for i, each in enumerate(known) if not each["loops"]]
        if not kept:
            raise ValueError("All answers run in circles; ask for more --requests.")
        return [asked[i] for i in kept], [known[i] for i in kept]

    def start(self, way: str) -> None:
        """Start a server with a process that asks it; our two ways share a server."""
        server = self.servers.get(SERVER) or self.servers.get(PLAIN) if way in (SERVER, PLAIN) else None
        if server is None:
            tell(f"width {self.width}: starting {way}")
            server = self._server(way)
            self.callback(server.close)
        self.servers[way] = server
        self.streams[way] = self.enter_context(peer("client", {"host": HOST, "port": server.port}, self.out))

    def _server(self, way: str) -> Server:
        how, log = self.how, self.out / "logs" / f"{way}-{self.width}.log"
        if way in (SERVER, PLAIN):
            more = ["--dtype", how.dtype, "--max-batch-size", str(how.batch), "--served-model-name", MODEL]
            more += ["--prefix-tokens", str(how.prefix_tokens)]
            return ours(self.target, self.drafter, log, how.threads, more)
        if reason := environments.why_missing("llama_server"):
            raise PeerError(reason)
        given = {"dtype": how.dtype, "models": str(self.folder)}
        try:
            model, drafter = as_gguf(str(self.target), given), None
            if way == LLAMA_DRAFTS:
                drafter = as_gguf(str(self.drafter), given, target=str(self.target))
        except Failed as failed:
            raise PeerError(str(failed)) from failed
        return llama(model, drafter, log, how.threads, how.batch, LENGTH)

    def ask(self, way: str, streams: int, seconds: float, first: int) -> tuple[list[Heard], int]:
        """Put a server or the engine under load; return the responses and the peak memory of its process.

        Raises:
            ValueError: Our server ended.
            PeerError: Another server ended; it has been started again.
        """
        given: dict[str, Any] = {"streams": streams, "seconds": seconds, "first": first}
        if way == ENGINE:
            found = self.alone.ask("load", given | {"requests": self.requests})
            peak = self.alone.peak_bytes()
        else:
            drafts = {SERVER: True, PLAIN: False}.get(way)
            bodies = [json.dumps(chats.body(request, MODEL, drafts)) for request in self.requests]
            found = self.streams[way].ask("load", given | {"bodies": bodies})
            process = self.servers[way].process
            peak, status = peak_bytes(process.pid), process.poll()
            if status is not None and way in EXACT:
                raise ValueError(f"{way} ended with {status} under the load of {streams} streams; see its log.")
            if status is not None:
                self.start(way)
                raise PeerError(f"it ended with {status} under the load of {streams} streams")
        return [Heard(**each) for each in found["heard"]], peak

    def judge(self, all_heard: Sequence[Heard]) -> tuple[int, list[str]]:
        """Return the number of responses that differ from plain decoding, and the problems of the others."""
        said = [(asdict(heard), self.known[heard.index]) for heard in all_heard if not heard.problem]
        unequal = sum(any(own[name] != known[name] for name in ("text", "finish", "tokens")) for own, known in said)
        return unequal, [heard.problem for heard in all_heard if heard.problem]


def measure(how: LoadSettings, out: Path, runs: Records[Run]) -> dict[str, str]:
    """Measure what is left, and keep it; returns why ways are missing."""
    missing: dict[str, str] = {}
    for width in how.widths:
        left = [
            (repeat, streams, way)
            for repeat, streams, way in interleaved(how.streams, how.ways, how.repeats)
            if (width, way, streams, repeat) not in runs.had
        ]
        needed = [way for way in how.ways if any(step[2] == way for step in left)]
        if not left:
            continue
        with tempfile.TemporaryDirectory(dir=out) as folder, Ways(width, how, needed, out, Path(folder)) as ways:
            missing |= ways.missing
            for way in needed:  # its first answers warm it up
                if way not in ways.missing:
                    ways.ask(way, min(4, max(how.streams)), 0.1 * how.seconds, 0)
            ended = {(way, streams) for way in ways.missing for streams in how.streams}
            for done, (repeat, streams, way) in enumerate(left, 1):
                if (way, streams) in ended:
                    continue
                try:
                    heard, peak = ways.ask(way, streams, how.seconds, 31 * repeat)
                except PeerError as error:
                    ended.add((way, streams))
                    missing[f"{way} at {streams} streams, width {width}"] = str(error)
                    continue
                unequal, problems = ways.judge(heard)
                found: Figures = figures(heard, RAMP * how.seconds, how.seconds)
                counts = {"answers": len(heard), "unequal": unequal, "problems": len(problems), "peak_bytes": peak}
                place = {"width": width, "way": way, "streams": streams, "repeat": repeat, "seconds": how.seconds}
                runs.add(Run(**place, parameters=parameters(ways.target), **asdict(found), **counts))
                speed = f"{found.tokens_per_second:.0f} tokens/s, {unequal} of {len(heard)} answers differ"
                said = "; ".join([f"width {width}, {streams} streams, {way}: {speed}", *problems[:3]])
                tell(f"{said} ({done} of {len(left)})")
    return missing


def broken(runs: Sequence[Run]) -> list[str]:
    """Return our runs with wrong responses."""
    return [
        f"{run.way} at {run.streams} streams, width {run.width}: {run.unequal} answers differ, {run.problems} failed"
        for run in runs
        if run.way in EXACT and (run.unequal or run.problems)
    ]
