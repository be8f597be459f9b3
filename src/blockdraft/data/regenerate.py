"""Answers written by the target itself, which are what a drafter should learn from, since it guesses the target's
tokens.

A `Task` is a record on its way to its answers: a chat, whose turns are answered one after the other, or a text that the
target continues without a chat template, as base models do.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import arange, tensor

from blockdraft.data.answerers import Answer, Answerer
from blockdraft.data.chats import ChatEncoder, answer_places
from blockdraft.data.documents import LOOPS, Document
from blockdraft.data.loops import before_loop
from blockdraft.data.records import Message
from blockdraft.data.writer import DataWriter
from blockdraft.errors import UsageError
from blockdraft.types import SamplingParams

LOOPS_AFTER = 50  # number of answers before a note on loops
MANY_LOOPS = 0.2  # share of looping answers that gets a note
SAMPLING = 0.7  # a temperature at which few answers loop
TOKEN_CHARACTERS = 32  # upper bound on the characters of a token


class Task(Protocol):
    """A record whose answers are to be written.

    Attributes:
        messages: The chat so far; empty if a text is continued.
        documents: Finished documents.
        reason: Reason for which it ended before its first answer; None if it did not.
        looped: Whether the last answer loops. It is kept up to where the loop begins.
    """

    messages: list[Message]
    documents: list[Document]
    reason: str | None
    looped: bool

    def next_prompt(self) -> list[int] | None:
        """Token ids of the next prompt; None if there is nothing left to answer."""

    def take(self, answer: Answer) -> None:
        """Add the answer to the last prompt.

        Raises:
            UsageError: A server and we disagree about the tokens.
        """


class Conversation:
    """A chat that is answered turn by turn; a `Task`.

    Attributes:
        documents: Finished documents. Turns share a document as long as the template's next prompt begins with exactly
            the tokens so far. Otherwise, for instance because the template drops earlier reasoning, the turn begins a
            new document.
    """

    def __init__(self, prompts: list[list[Message]], encoder: ChatEncoder, length: int) -> None:
        self.messages: list[Message] = []
        self.documents: list[Document] = []
        self.reason: str | None = None
        self.looped = False
        self._parts, self._encoder, self._length = prompts, encoder, length
        self._ids: list[int] = []
        self._written: list[bool] = []
        self._prompt: list[int] = []

    def next_prompt(self) -> list[int] | None:
        if self._parts:
            self.messages += self._parts.pop(0)
            self._prompt = self._encoder.prompt(self.messages)
            if len(self._prompt) < self._length:
                return self._prompt
            self.reason = "prompt too long"
        self._close()
        return None

    def take(self, answer: Answer) -> None:
        message = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        self.messages.append(message)
        prompt, ids = self._prompt, answer.token_ids
        if answer.prompt_ids is not None and answer.prompt_ids != prompt:
            raise UsageError(
                f"The server reads a prompt as {len(answer.prompt_ids)} tokens and the target's chat template makes "
                f"{len(prompt)} other ones; have it use the same model, or give --chat-template or --template-args."
            )
        if ids is None:
            prompt, ids = self._encoder.last_answer(self.messages)
            if answer.reasoning and answer.reasoning.strip() not in self._encoder.decode(ids):
                raise UsageError(
                    "The server reports reasoning apart from the answer, and the target's chat template drops it; "
                    "start the server without its reasoning parser."
                )
            if not answer.ended:
                ids = self._encoder.without_end(ids)
        ids, self.looped = before_loop(ids)
        if not ids:
            self.reason = LOOPS if self.looped else "no supervised token"
            self._parts.clear()
            return
        if prompt[: len(self._ids)] != self._ids:
            self._close()
        self._written += [False] * (len(prompt) - len(self._written)) + [True] * len(ids)
        self._ids = prompt + ids
        if self.looped or not answer.ended:
            self._parts.clear()  # a chat does not go on after half an answer

    def _close(self) -> None:
        if self._ids:
            over = len(self._ids) > self._length
            ids, written = self._ids[: self._length], self._written[: self._length]
            self.documents.append(Document(tensor(ids), tensor(written), over))
        self._ids, self._written = [], []


def prompts_of(messages: Sequence[Message]) -> list[list[Message]]:
    """Messages before each answer that is to be written, without the answers themselves. The last message of a user
    gets an answer too."""
    parts: list[list[Message]] = [[]]
    replaced = answer_places(messages)
    for i, message in enumerate(messages):
        if i not in replaced:
            parts[-1].append(message)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


class Continuation:
    """A text that is continued; a `Task`.

    Args:
        text: The text. A blank text has nothing to continue.
        most: Number of tokens at its beginning that are continued; None continues the whole text.
        encode: Function from texts to token ids.
        length: Maximum number of tokens of the document.

    Attributes:
        begun: The beginning that is continued, once `next_prompt` has returned its tokens.
    """

    def __init__(self, text: str, most: int | None, encode: Callable[[str], list[int]], length: int) -> None:
        self.messages: list[Message] = []
        self.documents: list[Document] = []
        self.reason: str | None = None
        self.looped = False
        self._text, self._most, self._encode, self._length = text, most, encode, length
        self._prompt: list[int] | None = None
        self.begun = ""

    def next_prompt(self) -> list[int] | None:
        if self._prompt is not None:
            return None
        self._prompt = []
        if not self._text.strip():
            self.reason = "no supervised token"
            return None
        most = self._most
        self.begun = self._text if most is None else beginning(self._text, most, self._encode)
        self._prompt = self._encode(self.begun)
        if len(self._prompt) < self._length:
            return self._prompt
        self.reason = "prompt too long"
        return None

    def take(self, answer: Answer) -> None:
        assert self._prompt is not None
        prompt, ids = self._prompt, answer.token_ids
        if ids is None:
            raise UsageError(
                "The server does not report the ids of the tokens that it writes (`return_token_ids`, as vLLM does), "
                "and the text of a continuation does not determine them; use another server, or leave out --server."
            )
        if answer.prompt_ids is not None and answer.prompt_ids != prompt:
            raise UsageError(
                f"The server reads a text as {len(answer.prompt_ids)} tokens that differ from the {len(prompt)} that "
                "were sent; have it use the same model."
            )
        ids, self.looped = before_loop(ids)
        if not ids:
            self.reason = LOOPS if self.looped else "no supervised token"
            return
        whole = tensor(prompt + ids)
        self.documents.append(Document(whole, arange(len(whole)) >= len(prompt)))


def beginning(text: str, most: int, encode: Callable[[str], list[int]]) -> str:
    """Longest beginning of a text that has at most `most` tokens. It ends with a whole word, or, where words are far
    too long, as in a script without spaces, with a character.

    The tokens counted are those of the beginning alone, as decoding would read it, and not the first ones of the whole
    text: a tokenizer may join characters on both sides of the cut.

    Raises:
        UsageError: Even the first character has more tokens.
    """
    text = text[: TOKEN_CHARACTERS * most]
    if len(encode(text)) <= most:
        return text
    found = ""
    for ends in ([word.end() for word in re.finditer(r"\S+", text)], range(1, len(text) + 1)):
        count = bisect_right(ends, most, key=lambda end: len(encode(text[:end])))
        found = max(found, text[: ends[count - 1]] if count else "", key=len)
        if found and 2 * len(encode(found)) >= most:
            break
    if not found:
        raise UsageError(f"the text has no beginning of {most} tokens or less; have more of it continued.")
    return found


def loops_note(looped: int, total: int, temperature: float) -> str | None:
    """Note on looping answers, with a remedy; None if there are few."""
    if looped <= MANY_LOOPS * total:
        return None
    found = f"{looped} of {total} answers loop ({looped / total:.0%}) and are kept up to where they begin to"
    if temperature < SAMPLING:
        return f"{found}; --temperature {SAMPLING} (sampling), with another --out, makes them fewer."
    return f"{found}; a smaller --max-new-tokens, with another --out, makes them fewer."


def regenerate(
    tasks: Iterable[tuple[int, Task]],
    answerer: Answerer,
    writer: DataWriter,
    params: SamplingParams,
    length: int,
    progress: Callable[[], None],
    note: Callable[[str], None],
) -> None:
    """Have all answers written, and write the resulting documents.

    Args:
        tasks: Tasks with the numbers of their source records.
        params: Sampling parameters of every answer. Each answer gets a seed of its own, which follows from the seed
            here, the record and the turn.
        length: Maximum number of tokens of a document; answers are cut there.
        progress: Called after each record.
        note: Called once with a sentence if many answers loop.
    """
    running: dict[int, Task] = {}
    waiting = iter(tasks)
    answered = looped = 0
    noted = False

    def go_on(key: int, answer: Answer | None = None) -> None:
        task = running[key]
        try:
            if answer is not None:
                task.take(answer)
            prompt = task.next_prompt()
        except ValueError as error:
            raise UsageError(f"Record {key + 1}: {error}") from error
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
        nonlocal answered, looped, noted
        answered, looped = answered + 1, looped + task.looped
        text = loops_note(looped, answered, params.temperature) if answered >= LOOPS_AFTER and not noted else None
        if text is not None:
            noted = True
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
