"""Responses written by the target itself: what a drafter should learn from, since it will guess the target's tokens.

Conversations come in turns: each answer is part of the next prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import tensor

from blockdraft.data.answerers import Answer, Answerer
from blockdraft.data.chats import ChatEncoder, answer_places
from blockdraft.data.documents import LOOPS, Document
from blockdraft.data.rows import Message
from blockdraft.data.writer import DataWriter
from blockdraft.engine import loops
from blockdraft.errors import UsageError
from blockdraft.types import SamplingParams

LOOPS_AFTER = 50  # answers
MANY_LOOPS = 0.2  # of the answers
SAMPLING = 0.7  # a temperature at which few answers loop


class Task(Protocol):
    """A row whose answers are to be written.

    Attributes:
        messages: The chat so far; empty where a text is continued.
        documents: Those that are whole.
        reason: Why it ended before its first answer, if it did.
    """

    messages: list[Message]
    documents: list[Document]
    reason: str | None

    def next_prompt(self) -> list[int] | None:
        """Token ids of what is to be answered next; None where nothing is."""

    def take(self, answer: Answer) -> None:
        """Take the answer to the last prompt. Raises ValueError where a server and we disagree."""


def loops_note(looped: int, total: int, temperature: float) -> str | None:
    """What is to be said of answers that run in circles, and how to mend it; None if they are few."""
    if looped <= MANY_LOOPS * total:
        return None
    found = f"{looped} of {total} answers run in circles and are left out ({looped / total:.0%})"
    if temperature < SAMPLING:
        return f"{found}; --temperature {SAMPLING} (sampling), with another --out, makes them fewer."
    return f"{found}; a smaller --max-new-tokens, with another --out, loses fewer."


def prompts_of(messages: Sequence[Message]) -> list[list[Message]]:
    """What comes before each answer that is to be written, the answers themselves left out. A chat that ends with a
    user's message gets an answer to it."""
    parts: list[list[Message]] = [[]]
    replaced = answer_places(messages)
    for i, message in enumerate(messages):
        if i not in replaced:
            parts[-1].append(message)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


class Conversation:
    """A chat on its way through its turns; a `Task`.

    Attributes:
        documents: Those that are whole. Turns share one as long as the template's next prompt begins with the very
            tokens so far; where it does not (it drops earlier reasoning, say), that turn begins a document of its own.
        reason: Why the conversation ended before its first answer, if it did.
    """

    def __init__(self, prompts: list[list[Message]], encoder: ChatEncoder, length: int) -> None:
        self.messages: list[Message] = []
        self.documents: list[Document] = []
        self.reason: str | None = None
        self._parts, self._encoder, self._length = prompts, encoder, length
        self._ids: list[int] = []
        self._written: list[bool] = []
        self._prompt: list[int] = []

    def next_prompt(self) -> list[int] | None:
        """Token ids of what is to be answered next; None where nothing is."""
        if self._parts:
            self.messages += self._parts.pop(0)
            self._prompt = self._encoder.prompt(self.messages)
            if len(self._prompt) < self._length:
                return self._prompt
            self.reason = "prompt too long"
        self._close()
        return None

    def take(self, answer: Answer) -> None:
        """Take the answer to the last prompt. Raises ValueError where a server and our template disagree."""
        message = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        self.messages.append(message)
        prompt, ids = self._prompt, answer.token_ids
        if answer.prompt_ids is not None and answer.prompt_ids != prompt:
            raise UsageError(
                f"The server reads a prompt as {len(answer.prompt_ids)} tokens and the target's chat template makes "
                f"{len(prompt)}, other ones; have it use the same model, or give --chat-template or --template-args."
            )
        if ids is None:
            prompt, ids = self._encoder.last_answer(self.messages)
            if answer.reasoning and answer.reasoning.strip() not in self._encoder.decode(ids):
                raise UsageError(
                    "The server tells reasoning apart and the target's chat template drops it; start the server "
                    "without its reasoning parser."
                )
            if not answer.ended:
                ids = self._encoder.without_end(ids)
        if loops(ids) or not ids:
            self.reason = LOOPS if ids else "no supervised token"
            self._parts.clear()
            return
        if prompt[: len(self._ids)] != self._ids:
            self._close()
        self._written += [False] * (len(prompt) - len(self._written)) + [True] * len(ids)
        self._ids = prompt + ids
        if not answer.ended:
            self._parts.clear()  # nobody would go on behind half an answer

    def _close(self) -> None:
        if self._ids:
            over = len(self._ids) > self._length
            ids, written = self._ids[: self._length], self._written[: self._length]
            self.documents.append(Document(tensor(ids), tensor(written), over))
        self._ids, self._written = [], []


def regenerate(
    tasks: Iterable[tuple[int, Task]],
    answerer: Answerer,
    writer: DataWriter,
    params: SamplingParams,
    length: int,
    progress: Callable[[], None],
    note: Callable[[str], None],
) -> None:
    """Have answers written, and write what comes of it.

    Args:
        tasks: By the numbers of their source rows.
        params: Of every answer. Each gets a seed of its own, which follows from this one, the row and the turn.
        length: Tokens of a document at most; an answer is cut there.
        progress: Called after each row.
        note: Called with a sentence, once, where many answers run in circles.
    """
    running: dict[int, Task] = {}
    waiting = iter(tasks)
    answered = looped = 0
    told = False

    def go_on(key: int, answer: Answer | None = None) -> None:
        task = running[key]
        try:
            if answer is not None:
                task.take(answer)
            prompt = task.next_prompt()
        except ValueError as error:
            raise UsageError(f"Row {key + 1}: {error}") from error
        if answer is not None:
            count(task)
        if prompt is None:
            writer.add(key, task.documents, None if task.documents else task.reason)
            del running[key]
            progress()
            return
        seed = (((params.seed or 0) * 1_000_003 + key) * 1_009 + len(task.messages)) % 2**31
        most = min(params.max_new_tokens, length - len(prompt))
        answerer.ask(key, task.messages, prompt, replace(params, max_new_tokens=most, seed=seed))

    def count(task: Task) -> None:
        nonlocal answered, looped, told
        answered, looped = answered + 1, looped + (task.reason == LOOPS)
        text = loops_note(looped, answered, params.temperature) if answered >= LOOPS_AFTER and not told else None
        if text is not None:
            told = True
            note(text)

    try:
        while True:
            while len(running) < answerer.at_once and (one := next(waiting, None)) is not None:
                running[one[0]] = one[1]
                go_on(one[0])
            if not running:
                return
            for key, answer in answerer.answers():
                go_on(key, answer)
    finally:
        answerer.close()
