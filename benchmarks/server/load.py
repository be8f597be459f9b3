"""The load: ways take turns at each number of streams, and every answer is compared with its own, decoded plainly."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.process import PeerError, PeerProcess, peak_bytes
from benchmarks.peers import environments
from benchmarks.peers.adapters.llama_cpp import Failed, as_gguf
from benchmarks.server import chats
from benchmarks.server.heard import Heard, figures
from benchmarks.server.report import ENGINE, LLAMA_DRAFTS, PLAIN, SERVER, WAYS
from benchmarks.server.runs import Run, Runs
from benchmarks.server.servers import HOST, Server, llama, ours
from benchmarks.sizes.pairs import parameters
from benchmarks.sizes.widen import DRAFTER, TARGET, widen
from blockdraft.settings import settings

MODEL = "target"  # as our server names it
LENGTH = 640  # tokens that the longest request has room for
RAMP = 0.25  # share of a load before anything counts
EXACT = (SERVER, PLAIN, ENGINE)  # ways whose answers must be those of plain decoding


@settings
class LoadSettings:
    """How the load is measured.

    Attributes:
        widths: How many times as wide as the bundled pair; 4 has 75 M parameters.
        streams: Requests at a time.
        ways: Of `benchmarks.server.report.WAYS`.
        repeats: How often each way is measured at each number of streams.
        seconds: That streams send requests for; a quarter of it warms up.
        requests: Different ones that are asked in turns.
        batch: Requests that a server decodes together at most.
        prefix_tokens: Tokens of ended requests that our server and engine remember.
        dtype: Of weights and arithmetic.
        threads: Of each server.
    """

    widths: tuple[int, ...] = (1, 4)
    streams: tuple[int, ...] = (1, 4, 16, 64)
    ways: tuple[str, ...] = WAYS
    repeats: int = 3
    seconds: float = 24.0
    requests: int = 96
    batch: int = 64
    prefix_tokens: int = 4096
    dtype: str = "bfloat16"
    threads: int = 2


@dataclass(frozen=True)
class Pair:
    """Folders of a target and its drafter."""

    width: int
    target: Path
    drafter: Path

    @property
    def parameters(self) -> int:
        return int(parameters(self.target))


def make_pair(width: int, folder: Path) -> Pair:
    return Pair(width, widen(TARGET, folder / "target", width), widen(DRAFTER, folder / "drafter", width))


def peer(module: str, given: Mapping[str, Any], out: Path, patience: float = 3600.0) -> PeerProcess:
    """A process of this folder that talks as the peers do."""
    command = [
        sys.executable,
        "-c",
        f"import runpy; runpy.run_module('benchmarks.server.{module}', run_name='__main__')",
    ]
    return PeerProcess(command, given, given.get("threads", 1), out / "logs" / f"{module}.log", patience)


def offline(pair: Pair, how: LoadSettings, out: Path) -> PeerProcess:
    given = {"target": str(pair.target), "drafter": str(pair.drafter), "dtype": how.dtype, "batch": how.batch}
    return peer("offline", given | {"prefix_tokens": how.prefix_tokens, "threads": how.threads}, out)


def known_answers(alone: PeerProcess, pair: Pair, how: LoadSettings, out: Path) -> tuple[list[Any], list[Any]]:
    """Requests and their answers, decoded plainly and alone; those whose answers run in circles are left out, for
    they are easy to guess. Kept in the folder."""
    asked = chats.make(how.requests)
    digest = hashlib.sha256(json.dumps([asked, how.dtype, pair.width]).encode()).hexdigest()[:16]
    path = out / f"known-{pair.width}-{digest}.json"
    if not path.exists():
        print(f"width {pair.width}: decoding {len(asked)} answers plainly", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(alone.ask("known", {"requests": asked})["known"]), encoding="utf-8")
    known = json.loads(path.read_text(encoding="utf-8"))
    kept = [i for i, each in enumerate(known) if not each["loops"]]
    if not kept:
        raise ValueError("All answers run in circles; ask for more --requests.")
    return [asked[i] for i in kept], [known[i] for i in kept]


def gguf(model: Path, dtype: str, folder: Path, of: Path | None = None) -> Path:
    """The GGUF file of a model folder, or of a drafter of this target; raises PeerError."""
    try:
        return as_gguf(str(model), {"dtype": dtype, "models": str(folder)}, target=of and str(of))
    except Failed as failed:
        raise PeerError(str(failed)) from failed


class Ways:
    """Everything that is loaded for a pair, for `with`; ways that cannot be had are in `missing`."""

    def __init__(self, pair: Pair, how: LoadSettings, ways: Sequence[str], out: Path, folder: Path) -> None:
        self.pair, self.how, self.out, self.folder = pair, how, out, folder
        self.missing: dict[str, str] = {}
        self.servers: dict[str, Server] = {}
        self.streams: dict[str, PeerProcess] = {}
        self._stack = ExitStack()
        try:
            self.alone = self._stack.enter_context(offline(pair, how, out))
            self.requests, self.known = known_answers(self.alone, pair, how, out)
            for way in ways:
                if way != ENGINE:
                    try:
                        self._start(way)
                    except PeerError as error:
                        self.missing[way] = str(error)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, way: str) -> None:
        server = self.servers.get(SERVER) or self.servers.get(PLAIN) if way in (SERVER, PLAIN) else None
        if server is None:
            print(f"width {self.pair.width}: starting {way}", file=sys.stderr, flush=True)
            server = self._server(way)
            self._stack.callback(server.close)
        self.servers[way] = server
        self.streams[way] = self._stack.enter_context(peer("streams", {"host": HOST, "port": server.port}, self.out))

    def _server(self, way: str) -> Server:
        how, log = self.how, self.out / "logs" / f"{way}-{self.pair.width}.log"
        if way in (SERVER, PLAIN):
            more = ["--dtype", how.dtype, "--max-batch-size", str(how.batch), "--served-model-name", MODEL]
            more += ["--prefix-tokens", str(how.prefix_tokens)]
            return ours(self.pair.target, self.pair.drafter, log, how.threads, more)
        if reason := environments.why_missing("llama_server"):
            raise PeerError(reason)
        model = gguf(self.pair.target, how.dtype, self.folder)
        drafter = gguf(self.pair.drafter, how.dtype, self.folder, self.pair.target) if way == LLAMA_DRAFTS else None
        return llama(model, drafter, log, how.threads, how.batch, LENGTH)

    def ask(self, way: str, streams: int, seconds: float, first: int) -> tuple[list[Heard], int]:
        """Put a way under load; returns what was heard and the most memory of its process. Raises PeerError where that
        ended, and starts it again."""
        given: dict[str, Any] = {"streams": streams, "seconds": seconds, "first": first}
        if way == ENGINE:
            found = self.alone.ask("load", given | {"requests": self.requests})
            peak = self.alone.peak_bytes()
        else:
            drafts = {SERVER: True, PLAIN: False}.get(way)
            bodies = [json.dumps(chats.body(request, MODEL, drafts)) for request in self.requests]
            found = self.streams[way].ask("load", given | {"bodies": bodies})
            server = self.servers[way]
            peak = peak_bytes(server.process.pid)
            if (status := server.process.poll()) is not None:
                if way in EXACT:
                    raise ValueError(f"{way} ended with {status} under the load of {streams} streams; see its log.")
                self._start(way)
                raise PeerError(f"it ended with {status} under the load of {streams} streams")
        return [Heard(**each) for each in found["heard"]], peak

    def judge(self, all_heard: Sequence[Heard]) -> tuple[int, list[str]]:
        """How many answers are not their own, and what was wrong with others."""
        unequal = sum(
            (heard.text, heard.finish, heard.tokens)
            != tuple(self.known[heard.index][name] for name in ("text", "finish", "tokens"))
            for heard in all_heard
            if not heard.problem
        )
        return unequal, [heard.problem for heard in all_heard if heard.problem]

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Ways:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def steps(how: LoadSettings) -> list[tuple[int, int, str]]:
    """(repeat, streams, way) in turns: in each repeat another way begins."""
    found = []
    for repeat in range(how.repeats):
        for i, streams in enumerate(how.streams):
            begin = (repeat + i) % len(how.ways)
            found += [(repeat, streams, way) for way in (*how.ways[begin:], *how.ways[:begin])]
    return found


def measure(how: LoadSettings, out: Path, runs: Runs) -> dict[str, str]:
    """Measure what is left, and keep it; returns why ways are missing."""
    missing: dict[str, str] = {}
    for width in how.widths:
        left = [step for step in steps(how) if (width, step[2], step[1], step[0]) not in runs.had]
        if not left:
            continue
        with tempfile.TemporaryDirectory(dir=out) as folder:
            pair = make_pair(width, Path(folder))
            with Ways(
                pair, how, [way for way in how.ways if any(step[2] == way for step in left)], out, Path(folder)
            ) as ways:
                missing |= ways.missing
                ended = set[tuple[str, int]]()
                for way in how.ways:  # its first answers warm it up
                    if way not in ways.missing:
                        ways.ask(way, min(4, max(how.streams)), 0.1 * how.seconds, 0)
                for done, (repeat, streams, way) in enumerate(left):
                    if way in ways.missing:
                        continue
                    if (way, streams) in ended:
                        continue
                    try:
                        heard, peak = ways.ask(way, streams, how.seconds, 31 * repeat)
                    except PeerError as error:
                        ended.add((way, streams))
                        missing[f"{way} at {streams} streams, width {width}"] = str(error)
                        continue
                    unequal, problems = ways.judge(heard)
                    found = figures(heard, RAMP * how.seconds, how.seconds)
                    counts = {"answers": len(heard), "unequal": unequal, "problems": len(problems)}
                    place = (width, pair.parameters, way, streams, repeat, how.seconds)
                    runs.add(Run(*place, **asdict(found), **counts, peak_bytes=peak))
                    speed = f"{found.tokens_per_second:.0f} tokens/s, {unequal} of {len(heard)} answers differ"
                    said = [f"width {width}, {streams} streams, {way}: {speed}", *problems[:3]]
                    print(f"{'; '.join(said)} ({done + 1} of {len(left)})", file=sys.stderr, flush=True)
    return missing


def broken(runs: Sequence[Run]) -> list[str]:
    """Runs of ours with answers that are not right."""
    return [
        f"{run.way} at {run.streams} streams, width {run.width}: {run.unequal} answers differ, {run.problems} failed"
        for run in runs
        if run.way in EXACT and (run.unequal or run.problems)
    ]
