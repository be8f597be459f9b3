"""What `fit` makes of an hour, beside a recipe made by hand: `python -m benchmarks.stranger.hour --help`.

Both make a drafter for the bundled target at the same time, with half of the cores each, and from the same prompts
(those that the recipe draws from what `recipes/tiny/corpus.py` has written). By hand, the target answers for a fifth of
the time, and the drafter is trained on its answers for the rest, as `recipes/tiny/drafter.toml` says. Then tau of both
is measured on prompts that neither was trained on. The status is 1 where that of `fit` is lower. Finished steps are
kept in `--out`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.command import CORES, ROOT, Parser
from blockdraft.targets import BUNDLED

RECIPE = ROOT / "recipes" / "tiny"
ANSWERING = 0.2  # share of the time in which the target answers
ENDING = (
    0.06  # share of the time left when the training is told to end, for the rates to fall and the drafter to be written
)
PYTHON = [sys.executable, "-u"]


def limited(command: Sequence[str | Path], log: Path, threads: int) -> subprocess.Popen[bytes]:
    print(f"{log.name}: {' '.join(map(str, command))}", flush=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            start_new_session=True,
        )


def done(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.wait():
        raise SystemExit(f"{log.name} failed; its end is:\n{log.read_text(encoding='utf-8', errors='replace')[-2000:]}")


def by_hand(corpus: Path, seconds: float, out: Path, threads: int) -> None:
    """Run the recipe's steps in this time."""
    began, log, answers = time.monotonic(), out / "by-hand.log", out / "answers.jsonl"
    of_target = ["--target", BUNDLED]
    answer = [*PYTHON, RECIPE / "write_answers.py", "--corpus", corpus, *of_target, "--out", answers]
    answering = limited(answer, log, threads)
    try:
        answering.wait(ANSWERING * seconds)
    except subprocess.TimeoutExpired:  # a row that is cut off by this is left out
        os.killpg(answering.pid, signal.SIGKILL)
        answering.wait()
    whole = answers.read_bytes().rpartition(b"\n")[0]
    answers.write_bytes(whole + b"\n")
    pack = [*PYTHON, RECIPE / "pack_answers.py", "--answers", answers, *of_target, "--out", out / "data"]
    done(limited(pack, log, threads), log)
    drafter = out / "by-hand"
    train = [*PYTHON, "-m", "blockdraft", "train", "dflash", RECIPE / "drafter.toml", *of_target]
    training = limited([*train, "--data", out / "data", "--out", drafter], log, threads)
    try:
        training.wait(seconds * (1 - ENDING) - (time.monotonic() - began))
    except subprocess.TimeoutExpired:
        drafter.with_name("by-hand.run").joinpath("finish").touch()
    done(training, log)
    print(f"by hand: {time.monotonic() - began:.0f} of {seconds:.0f} s", flush=True)


def recipes_prompts(corpus: Path, out: Path) -> Path:
    """Write the prompts that the recipe has answered to a file."""
    sys.path.insert(0, str(RECIPE))
    from write_answers import training_prompts  # type: ignore[import-not-found]

    prompts = out / "prompts.jsonl"
    with prompts.open("w", encoding="utf-8") as file:
        for _, prompt, sampled in training_prompts(corpus, seed=1, sampled_share=0.5):
            if not sampled:
                file.write(json.dumps({"messages": [{"role": "user", "content": prompt}]}, ensure_ascii=False) + "\n")
    return prompts


def by_fit(corpus: Path, seconds: float, out: Path, threads: int) -> None:
    began, log = time.monotonic(), out / "by-fit.log"
    data = recipes_prompts(corpus, out)
    command = [*PYTHON, "-m", "blockdraft", "fit", "--data", data, "--hours", f"{seconds / 3600:g}"]
    done(limited([*command, "--out", out / "by-fit"], log, threads), log)
    print(f"fit: {time.monotonic() - began:.0f} of {seconds:.0f} s", flush=True)


def main() -> int:
    parser = Parser(__doc__, out=Path("build/hour"))
    parser.add_argument("--corpus", type=Path, required=True, help="what corpus.py has written")
    parser.add_argument("--data", type=Path, required=True, help="folder with prompts/gsm8k.jsonl and humaneval.jsonl")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--limit", type=int, default=100, help="prompts of each set that tau is measured on")
    args = parser.parse()
    args.out.mkdir(parents=True, exist_ok=True)
    threads = max(1, CORES // 2)
    running = [
        threading.Thread(target=make, args=(args.corpus, 3600 * args.hours, args.out, threads))
        for make, name in ((by_hand, "by-hand"), (by_fit, "by-fit"))
        if not (args.out / name / "config.json").exists()
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    taus: dict[str, dict[str, float]] = {}
    for name in ("by-hand", "by-fit"):
        figures = args.out / f"{name}.json"
        command = [*PYTHON, str(RECIPE / "measure.py"), "--data", str(args.data), "--drafter", str(args.out / name)]
        command += ["--skip-plain", "--speed", "0", "--limit", str(args.limit), "--out", str(figures)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taus[name] = {each: found["tau"] for each, found in json.loads(figures.read_text())["sets"].items()}
        print(f"{name}: tau {taus[name]}", flush=True)
    return int(any(taus["by-fit"][each] < tau for each, tau in taus["by-hand"].items()))


if __name__ == "__main__":
    sys.exit(main())
