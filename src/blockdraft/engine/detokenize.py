"""Tokens back to text while they arrive, for every tokenizer of transformers."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any, cast

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are no character, or none yet
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a token that stands for one byte of a character without an entry
# Decoders of `tokenizers` that write each token's text independently of the tokens after it, bytes aside.
FORWARD_DECODERS = {"BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
WINDOW, KEPT = 16, 8  # tokens that a window may have, and the last ones that stay when it has more
REACH = 3  # characters that a pattern of `clean_up_tokenization` has after its first, which is a space


class TextStream:
    """Turns the tokens of one answer into text piece by piece, giving out only what no later token can change.

    The pieces, joined, are what the tokenizer's `decode` makes of all tokens, special ones skipped, less an end that is
    still open. What is open depends on the tokenizer:

    - the bytes of an unfinished character;
    - a run of byte tokens such as `<0xE2>`, up to its end: one invalid byte turns all of them into replacements;
    - for tokenizers in Python and unusual decoders, of which nothing is known, what the last token has changed;
    - for those that clean up spaces ("do n't" becomes "don't"), the last characters, which may begin such a pattern.

    Each step decodes only a window of the last tokens. The first token of a text may be written in another way than
    later ones, without its space, say; so the window begins some tokens before those that matter.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        decoders = _decoders(self._backend)
        self._bytes_are_known = decoders is not None
        self._has_bytes = decoders is None or any(decoder["type"] == "ByteFallback" for decoder in decoders)
        self._forward = decoders is not None and _write_forward(decoders) and not _overrides_decode(tokenizer)
        self._cleans = _cleans_up(tokenizer, self._backend)
        self._skipped = _skipped_ids(tokenizer, self._backend)
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were given out
        self._run: list[int] = []  # byte tokens behind the window
        self._bytes = bytearray()  # what they stand for
        self._uncleaned = ""  # given out by the window, and still subject to cleaning

    def push(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """Take the next tokens. Whatever the tokenizer raises comes through, and then nothing was taken.

        Returns:
            The text that is settled now, and the text that would follow it if the answer ended here, without an
            unfinished character.
        """
        window, before = list(self._window), self._run
        run, values = list[int](), bytearray()  # byte tokens at the end, those in `before` left out
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
            cut = _last_cut(uncleaned)
            new, uncleaned = self._tokenizer.clean_up_tokenization(uncleaned[:cut]), uncleaned[cut:]
            tail = self._tokenizer.clean_up_tokenization(uncleaned + tail)
        else:
            uncleaned = ""
        if len(window) > WINDOW:
            window, given = self._shortened(window, text, given)
        if not before:
            self._run, self._bytes = [], bytearray()
        self._run += run
        self._bytes += values
        self._window, self._given, self._uncleaned = window, given, uncleaned
        return new, tail.rstrip(REPLACEMENT)

    def _settled(self, window: list[int], text: str) -> int:
        """How many characters of a window's text no later token can change."""
        known = text if self._forward else commonprefix([text, self._decode(window[:-1])])
        count = len(known.rstrip(REPLACEMENT))
        if not text.endswith(REPLACEMENT):
            return count
        before, last = self._decode(window[:-1]), self._decode(window[-1:])
        if last and text.startswith(before) and text[len(before) :].endswith(last):
            return max(count, len(before))  # the last token continues no character of those before it
        return count

    def _shortened(self, window: list[int], text: str, given: int) -> tuple[list[int], int]:
        """The window's last tokens, and how many characters of their text were given out; the window as it is where
        they do not show the same end."""
        kept = window[-KEPT:]
        short, held = self._decode(kept), len(text) - given
        if len(short) > held and text.endswith(short[-held - 1 :]):
            return kept, len(short) - held
        return window, given

    def _name(self, token: int) -> str | None:
        """The token's entry in the vocabulary; None for one that adds no text."""
        if token in self._skipped:
            return None
        if self._backend is not None:
            return cast("str | None", self._backend.id_to_token(token))
        return cast(str, self._tokenizer.convert_ids_to_tokens(token))

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        return cast(
            str, self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


def _text_of(values: bytes | bytearray) -> str:
    """The characters of a run of bytes, without an unfinished one; nothing if a byte is invalid."""
    try:
        return codecs.utf_8_decode(values, "strict", False)[0]
    except UnicodeDecodeError:
        return ""


def _last_cut(text: str) -> int:
    """The last place at which the text can be divided and its parts cleaned up one by one, whatever follows.

    All patterns of `clean_up_tokenization` begin with a space and have up to three characters after it, and the only
    space after another character is in " ' ". What is removed are spaces.
    """
    for at in range(len(text), 0, -1):
        if " " not in text[max(0, at - REACH) : at]:
            return at
        if text[at : at + 1] == " " and text[at - 1] not in " 'n":  # " n" and " ' t" become "n't"
            return at
    return 0


def _decoders(backend: Any) -> list[dict[str, Any]] | None:
    """The steps in which a fast tokenizer makes text of tokens; None where they cannot be known."""
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


def _write_forward(decoders: Sequence[Mapping[str, Any]]) -> bool:
    """Whether they write each token's text whatever follows it, bytes aside."""
    kinds = [decoder["type"] for decoder in decoders]
    fused = min((kinds.index(kind) for kind in ("Fuse", "ByteLevel") if kind in kinds), default=len(kinds))
    return (
        set(kinds) <= FORWARD_DECODERS
        and "Replace" not in kinds[fused:]  # which could replace what several tokens form
        and not any(decoder.get("stop") for decoder in decoders)  # of Strip, at the end of the text
    )


def _overrides_decode(tokenizer: PreTrainedTokenizerBase) -> bool:
    kind, fast = type(tokenizer), PreTrainedTokenizerFast
    return kind.decode is not fast.decode or kind._decode is not fast._decode


def _cleans_up(tokenizer: PreTrainedTokenizerBase, backend: Any) -> bool:
    """Whether `decode` cleans up spaces; with the merges of BPE only if that is forced."""
    if backend is not None and type(backend.model).__name__ == "BPE":
        forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        if not getattr(tokenizer, forced, False):
            return False
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))


def _skipped_ids(tokenizer: PreTrainedTokenizerBase, backend: Any) -> set[int]:
    """The tokens that `skip_special_tokens` skips."""
    if backend is None:
        return set(tokenizer.all_special_ids)
    return {token for token, added in backend.get_added_tokens_decoder().items() if added.special}
