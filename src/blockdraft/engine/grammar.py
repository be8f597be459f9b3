"""Grammars of answers: which tokens may follow. llguidance computes them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.targets import Target, without_tokenizer
from blockdraft.types import Grammar

if TYPE_CHECKING:  # an optional package, loaded by the first request that has a grammar
    from llguidance import LLMatcher, LLTokenizer

# Between the parts of JSON one space is allowed, or a line break with its indent: with more, some models never stop
# adding whitespace. "lenient" turns unsupported keywords into warnings, which `compile_schema` checks.
JSON_STYLE: Any = {"whitespace_pattern": r" |\r?\n[ \t]{0,40}", "lenient": True}
ERROR_LENGTH = 300
SEPARATOR = re.compile(r'[\s{}\[\]",:]+')  # text of tokens between names and values
MAX_SEPARATORS = 2  # that are remembered of each context
FORCED_PROB = 0.95  # assumed acceptance of forced tokens, since the target may divide the text into other tokens
SEPARATOR_PROB = 0.8  # initial acceptance of a separator that came before
NEWEST = 0.1  # weight of the newest one in that
FORCED = -1  # context behind forced tokens that are no separators; no token of a vocabulary

_tokenizers: WeakKeyDictionary[Target, LLTokenizer] = WeakKeyDictionary()
_lock = threading.Lock()


class AnswerGrammar:
    """State of a grammar after the tokens of an answer so far.

    It also drafts. Where the grammar forces tokens, these are drafted. Between them the model chooses the separators,
    such as a colon with or without a space, and mostly keeps to its choice. So the ones that came last in the same
    context are drafted. The context is the token before, if that is a separator, or else whether it was forced.

    Raises:
        UsageError: The grammar is wrong or allows no answer, or the target's tokenizer does not suit it.
    """

    def __init__(self, grammar: Grammar, target: Target) -> None:
        library = _llguidance()
        tokenizer = _tokenizer(target)
        self._vocab_size, self._decode = target.vocab_size, tokenizer.decode_str
        self._ends = torch.zeros(target.vocab_size, dtype=torch.bool)
        self._ends[[token for token in tokenizer.eos_tokens if token < target.vocab_size]] = True
        try:
            compiled = _compile(grammar)
        except ValueError as error:
            raise UsageError(f"The grammar of kind {grammar.kind} is refused: {error}.") from error
        limits = library.LLParserLimits(verbose_errors=False)
        self._matcher: LLMatcher = library.LLMatcher(tokenizer, compiled, log_level=0, limits=limits)
        self._context: int | None = None
        self._separators: dict[int | None, list[int]] = {}  # by context, the latest first
        self._separator_prob = SEPARATOR_PROB
        if (why := self.dead_end()) is not None:
            raise UsageError(f"The grammar of kind {grammar.kind} is refused: {why}.")

    def advance(self, token: int) -> bool:
        """Add a token to the answer, and return whether the grammar allows it."""
        drafted, is_forced = self._separator(self._matcher, self._context), self.forced_tokens()[:1] == [token]
        if drafted is not None:
            self._separator_prob += NEWEST * ((drafted == token) - self._separator_prob)
        if self._is_separator(token):
            known = self._separators.get(self._context, [])
            self._separators[self._context] = [token, *(other for other in known if other != token)][:MAX_SEPARATORS]
        self._context = token if self._is_separator(token) else FORCED if is_forced else None
        return self._matcher.consume_token(token)

    def draft(self, most: int) -> tuple[list[int], list[float]]:
        """Return at most `most` tokens that should follow the answer.

        Returns:
            The tokens, and the probability of each that it is accepted with all before it.
        """
        matcher, context = self._matcher.deep_copy(), self._context
        tokens, probs, prob = list[int](), list[float](), 1.0
        while len(tokens) < most:
            following = self._forced(matcher)
            if following:
                context, factor = following[-1] if self._is_separator(following[-1]) else FORCED, FORCED_PROB
            else:
                context, factor = self._separator(matcher, context), self._separator_prob
                if context is None:
                    break
                following = [context]
            prob *= factor
            tokens += following
            probs += [prob] * len(following)
            if not all(map(matcher.consume_token, following)):
                break
        return tokens[:most], probs[:most]

    def forced_tokens(self) -> list[int]:
        """Return the tokens that the answer must go on with, in the tokenizer's own division of the text."""
        return self._forced(self._matcher)

    def _forced(self, matcher: LLMatcher) -> list[int]:
        # A tokenizer may know tokens that the target lacks.
        return list(takewhile(lambda token: token < self._vocab_size, matcher.compute_ff_tokens()))

    def _is_separator(self, token: int) -> bool:
        return SEPARATOR.fullmatch(self._decode([token])) is not None

    def _separator(self, matcher: LLMatcher, context: int | None) -> int | None:
        """Return the separator that came last in a context, of those that the grammar allows; None if there is none."""
        known = self._separators.get(context, ()) if context is not None else ()
        return next((token for token in known if matcher.validate_tokens([token]) == 1), None)

    def allows(self, tokens: Sequence[int], token: int) -> bool:
        """Return whether `token` may follow the answer and `tokens`, in a fraction of the time of `after`."""
        if self._ends[[*tokens, token]].any():
            allowed = self.after(tokens)
            return allowed is not None and bool(allowed[token])
        matcher = self._matcher.deep_copy()
        # Each is consumed, since tokens validated together may exceed a `max_tokens` of the grammar.
        return all(map(matcher.consume_token, tokens)) and matcher.validate_tokens([token]) == 1

    def after(self, tokens: Sequence[int]) -> Tensor | None:
        """Return the tokens that may follow the answer and `tokens`, `[V]` bool on the CPU.

        Return None if `tokens` may not follow the answer, or if nothing may follow them. Only end tokens follow an end
        token.
        """
        matcher = self._matcher.deep_copy()  # an error at a draft token must not end the answer
        for token in tokens:
            if self._ends[token]:
                return self._ends
            if not matcher.consume_token(token):
                return None
        return self._mask(matcher)

    def dead_end(self) -> str | None:
        """Return why no token can follow the answer, or None if one can."""
        matcher = self._matcher.deep_copy()
        if self._mask(matcher) is not None:
            return None
        why = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
        return why[:ERROR_LENGTH] or "no token of the target continues it"

    def _mask(self, matcher: LLMatcher) -> Tensor | None:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():  # the mask then holds the end tokens, which are not allowed
            return None
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size].view(bool))
        return allowed if allowed.any() else None


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError("Grammars need llguidance; run pip install 'blockdraft[server]'.") from error
    return llguidance


def _compile(grammar: Grammar) -> str:
    matcher: type[LLMatcher] = _llguidance().LLMatcher
    if grammar.kind == "regex":
        return matcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return matcher.grammar_from_lark(grammar.text)
    return compile_schema(grammar.text or '{"type": "object"}')


def compile_schema(schema: str) -> str:
    """Compile a JSON schema into llguidance's form. Unknown formats are ignored, as in the standard.

    Raises:
        ValueError: The schema is wrong, or has keywords that llguidance cannot enforce.
    """
    matcher: type[LLMatcher] = _llguidance().LLMatcher
    compiled = matcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
    _, warnings = matcher.validate_grammar_with_warnings(compiled)
    unsupported = [warning for warning in warnings if not warning.startswith("Unknown format: ")]
    if unsupported:
        raise ValueError(" ".join(" ".join(unsupported).split())[:ERROR_LENGTH])
    check_patterns(json.loads(schema))
    return compiled


def check_patterns(schema: Any) -> None:
    """Raise a ValueError if the patterns of a closed object match only names of its properties.

    llguidance would allow a comma after the last property, and no name behind it.
    """
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        check_patterns(part)
    if not isinstance(schema, dict) or schema.get("additionalProperties") is not False:
        return
    named, patterns = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(named, dict) or not isinstance(patterns, dict) or not named or not patterns:
        return
    if not all(pattern.startswith("^") and pattern.endswith("$") for pattern in patterns):
        return  # any text may precede or follow
    expressions = "|".join(pattern[1:-1] for pattern in patterns), "|".join(map(re.escape, named))
    matched, known = (text.replace("/", r"\/") for text in expressions)
    library = _llguidance()
    grammar = library.LLMatcher.grammar_from_lark(f"start: NAME\nNAME: /{matched}/ & ~/{known}/")
    matcher = library.LLMatcher(library.LLTokenizer("byte"), grammar, log_level=0)
    if not matcher.is_error() and matcher.compute_bitmask() and matcher.is_error():  # no first byte is allowed
        raise ValueError(f"patternProperties {list(patterns)} match only names in properties; leave them out")


def _tokenizer(target: Target) -> LLTokenizer:
    """Return llguidance's tokenizer of a target, made once because that takes long."""
    from llguidance.hf import from_tokenizer
    from transformers import PreTrainedTokenizerFast

    with _lock:
        if target not in _tokenizers:
            tokenizer = target.tokenizer
            if tokenizer is None:
                raise UsageError(f"{without_tokenizer(target)}, so it cannot follow a grammar.")
            if not isinstance(tokenizer, PreTrainedTokenizerFast):
                raise UsageError(f"Grammars need a fast tokenizer, and the target's is a {type(tokenizer).__name__}.")
            known = 1 + max(tokenizer.get_vocab().values())
            ends: Any = sorted(token for token in target.eos_token_ids if token < min(known, target.vocab_size))
            if not ends:
                raise UsageError("The target has no end token, so an answer under a grammar could not end.")
            _tokenizers[target] = from_tokenizer(tokenizer, max(known, target.vocab_size), ends)
        return _tokenizers[target]
