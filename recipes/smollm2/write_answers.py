"""Prompts and the target's answers to them, as lines of `chats.py`. Goes on where it stopped; SIGTERM and Ctrl-C stop
it, and what is lost are the few chats that were being written.

Answers are greedy. One that loops is ended there and answered once more with sampling; one that loops even then is cut
before its loop. Every sixth chat goes on to a second turn, whose prompt the target writes too.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from chats import Chat, kept, sha
from prompts import SYSTEM, PublicPrompts, key, kind_of, measured_grams, unfit

from blockdraft import Engine, SamplingParams, load_target
from blockdraft.engine import Chunk, Request
from blockdraft.engine.stats import LOOP_SIZE, LOOP_TIMES

PROMPT = SamplingParams(max_new_tokens=128, temperature=0.9, top_p=0.95)
FIRST, FURTHER = 512, 320  # longest answers of a chat's first turn and of its second
AGAIN = 0.7  # temperature at which a looping answer is drawn anew
TWO_TURNS = 6  # of so many chats one has two turns

# A task asks for tokens after a prompt, is sent them, and returns its line at last.
Asking: TypeAlias = "tuple[list[int], SamplingParams]"
Task: TypeAlias = "Generator[Asking, list[int], dict[str, Any]]"


class Loops:
    """Listener that ends a request as soon as its answer loops, by the measure of `blockdraft.engine.loops`."""

    def __init__(self) -> None:
        self.at: int | None = None  # where the repeated run stands for the second time
        self._ids: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}

    def loops(self, token_ids: tuple[int, ...]) -> bool:
        """Take further tokens. Returns whether they loop."""
        for token in token_ids:
            self._ids.append(token)
            begin = len(self._ids) - LOOP_SIZE
            if begin >= 0 and self.at is None:
                places = self._places.setdefault(tuple(self._ids[begin:]), [])
                places.append(begin)
                if len(places) >= LOOP_TIMES:
                    self.at = places[1]
        return self.at is not None


class Writer:
    def __init__(self, target: Any, prompts: PublicPrompts, measured: set[tuple[str, ...]], seed: int) -> None:
        self.target, self.prompts, self.measured, self.seed = target, prompts, measured, seed
        self.asked: set[str] = set()

    def task(self, number: int) -> Task:
        """Prompts and answers of a task."""
        tokenizer = self.target.tokenizer
        kind, count = kind_of(number)
        row: dict[str, Any] = {"task": number, "source": kind}
        if kind in SYSTEM:
            ids = yield Chat(tokenizer, SYSTEM[kind]).user_header(), self.params(PROMPT, number, 0)
            prompt = self.text(ids)
        else:
            name = self.prompts.name(kind, count)
            prompt = self.prompts.text(**name) if name else None
            row |= name or {}
        reason = "no prompt" if prompt is None else unfit(prompt, self.measured, self.asked)
        if prompt is None or reason:
            return row | {"dropped": reason}
        self.asked.add(key(prompt))
        if kind not in SYSTEM:
            row["sha"] = sha(prompt)
        chat, turns = Chat(tokenizer), []
        for turn in range(2 if number % TWO_TURNS == 1 else 1):
            if turn:
                ids = yield chat.user_header(), self.params(PROMPT, number, 3)
                prompt = self.text(ids)
                if prompt is None or unfit(prompt, self.measured, self.asked):
                    break
                self.asked.add(key(prompt))
            chat.ask(prompt)
            found = {} if "sha" in row and not turn else {"prompt": prompt}
            longest = FURTHER if turn else FIRST
            answer = yield chat.ids, SamplingParams(max_new_tokens=longest)
            cut = before_loop(answer)
            if cut is not None:
                found |= kept(tokenizer, "looped", cut) | {"temperature": AGAIN}
                again = SamplingParams(max_new_tokens=longest, temperature=AGAIN)
                answer = yield chat.ids, self.params(again, number, 2 * turn + 1)
                cut = before_loop(answer)
                answer = answer if cut is None else cut
            ended = answer[-1:] == [tokenizer.eos_token_id]
            found |= kept(tokenizer, "answer", answer[:-1] if ended else answer) | ({} if ended else {"open": True})
            turns.append(found)
            if not ended:
                break
            chat.answer(answer)
        return row | {"turns": turns}

    def params(self, params: SamplingParams, number: int, draw: int) -> SamplingParams:
        return replace(params, seed=(self.seed * 1_000_003 + number) * 8 + draw)

    def text(self, ids: list[int]) -> str | None:
        """Prompt that the target wrote; None if it did not come to an end."""
        ended = ids[-1:] == [self.target.tokenizer.eos_token_id]
        return str(self.target.tokenizer.decode(ids[:-1])).strip() if ended else None


def before_loop(ids: list[int]) -> list[int] | None:
    """Tokens before a loop; None if there is none."""
    watch = Loops()
    return ids[: watch.at] if watch.loops(tuple(ids)) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the GGUF file")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of the public sets")
    parser.add_argument("--measured", type=Path, nargs="+", required=True, help="JSON-lines files not to be trained on")
    parser.add_argument("--out", type=Path, default=Path("build/smollm2/answers.jsonl"))
    parser.add_argument("--tasks", type=int, default=24_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    target = load_target(args.target)
    writer = Writer(target, PublicPrompts(args.prompts), measured_grams(args.measured), args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done: set[int] = set()
    if args.out.exists():  # what follows the last whole line was being written
        whole = args.out.read_bytes().rpartition(b"\n")[0]
        args.out.write_bytes(whole + b"\n" if whole else b"")
        for row in map(json.loads, whole.splitlines()):
            done.add(row["task"])
            writer.asked |= {key(turn["prompt"]) for turn in row.get("turns", ()) if "prompt" in turn}
            if "sha" in row:
                text = writer.prompts.text(row["source"], row["line"])
                assert text is not None
                writer.asked.add(key(text))
    left = [number for number in range(args.tasks) if number not in done]
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    ended: SimpleQueue[int] = SimpleQueue()
    running: dict[int, tuple[Task, Request]] = {}
    kinds, tokens, finished, began, told = Counter[str](), 0, 0, time.monotonic(), time.monotonic()

    with Engine(target, max_batch_size=args.batch) as engine, args.out.open("a", encoding="utf-8") as file:

        def ask(number: int, task: Task, asking: Asking) -> None:
            watch, requests = Loops(), list[Request]()

            def listen(chunk: Chunk) -> None:
                if watch.loops(chunk.token_ids) and requests:
                    requests[0].cancel()
                if chunk.finish_reason is not None:
                    ended.put(number)

            requests.append(engine.submit(*asking, listen))
            running[number] = task, requests[0]

        def go_on(number: int, task: Task, ids: list[int] | None) -> None:
            nonlocal tokens, finished
            try:
                asking = next(task) if ids is None else task.send(ids)
            except StopIteration as end:
                file.write(json.dumps(end.value, ensure_ascii=False) + "\n")
                file.flush()
                finished += 1
                kinds["dropped" if "dropped" in end.value else "answered"] += 1
                for turn in end.value.get("turns", ()):
                    kinds["looped"] += "looped" in turn
            else:
                ask(number, task, asking)

        waiting = iter(left)
        while not stopping:
            while len(running) < args.batch + args.batch // 2 and (number := next(waiting, None)) is not None:
                go_on(number, writer.task(number), None)
            if not running:
                break
            try:
                number = ended.get(timeout=1)
            except Empty:
                continue
            task, request = running.pop(number)
            completion = request.result().checked()
            tokens += len(completion.token_ids)
            go_on(number, task, completion.token_ids)
            if time.monotonic() - told > 20:
                told = time.monotonic()
                pace = (told - began) / finished if finished else 0
                print(
                    f"{len(done) + finished}/{args.tasks} tasks, {tokens} tokens at {tokens / (told - began):.0f} a "
                    f"second, {dict(kinds)}, {pace * (len(left) - finished) / 60:.0f} min left",
                    flush=True,
                )
        for _, request in running.values():
            request.cancel()
    print(f"{'Stopped' if stopping else 'Finished'}: {len(done) + finished}/{args.tasks} tasks in {args.out}", flush=True)


if __name__ == "__main__":
    main()
