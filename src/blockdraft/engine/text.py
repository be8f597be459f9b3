"""Prompts to token ids, what must hold before they are decoded, and committed tokens back to text as they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from blockdraft.engine.detokenize import TextStream
from blockdraft.errors import RequestError, UsageError
from blockdraft.targets import Target, TargetText, without_tokenizer
from blockdraft.types import Message, Prompt, SamplingParams


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text as it is, without a chat template, with the special tokens that the tokenizer puts around."""
    return list(cast("list[int]", tokenizer(text)["input_ids"]))


def encode(prompt: Prompt, target: Target | TargetText) -> list[int]:
    """Token ids of a text, a chat or token ids (also as an integer array of one dimension).

    A text becomes the user's message of a chat where the target has a chat template, and plain text otherwise. Whether
    the ids are the target's is for `check_request` to say.

    Raises:
        UsageError: The prompt is empty, of another kind, refused by the chat template, or needs a tokenizer that the
            target lacks.
    """
    tokenizer = target.tokenizer
    if hasattr(prompt, "tolist"):  # of numpy, torch, ...
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise UsageError(f"The prompt is {_short(prompt)}; give a text, a list of messages or a list of token ids.")
    if len(prompt) == 0 or (isinstance(prompt, str) and not prompt.strip()):
        raise UsageError("The prompt is empty; give at least one token of text.")
    if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
        for token in prompt:
            if not isinstance(token, Integral) or isinstance(token, bool):
                raise UsageError(f"The prompt holds {_short(token)} among its token ids; they must be whole numbers.")
        return [int(token) for token in cast("Sequence[int]", prompt)]
    if tokenizer is None:
        raise UsageError(f"{without_tokenizer(target)}, so prompts must be lists of token ids.")
    if isinstance(prompt, str) and tokenizer.chat_template is None:
        return encode_text(prompt, tokenizer)
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else cast("Sequence[Message]", prompt)
    for message in chat:
        if not isinstance(message, Mapping):
            raise UsageError(f"The chat holds {_short(message)}; each message is a dict of role and content.")
    if tokenizer.chat_template is None:
        raise UsageError("The target's tokenizer has no chat template; give the prompt as text or token ids.")
    try:
        encoded = tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, return_dict=True)
    except TemplateError as error:
        raise UsageError(f"The target's chat template refuses the chat: {error}; change its messages.") from error
    return list(cast("dict[str, Any]", encoded)["input_ids"])


def _short(value: object) -> str:
    text = repr(value)
    return f"{text[:40]}... ({type(value).__name__})" if len(text) > 40 else f"{text} ({type(value).__name__})"


def check_request(ids: Sequence[int], params: SamplingParams, target: Target) -> None:
    """Refuse what the target cannot decode, before anything runs.

    Args:
        ids: The prompt.

    Raises:
        UsageError: No token, or more than the context holds together with the answer; a token id in prompt, biases or
            stop tokens that is not the target's; stop strings without a tokenizer.
    """
    if not ids:
        raise UsageError("The prompt is empty: its text has no tokens; give another text or token ids.")
    size, limit = target.vocab_size, target.max_context
    outside = next((token for token in ids if not 0 <= token < size), None)
    if outside is not None:
        raise UsageError(
            f"Token id {outside} of the prompt is outside the target's vocabulary of {size} tokens; give ids from 0 to "
            f"{size - 1}. Where the tokenizer made it, it has tokens that the model was not given; leave them out."
        )
    for name, tokens in (("logit_bias", dict(params.logit_bias)), ("stop_token_ids", params.stop_token_ids)):
        outside = next((token for token in tokens if token >= size), None)
        if outside is not None:
            raise UsageError(
                f"{name} names the token {outside}, outside the target's vocabulary of {size} tokens; its ids go from "
                f"0 to {size - 1}."
            )
    if len(ids) >= limit:
        raise UsageError(f"The prompt has {len(ids)} tokens and the target's context {limit}; shorten the prompt.")
    if len(ids) + params.max_new_tokens > limit:
        raise UsageError(
            f"The prompt's {len(ids)} tokens and max_new_tokens {params.max_new_tokens} exceed the target's "
            f"context of {limit}; ask for at most {limit - len(ids)} new tokens."
        )
    if params.stop and target.tokenizer is None:
        raise UsageError(f"{without_tokenizer(target)}, so it cannot stop at a text; use stop_token_ids.")


class AnswerText:
    """The text of one answer as it may be shown: whole characters only, and cut before a stop string.

    An exception of the tokenizer comes through once; the text then stays at what could be shown before.

    Args:
        tokenizer: None leaves every text empty.
        stop: Stop strings. What may be the beginning of one is held back until that is decided.

    Attributes:
        stopped: Whether a stop string has appeared. Where several appear with one token, the one that begins first
            cuts the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream: TextStream | None = None  # made when text is asked for before the end
        self._stop = stop
        self._longest = max(map(len, stop), default=1)
        self._ids: list[int] = []
        self._read_ids = 0
        self._text = ""  # settled, until the end
        self._safe = 0  # characters that no later token can take back
        self._taken = 0
        self._over = tokenizer is None
        self.stopped = False

    def push(self, token: int) -> None:
        self._ids.append(token)
        if self._stop:  # else no one needs the text yet
            self._read()

    def finish(self) -> None:
        """No token follows, so what was held back can be shown.

        Raises:
            RequestError: Text that was already taken is not the beginning of the tokenizer's text.
        """
        if not self._over:
            with self._closing_on_failure():
                self._close(self._whole())

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
        if self._over or self._read_ids == len(self._ids):
            return
        assert self._tokenizer is not None
        with self._closing_on_failure():
            self._stream = self._stream or TextStream(self._tokenizer)
            new, tail = self._stream.push(self._ids[self._read_ids :])
            self._read_ids = len(self._ids)
            seen = max(0, len(self._text) - self._longest + 1)  # no stop string begins before it
            self._text += new
            # The tail of a run of bytes is likely, not certain; whether the answer ends is for the tokenizer to say.
            if self._stop and self._first_stop(self._text[seen:] + tail) is not None:
                whole = self._whole()
                if self._first_stop(whole) is not None:
                    self._close(whole)
                    return
        held = max(map(self._beginning, self._stop), default=0)
        self._safe = max(self._safe, len(self._text) - held)

    def _close(self, whole: str) -> None:
        """End the answer with the tokenizer's text of all its tokens."""
        at = self._first_stop(whole)
        text = whole[:at]
        if not text.startswith(self._text[: self._taken]):
            raise RequestError(
                f"The tokenizer {type(self._tokenizer).__name__} changed text of this answer that was already sent; "
                f"do not stream answers with it."
            )
        self._text, self._safe, self._over, self.stopped = text, len(text), True, at is not None

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            panic = type(error).__name__ == "PanicException"  # of tokenizers' Rust code, and no Exception
            if not panic and not isinstance(error, Exception):
                raise
            self._over, self._safe = True, len(self._text)
            if panic:
                raise RequestError(f"The tokenizer failed at this answer: {error}.") from error
            raise

    def _whole(self) -> str:
        assert self._tokenizer is not None
        return cast(str, self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _first_stop(self, text: str) -> int | None:
        """Where the first stop string of a text begins."""
        return min((at for at in map(text.find, self._stop) if at >= 0), default=None)

    def _beginning(self, stop: str) -> int:
        """Length of the longest end of the text with which this stop string begins."""
        end = self._text[max(0, len(self._text) - len(stop) + 1) :]
        at = end.find(stop[0])
        while at >= 0 and not stop.startswith(end[at:]):
            at = end.find(stop[0], at + 1)
        return len(end) - at if at >= 0 else 0
