"""A simulated user: what a drafter gains from the recorded conversations of one person about one repository.

    python -m benchmarks.own_traffic --target smollm2 --repository DIR --minutes 30 --out build/own-traffic

A server (`blockdraft serve --record`) answers 60 requests about the Python files of a repository: edits, tests,
explanations, commit messages and questions, some with a second turn. `blockdraft fit --init` then continues the bundled
drafter, and tau is measured on 20 further requests, before and after. Files that these are about are not in the 60.
Everything but the training resumes, and the requests depend on the files and --seed alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from blockdraft import Engine, SamplingParams, load_drafter, load_target
from blockdraft.drafters import drafter_files
from blockdraft.engine.stats import merge
from blockdraft.types import Drafting

RECORDED, HELD_OUT = 60, 20
HELD_OUT_FILES = 0.25  # share of the files that the held-out requests are about
CHARACTERS = (200, 1600)  # of a function or class that a request quotes
TOKENS = 160  # of a response
ASKS = {
    "edit": (
        "Add type hints to this code. Answer with the whole code.",
        "Add a docstring to each function here. Answer with the whole code.",
        "Rename the local variables of this code so that they say more. Answer with the whole code.",
        "Make this code raise a ValueError with a clear message for bad arguments. Answer with the whole code.",
    ),
    "tests": ("Write pytest tests for this code.", "Which edge cases does this code have? Write a test for each."),
    "explanation": (
        "Explain this code to a new colleague.",
        "What does this code return, and when does it raise?",
        "Is there a bug in this code? Explain your answer.",
    ),
    "commit": ("Write a commit message for this diff.",),
    "chat": (
        "How would you split this code into smaller functions?",
        "Write documentation for users of this code, in Markdown.",
        "How is this code used? Show an example.",
    ),
}
FOLLOW_UPS = ("Make it shorter.", "Why?", "Show that with an example.", "Now do the same for the error cases.")


def pieces(repository: Path) -> dict[str, list[str]]:
    """Return the functions and classes of each Python file that are long enough to ask about."""
    found = {}
    for path in sorted(repository.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        try:
            nodes = ast.walk(ast.parse(source))
        except SyntaxError:
            continue
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        code = [ast.get_source_segment(source, node) or "" for node in nodes if isinstance(node, kinds)]
        if fitting := [text for text in code if CHARACTERS[0] <= len(text) <= CHARACTERS[1]]:
            found[str(path.relative_to(repository))] = fitting
    return found


def requests(repository: Path, seed: int) -> tuple[list[list[str]], list[list[str]]]:
    """Return the user's messages of each recorded and each held-out request."""
    pick, by_file = random.Random(seed), pieces(repository)
    files = pick.sample(sorted(by_file), len(by_file))
    cut = max(1, int(HELD_OUT_FILES * len(files)))
    if len(files) < 2:
        raise SystemExit(f"{repository} holds {len(files)} Python files with functions; name a larger repository.")
    held_out, recorded = files[:cut], files[cut:]
    return tuple(
        [_request(pick, by_file, chosen) for _ in range(count)]
        for chosen, count in ((recorded, RECORDED), (held_out, HELD_OUT))
    )  # type: ignore[return-value]


def _request(pick: random.Random, by_file: dict[str, list[str]], files: list[str]) -> list[str]:
    kind, name = pick.choice(list(ASKS)), pick.choice(files)
    code, fence = pick.choice(by_file[name]), "python"
    if kind == "commit":
        code, fence = _diff(pick, code), "diff"
    turns = [f"{pick.choice(ASKS[kind])}\n\n`{name}`:\n```{fence}\n{code}\n```"]
    return [*turns, pick.choice(FOLLOW_UPS)] if pick.random() < 0.3 else turns


def _diff(pick: random.Random, code: str) -> str:
    lines = code.splitlines()
    begin = pick.randrange(1, len(lines))
    end = min(len(lines), begin + pick.randrange(1, 4))
    marked = [("+" if begin <= number < end else " ") + line for number, line in enumerate(lines)]
    return "\n".join(marked[max(0, begin - 5) : end + 5])


def record(args: argparse.Namespace, recorded: list[list[str]]) -> Path:
    """Let a server answer and record the requests. Return the folder of the recorded conversations."""
    folder = args.out / "traffic"
    if (args.out / "recorded").exists():
        return folder
    command = [sys.executable, "-m", "blockdraft", "serve", "--target", args.target, "--port", "0"]
    command += ["--record", folder, "--record-hidden-states", "--temperature", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next(ready.group(1) for line in server.stdout if (ready := re.match(r"Ready: (\S+)", line)))
        try:
            for number, turns in enumerate(recorded, 1):
                messages: list[dict[str, str]] = []
                for turn in turns:
                    messages.append({"role": "user", "content": turn})
                    body = {"messages": messages, "max_tokens": TOKENS}
                    answer = httpx.post(f"{url}/chat/completions", json=body, timeout=600).raise_for_status().json()
                    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                print(f"{number} of {len(recorded)} requests answered", flush=True)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    (args.out / "recorded").touch()
    return folder


def measure(target: Any, drafters: dict[str, Path], held_out: list[list[str]]) -> Iterator[dict[str, Any]]:
    """Yield tau of each drafter on first turns of held-out requests, and how many responses equal plain decoding."""
    prompts: list[Any] = [[{"role": "user", "content": turns[0]}] for turns in held_out]
    params, plain = SamplingParams(TOKENS), None
    for name, path in ({"plain": None} | drafters).items():
        drafter = load_drafter("none" if path is None else path, target=target)
        with Engine(target, drafter, 4, Drafting(block_size=None)) as engine:
            completions = [completion.checked() for completion in engine.generate(prompts, params)]
        tokens = [completion.token_ids for completion in completions]
        plain = plain or tokens
        stats = merge([completion.stats for completion in completions])
        same = sum(ours == theirs for ours, theirs in zip(tokens, plain, strict=True))
        accepted = [round(share, 3) for share in stats.acceptance_by_position]
        yield {"drafter": name, "tau": round(stats.tau, 3), "accepted": accepted, "identical": f"{same}/{len(tokens)}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2", help="target with a bundled drafter")
    parser.add_argument("--repository", type=Path, required=True, help="folder of Python files")
    parser.add_argument("--minutes", type=float, default=30.0, help="time of `blockdraft fit`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/own-traffic"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    recorded, held_out = requests(args.repository, args.seed)
    traffic = record(args, recorded)
    mine, began = args.out / "drafter", time.monotonic()
    fitted = True
    if not mine.exists():
        words = ["fit", "--target", args.target, "--init", "bundled", "--data", traffic, "--minutes", args.minutes]
        command = [sys.executable, "-m", "blockdraft", *map(str, words), "--out", str(mine)]
        fitted = subprocess.run(command).returncode == 0
        print(f"fit took {(time.monotonic() - began) / 60:.1f} minutes")
    target = load_target(args.target)
    after = mine if fitted else args.out / "drafter.fit" / "drafter"  # which `fit` did not keep
    drafters = {"bundled": drafter_files("bundled", target.path), "continued" if fitted else "not kept": after}
    with (args.out / "results.jsonl").open("w", encoding="utf-8") as file:
        for result in measure(target, drafters, held_out):
            print(json.dumps(result), flush=True)
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
