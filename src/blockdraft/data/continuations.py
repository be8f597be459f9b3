"""Texts that the target continues as they are, without a chat template: what base models learn to draft from."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable

from torch import arange, tensor

from blockdraft.data.answerers import Answer
from blockdraft.data.documents import LOOPS, Document
from blockdraft.data.rows import Message
from blockdraft.engine import loops
from blockdraft.errors import UsageError

TOKEN_CHARACTERS = 32  # of the longest tokens that are expected


def beginning(text: str, most: int, encode: Callable[[str], list[int]]) -> str:
    """The longest beginning of a text that has at most so many tokens: whole words, or, where words are far too long,
    as in a script without spaces, characters.

    The tokens are those of the beginning by itself, as decoding would read it, and not the first ones of the whole
    text: a tokenizer may join what stands before a cut with what stands behind it.

    Raises:
        ValueError: Not even the first character has so few tokens.
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


class Continuation:
    """A text on its way to being continued; a `Task`.

    Args:
        text: As it is; blank ones have nothing to continue.
        most: Tokens of it that are continued; None continues the whole of it.
        encode: Texts to token ids.
        length: Tokens of the document at most.

    Attributes:
        begun: The beginning that is continued, once `next_prompt` has told its tokens.
    """

    def __init__(self, text: str, most: int | None, encode: Callable[[str], list[int]], length: int) -> None:
        self.messages: list[Message] = []
        self.documents: list[Document] = []
        self.reason: str | None = None
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
        """Take the continuation. Raises ValueError where a server does not tell its tokens, or read other ones."""
        assert self._prompt is not None
        prompt, ids = self._prompt, answer.token_ids
        if ids is None:
            raise UsageError(
                "The server does not tell the ids of the tokens that it writes (`return_token_ids`, as vLLM does), and "
                "a continuation's text alone does not say them; use another server, or leave out --server."
            )
        if answer.prompt_ids is not None and answer.prompt_ids != prompt:
            raise UsageError(
                f"The server reads a text as {len(answer.prompt_ids)} tokens that was sent as {len(prompt)}, other "
                f"ones; have it use the same model."
            )
        if loops(ids) or not ids:
            self.reason = LOOPS if ids else "no supervised token"
            return
        whole = tensor(prompt + ids)
        self.documents.append(Document(whole, arange(len(whole)) >= len(prompt)))
