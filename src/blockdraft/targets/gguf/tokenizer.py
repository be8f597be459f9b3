"""Tokenizers from the metadata of GGUF files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# DeepSeek's split text in several passes. Letters of V2's are those that had a case in an older version of Unicode.
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ"
    "-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ"
    "-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK2 = (
    r"[\r\n]",
    rf"\s?[{CASED}]+",
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
    r"\p{N}+",
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Tokens that end a response in every vocabulary that has them, whatever their type, as in llama.cpp. Many files name
# the wrong one.
ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<turn|>",
    "<|tool_response>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<eos>",
    "<｜end▁of▁sentence｜>",
)
HTML_END = "</s>"  # ends a response as a control token only; Qwen's vocabulary has it as a piece of text
# Tokens that a model for code writes after what it fills in. Of each kind the first that the vocabulary has is used.
FILL_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
HARMONY = {"<|return|>", "<|call|>"}  # in a vocabulary with both, "<|end|>" ends a message and not the response
log = logging.getLogger(__name__)
SPACE = "▁"


class UnknownTokenizer(ValueError):
    """The metadata define no supported tokenizer; the message is the reason."""


@dataclass(frozen=True)
class Split:
    """Pre-tokenization, as named by `tokenizer.ggml.pre`.

    Attributes:
        patterns: Regular expressions of pieces, each applied to the pieces of the one before; none is GPT-2's.
        digits: Whether each digit is a piece.
        whole: Whether a piece that is a token is used without merging.
        composed: Whether text is normalized to NFC.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    whole: bool = False
    composed: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        parts: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        parts += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return pre_tokenizers.Sequence(parts)


SPLITS = {
    "gpt-2": Split(),
    "smollm": Split(digits=True),
    "qwen2": Split((QWEN2,), composed=True),
    "deepseek-r1-qwen": Split((QWEN2,)),
    "qwen35": Split((QWEN35,), composed=True),
    "tekken": Split((TEKKEN,), whole=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2"), Split((LLAMA3,), whole=True)),
    "refact": Split(digits=True),
    "dbrx": Split((LLAMA3,)),
    "smaug-bpe": Split((LLAMA3,), whole=True),
    "glm4": Split((LLAMA3,), whole=True),
    "gpt-4o": Split((GPT4O,)),
    "deepseek-llm": Split(DEEPSEEK2),
    "deepseek-v3": Split(DEEPSEEK3),
}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a file, with its chat template.

    Raises:
        UnknownTokenizer: The file has no tokenizer, or one of an unknown kind.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise UnknownTokenizer("the file holds none")
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    # Unused ids have names such as [PAD7], which are not tokens.
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    if kind == "gpt2":
        if split not in SPLITS:
            problem = "does not name its pre-tokenization" if split is None else f"uses the pre-tokenization {split!r}"
            raise UnknownTokenizer(f"it {problem}; supported are {', '.join(sorted(SPLITS))}")
        tokenizer = of_bytes(vocab, metadata, SPLITS[split])
    elif kind in ("llama", "gemma4"):
        tokenizer = of_pieces(vocab, types, metadata)  # which may spell tokens differently
        vocab = dict(sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1]))
    else:
        raise UnknownTokenizer(f"it is of the kind {kind!r}; supported are gpt2, llama and gemma4")
    ends = set(end_ids(metadata))
    kinds = {token: TokenType.CONTROL if i in ends else types[i] for token, i in vocab.items()}
    for special, wanted in ((True, TokenType.CONTROL), (False, TokenType.USER_DEFINED)):
        own = [AddedToken(token, normalized=False, special=special) for token in vocab if kinds[token] == wanted]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(own)
    spelled = {name: special_token(metadata, key) for name, key in SPECIAL.items()}
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind != "gpt2" or split in WITH_BOS)
    bos = spelled["bos_token"] if adds_bos else None
    tokenizer.post_processor = post_processor(vocab, bos, spelled["eos_token"], metadata)
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_Kept(tokenizer),
        clean_up_tokenization_spaces=False,
        chat_template=chat_templates(metadata),
        **spelled,
    )


class _Kept:
    """Wraps a tokenizer so that a deep copy, which transformers makes and which is slow, returns the original."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self._tokenizer


SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "mask_token": "mask"}
WITH_BOS = {"lfm2", "llama-bpe", "llama3", "llama-v3", "tekken"}


def special_token(metadata: Mapping[str, Any], key: str) -> str | None:
    number = metadata.get(f"tokenizer.ggml.{key}_token_id")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return None if number is None or number >= len(tokens) else tokens[number]


def post_processor(
    vocab: Mapping[str, int], bos: str | None, eos: str | None, metadata: Mapping[str, Any]
) -> processors.PostProcessor:
    """Return the post-processor that adds the beginning and end tokens of the file."""
    eos = eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    around = [token for token in (bos, eos) if token is not None]
    before, behind = ([bos] if bos is not None else []), ([eos] if eos is not None else [])
    return processors.TemplateProcessing(
        single=[*before, "$A", *behind],
        pair=[*before, "$A", *behind, *before, "$B", *behind],
        special_tokens=[(token, vocab[token]) for token in around],
    )


def of_bytes(vocab: Mapping[str, int], metadata: Mapping[str, Any], split: Split) -> Tokenizer:
    """Return a byte-pair tokenizer, like GPT-2's."""
    tokenizer = Tokenizer(models.BPE(dict(vocab), merges_of(metadata), ignore_merges=split.whole))
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = split.pre_tokenizer(), decoders.ByteLevel()
    return tokenizer


def merges_of(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for merge in metadata.get("tokenizer.ggml.merges") or ():
        at = merge.find(" ", 1)
        merges.append((merge[:at], merge[at + 1 :]))
    return merges


def of_pieces(vocab: Mapping[str, int], types: list[int], metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a SentencePiece vocabulary, whose merges follow from its scores."""
    gemma = str(metadata.get("general.architecture")).startswith("gemma")
    if gemma:  # its vocabulary has runs of plain spaces, and its scores are not in the order of merging
        vocab = {SPACE * len(token) if not token.strip(" ") else token: i for token, i in vocab.items()}
        scores: dict[str, float] = {token: -i for token, i in vocab.items()}
    else:
        given = metadata.get("tokenizer.ggml.scores") or ()
        if len({score for score, kind in zip(given, types, strict=False) if kind == TokenType.NORMAL}) < 2:
            raise UnknownTokenizer("its tokens have no scores, which define the merges")
        scores = {token: given[i] for token, i in vocab.items()}
    from transformers import GemmaTokenizer, LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    if metadata.get("tokenizer.ggml.model") == "gemma4":
        merges = merges_of(metadata)
    else:
        merges = generate_merges(dict(vocab), scores)
    # These classes would add the special tokens that they expect.
    names = {"unk_token": "<unk>", "bos_token": "<bos>" if gemma else "<s>", "eos_token": "<eos>" if gemma else "</s>"}
    names |= {"pad_token": "<pad>", "mask_token": "<mask>"} if gemma else {}
    known = {name: token if token in vocab else None for name, token in names.items()}
    spaced = {} if gemma else {"add_prefix_space": metadata.get("tokenizer.ggml.add_space_prefix", True)}
    made: Any = GemmaTokenizer if gemma else LlamaTokenizer
    built: Tokenizer = made(vocab=dict(vocab), merges=merges, **known, **spaced).backend_tokenizer
    return built


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens that end a response."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = metadata.get("tokenizer.ggml.token_type") or []
    wanted = {*ENDS, *(name for names in FILL_ENDS.values() for name in names)}
    known = {token: number for number, token in enumerate(tokens) if token in wanted}
    ends = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    if strange := [number for number in ends if number is not None and tokens and not 0 <= number < len(tokens)]:
        log.warning("The end tokens %s are no tokens of the model, 0 to %d; ignored.", strange, len(tokens) - 1)
    ends |= {known.get(token) for token in ENDS}
    ends |= {i for i, kind in enumerate(types) if kind == TokenType.CONTROL and tokens[i] == HTML_END}
    for key, names in FILL_ENDS.items():
        ids = (metadata.get(f"tokenizer.ggml.{key}_token_id"), *map(known.get, names))
        ends.add(next((number for number in ids if number is not None), None))
    if known.keys() >= HARMONY:
        ends.discard(known.get("<|end|>"))
    return sorted(number for number in ends if number is not None and (not tokens or 0 <= number < len(tokens)))


def chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template of a file, or its templates by name if there are several, as transformers does."""
    key = "tokenizer.chat_template"
    named = {name: metadata.get(f"{key}.{name}") for name in metadata.get("tokenizer.chat_templates") or ()}
    named |= {name[len(key) + 1 :]: text for name, text in metadata.items() if name.startswith(f"{key}.")}
    templates = {name: text for name, text in {"default": metadata.get(key), **named}.items() if text}
    return templates.get("default") if set(templates) <= {"default"} else templates
