"""The values that pass between users and the engine, and the shape legend of the code.

Letters in names and docstrings: B rows of the batch, N nodes of a proposal, V vocabulary, H hidden size, T cached
tokens, D head size, m taps. A tensor named `logits_BNV` has that shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from blockdraft.errors import UsageError

T = TypeVar("T")

Message: TypeAlias = dict[str, str]
# A text, a chat (a list of {"role", "content"}) or token ids.
Prompt: TypeAlias = "str | Sequence[Message] | Sequence[int]"
# What runs a target: the name of a file of `targets`, such as "native", our own decoder, or "hf", transformers; "auto"
# asks them in turn.
Backend: TypeAlias = str
DEFAULT_BACKEND: Backend = "auto"
JOINT = "+"  # between the names of drafters that draft together
# Of a target's forward: compiled where that is possible, always, or never.
Compile: TypeAlias = Literal["auto", "on", "off"]
DEFAULT_COMPILE: Compile = "auto"
# Largest block that a CPU computes for little more than one token where the target is compiled.
CPU_BLOCK_SIZE = 4
# Of a target's weights.
Quantize: TypeAlias = Literal["int8", "int4", "fp8"]
KVDtype: TypeAlias = Literal["int8"]
# What matrices of GGUF files are rounded to; by default no number of a model in bfloat16 changes.
GGUFWeights: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
DEFAULT_GGUF_WEIGHTS: GGUFWeights = "bf16"
FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]
GrammarKind: TypeAlias = Literal["json_schema", "json_object", "regex", "lark"]
LEAST, MOST = 1e-30, 1e30  # of temperature, top-p and penalty: much further out float32 makes 0 or infinity of them
MOST_LOGPROBS = 20  # likely tokens that are reported beside the chosen one


@dataclass(frozen=True)
class Grammar:
    """What the text of an answer has to look like. `Engine.submit` checks it, which needs the package llguidance.

    Attributes:
        kind: "json_schema", "json_object" (any object, without a text), "regex" (of the whole answer), or "lark" (the
            dialect of Lark that llguidance reads).
        text: The schema as JSON, the regular expression or the grammar.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise UsageError(
                f"The grammar is of kind {self.kind!r}; it must be one of {', '.join(get_args(GrammarKind))}."
            )
        if not isinstance(self.text, str):
            raise UsageError(f"The grammar's text is a {type(self.text).__name__}; it must be a string.")
        if bool(self.text) == (self.kind == "json_object"):
            needs = "takes no text; leave it out, or use json_schema" if self.text else "needs a text"
            raise UsageError(f"A grammar of kind {self.kind} {needs}.")


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. A `UsageError` refuses what is out of range or of another kind.

    Attributes:
        max_new_tokens: Number of tokens after which the answer is cut, exact to the token.
        temperature: 0 decodes greedily; otherwise the divisor of the logits, 1e-30 to 1e30.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the most probable tokens that together reach this probability; 1 keeps all.
        min_p: Keep tokens of at least this share of the best token's probability; 0 keeps all. The order is that of
            transformers: temperature, top-k, top-p, min-p.
        logit_bias: Added to the logits of these token ids, -100 to 100, before anything else, as in OpenAI's API. Kept
            as pairs.
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens that occur in prompt or
            output (arXiv 1909.05858); 1 is none. This and the next two shape greedy decoding too.
        presence_penalty: Subtracted from the logits of tokens that occur in the output, -2 to 2, as in OpenAI's API.
        frequency_penalty: Subtracted once for each time that a token occurs in the output, -2 to 2, likewise.
        seed: Same seed, same tokens, whichever drafter and block size; None draws one.
        stop_token_ids: Tokens that end the answer besides the target's own end tokens.
        stop: Texts that end the answer, which is cut before them. A single one may be given as it is.
        ignore_eos: Go on past the target's end tokens, to `max_new_tokens`.
        logprobs: Report how likely each token of the answer was, and this many of the likeliest, 0 to 20; None reports
            nothing. It is the log-softmax of the target's logits, before biases, penalties, temperature and cuts.
        prompt_logprobs: The same of the prompt's tokens. The prompt is then read whole, whatever is remembered of it.
        grammar: What the text of the answer has to look like. Once it is complete, the target's end tokens alone are
            possible.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_new_tokens", _whole("max_new_tokens", self.max_new_tokens))
        object.__setattr__(self, "top_k", _whole("top_k", self.top_k))
        if self.seed is not None:
            object.__setattr__(self, "seed", _whole("seed", self.seed))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name))
        _check_flag("ignore_eos", self.ignore_eos)
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1.")
        if self.temperature != 0 and not LEAST <= self.temperature <= MOST:
            raise UsageError(f"temperature is {self.temperature}; it must be 0 (greedy) or from {LEAST:g} to {MOST:g}.")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}; it must be 0 (keep all) or more.")
        if not LEAST <= self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}; it must be from {LEAST:g} to 1 (keep all).")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p is {self.min_p}; it must be from 0 (keep all) to 1.")
        if not LEAST <= self.repetition_penalty <= MOST:
            raise UsageError(
                f"repetition_penalty is {self.repetition_penalty}; it must be from {LEAST:g} to {MOST:g} (1 is none)."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be from -2 to 2; 0 is no penalty.")
        # Tuples of what was given, which no caller can change later.
        try:
            biases = dict(self.logit_bias)
        except (TypeError, ValueError) as error:
            raise UsageError(f"logit_bias is {self.logit_bias!r}; it must map token ids to numbers.") from error
        for token, bias in biases.items():
            if not _is_whole(token) or token < 0:
                raise UsageError(f"logit_bias names the token {token!r}; its keys must be token ids, 0 or more.")
            _check_number(f"logit_bias for token {token}", bias)
            if not -100 <= bias <= 100:
                raise UsageError(f"logit_bias is {bias} for token {token}; it must be from -100 to 100.")
        object.__setattr__(self, "logit_bias", tuple((int(token), bias) for token, bias in biases.items()))
        stop_ids = _listed("stop_token_ids", self.stop_token_ids)
        for token in stop_ids:
            if not _is_whole(token) or token < 0:
                raise UsageError(f"stop_token_ids holds {token!r}; it must hold token ids, 0 or more.")
        object.__setattr__(self, "stop_token_ids", tuple(map(int, stop_ids)))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise UsageError(f"stop holds {text!r}; every stop must be a text of at least one character.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}; it must be from 0 to 2**63 - 1.")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, count := _whole(name, value, " or None"))
                if not 0 <= count <= MOST_LOGPROBS:
                    raise UsageError(f"{name} is {count}; it must be from 0 to {MOST_LOGPROBS}, or None.")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise UsageError(f"grammar is {self.grammar!r}; it must be a Grammar or None.")
        if self.grammar is not None and self.ignore_eos:
            raise UsageError("ignore_eos goes on past the end, where a grammar allows nothing; leave out one of them.")


def _renamed(old: str, new: str) -> Callable[[type[T]], type[T]]:
    """Lets a dataclass be made with the old name of a field, and the field be read by it."""

    def decorate(kind: type[T]) -> type[T]:
        made: Any = kind
        construct = made.__init__

        @wraps(construct)
        def init(self: T, *values: Any, **named: Any) -> None:
            if old in named:
                if new in named:
                    raise UsageError(f"{old} is the old name of {new}, and both are given; leave out {old}.")
                named[new] = named.pop(old)
            construct(self, *values, **named)

        made.__init__ = init
        setattr(made, old, property(attrgetter(new)))
        return kind

    return decorate


@_renamed("drawn", "sampled")
@dataclass(frozen=True)
class Drafting:
    """How far an engine drafts. It changes the speed and never the distribution of the output.

    Attributes:
        block_size: Tokens of a block, anchor included; None is the drafter's trained size. "auto" lets each cycle use
            as many of them as pay, or none.
        tree_budget: Most guesses of a draft tree; 0, the usual, drafts chains. "auto" lets each cycle use as many as
            pay, or none.
        sampled: Sample the guesses of requests with a temperature from the drafter's distribution, in chains, instead
            of taking the likeliest. The distribution of the output stays the same, but which tokens a seed gives then
            depends on the drafter. With a tree budget, likeliest guesses of the other drafters of a combination stand
            beside the chain. Its name before was `drawn`, which still works.
        draft_window: Latest tokens of the text that a draft pass looks at, so that it costs no more in long contexts;
            None is all of them. Drafters without such a pass ignore it.
        draft_passes: Passes over a block of which each settles the surest guesses, so that the next one sees them, or
            of a flow map the jumps from noise to tokens; None is what the drafter was made with, 1 as a rule. Drafters
            that guess one token after the other, or cannot take several, ignore it.
    """

    block_size: int | Literal["auto"] | None = None
    tree_budget: int | Literal["auto"] = 0
    sampled: bool = False
    draft_window: int | None = None
    draft_passes: int | None = None

    def __post_init__(self) -> None:
        for name, value, least, meaning in (
            ("block_size", self.block_size, 1, "no drafting"),
            ("tree_budget", self.tree_budget, 0, "chains"),
            ("draft_window", self.draft_window, 1, "the newest token alone"),
            ("draft_passes", self.draft_passes, 1, "all guesses from one pass"),
        ):
            may_be_auto = not name.startswith("draft_")
            if (value is None and name != "tree_budget") or (value == "auto" and may_be_auto):
                continue
            number = _whole(name, value, " or 'auto'" if may_be_auto else " or None")
            if number < least:
                raise UsageError(f"{name} is {value}; it must be at least {least} ({meaning}).")
            object.__setattr__(self, name, number)
        _check_flag("sampled", self.sampled)
        for name in ("block_size", "tree_budget"):
            if self.sampled and self.tree_budget != 0 and getattr(self, name) == "auto":
                raise UsageError(f"{name} is 'auto'; trees around sampled guesses have a fixed size, so give a number.")


@dataclass(frozen=True)
class DraftModel:
    """Where a smaller language model drafts, and what it does while the target verifies; see `load_drafter`.

    Attributes:
        drafter_device: A device of its own for a language model that drafts, such as cuda:1, or cpu beside a GPU; None
            is the target's.
        draft_ahead: How many outcomes of each verification it drafts for meanwhile, on a device of its own; 0 is none.
    """

    drafter_device: str | None = None
    draft_ahead: int = 0


@dataclass(frozen=True)
class RequestDrafting:
    """How far one request is drafted for: bounds inside of those of its engine. As `Drafting`, it changes the speed and
    never the distribution of the output.

    Attributes:
        enabled: False decodes this request plainly.
        block_size: Most tokens of a block, anchor included; None is what the engine drafts.
        tree_budget: Most guesses of a draft tree, 0 for a chain; None is what the engine drafts. It bounds trees only.
    """

    enabled: bool = True
    block_size: int | None = None
    tree_budget: int | None = None

    def __post_init__(self) -> None:
        _check_flag("enabled", self.enabled)
        for name, least, meaning in (("block_size", 1, "no drafting"), ("tree_budget", 0, "chains")):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, number := _whole(name, value, " or None"))
                if number < least:
                    raise UsageError(f"{name} is {number}; it must be at least {least} ({meaning}).")


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was.

    Attributes:
        logprob: Log-softmax of the target's own logits.
        top: The likeliest tokens with theirs, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class CycleTrace:
    """What one cycle did for one request.

    Attributes:
        tokens: The anchor, which is the last token before the cycle, and the guesses.
        parents: The place in `tokens` of the one that each follows; -1 for the anchor.
        path: Places of those that were accepted, from the anchor, 0, on. What the target says after them is the last
            of the cycle's new tokens.
        seconds: Of the cycle, which other requests may have been part of.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    seconds: float


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _whole(name: str, value: Any, other: str = "") -> int:
    if not _is_whole(value):
        raise UsageError(f"{name} is {value!r}; it must be a whole number{other}.")
    return int(value)


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; it must be a number.")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; it must be True or False.")


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError as error:
        raise UsageError(f"{name} is {value!r}; give a list.") from error
