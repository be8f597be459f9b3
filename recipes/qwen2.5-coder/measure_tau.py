"""Measure tau of drafters on prompts that they never learned from, and check that drafting changes no token.

measure_tau.py --target GGUF --drafter build/qwen2.5-coder/drafter --measured DATA/prompts/humaneval.jsonl

The prompts are held-out tasks of each kind (`documents.py` keeps one task in fifty apart) and those of --measured.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from chats import ChatTokens
from documents import is_validation
from prompts import read_lines

from blockdraft import Engine, SamplingParams, load_drafter, load_target
from blockdraft.engine.stats import merge
from blockdraft.types import Drafting

LONGEST = 900  # tokens of a prompt
BATCH_SIZE = 4


def prompt_sets(
    chats: ChatTokens, tasks: Path, measured: list[Path], kinds: list[str], count: int, longest: int
) -> dict[str, list[list[int]]]:
    """Return up to `count` prompts of each file and kind, of at most `longest` tokens."""
    sets = {file.stem: [chats.first_turn({}, line["turns"][0]) for line in read_lines(file)] for file in measured}
    held_out = [task for task in read_lines(tasks) if is_validation(task["id"])]
    for kind in kinds:
        sets[kind] = [
            chats.encode(task["text"]) if "text" in task else chats.first_turn(task, task["turns"][0]["text"])
            for task in held_out
            if task["kind"] == kind
        ]
    short = {name: [prompt for prompt in prompts if len(prompt) <= longest][:count] for name, prompts in sets.items()}
    return {name: prompts for name, prompts in short.items() if prompts}


def holes(chats: ChatTokens, folder: Path, count: int) -> list[list[int]]:
    """Return fill-in-the-middle prompts: holes of 1, 3 or 6 lines, with 30 lines before and 15 behind them."""
    pick, prompts = random.Random(5), list[list[int]]()
    texts = [path.read_text(encoding="utf-8").splitlines(keepends=True) for path in sorted(folder.rglob("*.py"))]
    files = [lines for lines in texts if len(lines) >= 80]
    while files and len(prompts) < count:
        lines = pick.choice(files)
        at, gap = pick.randrange(40, len(lines) - 30), pick.choice([1, 3, 6])
        prefix, suffix = "".join(lines[at - 30 : at]), "".join(lines[at + gap : at + gap + 15])
        prompts.append(chats.encode(f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"))
    return prompts


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the GGUF file")
    parser.add_argument("--drafter", nargs="+", required=True, help="drafters, such as DIR, lookup or lookup+DIR")
    parser.add_argument("--prompts", type=Path, default=Path("build/qwen2.5-coder/prompts.jsonl"), help="the tasks")
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="further prompts, one a line")
    parser.add_argument(
        "--kinds",
        nargs="*",
        default=["fim", "edit", "request"],
        help="kinds of held-out tasks, whose prompts are not written by the target",
    )
    parser.add_argument("--holes", type=Path, help="folder of Python files, for holes to fill in")
    parser.add_argument("--count", type=int, default=12, help="prompts of each set")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[3, 4, 7])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args(words)

    target = load_target(args.target)
    assert target.tokenizer is not None
    ends = ("<|fim_pad|>", "<|file_sep|>")
    stop = tuple(token for token in target.tokenizer.convert_tokens_to_ids(ends) if token is not None)
    params = SamplingParams(max_new_tokens=args.max_new_tokens, stop_token_ids=stop)
    chats, longest = ChatTokens(target.tokenizer), min(LONGEST, target.max_context - args.max_new_tokens)
    sets = prompt_sets(chats, args.prompts, args.measured, args.kinds, args.count, longest)
    if args.holes is not None:
        sets["holes"] = holes(chats, args.holes, args.count)
    results = []
    for name, prompts in sets.items():
        plain: list[list[int]] | None = None
        for drafter, count in [("none", 0), *((d, n) for d in args.drafter for n in args.draft_tokens)]:
            drafting = Drafting(block_size=count + 1)
            with Engine(target, load_drafter(drafter, target=target), BATCH_SIZE, drafting) as engine:
                completions = [completion.checked() for completion in engine.generate(prompts, params)]
            tokens = [completion.token_ids for completion in completions]
            plain = plain or tokens
            stats = merge([completion.stats for completion in completions])
            result = {
                "set": name,
                "drafter": drafter,
                "draft_tokens": count,
                "tau": round(stats.tau, 3),
                "accepted": [round(share, 3) for share in stats.acceptance_by_position],
                "identical": sum(ours == theirs for ours, theirs in zip(tokens, plain, strict=True)) / len(tokens),
                "tokens": sum(map(len, tokens)),
            }
            results.append(result)
            print(json.dumps(result), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
