"""Conversion between text and tokens, with any tokenizer of transformers.

It encodes and checks prompts, and decodes answers token by token.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, cast

from blockdraft.chat_text import can_continue, encode_chat, harmony_ids
from blockdraft.errors import RequestError, UsageError
from blockdraft.targets import Target, TargetText, without_tokenizer
from blockdraft.types import Message, Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Encode a plain text without a chat template, with the special tokens that the tokenizer adds."""
    return list(cast("list[int]", tokenizer(text)["input_ids"]))


def encode(prompt: Prompt, target: Target | TargetText) -> list[int]:
    """Return the token ids of a text, a chat or token ids (also as a one-dimensional integer array).

    A text becomes the user's message of a chat if the target has a chat template. The answer continues a chat that ends
    in a text of the assistant. `check_request` checks the ids.

    Raises:
        UsageError: The prompt is empty, of another type, refused by the chat template, or needs a tokenizer that the
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
                raise UsageError(f"The prompt's token ids must be whole numbers, got {_short(token)}.")
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
    continues = can_continue(chat)
    return encode_chat(tokenizer, chat, add_generation_prompt=not continues, continue_final_message=continues)


def _short(value: object) -> str:
    text = repr(value)
    return f"{text[:40]}... ({type(value).__name__})" if len(text) > 40 else f"{text} ({type(value).__name__})"


def check_request(ids: Sequence[int], params: SamplingParams, target: Target) -> None:
    """Raise for what the target cannot decode, before anything runs.

    Args:
        ids: The prompt.

    Raises:
        UsageError: The prompt is empty, or too long for the context together with the answer; prompt, biases or stop
            tokens hold a token id outside the vocabulary; there are stop strings and no tokenizer.
    """
    if not ids:
        raise UsageError("The prompt is empty: its text has no tokens; give another text or token ids.")
    size, limit = target.vocab_size, target.max_context
    outside = next((token for token in ids if not 0 <= token < size), None)
    if outside is not None:
        raise UsageError(
            f"Token id {outside} of the prompt is outside the target's vocabulary of {size} tokens; give ids from 0 to "
            f"{size - 1}. If the tokenizer made it, it knows tokens that the model lacks; leave these out."
        )
    predicted = () if isinstance(params.prediction, str) else params.prediction
    for name, tokens in (
        ("logit_bias", dict(params.logit_bias)),
        ("stop_token_ids", params.stop_token_ids),
        ("prediction", predicted),
    ):
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


CHARACTERS = 8  # of a prediction for each token of the context


def encode_prediction(prediction: str | Sequence[int], target: Target) -> list[int]:
    """Return the token ids of a prediction, at most as many as the context holds.

    Tokens that the tokenizer knows and the target lacks are left out. Of a long text only the start is encoded.

    Raises:
        UsageError: The prediction is a text that cannot be encoded.
    """
    if not isinstance(prediction, str):
        return list(prediction[: target.max_context])
    if not prediction:
        return []
    if target.tokenizer is None:
        raise UsageError(f"{without_tokenizer(target)}, so a prediction must be a list of token ids.")
    prediction = prediction[: CHARACTERS * target.max_context]
    check_unicode("prediction", prediction)
    ids = cast("list[int]", target.tokenizer(prediction, add_special_tokens=False)["input_ids"])
    return [token for token in ids if token < target.vocab_size][: target.max_context]


def check_unicode(name: str, text: str) -> None:
    """Raise a UsageError if a text holds a lone surrogate, which no tokenizer encodes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} holds a lone surrogate at character {error.start}; give valid Unicode.") from error


def end_token_ids(params: SamplingParams, target: Target) -> frozenset[int]:
    """Return the tokens that end an answer."""
    own = frozenset() if params.ignore_eos else target.eos_token_ids
    return own | set(params.stop_token_ids)


class AnswerText:
    """Decodes one answer into text that may be shown: whole characters only, cut before a stop string.

    It is the text that the answer adds to its prompt. Tokenizers such as SentencePiece write the first token of a text
    without its space, which a later one keeps.

    A stop string may spell special tokens, which the text itself does not show.

    An exception of the tokenizer is raised once. Afterwards the text is what could be shown before it.

    Args:
        tokenizer: None leaves the text empty.
        stop: Stop strings. Text that may become one is held back until that is decided.
        token_ids: Tokens of the answer, a list that the caller extends; None is a list that `push` extends.
        prompt: Tokens before the answer.
        end_ids: Tokens that end the answer. Their text is not shown.

    Attributes:
        stopped: Whether a stop string has appeared. If several appear with one token, the one that begins first cuts
            the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: Sequence[str] = (),
        token_ids: list[int] | None = None,
        prompt: Sequence[int] = (),
        end_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._end_ids = end_ids
        self._stream: TextStream | None = None  # made when text is asked for before the end
        self._decoder: Callable[[list[int]], str] | None = None
        self._stop = stop
        self._longest = max(map(len, stop), default=1)
        self._spelled: dict[int, str] | None = None  # special tokens that stop strings spell
        self._special: list[tuple[int, str]] = []  # those in the answer, each with its position in the text
        self._ids = [] if token_ids is None else token_ids
        self._read_ids = 0
        self._text = ""  # settled, until the end
        self._safe = 0  # characters that no later token can take back
        self._taken = 0
        self._over = tokenizer is None
        self.stopped = False

    def push(self, token: int) -> None:
        self._ids.append(token)
        if self._stop:  # else the text is not needed yet
            self.read()

    def finish(self) -> None:
        """End the answer, so that all of its text can be shown.

        Raises:
            RequestError: Text that was already taken is not the beginning of the tokenizer's text.
        """
        if not self._over:
            with self._closing_on_failure():
                self._find_special()
                self._close(self._whole(self._ids))

    def take(self) -> str:
        """Return the text that has become safe to show since the last call."""
        self.read()
        new = self._text[self._taken : self._safe]
        self._taken = self._safe
        return new

    @property
    def shown(self) -> str:
        """The text that may be shown."""
        self.read()
        return self._text[: self._safe]

    def read(self) -> None:
        """Decode the tokens that have come since the last call, and look for stop strings."""
        if self._over or self._read_ids == len(self._ids):
            return
        assert self._tokenizer is not None
        with self._closing_on_failure():
            self._stream = self._stream or TextStream(self._tokenizer, text_context(self._tokenizer, self._prompt))
            new, tail = self._stream.push(self._with_text(self._ids[self._read_ids :]))
            self._find_special()
            self._read_ids = len(self._ids)
            # No stop string can begin before `first`.
            first = 0 if self._special else max(0, len(self._text) - self._longest + 1)
            self._text += new
            # The tail of a run of bytes is provisional; the tokenizer decides whether the answer ends.
            if self._stop and self._first_stop(self._text[first:] + tail) is not None:
                whole = self._whole(self._ids)
                if self._first_stop(whole) is not None:
                    self._close(whole)
                    return
        spelled = self._with_special(self._text)
        undecided = max((begun(stop, spelled) for stop in self._stop), default=0)
        self._safe = max(self._safe, min(self._position(len(spelled) - undecided), len(self._text)))

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
            panic = type(error).__name__ == "PanicException"  # of tokenizers' Rust code; a BaseException only
            if not panic and not isinstance(error, Exception):
                raise
            self._over, self._safe = True, len(self._text)
            if panic:
                raise RequestError(f"The tokenizer failed at this answer: {error}.") from error
            raise

    def _whole(self, token_ids: list[int]) -> str:
        """Return the tokenizer's text of the answer's first tokens."""
        assert self._tokenizer is not None
        token_ids = self._with_text(token_ids)
        if context := text_context(self._tokenizer, self._prompt):
            before, text = (self._decode([*context, *ids]) for ids in ([], token_ids))
            if text.startswith(before):
                return text[len(before) :]
        return self._decode(token_ids)

    def _with_text(self, token_ids: list[int]) -> list[int]:
        return [token for token in token_ids if token not in self._end_ids] if self._end_ids else token_ids

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        self._decoder = self._decoder or text_decoder(self._tokenizer)
        return self._decoder(token_ids)

    def _find_special(self) -> None:
        """Find the special tokens that stop strings spell among the tokens that have come since the last call."""
        if not self._stop:
            return
        assert self._tokenizer is not None
        if self._spelled is None:
            special = _special_tokens(self._tokenizer)
            self._spelled = {token: text for token, text in special.items() if any(text in stop for stop in self._stop)}
        for i in range(self._read_ids, len(self._ids)):
            if self._ids[i] in self._spelled:
                self._special.append((len(self._whole(self._ids[:i])), self._spelled[self._ids[i]]))

    def _with_special(self, text: str) -> str:
        """Return a beginning of the answer's text with the special tokens that stop strings spell."""
        parts, begin = [], 0
        for position, special in self._special:
            parts += [text[begin:position], special]
            begin = position
        return "".join([*parts, text[begin:]])

    def _position(self, at: int) -> int:
        """Return the position in the text of a position in that of `_with_special`."""
        added = 0
        for position, special in self._special:
            if at < position + added + len(special):
                return min(at - added, position)
            added += len(special)
        return at - added

    def _first_stop(self, text: str) -> int | None:
        """Return the position of the first stop string in a text, or None."""
        spelled = self._with_special(text)
        first = min((at for at in map(spelled.find, self._stop) if at >= 0), default=None)
        return None if first is None else self._position(first)


def begun(stop: str, text: str) -> int:
    """Return the length of the longest end of a text with which a stop string begins."""
    end = text[max(0, len(text) - len(stop) + 1) :]
    at = end.find(stop[0])
    while at >= 0 and not stop.startswith(end[at:]):
        at = end.find(stop[0], at + 1)
    return len(end) - at if at >= 0 else 0


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoders write it for invalid or unfinished bytes
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a token for one byte of a character that has no token
# Decoders of `tokenizers` for which no token changes the text of those before it, bytes aside.
FORWARD_DECODERS = {"BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
REACHED = 64  # last tokens of a prompt among which its last text is looked for
WINDOW, KEPT = 16, 8  # most tokens of a window, and how many stay of a longer one
REACH = 3  # characters after the leading space of a pattern of `clean_up_tokenization`


class TextStream:
    """Decodes the tokens of one answer piece by piece, and returns only text that no later token can change.

    The joined pieces are what the tokenizer's `decode` returns for all tokens, special ones skipped, without an end
    that is still open. What is open depends on the tokenizer:

    - the bytes of an unfinished character;
    - a run of byte tokens such as `<0xE2>`, up to its end: one invalid byte turns all of them into replacements;
    - for tokenizers in Python and unknown decoders, whatever the last token has changed;
    - for those that clean up spaces ("do n't" becomes "don't"), the last characters, which may begin such a pattern.

    Each call decodes a window of the last tokens only. The window begins some tokens before those that matter: decoders
    may write the first token of a text differently, for instance without its space.

    Args:
        tokenizer: Any tokenizer.
        context: Tokens before the answer whose text is not returned; see `text_context`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        decoders = _decoders(self._backend)
        self._bytes_are_known = decoders is not None
        self._has_bytes = decoders is None or any(decoder["type"] == "ByteFallback" for decoder in decoders)
        self._forward = decoders is not None and write_forward(decoders) and not _overrides_decode(tokenizer)
        self._cleans = _cleans_up(tokenizer, self._backend)
        self._skipped = _skipped_ids(tokenizer, self._backend)
        self._decode_some = text_decoder(tokenizer, clean_up_tokenization_spaces=False)
        self._window = list(context)
        self._given = len(self._decode(self._window))  # characters of the window's text that were returned
        self.byte_run: list[int] = []  # byte tokens after the window
        self._bytes = bytearray()  # their bytes
        self._uncleaned = ""  # settled text that may still be part of a pattern to clean up

    def push(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """Decode the next tokens. If the tokenizer raises, nothing has changed.

        Returns:
            The text that has become settled, and the text that would follow it if the answer ended here, without an
            unfinished character.
        """
        window, before = list(self._window), self.byte_run
        run, values = list[int](), bytearray()  # byte tokens at the end, without those in `before`
        for token in token_ids:
            name = self._name(token)
            if name is None:
                continue
            if self._has_bytes and (byte := BYTE.fullmatch(name)):
                run.append(token)
                values.append(int(byte[1], 16))
            else:
                window += [*before, *run, token]
                before, run, values = [], [], bytearray()
        text = self._decode(window)
        given = max(self._given, self._settled(window, text))
        new = text[self._given : given]
        if not before and not run:
            tail = text[given:]
        elif self._bytes_are_known:
            tail = text[given:] + _text_of(self._bytes + values if before else values)
        else:
            tail = self._decode([*window, *before, *run])[given:]
        uncleaned = self._uncleaned + new
        if self._cleans:
            cut = last_cut(uncleaned)
            new, uncleaned = self._tokenizer.clean_up_tokenization(uncleaned[:cut]), uncleaned[cut:]
            tail = self._tokenizer.clean_up_tokenization(uncleaned + tail)
        else:
            uncleaned = ""
        if len(window) > WINDOW:
            window, given = self._shortened(window, text, given)
        if not before:
            self.byte_run, self._bytes = [], bytearray()
        self.byte_run += run
        self._bytes += values
        self._window, self._given, self._uncleaned = window, given, uncleaned
        return new, tail.rstrip(REPLACEMENT)

    def _settled(self, window: list[int], text: str) -> int:
        """Return the number of characters of a window's text that no later token can change."""
        known = text if self._forward else commonprefix([text, self._decode(window[:-1])])
        count = len(known.rstrip(REPLACEMENT))
        if not text.endswith(REPLACEMENT):
            return count
        before, last = self._decode(window[:-1]), self._decode(window[-1:])
        if last and text.startswith(before) and text[len(before) :].endswith(last):
            return max(count, len(before))  # the last token continues no character of those before it
        return count

    def _shortened(self, window: list[int], text: str, given: int) -> tuple[list[int], int]:
        """Return the window's last tokens, and how many characters of their text were returned already.

        Return the whole window if its last tokens alone do not end in the same text.
        """
        last_tokens = window[-KEPT:]
        short, remaining = self._decode(last_tokens), len(text) - given
        if len(short) > remaining and text.endswith(short[-remaining - 1 :]):
            return last_tokens, len(short) - remaining
        return window, given

    def _name(self, token: int) -> str | None:
        """Return the token's entry in the vocabulary, or None for a token without text."""
        if token in self._skipped:
            return None
        if self._backend is not None:
            return cast("str | None", self._backend.id_to_token(token))
        return cast(str, self._tokenizer.convert_ids_to_tokens(token))

    def _decode(self, token_ids: list[int]) -> str:
        return self._decode_some(token_ids) if token_ids else ""


def text_decoder(tokenizer: PreTrainedTokenizerBase, **options: Any) -> Callable[[list[int]], str]:
    """Return a function that decodes tokens without the special ones, except those of `HARMONY`."""
    if not harmony_ids(tokenizer):
        return cast("Callable[[list[int]], str]", partial(tokenizer.decode, skip_special_tokens=True, **options))
    skipped = _skipped_ids(tokenizer, getattr(tokenizer, "backend_tokenizer", None))

    def decode(token_ids: list[int]) -> str:
        return cast(str, tokenizer.decode([token for token in token_ids if token not in skipped], **options))

    return decode


def text_context(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> list[int]:
    """Return the token of a prompt after which to decode what follows it: the last that has text of its own.

    There is none if the tokenizer writes each token alike wherever it stands.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoders = _decoders(backend)
    alike = decoders is not None and all(decoder["type"] == "ByteLevel" for decoder in decoders)
    if not prompt or alike or _cleans_up(tokenizer, backend):
        return []
    skipped = _skipped_ids(tokenizer, backend)
    for token in reversed(prompt[-REACHED:]):
        if token not in skipped and not BYTE.fullmatch(str(tokenizer.convert_ids_to_tokens(token))):
            text = tokenizer.decode([token])
            if text and REPLACEMENT not in text:
                return [token]
    return []


def _text_of(values: bytes | bytearray) -> str:
    """Decode the whole characters of a run of bytes. Return nothing if a byte is invalid."""
    try:
        return codecs.utf_8_decode(values, "strict", False)[0]
    except UnicodeDecodeError:
        return ""


def last_cut(text: str) -> int:
    """Return the last position at which the text can be divided so that its parts can be cleaned up separately.

    All patterns of `clean_up_tokenization` begin with a space and have up to three characters after it; of these only
    " ' " has a second space. Cleaning removes spaces.
    """
    for at in range(len(text), 0, -1):
        if " " not in text[max(0, at - REACH) : at]:
            return at
        if text[at : at + 1] == " " and text[at - 1] not in " 'n":  # " n" and " ' t" become "n't"
            return at
    return 0


def _decoders(backend: Any) -> list[dict[str, Any]] | None:
    """Return the decoders of a fast tokenizer, in order, or None if they are unknown."""
    if backend is None:
        return None
    if backend.decoder is None:
        return []
    try:
        steps = [json.loads(backend.decoder.__getstate__())]
    except Exception:  # a decoder written in Python
        return None
    while any(step["type"] == "Sequence" for step in steps):
        steps = [inner for step in steps for inner in step.get("decoders", [step])]
    return steps


def write_forward(decoders: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether no token changes the text of those before it, except for bytes."""
    kinds = [decoder["type"] for decoder in decoders]
    fused = min((kinds.index(kind) for kind in ("Fuse", "ByteLevel") if kind in kinds), default=len(kinds))
    return (
        set(kinds) <= FORWARD_DECODERS
        and "Replace" not in kinds[fused:]  # could replace text that spans tokens
        and not any(decoder.get("stop") for decoder in decoders)  # Strip at the end of the text
    )


def _overrides_decode(tokenizer: PreTrainedTokenizerBase) -> bool:
    from transformers import PreTrainedTokenizerFast

    kind, fast = type(tokenizer), PreTrainedTokenizerFast
    return kind.decode is not fast.decode or kind._decode is not fast._decode


def _cleans_up(tokenizer: PreTrainedTokenizerBase, backend: Any) -> bool:
    """Return whether `decode` cleans up spaces. For BPE it does only if that is forced."""
    if backend is not None and type(backend.model).__name__ == "BPE":
        forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        if not getattr(tokenizer, forced, False):
            return False
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))


def _skipped_ids(tokenizer: PreTrainedTokenizerBase, backend: Any) -> set[int]:
    """Return the special tokens, which have no text, except those of `HARMONY`."""
    if backend is None:
        return set(tokenizer.all_special_ids)
    special = {token for token, added in backend.get_added_tokens_decoder().items() if added.special}
    return special - harmony_ids(tokenizer)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the texts of the tokens of `_skipped_ids`."""
    skipped = sorted(_skipped_ids(tokenizer, getattr(tokenizer, "backend_tokenizer", None)))
    return dict(zip(skipped, cast("list[str]", tokenizer.convert_ids_to_tokens(skipped)), strict=True))
