"""Decoding speed against other implementations, in turns on the same prompts.

Peers are installed by `python -m benchmarks.peers.environments`; one that is not is reported as missing. An interrupted
run goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness.command import in_words
from benchmarks.harness.process import PeerError, PeerProcess
from benchmarks.peers import report
from benchmarks.peers.environments import BUILD, ROOT
from benchmarks.peers.figures import differences, figures
from benchmarks.peers.registry import REFERENCE, Peer, choose
from benchmarks.peers.trials import Journal, Task, measure
from blockdraft.cli import display
from blockdraft.engine.text import encode
from blockdraft.evaluation.prompts import read_prompt_sets
from blockdraft.evaluation.results import hardware
from blockdraft.targets import BUNDLED, TargetText, load_target_text

JOURNAL = BUILD / "journal.jsonl"


@dataclass(frozen=True)
class Defaults:
    prompts: tuple[Path, ...] = (Path(__file__).parent / "prompts.jsonl",)
    max_new_tokens: int = 256
    repeats: int = 5
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = psutil.cpu_count(logical=False) or 1
    patience: float = 1800.0
    out: Path = ROOT / "benchmarks"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    add, default = parser.add_argument, Defaults()
    add("--prompts", type=Path, action="append", metavar="FILE", help="as for `blockdraft bench`; may be repeated")
    add("--limit", type=int, help="prompts taken of each file")
    add("--peers", type=lambda text: text.split(","), metavar="NAME,...", help="only these (and what they compare to)")
    add("--target", type=Path, default=BUNDLED, metavar="DIR")
    add("--drafter", type=Path, metavar="DIR", help="a DFlash checkpoint; by default the bundled one")
    add("--assistant", type=Path, metavar="DIR", help="a smaller model with the target's tokens")
    add("--max-new-tokens", type=int, default=default.max_new_tokens)
    add("--repeats", type=int, default=default.repeats)
    add("--dtype", choices=("float32", "bfloat16", "float16"), default=default.dtype)
    add("--device", default=default.device)
    add("--threads", type=int, default=default.threads, help=f"default: {default.threads}, the cores of this machine")
    add("--patience", type=float, default=default.patience, help="seconds that loading or one answer may take")
    add("--out", type=Path, default=default.out, metavar="DIR", help="for peers.md, peers.png and peers.json")
    add("--restart", action="store_true", help="discard an unfinished run")
    found = parser.parse_args()
    for name in ("max_new_tokens", "repeats", "threads"):
        if getattr(found, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(found, name)}; it must be at least 1.")
    found.prompts = found.prompts or list(default.prompts)
    if found.drafter is None:
        if found.target != BUNDLED:
            parser.error(f"no drafter is known for {found.target}; add --drafter DIR.")
        found.drafter = BUNDLED.parent / "drafter"
    return found


def read_tasks(args: argparse.Namespace, text: TargetText) -> list[Task]:
    """The prompts as token ids; raises ValueError where one does not fit."""
    tasks = []
    for one in read_prompt_sets(args.prompts, args.limit):
        for i, prompt in enumerate(one.prompts):
            ids = encode(prompt, text)  # type: ignore[arg-type]  # it reads the tokenizer only
            if len(ids) + args.max_new_tokens > text.max_context:
                raise ValueError(
                    f"Prompt {i + 1} of {one.name} has {len(ids)} tokens, and the target's context is "
                    f"{text.max_context}; lower --max-new-tokens to {text.max_context - len(ids)} or leave it out."
                )
            tasks.append(Task(one.name, i, tuple(ids)))
    return tasks


def start(
    peers: list[Peer], settings: dict[str, Any], args: argparse.Namespace, stack: ExitStack
) -> tuple[dict[str, PeerProcess], dict[str, str]]:
    """Processes by name, and why others are missing."""
    running: dict[str, PeerProcess] = {}
    missing: dict[str, str] = {}
    for peer in peers:
        reason = peer.why_missing()
        if reason is None:
            print(f"loading {peer.name}", file=sys.stderr, flush=True)
            log = BUILD / "logs" / f"{peer.name.replace(' ', '_')}.log"
            try:
                process = PeerProcess(
                    peer.command(), settings | {"options": peer.options}, args.threads, log, args.patience
                )
                running[peer.name] = stack.enter_context(process)
            except PeerError as error:
                reason = str(error)
        if reason is not None:
            missing[peer.name] = reason
            print(f"missing: {peer.name}: {reason}", file=sys.stderr, flush=True)
    if REFERENCE not in running:
        raise ValueError(f"Without {REFERENCE} there is nothing to compare with: {missing[REFERENCE]}")
    return running, missing


def run(args: argparse.Namespace) -> None:
    peers = choose(args.peers)
    text = load_target_text(args.target)
    tasks = read_tasks(args, text)
    stops = sorted(text.eos_token_ids)
    longest = max(len(task.prompt) for task in tasks)
    given: dict[str, Any] = {
        "target": str(args.target.resolve()),
        "drafter": str(args.drafter.resolve()),
        "assistant": str(args.assistant.resolve()) if args.assistant else None,
        "dtype": args.dtype,
        "device": args.device,
        "threads": args.threads,
        # Room for the longest answer; a little more, since some peers look ahead of what they commit.
        "max_length": min(text.max_context, longest + args.max_new_tokens + 64),
    }
    with ExitStack() as stack:
        running, missing = start(peers, given, args, stack)
        about = {name: process.about for name, process in running.items()}
        measured = given | {
            "max_new_tokens": args.max_new_tokens,
            "repeats": args.repeats,
            "prompt_ids": hashlib.sha256(json.dumps([task.prompt for task in tasks]).encode()).hexdigest(),
            "peers": about,
            "host": platform.node(),
        }
        if args.restart:
            JOURNAL.unlink(missing_ok=True)
        journal = Journal(JOURNAL, measured)
        if journal.trials:
            print(f"going on from {len(journal.trials)} answers in {JOURNAL}", file=sys.stderr, flush=True)
        request = {"max_new_tokens": args.max_new_tokens, "stops": stops}
        with display.progress("answers") as progress:
            measure(running, tasks, args.repeats, request, journal, progress)

        def margin(context: Any, one: int, other: int) -> float:
            answer = running[REFERENCE].ask("margin", {"tokens": list(context), "ids": [one, other]})
            return float(answer["margin"])

        different = differences(journal.trials, tasks, margin)
    trials = journal.trials
    names = list(dict.fromkeys(task.prompt_set for task in tasks))
    timed = {t.key for t in trials if t.repeat is not None}
    counts = {name: sum(task.prompt_set == name for task in tasks) for name in names}
    results = report.Results(
        settings={
            "target_name": _name(args.target),
            "drafter_name": _name(args.drafter),
            "prompts": counts,
            **{name: getattr(args, name) for name in ("dtype", "device", "threads", "max_new_tokens", "repeats")},
        },
        hardware=hardware(torch.device(args.device)),
        about=about,
        missing=missing | journal.failed,
        sets={name: figures([t for t in trials if t.prompt_set == name]) for name in names},
        looping={name: counts[name] - sum(key[0] == name for key in timed) for name in names},
        differences=different,
    )
    # Of a path its name only: where someone's files lie is nobody's business.
    told = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    command = shlex.join(["python", "-m", "benchmarks.peers", *told])
    written = report.write(args.out, results, peers, command)
    JOURNAL.unlink()
    print(report.page(results, peers, command))
    print(f"wrote {', '.join(map(str, written))}", file=sys.stderr)


def _name(path: Path) -> str:
    """Without the place of this checkout or of anyone's models."""
    return "bundled" if path.parent == BUNDLED.parent else path.resolve().name


def main() -> None:
    with in_words():
        run(arguments())


if __name__ == "__main__":
    main()
