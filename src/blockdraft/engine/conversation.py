"""A conversation: turns that an engine answers one after another, each on top of what was said before."""

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

ROWS = 2  # that the memory has room for, so that an answer never drives out the remembered turns before it


class ContextFull(UsageError):
    """What was said, with the new message, leaves no room for an answer."""


@dataclass(frozen=True)
class Turn:
    """A message that is being answered. The conversation knows nothing of it until `Conversation.keep`.

    Attributes:
        text: The message.
        request: Of the engine; `request.cancel()` ends the answer early.
    """

    text: str
    request: Request


class Conversation:
    """What was said so far, and an engine that answers what comes next.

    Each answer is what `Engine.generate` gives for the same messages: all of them go through the chat template anew,
    and the engine finds out which beginning of them is still in memory. A template that changes earlier turns, as
    where it drops their reasoning, makes that beginning shorter and nothing else.

    A target without chat template continues raw text: what was said so far, joined as it is.

    Args:
        engine: With `prefix_tokens`, or nothing is remembered; see `chat_engine`.
        system: Text that the conversation begins with, as the system's message.

    Raises:
        UsageError: The target has no tokenizer, or its template takes no system's message.

    Attributes:
        messages: Those of system, user and assistant so far.
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
    def said(self) -> list[Message]:
        """The messages without the system's."""
        return [message for message in self.messages if message["role"] != "system"]

    @property
    def limit(self) -> int:
        """Tokens that prompt and answer may have together: the target's context, or what the memory has room for."""
        engine = self.engine
        return min(engine.target.max_context, engine.cache_tokens - engine.slots_behind)

    def ask(
        self, text: str, params: SamplingParams | None = None, listener: Callable[[Chunk], object] | None = None
    ) -> Turn:
        """Begin to answer a message, and return at once.

        The answer has at most `params.max_new_tokens` tokens, and fewer where the context ends before. `listener` is
        called as in `Engine.submit`.

        Raises:
            ContextFull: There is no room for an answer.
            UsageError: As in `Engine.submit`.
        """
        ids = encode(self._prompt(text), self.engine.target)
        room = self.limit - len(ids)
        if room < 1:
            raise ContextFull(
                f"The conversation has {len(ids)} tokens with this message, and there is room for {self.limit}, answer "
                f"included; forget its oldest turns, begin anew, or shorten the message."
            )
        params = params or SamplingParams()
        params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
        return Turn(text, self.engine.submit(ids, params, listener))

    def keep(self, turn: Turn) -> Completion:
        """Wait for the answer and go on from it. One that was cancelled counts as far as it came; where it has no text
        at all, the conversation stays as it was.

        Raises:
            NumbersError, RequestError: It failed; the conversation stays as it was.
        """
        completion = turn.request.result().checked()
        if completion.text:
            self.messages += [
                {"role": "user", "content": turn.text},
                {"role": "assistant", "content": completion.text},
            ]
        return completion

    def set_system(self, text: str) -> None:
        """Replace the system's message; an empty text removes it.

        Raises:
            UsageError: There is no chat template, or it takes none.
        """
        if not self.has_template:
            raise UsageError("The target has no chat template, so there is no system's message; say it in the text.")
        messages = [{"role": "system", "content": text}] * bool(text) + self.said
        encode([*messages, {"role": "user", "content": "?"}], self.engine.target)
        self.messages = messages

    def undo(self) -> str | None:
        """Take back the last message and its answer. Returns the message, or None where there is none."""
        if not self.said:
            return None
        *self.messages, question, _ = self.messages
        return question["content"]

    def forget_oldest(self) -> str | None:
        """Forget the oldest message and its answer. Returns the message, or None where there is none."""
        said = self.said
        if not said:
            return None
        self.messages = [message for message in self.messages if message["role"] == "system"] + said[2:]
        return said[0]["content"]

    def reset(self) -> None:
        """Begin anew, with the same system's message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def save(self, path: str | Path) -> None:
        """Write the conversation as a JSON line, which `blockdraft data` reads; raw text as {"text"}.

        Raises:
            UsageError: There is nothing to save, there is a file that this conversation has not written, or it cannot
                be written.
        """
        path = Path(path).resolve()
        if not self.said:
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
    """An engine that remembers as much of a conversation as the target's context holds."""
    return Engine(target, drafter, ROWS, drafting, prefix_tokens=target.max_context)
