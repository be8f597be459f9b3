"""Fill-in-the-middle: prompts for the text between a prefix and a suffix, as code models were trained on them.

    <prefix> text before the cursor <suffix> text behind it <middle>

The suffix goes behind the prefix, as these models were trained. So each change of the prefix lets the suffix be read
again. Only models that were trained with the suffix in front, such as Codestral, keep it.

Other files of a project come first: by the repository pattern of arXiv 2409.12186, section 3, in models that know it,
else as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from blockdraft.engine.text import check_unicode
from blockdraft.errors import UsageError
from blockdraft.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Spellings in Qwen, StarCoder and Granite, SantaCoder, DeepSeek-Coder, CodeLlama, Codestral, GLM and Seed-Coder.
PREFIXES = (
    "<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>", "▁<PRE>", "<PRE>", "[PREFIX]",
    "<|code_prefix|>", "<[fim-prefix]>",
)  # fmt: skip
SUFFIXES = (
    "<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>", "▁<SUF>", "<SUF>", "[SUFFIX]",
    "<|code_suffix|>", "<[fim-suffix]>",
)  # fmt: skip
MIDDLES = (
    "<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "▁<MID>", "<MID>", "[MIDDLE]",
    "<|code_middle|>", "<[fim-middle]>",
)  # fmt: skip
REPOSITORIES = ("<|repo_name|>", "<|reponame|>", "<repo_name>", "<reponame>", "<|repo|>")
SEPARATORS = ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<filename>")
# Tokens that end an infill besides those above. Models go on to another file or explain what they wrote.
ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>", "<|endoftext|>", "<|im_end|>", "<|end_of_text|>")
# Models that read the suffix first, and continue the prefix without a middle token.
SUFFIX_FIRST = ("[PREFIX]", "<[fim-prefix]>")
CUT_STEPS = 16  # parts of the room in which a long prefix is cut, so that most keystrokes leave its beginning as it was
DEFAULT_REPOSITORY, DEFAULT_FILE = "project", "file"


@dataclass(frozen=True)
class InfillTokens:
    """Tokens of a vocabulary that mark the parts of an infill prompt.

    Attributes:
        prefix, suffix, middle: Ids of the tokens before these parts. `middle` is None in models that read the suffix
            first and continue the prefix.
        repository, separator: Ids of the tokens before the names of a repository and of a file; None if unknown.
        ends: Ids that end an infill.
        shown: Texts of those that decoding does not skip.
        names: Texts of all of them.
    """

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    separator: int | None
    ends: tuple[int, ...]
    shown: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None) -> InfillTokens | None:
        """Return the infill tokens of a tokenizer, or None if it has none."""
        if tokenizer is None:
            return None
        size, tokens = _infill_tokens.get(tokenizer, (0, None))
        if size != len(tokenizer):  # reading a large vocabulary takes a tenth of a second
            tokens = cls._read(tokenizer)
            _infill_tokens[tokenizer] = len(tokenizer), tokens
        return tokens

    @classmethod
    def _read(cls, tokenizer: PreTrainedTokenizerBase) -> InfillTokens | None:
        vocabulary = tokenizer.get_vocab()

        def find(part: str, spellings: Sequence[str]) -> str | None:
            # GGUF files may name these tokens; `gguf_tokenizer` keeps the names.
            named = getattr(tokenizer, f"fim_{part}_token", None)
            return next((name for name in (named, *spellings) if name is not None and name in vocabulary), None)

        prefix, suffix, middle = find("pre", PREFIXES), find("suf", SUFFIXES), find("mid", MIDDLES)
        if prefix is None or suffix is None or (middle is None and prefix not in SUFFIX_FIRST):
            return None
        if prefix in SUFFIX_FIRST:
            middle = None
        repository, separator = find("rep", REPOSITORIES), find("sep", SEPARATORS)
        marks = (prefix, suffix, middle, repository, separator, find("pad", ()), *ENDS)
        ends = {vocabulary[name]: name for name in marks if name is not None and name in vocabulary}
        added = tokenizer.added_tokens_decoder
        return cls(
            prefix=vocabulary[prefix],
            suffix=vocabulary[suffix],
            middle=None if middle is None else vocabulary[middle],
            repository=None if repository is None else vocabulary[repository],
            separator=None if separator is None else vocabulary[separator],
            ends=tuple(ends),
            shown=tuple(name for id, name in ends.items() if id not in added or not added[id].special),
            names=tuple(ends.values()),
        )


_infill_tokens: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, InfillTokens | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class ExtraFile:
    """Part of another file of the project, which the model reads before the one to complete."""

    name: str
    text: str


def infill_prompt(
    tokenizer: PreTrainedTokenizerBase | None,
    prefix: str,
    suffix: str,
    extra: Sequence[ExtraFile] = (),
    *,
    name: str = DEFAULT_FILE,
    repository: str = DEFAULT_REPOSITORY,
    begun: str = "",
    max_tokens: int | None = None,
) -> list[int]:
    """Return the prompt for the text between `prefix` and `suffix`.

    Args:
        extra: Parts of other files, the most important last.
        name, repository: Names of the file and its repository, for models that read them.
        begun: Text of the middle that is already there, which the model continues.
        max_tokens: Maximum number of tokens of the prompt. What is too long loses, in this order: the oldest extra
            files, then the beginning of the prefix and the end of the suffix. The prefix keeps three quarters.

    Raises:
        UsageError: The model was not trained to fill in the middle, `max_tokens` leaves no room, or a text is not valid
            Unicode.
    """
    marks = InfillTokens.of(tokenizer)
    if marks is None or tokenizer is None:
        raise UsageError(
            "The target has no fill-in-the-middle tokens, so it cannot use a suffix; use a code model such as "
            "Qwen2.5-Coder, or leave out the suffix."
        )

    def plain(name: str, text: str) -> list[int]:
        check_unicode(name, text)
        return _plain(tokenizer, text, marks.names)

    beginning = _beginning(tokenizer)
    before, behind, continued = plain("prefix", prefix), plain("suffix", suffix), plain("begun", begun)
    header: list[int] = []
    if extra and marks.repository is not None and marks.separator is not None:
        header = [marks.repository, *plain("repository", f"{repository}\n")]
        files = [[marks.separator, *plain("extra", f"{file.name}\n{file.text}\n")] for file in extra]
        header_end = [marks.separator, *plain("name", f"{name}\n")]
    else:
        files = [plain("extra", f"{file.text}\n\n") for file in extra]
        header_end = []
    if max_tokens is not None:
        room = max_tokens - len(beginning) - 3 - len(continued)
        if room < 1:
            raise UsageError(
                f"The context leaves {max_tokens} tokens for the prompt of an infill, and its frame takes "
                f"{len(beginning) + 3 + len(continued)}; ask for fewer new tokens, or shorten what the middle begins "
                f"with."
            )
        of_suffix = min(len(behind), max(room // 4, room - len(before)))
        step = max(1, max_tokens // CUT_STEPS)
        cut = -(-max(0, len(before) - (room - of_suffix)) // step) * step
        before, behind = before[cut:], behind[:of_suffix]
        room -= len(before) + len(behind) + len(header) + len(header_end)
        kept: list[list[int]] = []
        for file in reversed(files):
            room -= len(file)
            if room < 0:
                break
            kept.insert(0, file)
        files = kept
        if not files:
            header, header_end = [], []
    context = [*header, *(token for file in files for token in file), *header_end]
    if marks.middle is None:
        return [*beginning, *context, marks.suffix, *behind, marks.prefix, *before, *continued]
    return [*beginning, *context, marks.prefix, *before, marks.suffix, *behind, marks.middle, *continued]


def infill_params(tokenizer: PreTrainedTokenizerBase | None, params: SamplingParams) -> SamplingParams:
    """Return parameters under which an infill ends at the model's separators, none of which is shown."""
    marks = InfillTokens.of(tokenizer)
    if marks is None:
        return params
    return replace(
        params,
        stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *marks.ends))),
        stop=tuple(dict.fromkeys((*params.stop, *marks.shown))),
    )


def _plain(tokenizer: PreTrainedTokenizerBase, text: str, names: Sequence[str]) -> list[int]:
    """Encode a text that continues another one. Names of special tokens, and these names, are text in it."""

    def encode(text: str) -> list[int]:
        encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return list(cast("list[int]", encoded))

    line_end = encode("\n")
    ids = list[int]()
    # Infill tokens need not be special, as in Qwen2.5-Coder. A name that is cut in two is none.
    for part in filter(None, _cuts(tuple(names)).split(text)):
        # SentencePiece puts a space before every text. Take it from before a line end in front.
        ids += encode(part) if len(line_end) == 1 else encode("\n" + part)[len(line_end) :]
    return ids


@lru_cache(maxsize=16)
def _cuts(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the places behind the first character of each name."""
    return re.compile("|".join(f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names))


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer puts before every text."""
    ids = cast("list[int]", tokenizer("")["input_ids"])
    return [token for token in ids[:1] if token == tokenizer.bos_token_id]
