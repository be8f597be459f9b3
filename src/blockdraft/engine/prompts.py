"""Prompts to token ids, and committed tokens back to text as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

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
        raise ValueError("The prompt is empty; give at least one token of text.")
    if not isinstance(prompt, str) and not isinstance(prompt[0], dict):
        ids = [int(token) for token in cast("Sequence[int]", prompt)]
        outside = [token for token in ids if not 0 <= token < target.vocab_size]
        if outside:
            raise ValueError(f"Token id {outside[0]} is outside the target's vocabulary of {target.vocab_size}.")
        return ids
    if tokenizer is None:
        raise ValueError("The target has no tokenizer, so prompts must be lists of token ids.")
    if isinstance(prompt, str) and tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else cast("Sequence[Message]", prompt)
    if tokenizer.chat_template is None:
        raise ValueError("The target's tokenizer has no chat template; give the prompt as text or token ids.")
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
