"""Drafters for three new targets, each by one command: `make try-stranger`.

Targets of three families are trained on a text for some minutes (`targets.py`), and `blockdraft fit --hours H` is run
for each, for the last also without data. It must end in time; the drafter must load, yield 1.7 tokens a cycle, change
no token, and cost nothing where "auto" decides how far to draft. The status is 1 where a check fails. Finished steps
are kept in `--out`.
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.command import ROOT, Parser

LEAST_TAU, LEAST_AUTO = 1.7, 0.97
PROBLEMS = 6000  # word problems of the text that is used where none is given


def own_text() -> str:
    """Word problems with their answers, as the recipe of the bundled pair makes them."""
    sys.path.insert(0, str(ROOT / "recipes" / "tiny"))
    from word_problems import word_problem

    rng = random.Random(0)
    return "\n\n".join("\n".join(word_problem(rng)) for _ in range(PROBLEMS))


def fit(target: Path, data: Path | None, hours: float, out: Path) -> dict[str, Any]:
    """Run a fit; returns its figures and failures."""
    command = [sys.executable, "-m", "blockdraft", "fit", "--target", str(target), "--hours", f"{hours:g}"]
    command += ["--out", str(out), *(["--data", str(data)] if data else [])]
    print(shlex.join(["blockdraft", *command[3:]]), flush=True)
    took = out.with_suffix(".seconds")
    if not took.exists():
        began = time.monotonic()
        subprocess.run(command, check=True)
        took.write_text(f"{time.monotonic() - began:.0f}")
    seconds = float(took.read_text())
    answer = [sys.executable, "-m", "blockdraft", "generate", "--target", str(target), "--drafter", str(out)]
    subprocess.run([*answer, "--max-new-tokens", "32", "Once there was"], check=True, stdout=subprocess.DEVNULL)
    methods = json.loads((out.with_name(f"{out.name}.fit") / "bench" / "results.json").read_text())["methods"]
    whole, auto = methods["chain"], methods["chain:auto"]
    wrong = {
        f"took {seconds:.0f} s of {3600 * hours:.0f}": seconds > 3600 * hours,
        f"tau {whole['tau']}": (whole["tau"] or 0) < LEAST_TAU,
        "tokens differ": min(whole["identical"], auto["identical"]) < 1,
        f"auto {auto['speedup']}": (auto["speedup"] or 0) < LEAST_AUTO,
    }
    told = [text for text, is_so in wrong.items() if is_so]
    return {"seconds": seconds, "tau": whole["tau"], "whole": whole["speedup"], "auto": auto["speedup"], "wrong": told}


def main() -> int:
    parser = Parser(__doc__, out=Path("build/stranger"))
    parser.add_argument("--text", type=Path, help="what the targets learn, paragraphs with a blank line between")
    parser.add_argument("--hours", type=float, default=0.3, help="of each fit")
    parser.add_argument("--steps", type=int, default=600, help="of training a target; some minutes")
    args = parser.parse()

    from benchmarks.stranger.targets import FAMILIES, make_target

    args.out.mkdir(parents=True, exist_ok=True)
    text = args.text
    if text is None:
        text = args.out / "text.txt"
        text.write_text(own_text(), encoding="utf-8")
    results = {}
    for name in FAMILIES:
        target = args.out / "targets" / name
        make_target(name, text.read_text(encoding="utf-8"), target, args.steps)
        results[name] = fit(target, text, args.hours, args.out / name)
    results["qwen3 without data"] = fit(args.out / "targets" / "qwen3", None, args.hours, args.out / "qwen3-own")
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    for name, found in results.items():
        told = f"{found['seconds']:.0f} s, tau {found['tau']}, auto {found['auto']}"
        print(f"{name}: {told}: {', '.join(found['wrong']) or 'all holds'}")
    return int(any(found["wrong"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
