"""Decoding speed against other implementations, interleaved on the same prompts.

Peers are installed by `python -m benchmarks.peers.environments`; one that is not is reported as missing. An interrupted
run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import command
from benchmarks.harness.process import PeerError, PeerProcess, Processes
from benchmarks.harness.records import Records
from benchmarks.peers import report
from benchmarks.peers.environments import BUILD
from benchmarks.peers.measure import (
    UNTIMED,
    Burst,
    Process,
    Task,
    Trial,
    differences,
    figures,
    measure,
    measure_at_once,
    rates_at_once,
)
from benchmarks.peers.registry import DFLASH, LLAMA, REFERENCE, Peer, choose

from blockdraft.cli import display
from blockdraft.drafters import entries
from blockdraft.engine.text import encode
from blockdraft.formats.gguf import is_gguf, open_gguf
from blockdraft.prompt_sets import read_prompt_sets
from blockdraft.targets import BUNDLED, TargetText, load_target_text
from blockdraft_bench.results import hardware

UNFINISHED = BUILD / "unfinished"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command.Parser(__doc__, prog="python -m benchmarks.peers", threads=command.CORES, out=BUILD)
    add = parser.add_argument
    add("--prompts", type=Path, action="append", metavar="FILE", help="as for `blockdraft bench`; may be repeated")
    add("--limit", type=int, help="prompts taken of each file")
    add("--peers", type=command.listed(), metavar="NAME,...", help="only these (and what they compare to)")
    add(
        "--target",
        type=Path,
        default=BUNDLED,
        metavar="DIR|FILE",
        help="a model folder, or a GGUF file for ours and llama.cpp",
    )
    add(
        "--drafter",
        type=Path,
        metavar="DIR",
        help="a DFlash or EAGLE-3 checkpoint, a GGUF file for one; by default the bundled pair's",
    )
    add("--assistant", type=Path, metavar="DIR", help="a smaller model with the target's tokens")
    add("--max-new-tokens", type=int, default=256)
    add("--repeats", type=int, default=5)
    add("--at-once", type=int, default=0, metavar="N", help="also ask peers that can N prompts at once")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(float32; of GGUF files their own)")
    add("--device", default="cpu")
    add("--patience", type=float, default=1800.0, help="seconds that loading or one answer may take")
    add("--restart", action="store_true", help="discard an unfinished run")
    found = parser.parse(words)
    for name in ("max_new_tokens", "repeats", "threads"):
        if getattr(found, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(found, name)}.")
    found.prompts = found.prompts or [command.PROMPTS]
    files = is_gguf(found.target)
    if found.drafter is None and not files:
        if found.target != BUNDLED:
            parser.error(f"no drafter is known for {found.target}; add --drafter DIR.")
        found.drafter = BUNDLED.parent / "drafter"
    if found.drafter is not None and is_gguf(found.drafter) != files:
        parser.error("target and drafter must both be GGUF files, or both folders.")
    found.dtype = found.dtype or (None if files else "float32")
    return found


def read_tasks(args: argparse.Namespace, text: TargetText) -> list[Task]:
    """Return the prompts as token ids. Raises ValueError if one does not fit."""
    tasks = []
    for one in read_prompt_sets(args.prompts, args.limit):
        for i, prompt in enumerate(one.prompts):
            ids = encode(prompt, text)
            if len(ids) + args.max_new_tokens > text.max_context:
                raise ValueError(
                    f"Prompt {i + 1} of {one.name} has {len(ids)} tokens, and the target's context is "
                    f"{text.max_context}; lower --max-new-tokens to {text.max_context - len(ids)} or leave it out."
                )
            tasks.append(Task(one.name, i, tuple(ids)))
    return tasks


def kind_of(drafter: Path) -> str:
    """Return the name of a drafter's kind; DFlash if its folder does not name it."""
    if is_gguf(drafter):
        return str(open_gguf(drafter).metadata["general.architecture"])
    file = drafter / "config.json"
    named = json.loads(file.read_text()).get("architectures", []) if file.exists() else []
    return next((name for name, entry in entries().items() if {*named} & {*entry.architectures}), DFLASH)


def run(args: argparse.Namespace, chosen: Sequence[Peer] | None = None) -> None:
    """Measure the chosen peers, by default those that the command line names, and write the report."""
    kind, files = kind_of(args.drafter) if args.drafter else None, is_gguf(args.target)
    reference = LLAMA if files else REFERENCE
    peers = {peer.name: peer for peer in chosen or choose(args.peers, kind, files)}
    text = load_target_text(args.target)
    tasks = read_tasks(args, text)
    longest = max(len(task.prompt) for task in tasks)
    given: dict[str, Any] = {
        "target": str(args.target.resolve()),
        "drafter": str(args.drafter.resolve()) if args.drafter else None,
        "kind": kind,
        "assistant": str(args.assistant.resolve()) if args.assistant else None,
        "dtype": args.dtype,
        "device": args.device,
        "threads": args.threads,
        # Room for the longest answer, and some more, since some peers look ahead of what they commit.
        "max_length": min(text.max_context, longest + args.max_new_tokens + 64),
        "at_once": args.at_once,
        "cache_type": "f16" if files else None,  # of llama.cpp, whose default it is
    }

    def start(name: str) -> PeerProcess:
        if reason := peers[name].why_missing():
            raise PeerError(reason)
        command.tell(f"loading {name}")
        log, settings = BUILD / "logs" / f"{name.replace(' ', '_')}.log", given | {"options": peers[name].options}
        process = PeerProcess(peers[name].command(), settings, args.threads, log, args.patience)
        if peers[name].converts:  # once more, since the first start may have written the models anew
            process.close()
            process = PeerProcess(peers[name].command(), settings, args.threads, log, args.patience)
        return process

    with Processes(start) as processes:
        for name in peers:
            if processes.started(name) is None:
                command.tell(f"missing: {name}: {processes.missing[name]}")
        if reference not in processes.running:
            reason = processes.missing[reference]
            raise ValueError(f"Without {reference} there is nothing to compare with: {reason}")
        about = {name: process.about for name, process in processes.running.items()}
        measured = given | {"max_new_tokens": args.max_new_tokens, "repeats": args.repeats, "peers": about}
        measured |= {"prompt_ids": command.digest([task.prompt for task in tasks]), "host": platform.node()}
        command.keep_settings(UNFINISHED, measured, args.restart, "finish it with what it began with, or add --restart")
        trials = Records(Trial, UNFINISHED / "trials.csv")
        if trials.all:
            command.tell(f"going on from {len(trials.all)} answers in {UNFINISHED}")
        request = {"max_new_tokens": args.max_new_tokens, "stops": sorted(text.eos_token_ids)}
        with display.progress("answers") as progress:
            measure(processes, list(about), tasks, args.repeats, request, trials, progress, reference)
        taken = Records(Process, UNFINISHED / "processes.csv")  # not those of a run that finds all answers there
        taken.add(*(Process(name, each.start_seconds, each.peak_bytes()) for name, each in processes.running.items()))
        bursts = Records(Burst, UNFINISHED / "bursts.csv")
        if args.at_once:
            command.tell(f"{args.at_once} prompts at once")
            measure_at_once(processes, list(about), tasks, args.at_once, args.repeats, request, bursts)

        def margin(context: Any, one: int, other: int) -> float:
            answer = processes.running[reference].ask("margin", {"tokens": list(context), "ids": [one, other]})
            return float(answer["margin"])

        different = differences(trials.all, tasks, None if files else margin)
        ran = [one for one in taken.all if one.peer in processes.running]
    names = list(dict.fromkeys(task.prompt_set for task in tasks))
    timed = {trial.key for trial in trials.all if trial.repeat != UNTIMED}
    counts = {name: sum(task.prompt_set == name for task in tasks) for name in names}
    settings = {"date": date.today().isoformat(), "reference": reference}
    settings |= {
        name: getattr(args, name) for name in ("dtype", "device", "threads", "max_new_tokens", "repeats", "at_once")
    }
    settings["dtype"] = args.dtype or "as in the file"
    models = {"target_name": _name(args.target), "drafter_name": _name(args.drafter) if args.drafter else "none"}
    results = report.Results(
        settings=models | {"prompts": counts} | settings,
        hardware=hardware(torch.device(args.device)),
        about=about,
        start_seconds={one.peer: one.start_seconds for one in ran},
        peak_bytes={one.peer: one.peak_bytes for one in ran},
        at_once=rates_at_once(bursts.all),
        missing=processes.missing,
        sets={name: figures([one for one in trials.all if one.prompt_set == name], reference) for name in names},
        repetitive={name: counts[name] - sum(key[0] == name for key in timed) for name in names},
        differences=different,
    )
    told, shown = command.command_line("benchmarks.peers"), list(peers.values())
    written = report.write(args.out, results, shown, told)
    shutil.rmtree(UNFINISHED)
    print(report.page(results, shown, told))
    print(f"wrote {', '.join(map(str, written))}", file=sys.stderr)


def _name(path: Path) -> str:
    """Return the name of a model without its folder."""
    return "bundled" if path.parent == BUNDLED.parent else path.resolve().name


def main(words: Sequence[str] | None = None, chosen: Sequence[Peer] | None = None) -> None:
    with command.in_words():
        run(arguments(words), chosen)


if __name__ == "__main__":
    main()
