"""Grammars of answers: which tokens may follow. llguidance computes them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from blockdraft.engine.json_schema import References, endless_references, map_parts, pointer, walk, with_pointers
from blockdraft.errors import UsageError
from blockdraft.targets import Target, without_tokenizer
from blockdraft.types import Grammar

if TYPE_CHECKING:  # an optional package, loaded by the first request that has a grammar
    from llguidance import LLMatcher, LLTokenizer

# Between the parts of JSON one space is allowed, or a line break with its indent: with more, some models never stop
# adding whitespace. "lenient" turns unsupported keywords into warnings, which `compile_schema` checks.
JSON_STYLE: Any = {"whitespace_pattern": r" |\r?\n[ \t]{0,40}", "lenient": True}
ERROR_LENGTH = 300
TOO_DEEP = "the schema exceeds the recursion limit; nest it less deeply"
BIG = "it exceeds the limits of the grammar's parser; make it smaller"
TOO_BIG = re.compile(r"too (big|large|many)|limit for|max is")  # in llguidance's errors
MAX_PARTS = 200  # of a wrong schema that are tried to find the fault
LACKING = "Unimplemented keys: "  # how llguidance's warning of keywords that it lacks begins
WHOLE = "a whole number of at least 0"
COUNTS = frozenset(f"{end}{what}" for end in ("min", "max") for what in ("Items", "Length", "Properties", "Contains"))
# Expected values of keywords, by keyword.
EXPECTED = dict.fromkeys(COUNTS, WHOLE) | {
    "type": 'one of "null", "boolean", "integer", "number", "string", "array" and "object", or a list of them',
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), "a list of schemas, which are objects or booleans"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "a number"),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), "an object of names and schemas"),
    **dict.fromkeys(("items", "additionalItems", "additionalProperties"), "a schema, which is an object or a boolean"),
    **dict.fromkeys(("$ref", "pattern", "format"), "a text"),
    "enum": "a list",
    "required": "a list of names",
    "multipleOf": "a number above 0",
}
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
        if TOO_BIG.search(why):
            return BIG
        return (
            "no text fits it" if "NoExtension" in why else why[:ERROR_LENGTH] or "no token of the target continues it"
        )

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
    try:
        value = json.loads(schema)
        checked = checked_schema(value)
        text = _as_json(checked)
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    if useless := next((part for _, part in walk(checked) if _has_useless_patterns(part)), None):
        names = list(useless["patternProperties"])
        raise ValueError(f"patternProperties {names} match only names in properties; leave them out")
    compiled, warnings = _validate(text)
    if not warnings:
        return compiled
    is_empty = any("Unsatisfiable" in warning for warning in warnings)
    endless = endless_references(with_pointers(value)) if is_empty else set()
    raise ValueError(_endless(endless) if endless else _explain(checked, warnings, is_empty))


def _as_json(schema: Any) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except ValueError as error:
        raise ValueError("the schema holds a number that is infinite or NaN, which JSON lacks; change it") from error


def _validate(schema: str) -> tuple[str, list[str]]:
    """Return a schema in llguidance's form, and what it cannot enforce or read."""
    matcher: type[LLMatcher] = _llguidance().LLMatcher
    try:
        compiled = matcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
    except ValueError as error:  # the schema is valid JSON, which llguidance's reader limits further
        is_deep = "recursion" in str(error)
        why = TOO_DEEP if is_deep else "the schema holds a number beyond the range of 64 bits; change it"
        raise ValueError(why) from error
    _, warnings = matcher.validate_grammar_with_warnings(compiled)
    return compiled, [warning for warning in warnings if not warning.startswith("Unknown format: ")]


def _explain(checked: Any, warnings: Sequence[str], is_empty: bool) -> str:
    """Return what is wrong with a schema: which keywords, where, and what to change.

    Args:
        warnings: Those of llguidance.
        is_empty: Whether no value fits the schema.
    """
    lacking = sorted(_lacking(warnings))
    if all(warning.startswith((LACKING, "oneOf")) for warning in warnings):
        them = "it" if len(lacking) == 1 else "them"
        remedy = f"leave {them} out" + (', and replace "oneOf" by "anyOf"' if "oneOf" in lacking else "")
        return f"no grammar expresses {_quoted(lacking)} as the schema has {them}; {remedy}"
    if not is_empty and any(map(TOO_BIG.search, warnings)):
        return BIG
    part, place, keys = _fault(checked)
    if is_empty:
        return f"no value fits {_quoted(keys)} at {place}; change them"
    if len(keys) == 1 and keys[0] in EXPECTED:
        return f'"{keys[0]}" at {place} must be {EXPECTED[keys[0]]}, got {json.dumps(part[keys[0]])[:80]}'
    return f"{_quoted(keys)} at {place} cannot be followed; change them"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name[:80]}"' for name in names)


def _fault(schema: dict[str, Any]) -> tuple[dict[str, Any], str, list[str]]:
    """Return the smallest wrong part of a schema, where it stands, and which of its keywords are at fault."""

    def is_wrong(part: dict[str, Any]) -> bool:
        warnings = _validate(json.dumps(without_references(part)))[1]
        return any(not warning.startswith((LACKING, "oneOf")) for warning in warnings)

    def without_references(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return map_parts({key: value for key, value in part.items() if key != "$ref"}, without_references)

    for path, part in sorted(walk(schema), key=lambda entry: -len(entry[0]))[:MAX_PARTS]:
        if is_wrong(part):
            alone = [key for key in part if not is_wrong({name: part[name] for name in part if name != key})]
            return part, unquote(pointer(path)), alone or list(part)
    path, part = next(((path, part) for path, part in walk(schema) if "$ref" in part), ((), schema))
    return part, unquote(pointer(path)), ["$ref"] if "$ref" in part else list(part)  # by what it points to


def checked_schema(schema: Any) -> Any:
    """Return a schema as llguidance takes it.

    References become pointers, which are percent-encoded. Those of which no value is finite become `false`. Counts
    become whole numbers, since some programs write 1 as 1.0.

    Raises:
        ValueError: The schema allows no value, or a reference, pattern or type in it cannot be followed.
    """
    if schema is False:
        raise ValueError("the schema false allows no value; give another")
    if not isinstance(schema, dict | bool):
        raise ValueError(f"the schema must be an object or true, got {json.dumps(schema)[:80]}")
    checked = _with_whole_counts(with_pointers({} if schema is True else schema))
    references = References(checked)
    for path, part in walk(checked):
        reference, pattern = part.get("$ref", "#"), part.get("pattern")
        if not isinstance(reference, str):
            raise ValueError(f'"$ref" at {unquote(pointer(path))} must be a text, got {json.dumps(reference)[:80]}')
        if references.path(reference) is None:
            raise ValueError(f'"$ref" {reference[:80]!r} points to nothing in the schema; add what it names to "$defs"')
        names = part.get("patternProperties")
        names = names if isinstance(names, dict) else {}
        for key, text in [("pattern", pattern), *(("patternProperties", name) for name in names)]:
            if isinstance(text, str) and (why := _pattern_error(text)) is not None:
                raise ValueError(f'"{key}" {text[:80]!r} cannot be followed: {why}')
    endless = endless_references(checked)

    def change(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return False if str(part.get("$ref")) in endless else map_parts(part, change)

    if not endless:
        return checked
    if (ending := change(checked)) is False:
        raise ValueError(_endless(endless))
    return ending


def _endless(references: set[str]) -> str:
    return f'"$ref" {unquote(min(references))[:80]!r} never ends, since each value holds another one; add an end'


def _with_whole_counts(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    counts = {key: value for key, value in schema.items() if key in COUNTS and isinstance(value, float)}
    counts = {key: int(value) for key, value in counts.items() if value.is_integer()}
    return map_parts(schema, _with_whole_counts) | counts


@lru_cache(maxsize=1024)
def _pattern_error(pattern: str) -> str | None:
    """Return why llguidance cannot follow the pattern of a string, or None if it can."""
    _, warnings = _validate(json.dumps({"type": "string", "pattern": pattern}))
    return warnings[0].strip().rpartition("error: ")[2][:ERROR_LENGTH] if warnings else None


@lru_cache(maxsize=256)  # agents send the same tools with each request
def relax(text: str, references: bool = False) -> tuple[str, tuple[str, ...]]:
    """Return a JSON schema without what llguidance cannot enforce, and each keyword left out with its value.

    References to other documents are left out too. `oneOf` becomes `anyOf` where llguidance cannot tell the options
    apart.

    Args:
        references: Whether references that point to nothing in the schema itself are left out as well.

    Raises:
        ValueError: The schema is wrong, whatever is left out.
    """
    dropped: dict[str, None] = {}  # in order, each once
    schema = json.loads(text)

    def drop(part: dict[str, Any], key: str, value: Any) -> None:
        dropped[f"{key} {json.dumps(value, ensure_ascii=False)[:80]}"] = None
        part.pop(key, None)

    def change(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        part = map_parts(part, change)
        if isinstance(text := part.get("pattern"), str) and _pattern_error(text) is not None:
            drop(part, "pattern", text)
        patterns = part.get("patternProperties")
        if isinstance(patterns, dict) and (any(map(_pattern_error, patterns)) or _has_useless_patterns(part)):
            drop(part, "patternProperties", list(patterns))
            if not _has_useless_patterns({**part, "patternProperties": patterns}):
                part.pop("additionalProperties", None)  # would forbid the names that match
        reference = part.get("$ref")
        if isinstance(reference, str) and known.path(reference) is None:
            was_known = original.path(reference) is not None  # in a keyword that is left out
            if references or was_known or not reference.startswith("#"):
                drop(part, "$ref", reference)
        return part

    def without(part: Any, names: set[str]) -> Any:
        if not isinstance(part, dict):
            return part
        part = map_parts(part, lambda inner: without(inner, names))
        for name in names & set(part):
            value = part[name]
            drop(part, name, value)
            if name == "oneOf":  # weaker, and enforced
                weaker, others = {"anyOf": value}, part.get("allOf", [])
                part |= {"allOf": [*others, weaker]} if "anyOf" in part and isinstance(others, list) else weaker
        return part

    try:
        schema = with_pointers(schema)
        original = References(schema)
        while True:
            known = References(schema)
            schema = change(schema)
            relaxed = _as_json(checked_schema(schema))
            names = _lacking(_validate(relaxed)[1])
            before, schema = schema, without(schema, names)
            if schema == before:
                break
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    compile_schema(json.dumps(schema))
    return relaxed, tuple(dropped)


def _lacking(warnings: Sequence[str]) -> set[str]:
    """Return the keywords that llguidance's warnings name."""
    text = "\n".join(warnings)
    lists = [json.loads(names) for names in re.findall(LACKING + r"(\[.*\])", text)]
    return {name for names in lists for name in names} | {"oneOf" for _ in re.findall(r"^oneOf", text, re.MULTILINE)}


def _has_useless_patterns(schema: dict[str, Any]) -> bool:
    """Return whether the patterns of a closed object match only names of its properties.

    llguidance would allow a comma after the last property, and no name behind it.
    """
    named, patterns = schema.get("properties"), schema.get("patternProperties")
    if schema.get("additionalProperties") is not False or not (isinstance(named, dict) and isinstance(patterns, dict)):
        return False
    if not named or not patterns:
        return False
    if not all(pattern.startswith("^") and pattern.endswith("$") for pattern in patterns):
        return False  # any text may precede or follow
    expressions = "|".join(pattern[1:-1] for pattern in patterns), "|".join(map(re.escape, named))
    matched, known = (text.replace("/", r"\/") for text in expressions)
    library = _llguidance()
    grammar = library.LLMatcher.grammar_from_lark(f"start: NAME\nNAME: /{matched}/ & ~/{known}/")
    matcher = library.LLMatcher(library.LLTokenizer("byte"), grammar, log_level=0)
    # Then no first byte is allowed.
    return bool(not matcher.is_error() and matcher.compute_bitmask() and matcher.is_error())


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
            ends: Any = sorted(token for token in target.eos_token_ids if 0 <= token < min(known, target.vocab_size))
            if not ends:
                raise UsageError("The target has no end token, so an answer under a grammar could not end.")
            _tokenizers[target] = from_tokenizer(tokenizer, max(known, target.vocab_size), ends)
        return _tokenizers[target]
