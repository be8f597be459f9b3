"""Let the target respond to the prompts of `prompts.jsonl`, in batches, and append the responses to shards.

The command resumes where it stopped, also after a kill: tasks whose id is in any shard of the folder are done. SIGTERM
and Ctrl-C stop it at once; unfinished tasks begin again. A line of a shard is one task:

    {"id": "0f3a...", "kind": "edit", "turns": [{"response": "...<|im_end|>"}]}
    {"id": "17c2...", "kind": "question", "turns": [{"prompt": "How do I ...", "response": "..."}]}
    {"id": "93b0...", "kind": "chat", "dropped": "length"}

`prompt` is there where the target wrote it. A response that the target ended has its end token. `response_ids` holds
the tokens where the text does not give them back. Responses are greedy unless the task has a temperature. A repetitive
response is cut before its first repetition and ends the task, which is dropped if little remains.
"""

from __future__ import annotations

import argparse
import re
import signal
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

from chats import ChatTokens
from documents import COPIES, is_validation
from prompts import Grams, Task, grams, measured_grams, read_lines
from recording import DocumentWriter, SequenceRecorder
from shards import Shards, read_shards

from blockdraft import Engine, SamplingParams, load_target
from blockdraft.engine import Chunk, Request
from blockdraft.errors import UsageError
from blockdraft.targets import Target
from blockdraft_train.data.loops import KEPT_TOKENS, loop_begin

PROMPT_TOKENS, RESPONSE_TOKENS, FIM_TOKENS = 256, 512, 128
PROMPT_TEMPERATURE, PROMPT_TOP_P = 1.0, 0.95
CHECK_EVERY = 64  # tokens between two searches for repetition
# Code repeats itself more than prose: a response is repetitive if 16 tokens in a row occur six times.
REPEAT = {"size": 16, "times": 6}
SLOTS = 1600  # KV slots per sequence
PREFIX_TOKENS = 8192  # of finished sequences, so that a further turn of a chat needs no second prefill
PROGRESS_SECONDS = 60
FIM_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|im_end|>")

# A job asks for tokens after a prompt, is sent them, and returns the line of its task.
Query: TypeAlias = "tuple[list[int], SamplingParams]"
Job: TypeAlias = "Generator[Query, list[int], dict[str, Any]]"


class Dropped(Exception):
    """A task that yields nothing to learn from; the message is the reason."""


class Writer:
    """Turns tasks into prompts, and tokens into lines.

    Args:
        measured: Word runs that no prompt may contain.
        tokens: Maximum tokens of a response.
    """

    def __init__(self, target: Target, measured: Grams, tokens: int = RESPONSE_TOKENS) -> None:
        assert target.tokenizer is not None
        self._tokenizer, self._chats = target.tokenizer, ChatTokens(target.tokenizer)
        self._measured = measured
        self._response_tokens = tokens
        self._ends = set(target.eos_token_ids)
        vocabulary = self._tokenizer.get_vocab()
        self._fim_ends = tuple(vocabulary[end] for end in FIM_ENDS if end in vocabulary)
        self._openings: set[str] = set()

    def remember(self, line: dict[str, Any]) -> None:
        """Note the prompts of an earlier line, so that the target does not write them again."""
        self._openings |= {beginning(turn["prompt"]) for turn in line.get("turns", ()) if "prompt" in turn}

    def job(self, task: Task) -> Job:
        """Have a task's prompts and responses written."""
        line = {"id": task["id"], "kind": task["kind"]}
        turns: list[dict[str, Any]] = []
        try:
            yield from self._fim(task, turns) if "text" in task else self._chat(task, turns)
        except Dropped as reason:
            if not turns:
                return line | {"dropped": str(reason)}
        return line | {"turns": turns}

    def _fim(self, task: Task, turns: list[dict[str, Any]]) -> Generator[Query, list[int], None]:
        # Behind a fence the target would explain what it has completed, which no editor shows.
        params = SamplingParams(min(FIM_TOKENS, self._response_tokens), stop_token_ids=self._fim_ends, stop=("```",))
        yield from self._respond(self._chats.encode(task["text"]), params, turns, {})

    def _chat(self, task: Task, turns: list[dict[str, Any]]) -> Generator[Query, list[int], None]:
        ids: list[int] = []
        for number, turn in enumerate(task["turns"]):
            written = {} if "text" in turn else {"prompt": (yield from self._prompt(task, turn, ids, number))}
            text = written.get("prompt") or turn["text"]
            ids = ids + self._chats.further_turn(text) if number else self._chats.first_turn(task, text)
            temperature = task.get("temperature", 0.0)
            params = SamplingParams(self._response_tokens, temperature, top_p=0.95, seed=seed(task, 2 * number))
            response = yield from self._respond(ids, params, turns, written)
            if response[-1] not in self._ends:
                return
            ids = ids + response

    def _prompt(
        self, task: Task, turn: dict[str, str], ids: list[int], number: int
    ) -> Generator[Query, list[int], str]:
        """Let the target write the user's message.

        Raises:
            Dropped: The message does not end, or is not fit to be asked.
        """
        opening, stop = turn["opening"], turn.get("stop", "\n\n")
        prompt = self._chats.opening(turn, ids)
        params = SamplingParams(
            min(PROMPT_TOKENS, self._response_tokens),
            PROMPT_TEMPERATURE,
            top_p=PROMPT_TOP_P,
            seed=seed(task, 2 * number + 1),
            stop_token_ids=self._fim_ends,
            stop=(stop,),
        )
        response = yield prompt, params
        text = str(self._tokenizer.decode(response, skip_special_tokens=True))
        ended = response[-1] in {*self._fim_ends, *self._ends} or stop in text
        text = opening + text.partition(stop)[0].rstrip() + (stop if "```" in stop else "")
        reason = unfit(text, self._measured) if ended else "open"
        if reason is None and beginning(text) in self._openings:
            reason = "asked before"
        if reason is not None:
            raise Dropped(reason)
        self._openings.add(beginning(text))
        return text

    def _respond(
        self, ids: list[int], params: SamplingParams, turns: list[dict[str, Any]], written: dict[str, str]
    ) -> Generator[Query, list[int], list[int]]:
        """Have a response written, add its turn, and return its tokens.

        Raises:
            Dropped: Nothing remains before the response repeats itself.
        """
        response = yield ids, params
        begin = loop_begin(response, **REPEAT)
        if begin is not None:
            response = response[:begin]
            if len(response) < KEPT_TOKENS:
                raise Dropped("repetitive")
        turns.append(written | self._chats.stored(response))
        return response


def seed(task: Task, draw: int) -> int:
    """Return the seed of one of a task's responses."""
    return int(task["id"][:12], 16) * 8 + draw


def beginning(prompt: str) -> str:
    """Return what nearly equal prompts have in common: their first 80 letters."""
    return "".join(re.findall(r"[a-z]+", prompt.lower()))[:80]


def unfit(prompt: str, measured: Grams) -> str | None:
    """Return why a prompt that the target wrote is not asked; None if it is."""
    words = re.findall(r"[a-z']+", prompt.lower())
    if not 4 <= len(words) <= 120:
        return "length"
    if sum(character.isascii() for character in prompt) < 0.97 * len(prompt):
        return "not English"
    if "<|" in prompt:
        return "special token"
    if len(set(words)) < 0.3 * len(words):
        return "repetitive"
    return "measured" if measured & grams(prompt) else None


# Running


@dataclass(eq=False)
class Running:
    """A job, and the request that it waits for."""

    job: Job
    request: Request | None = None
    token_ids: list[int] = field(default_factory=list)


class Pool:
    """Runs jobs on an engine, as many at a time as keep its batch full."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._at_once = engine.max_batch_size + 4
        self._answered: SimpleQueue[Running | None] = SimpleQueue()
        self._stopped = False

    def stop(self) -> None:
        """End `lines` soon. May be called by a signal handler."""
        self._stopped = True
        self._answered.put(None)

    def lines(self, jobs: Iterator[Job]) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yield, for every response, its number of tokens, and the line of the task if it ended with it."""
        running: set[Running] = set()
        try:
            while not self._stopped:
                while len(running) < self._at_once and (job := next(jobs, None)) is not None:
                    entry = Running(job)
                    running.add(entry)
                    if (line := self._proceed(entry, None)) is not None:
                        running.discard(entry)
                        yield 0, line
                if not running:
                    return
                answered = self._answered.get()
                if answered is None or answered.request is None:
                    continue
                response = answered.request.result().checked().token_ids
                line = self._proceed(answered, response)
                if line is not None:
                    running.discard(answered)
                yield len(response), line
        finally:
            for entry in running:
                if entry.request is not None:
                    entry.request.cancel()

    def _proceed(self, entry: Running, response: list[int] | None) -> dict[str, Any] | None:
        """Resume a job with a response and submit its next query. Return its line if it ended."""
        try:
            prompt, params = next(entry.job) if response is None else entry.job.send(response)
            while True:
                try:
                    entry.request = self._submit(entry, prompt, params)
                    return None
                except UsageError as error:  # the prompt is too long
                    prompt, params = entry.job.throw(Dropped(str(error)))
        except StopIteration as end:
            return dict(end.value)

    def _submit(self, entry: Running, prompt: list[int], params: SamplingParams) -> Request:
        token_ids: list[int] = []
        checked = 0

        def listen(chunk: Chunk) -> None:
            nonlocal checked
            token_ids.extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                self._answered.put(entry)
            elif len(token_ids) >= checked + CHECK_EVERY and entry.request is not None:
                checked = len(token_ids)
                if loop_begin(token_ids, **REPEAT) is not None:
                    entry.request.cancel(complete=True)

        return self._engine.submit(prompt, params, listen)


def share(text: str) -> tuple[int, int]:
    """Return the numbers of "I/N"."""
    part, _, count = text.partition("/")
    return int(part), int(count)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the GGUF file")
    parser.add_argument("--prompts", type=Path, default=Path("build/qwen2.5-coder/prompts.jsonl"))
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="JSON-lines files not to be trained on")
    parser.add_argument("--out", type=Path, default=Path("build/qwen2.5-coder/responses"))
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=RESPONSE_TOKENS, help="most tokens of a response")
    parser.add_argument("--dense", action="store_true", help="leave out copies, which prompt lookup drafts")
    parser.add_argument("--record", type=Path, metavar="DIR", help="keep the hidden states of responses in DIR")
    parser.add_argument("--target-layers", default="7,16,26,28", help="whose outputs --record keeps")
    parser.add_argument("--share", type=share, default=(0, 1), metavar="I/N", help="only every N-th task, from I on")
    args = parser.parse_args(words)

    # Keys and values in 8 bits take a quarter of the memory and are read faster in large batches.
    target = load_target(args.target, kv_dtype="int8")
    writer = Writer(target, measured_grams(args.measured), args.tokens)
    part, parts = args.share
    shards = Shards(args.out, f"part-{part}")
    done = set()
    for earlier in read_shards(args.out):
        done.add(earlier["id"])
        writer.remember(earlier)
    tasks = [task for task in read_lines(args.prompts)[part::parts] if task["id"] not in done]
    if args.dense:
        tasks = [task for task in tasks if task["kind"] not in COPIES]
    print(f"{len(done)} tasks are done, {len(tasks)} are left.", flush=True)

    recorder = documents = None
    if args.record is not None:
        recorder = SequenceRecorder([int(layer) for layer in args.target_layers.split(",")])
        documents = DocumentWriter(recorder, args.record, f"part-{part}")
    by_id, chats = {task["id"]: task for task in tasks}, ChatTokens(target.tokenizer)

    counts, tokens, began = Counter[str](), 0, time.monotonic()
    reported = began
    memory = {"cache_tokens": args.batch * SLOTS + PREFIX_TOKENS, "prefix_tokens": PREFIX_TOKENS}
    with Engine(target, None, args.batch, **memory, recorder=recorder) as engine:
        pool = Pool(engine)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: pool.stop())
        for new, line in pool.lines(map(writer.job, tasks)):
            tokens += new
            if line is not None:
                shards.append(line)
                counts["dropped" if "dropped" in line else "answered"] += 1
                if documents is not None and "turns" in line and not is_validation(line["id"]):
                    task = by_id[line["id"]]
                    document = chats.document(task, line)
                    if "text" in task:  # around a hole is code, as good to learn from as the response
                        document.supervised[:] = True
                    documents.add(document)
            if time.monotonic() - reported > PROGRESS_SECONDS:
                reported = time.monotonic()
                print(
                    f"{time.strftime('%H:%M:%S')} {counts['answered']} tasks answered, {counts['dropped']} dropped, "
                    f"{tokens} tokens, {tokens / (reported - began):.1f} tokens/s",
                    flush=True,
                )
    if documents is not None:
        documents.finish()
    print(f"Stopped after {tokens} tokens; the responses are in {args.out}.", flush=True)


if __name__ == "__main__":
    main()
