"""Steps 2 and 3: write prompts and the target's responses, as lines that `chats.py` explains.

The same command continues an interrupted run; SIGTERM and Ctrl-C stop it, and only unfinished chats are written again.

Responses are greedy. A repetitive one ends there and is sampled once more; if that repeats too, it is cut before the
repetition. Every sixth chat has a second turn, whose prompt the target writes too.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, TypeAlias, cast

from batched import BatchedResponder
from chats import Chat, kept, sha
from prompts import PATTERN, SYSTEM, PublicPrompts, key, kind_of, measured_grams, unfit

from blockdraft import Engine, SamplingParams, load_target
from blockdraft.targets import Target
from blockdraft.targets.native import NativeTarget
from blockdraft_train.data.loops import loop_begin
from blockdraft_train.data.responders import EngineResponder, Responder

PROMPT_TEMPERATURE, PROMPT_TOP_P = 0.9, 0.95
AGAIN = 0.7  # temperature at which a repetitive output is drawn anew
TWO_TURNS = 6  # of so many chats one has two turns

SLOTS = 1536  # of a row on a GPU, in which the longest chat of two turns finds room
SECONDS = 20  # between two lines of progress

# A task asks for tokens after a prompt, is sent them, and returns its line at last.
Asking: TypeAlias = "tuple[list[int], SamplingParams]"
Task: TypeAlias = "Generator[Asking, list[int], dict[str, Any]]"
Progress: TypeAlias = "tuple[int, dict[str, Any] | None]"


@dataclass(frozen=True)
class Lengths:
    """Most tokens of a prompt that the target writes, and of an answer in a chat's first turn and further on."""

    prompt: int = 128
    first: int = 512
    further: int = 320


class Writer:
    """Writer of chats.

    Args:
        target: The target, whose tokenizer is used.
        public: Public prompts.
        measured: Word runs of the prompts that are measured on.
        seed: Seed of everything that is drawn.
    """

    def __init__(
        self,
        target: Target,
        public: PublicPrompts,
        measured: set[tuple[str, ...]],
        seed: int,
        lengths: Lengths = Lengths(),
    ) -> None:
        assert target.tokenizer is not None
        self._tokenizer = target.tokenizer
        self._public, self._measured, self._seed, self._lengths = public, measured, seed, lengths
        self._asked: set[str] = set()

    def remember(self, row: dict[str, Any]) -> None:
        """Take the prompts of an earlier run's line for asked."""
        prompts = [turn["prompt"] for turn in row.get("turns", ()) if "prompt" in turn]
        if "sha" in row:
            prompts.append(self._public.text(row["source"], row["line"]) or "")
        self._asked |= set(map(key, prompts))

    def task(self, number: int) -> Task:
        """Have a prompt written or looked up, and its answers written."""
        kind, count = kind_of(number)
        row: dict[str, Any] = {"task": number, "source": kind}
        if kind in SYSTEM:
            prompt = yield from self._prompt(Chat(self._tokenizer, SYSTEM[kind]), number, 0)
        else:
            name = self._public.name(kind, count)
            prompt = self._public.text(**name) if name else None
            row |= name or {}
        reason = "no prompt" if prompt is None else unfit(prompt, self._measured, self._asked)
        if prompt is None or reason:
            return row | {"dropped": reason}
        if kind not in SYSTEM:
            row["sha"] = sha(prompt)
        chat, turns = Chat(self._tokenizer), list[dict[str, Any]]()
        for turn in range(2 if number % TWO_TURNS == 1 else 1):
            if turn:
                prompt = yield from self._prompt(chat, number, 3)
                if prompt is None or unfit(prompt, self._measured, self._asked):
                    break
            self._asked.add(key(prompt))
            chat.ask(prompt)
            found = yield from self._answer(chat, number, turn)
            turns.append(found if "sha" in row and not turn else {"prompt": prompt} | found)
            if found.get("open"):
                break
        return row | {"turns": turns}

    def _prompt(self, chat: Chat, number: int, draw: int) -> Generator[Asking, list[int], str | None]:
        """Have the user's next message written; None if it does not come to an end."""
        params = SamplingParams(self._lengths.prompt, PROMPT_TEMPERATURE, top_p=PROMPT_TOP_P)
        ids = yield chat.user_header(), self._seeded(params, number, draw)
        return str(self._tokenizer.decode(ids[:-1])).strip() if self._ended(ids) else None

    def _answer(self, chat: Chat, number: int, turn: int) -> Generator[Asking, list[int], dict[str, Any]]:
        """Have a chat answered, and return the entries of the turn."""
        longest = self._lengths.further if turn else self._lengths.first
        found: dict[str, Any] = {}
        ids = yield chat.ids, SamplingParams(longest)
        if (begin := loop_begin(ids)) is not None:
            found |= kept(self._tokenizer, "looped", ids[:begin]) | {"temperature": AGAIN}
            ids = yield chat.ids, self._seeded(SamplingParams(longest, AGAIN), number, 2 * turn + 1)
            ids = ids[: loop_begin(ids)]
        chat.answer(ids)
        if self._ended(ids):
            return found | kept(self._tokenizer, "answer", ids[:-1])
        return found | kept(self._tokenizer, "answer", ids) | {"open": True}

    def _ended(self, ids: list[int]) -> bool:
        return ids[-1:] == [self._tokenizer.eos_token_id]

    def _seeded(self, params: SamplingParams, number: int, draw: int) -> SamplingParams:
        return replace(params, seed=(self._seed * 1_000_003 + number) * 8 + draw)


def write(
    responder: Responder, writer: Writer, numbers: Iterable[int], stopping: Callable[[], bool]
) -> Iterator[Progress]:
    """Do tasks, as many at a time as the responder wants.

    Yields:
        For every answer, its number of tokens, and the line of a task that ended with it.
    """
    running: dict[int, Task] = {}

    def go_on(number: int, ids: list[int] | None = None) -> dict[str, Any] | None:
        try:
            prompt, params = next(running[number]) if ids is None else running[number].send(ids)
        except StopIteration as end:
            del running[number]
            return cast("dict[str, Any]", end.value)
        responder.submit(number, (), prompt, params)
        return None

    waiting = iter(numbers)
    try:
        while not stopping():
            while len(running) < responder.at_once and (number := next(waiting, None)) is not None:
                running[number] = writer.task(number)
                if (row := go_on(number)) is not None:
                    yield 0, row
            if not running:
                return
            for number, answer in responder.responses():
                assert answer.token_ids is not None
                yield len(answer.token_ids), go_on(number, answer.token_ids)
    finally:
        responder.close()


def whole_lines(file: Path) -> list[dict[str, Any]]:
    """Return the whole lines of an earlier run; a last, unfinished one is cut off."""
    if not file.exists():
        return []
    whole = file.read_bytes().rpartition(b"\n")[0]
    file.write_bytes(whole + b"\n" if whole else b"")
    return [json.loads(line) for line in whole.split(b"\n")] if whole else []


def share(text: str) -> tuple[int, int]:
    """Parse the numbers of "I/N"."""
    first, _, count = text.partition("/")
    return int(first), int(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the GGUF file")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of the public sets")
    parser.add_argument("--measured", type=Path, nargs="+", required=True, help="JSON-lines files not to be trained on")
    parser.add_argument("--out", type=Path, default=Path("build/smollm2/answers.jsonl"))
    parser.add_argument("--tasks", type=int, default=30_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--gpu", action="store_true", help="answer by `batched.py` on a GPU, --batch being its rows")
    parser.add_argument(
        "--share", type=share, default=(0, 1), metavar="I/N", help="only every N-th round of tasks, from I on"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    if args.gpu:
        target = load_target(args.target, dtype="float16", device="cuda", backend="native", compile="off")
    else:
        target = load_target(args.target, kv_dtype="int8")  # two fifths faster in batches of 32
    writer = Writer(target, PublicPrompts(args.prompts), measured_grams(args.measured), args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    earlier = whole_lines(args.out)
    for row in earlier:
        writer.remember(row)
    done = {row["task"] for row in earlier}
    part, parts = args.share
    left = [n for n in range(args.tasks) if n not in done and n // len(PATTERN) % parts == part]
    stopped = Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopped.set())
    counts, tokens, began = Counter[str](), 0, time.monotonic()
    told = began
    with ExitStack() as stack:
        responder: Responder
        if args.gpu:
            responder = BatchedResponder(cast(NativeTarget, target), args.batch, SLOTS, seed=args.seed + args.share[0])
        else:
            responder = EngineResponder(stack.enter_context(Engine(target, max_batch_size=args.batch)))
        file = stack.enter_context(args.out.open("a", encoding="utf-8"))
        for new, row in write(responder, writer, left, stopped.is_set):
            tokens += new
            if row is not None:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                counts["dropped" if "dropped" in row else "answered"] += 1
                counts["looped"] += sum("looped" in turn for turn in row.get("turns", ()))
            if time.monotonic() - told > SECONDS:
                told = time.monotonic()
                finished = counts["dropped"] + counts["answered"]
                minutes = (told - began) / max(finished, 1) * (len(left) - finished) / 60
                print(
                    f"{len(done) + finished}/{args.tasks} tasks, {counts['answered']} answered now ({counts['looped']} "
                    f"greedy answers looped), {tokens} tokens, {tokens / (told - began):.0f} a second, {minutes:.0f} "
                    "min left",
                    flush=True,
                )
    print(f"{'Stopped' if stopped.is_set() else 'Finished'}; the chats are in {args.out}", flush=True)


if __name__ == "__main__":
    main()
