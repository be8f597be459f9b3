"""Metadata of tokenizers for GGUF files, which `blockdraft.targets.gguf.tokenizer` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gguf import TokenType

from blockdraft.errors import UsageError
from blockdraft.targets.base import TargetText, without_tokenizer
from blockdraft.targets.gguf.tokenizer import SPACE, SPLITS, UnknownTokenizer, end_ids, gguf_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Texts that readers of the file must tokenize equally, and rare ones, where a difference causes a warning.
COMMON = (
    "Hello, world! It's 7 o'clock, and they've sold 12345 of the 6 rolls.",
    "def f(x):\n    return x ** 2  # comment\n\n\nprint(f(3))\t\r\n",
    "  Naïve café, 東京 and русский;   three  spaces… “quoted” (1,000.50 €)",
)
RARE = ("'STOP' or WE'LL 'Do", "a\n\n \n b", "𝔘nd 🙂👩‍👧 ２３ e\u0301", "\u00a0\u3000x\u200by")
ENDS = ("eos", "eot", "eom")  # keys for tokens that end a response
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer_metadata(text: TargetText, size: int, architecture: str) -> tuple[dict[str, Any], str | None]:
    """Return the metadata of a target's tokenizer.

    Args:
        text: The target's tokenizer and limits.
        size: Rows of the target's embedding; ids beyond the tokenizer's get names such as [PAD7].
        architecture: The target's architecture in GGUF files.

    Returns:
        Values by their keys, and a warning if readers of the file tokenize some rare texts differently.

    Raises:
        UsageError: The target has no tokenizer, or GGUF cannot describe it.
    """
    tokenizer = text.tokenizer
    if tokenizer is None:
        raise UsageError(f"{without_tokenizer(text)}, and a GGUF file holds one; add the tokenizer's files.")
    model = _spelled_out(tokenizer)["model"]
    if model.get("type") != "BPE":
        raise UsageError(
            f"The target's tokenizer is of the kind {model.get('type')}; tokenizers of byte pairs (BPE) can be written."
        )
    spelled = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(spelled) >= size:
        raise UsageError(
            f"The target's tokenizer has the id {max(spelled)}, and its embedding {size} entries; use files that "
            "belong together."
        )
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    pieces = bool(model.get("byte_fallback"))
    metadata: dict[str, Any] = {"tokenizer.ggml.model": "llama" if pieces else "gpt2"}
    metadata |= _vocabulary(tokenizer, spelled, size, pieces)
    if pieces:
        metadata |= {"tokenizer.ggml.pre": "default", "tokenizer.ggml.scores": _scores(spelled, size, merges)}
        first = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))[0]
        metadata["tokenizer.ggml.add_space_prefix"] = first.startswith(SPACE)
    else:
        metadata |= {"tokenizer.ggml.pre": _nearest_split(tokenizer)}
        metadata |= {"tokenizer.ggml.merges": [" ".join(merge) for merge in merges]}
    metadata |= _special(tokenizer, text.eos_token_ids)
    return metadata, _checked(tokenizer, metadata | {"general.architecture": architecture}, text.eos_token_ids)


def _spelled_out(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the content of tokenizer.json."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UsageError("The target's tokenizer is not from the package tokenizers, and others cannot be written.")
    content: dict[str, Any] = json.loads(backend.to_str())
    return content


def _vocabulary(
    tokenizer: PreTrainedTokenizerBase, spelled: Mapping[int, str], size: int, pieces: bool
) -> dict[str, Any]:
    added, unknown = tokenizer.added_tokens_decoder, tokenizer.unk_token_id
    tokens, types = [], []
    for number in range(size):
        token = spelled.get(number, f"[PAD{number}]")
        kind = TokenType.NORMAL if number in spelled else TokenType.UNUSED
        if number in added:
            kind = TokenType.CONTROL if added[number].special else TokenType.USER_DEFINED
        if pieces and number == unknown:
            kind = TokenType.UNKNOWN
        if pieces and BYTE.fullmatch(token):
            kind = TokenType.BYTE
        if pieces and kind == TokenType.USER_DEFINED:
            token = token.replace(SPACE, " ")
        tokens.append(token)
        types.append(int(kind))
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


def _scores(spelled: Mapping[int, str], size: int, merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Return the score of each token, higher for tokens that are merged earlier."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    return [-float(ranks.get(spelled.get(number, ""), len(merges) + number)) for number in range(size)]


def _nearest_split(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the known split that agrees on most texts; of equals the first in `SPLITS`."""
    backend: Any = tokenizer.backend_tokenizer
    spelled = _spelled_out(tokenizer)
    whole, composed = bool(spelled["model"].get("ignore_merges")), "NFC" in json.dumps(spelled.get("normalizer"))

    def agreement(name: str) -> tuple[bool, int, bool]:
        split = SPLITS[name]
        ours, theirs = split.pre_tokenizer(), backend.pre_tokenizer
        same = sum(ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text) for text in COMMON + RARE)
        return split.whole == whole, same, split.composed == composed

    if backend.pre_tokenizer is None:
        raise UsageError("The target's tokenizer does not split text before it merges, which GGUF cannot describe.")
    return max(SPLITS, key=agreement)


def _special(tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]) -> dict[str, Any]:
    names = {"bos": "bos", "pad": "padding", "unk": "unknown", "mask": "mask"}
    ids = {key: getattr(tokenizer, f"{name}_token_id") for name, key in names.items()}
    own = tokenizer.eos_token_id
    ordered = sorted(ends, key=lambda number: (number != own, number)) or ([] if own is None else [own])
    ids |= dict(zip(ENDS, ordered, strict=False))
    metadata: dict[str, Any] = {f"tokenizer.ggml.{key}_token_id": i for key, i in ids.items() if i is not None}
    around = tokenizer("a")["input_ids"]
    metadata["tokenizer.ggml.add_bos_token"] = (
        tokenizer.bos_token_id is not None and around[0] == tokenizer.bos_token_id
    )
    metadata["tokenizer.ggml.add_eos_token"] = own is not None and around[-1] == own
    template = tokenizer.chat_template
    templates = template if isinstance(template, dict) else {"default": template}
    others = {name: text for name, text in templates.items() if text and name != "default"}
    if others:
        metadata["tokenizer.chat_templates"] = list(others)
        metadata |= {f"tokenizer.chat_template.{name}": text for name, text in others.items()}
    return metadata | ({"tokenizer.chat_template": templates["default"]} if templates.get("default") else {})


def _checked(tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any], ends: frozenset[int]) -> str | None:
    """Read the values back. Return a warning or None; errors as in `tokenizer_metadata`."""
    try:
        again = gguf_tokenizer(metadata)
    except UnknownTokenizer as unknown:
        raise UsageError(f"GGUF cannot describe the target's tokenizer: {unknown}.") from unknown
    wrong = [text for text in COMMON + RARE if again(text)["input_ids"] != tokenizer(text)["input_ids"]]
    cut = f"It splits text unlike all known tokenizers; {metadata['tokenizer.ggml.pre']!r} comes nearest"
    if set(wrong) & {*COMMON}:
        raise UsageError(f"The target's tokenizer cannot be written as GGUF. {cut}, and differs on {wrong[0]!r}.")
    lost = sorted(ends - {*end_ids(metadata)})
    if lost:
        raise UsageError(
            f"The tokens {lost} end responses too, and GGUF has keys for only {len(ENDS)} such tokens; remove them "
            "from the configuration."
        )
    if not wrong:
        return None
    detail = f"{cut}, but rare texts such as {wrong[0]!r} become other tokens"
    return f"The target's tokenizer has no name of its own in GGUF. {detail}."
