"""Prompts to token ids, and committed tokens back to text as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from blockdraft.errors import UsageError
from blockdraft.targets import Target
from blockdraft.types import Message, Prompt


def encode(prompt: Prompt, target: Target) -> list[int]:
    """Token ids of a text, a chat or token ids.

    A text becomes the user's message of a chat where the target has a chat template, and plain text otherwise.

    Raises:
        ValueError: The prompt is empty, holds unknown ids, or needs a tokenizer that the target lacks.
    """
    tokenizer = target.tokenizer
    if len(prompt) == 0 or (isinstance(prompt, str) and not prompt.strip()):
        raise UsageError("The prompt is empty; give at least one token of text.")
    if not isinstance(prompt, str) and not isinstance(prompt[0], dict):
        ids = [int(token) for token in cast("Sequence[int]", prompt)]
        outside = [token for token in ids if not 0 <= token < target.vocab_size]
        if outside:
            raise UsageError(f"Token id {outside[0]} is outside the target's vocabulary of {target.vocab_size}.")
        return ids
    if tokenizer is None:
        raise UsageError("The target has no tokenizer, so prompts must be lists of token ids.")
    if isinstance(prompt, str) and tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else cast("Sequence[Message]", prompt)
    if tokenizer.chat_template is None:
        raise UsageError("The target's tokenizer has no chat template; give the prompt as text or token ids.")
    encoded = tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, return_dict=True)
    return list(cast("dict[str, Any]", encoded)["input_ids"])


class TextStream:
    """Turns the tokens of one answer into text piece by piece, holding back unfinished UTF-8 characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._sent = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete."""
        self._ids += token_ids
        if self._backend is None:
            return ""
        new = "".join(self._stream.step(self._backend, token) or "" for token in token_ids)
        self._sent += new
        return new

    def finish(self) -> str:
        """What is still unsent once no token follows, an unfinished character included."""
        return self.text[len(self._sent) :]

    @property
    def text(self) -> str:
        """The whole answer so far, without special tokens; empty where the target has no tokenizer."""
        if self._tokenizer is None:
            return ""
        return cast(str, self._tokenizer.decode(self._ids, skip_special_tokens=True))


class AnswerText:
    """The text of one answer as it may be shown: whole characters only, and cut before a stop string.

    Args:
        stop: Stop strings. What may be the beginning of one is held back until that is decided.

    Attributes:
        stopped: Whether a stop string has appeared. Where several appear with one token, the one that begins first
            cuts the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] = ()) -> None:
        self._stream = TextStream(tokenizer)
        self._stop = stop
        self._text = ""
        self._safe = 0  # characters that no later token can take back
        self._taken = 0
        self._unread: list[int] = []
        self.stopped = False

    def push(self, token: int) -> None:
        self._unread.append(token)
        if self._stop:  # else no one needs the text yet
            self._read()

    def finish(self) -> None:
        """No token follows, so what was held back can be shown."""
        self._read()
        if not self.stopped:
            self._add(self._stream.finish())
        self._safe = len(self._text)

    def take(self) -> str:
        """Text that may be shown since the last call."""
        self._read()
        new = self._text[self._taken : self._safe]
        self._taken = self._safe
        return new

    @property
    def shown(self) -> str:
        """All text that may be shown."""
        self._read()
        return self._text[: self._safe]

    def _read(self) -> None:
        if self._unread:
            self._add(self._stream.push(self._unread))
            self._unread.clear()

    def _add(self, piece: str) -> None:
        searched = max(0, len(self._text) - max(map(len, self._stop), default=1) + 1)
        self._text += piece
        found = [at for at in (self._text.find(stop, searched) for stop in self._stop) if at >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True
        held = 0 if self.stopped else max(map(self._beginning, self._stop), default=0)
        self._safe = max(self._safe, len(self._text) - held)

    def _beginning(self, stop: str) -> int:
        """Length of the longest end of the text with which this stop string begins."""
        return next((n for n in range(len(stop) - 1, 0, -1) if self._text.endswith(stop[:n])), 0)
