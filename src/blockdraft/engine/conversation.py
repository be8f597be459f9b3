"""Conversations: an engine answers message after message, each with all messages before it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from blockdraft.drafters import Drafter
from blockdraft.engine.engine import Engine
from blockdraft.engine.request import Chunk, Completion, Request
from blockdraft.engine.text import encode
from blockdraft.errors import UsageError, describe
from blockdraft.targets import Target, without_tokenizer
from blockdraft.types import Drafting, Message, Prompt, SamplingParams

SEQUENCES = 2  # room in the cache, so that an answer never evicts the turns before it


class ContextFull(UsageError):
    """Raised if the messages leave no room for an answer."""


@dataclass(frozen=True)
class PendingTurn:
    """A message that is being answered. `Conversation.keep` adds it to the conversation.

    Attributes:
        text: The message.
        request: The engine's request; `request.cancel()` ends the answer early.
    """

    text: str
    request: Request


class Conversation:
    """Holds the messages so far, and answers the next one with an engine.

    Each answer is that of `Engine.generate` for the same messages: all of them pass through the chat template again,
    and the engine reuses the longest prefix of the tokens that it has kept. A template that changes earlier turns, for
    instance by dropping their reasoning, only makes that prefix shorter.

    A target without a chat template continues raw text: all messages, joined.

    Args:
        engine: Keeps turns if it has `prefix_tokens`; see `chat_engine`.
        system: Text of the system message, if any.

    Raises:
        UsageError: The target has no tokenizer, or its template allows no system message.

    Attributes:
        messages: The messages of system, user and assistant so far.
        has_template: Whether the target has a chat template.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        tokenizer = engine.target.tokenizer
        if tokenizer is None:
            raise UsageError(f"{without_tokenizer(engine.target)}, so it cannot chat; give a model that holds one.")
        self.engine = engine
        self.has_template = tokenizer.chat_template is not None
        self.messages: list[Message] = []
        self._saved: set[Path] = set()
        if system is not None:
            self.set_system(system)

    @property
    def turns(self) -> list[Message]:
        """The messages except the system message."""
        return [message for message in self.messages if message["role"] != "system"]

    @property
    def limit(self) -> int:
        """Most tokens of prompt and answer together, limited by the target's context and the engine's cache."""
        engine = self.engine
        return min(engine.target.max_context, engine.cache_tokens - engine.slots_behind)

    def ask(
        self, text: str, params: SamplingParams | None = None, listener: Callable[[Chunk], object] | None = None
    ) -> PendingTurn:
        """Begin to answer a message, and return at once.

        The answer has at most `params.max_new_tokens` tokens, or as many as fit. `listener` is called as in
        `Engine.submit`.

        Raises:
            ContextFull: There is no room for an answer.
            UsageError: As in `Engine.submit`.
        """
        ids = encode(self._prompt(text), self.engine.target)
        room = self.limit - len(ids)
        if room < 1:
            raise ContextFull(
                f"The conversation has {len(ids)} tokens with this message, and there is room for {self.limit}, the "
                f"answer included; forget its oldest turns, begin anew, or shorten the message."
            )
        params = params or SamplingParams()
        params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
        return PendingTurn(text, self.engine.submit(ids, params, listener))

    def keep(self, turn: PendingTurn) -> Completion:
        """Wait for the answer, and add message and answer to the conversation.

        A cancelled answer is added as far as it got, unless it has no text.

        Raises:
            NumbersError, RequestError: The answer failed; the conversation stays as it was.
        """
        completion = turn.request.result().checked()
        if completion.text:
            self.messages += [
                {"role": "user", "content": turn.text},
                {"role": "assistant", "content": completion.text},
            ]
        return completion

    def set_system(self, text: str) -> None:
        """Replace the system message; an empty text removes it.

        Raises:
            UsageError: There is no chat template, or it allows no system message.
        """
        if not self.has_template:
            raise UsageError("The target has no chat template, so it takes no system message; say it in the text.")
        messages = [{"role": "system", "content": text}] * bool(text) + self.turns
        encode([*messages, {"role": "user", "content": "?"}], self.engine.target)
        self.messages = messages

    def undo(self) -> str | None:
        """Remove the last message and its answer. Return the message, or None if there is none."""
        if not self.turns:
            return None
        *self.messages, question, _ = self.messages
        return question["content"]

    def forget_oldest(self) -> str | None:
        """Remove the oldest message and its answer. Return the message, or None if there is none."""
        turns = self.turns
        if not turns:
            return None
        self.messages = [message for message in self.messages if message["role"] == "system"] + turns[2:]
        return turns[0]["content"]

    def reset(self) -> None:
        """Remove all messages except the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def save(self, path: str | Path) -> None:
        """Write the conversation as a JSON line that `blockdraft data` reads, or raw text as {"text"}.

        Raises:
            UsageError: There is nothing to save, the file exists and was not written by this conversation, or it cannot
                be written.
        """
        path = Path(path).resolve()
        if not self.turns:
            raise UsageError("There is nothing to save yet.")
        if path.exists() and path not in self._saved:
            raise UsageError(f"{path} exists; give another name.")
        row = {"messages": self.messages} if self.has_template else {"text": self._prompt("")}
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({describe(error)}); give another place.") from error
        self._saved.add(path)

    def _prompt(self, text: str) -> Prompt:
        if self.has_template:
            return [*self.messages, {"role": "user", "content": text}]
        return "".join(message["content"] for message in self.messages) + text


def chat_engine(target: Target, drafter: Drafter, drafting: Drafting | None = None) -> Engine:
    """Return an engine that keeps a conversation of up to the target's context."""
    return Engine(target, drafter, max_batch_size=SEQUENCES, drafting=drafting, prefix_tokens=target.max_context)
