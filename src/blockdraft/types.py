"""Values that pass between users and the engine, and the letters of tensor shapes.

Letters in names and docstrings: B sequences of the batch, N nodes of a proposal, V vocabulary size, H hidden size, T
cached tokens, D head size, m number of target layers. A tensor named `logits_BNV` has the shape `[B, N, V]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args

from blockdraft.errors import UsageError
from blockdraft.settings import Flag, described

Message: TypeAlias = dict[str, str]
# A text, a chat (a list of {"role", "content"}), or token ids.
Prompt: TypeAlias = "str | Sequence[Message] | Sequence[int]"
# Name of the file of `targets` that runs a target: "native" is our own decoder, "hf" is transformers, "auto" the first
# that can.
Backend: TypeAlias = str
DEFAULT_BACKEND: Backend = "auto"
JOINT = "+"  # joins the names of the members of a hybrid drafter
# Whether a target's forward is compiled: where possible, always (else an error), or never.
Compile: TypeAlias = Literal["auto", "on", "off"]
DEFAULT_COMPILE: Compile = "auto"
# Largest block that costs a CPU little more than one token, where the target is compiled.
CPU_BLOCK_SIZE = 4
Quantize: TypeAlias = Literal["int8", "int4", "fp8"]  # quantization of a target's weights
KVDtype: TypeAlias = Literal["int8"]  # quantization of its keys and values
# Type of the matrices in GGUF files. The default is exact for a model in bfloat16.
GGUFWeights: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
DEFAULT_GGUF_WEIGHTS: GGUFWeights = "bf16"
FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]
GrammarKind: TypeAlias = Literal["json_schema", "json_object", "regex", "lark"]
LEAST, MOST = 1e-30, 1e30  # far beyond, float32 rounds to 0 or infinity
# Smallest and largest values of sampling parameters. The temperature may also be 0.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (LEAST, MOST),
    "top_p": (LEAST, 1),
    "min_p": (0, 1),
    "repetition_penalty": (LEAST, MOST),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "logit_bias": (-100, 100),
}
MAX_SEED = 2**63 - 1
MOST_LOGPROBS = 20  # likeliest tokens that may be reported with each token of the answer


@dataclass(frozen=True)
class Grammar:
    """A grammar that the text of an answer follows. It needs llguidance. `Engine.submit` checks the text.

    Attributes:
        kind: "json_schema", "json_object" (any JSON object; takes no text), "regex" (matches the whole answer), or
            "lark" (in llguidance's dialect of Lark).
        text: The schema as JSON, the regular expression, or the grammar.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise UsageError(f"grammar.kind must be one of {', '.join(get_args(GrammarKind))}, got {self.kind!r}.")
        if not isinstance(self.text, str):
            raise UsageError(f"grammar.text must be a string, got {self.text!r}.")
        if bool(self.text) == (self.kind == "json_object"):
            needs = "takes no text; leave it out, or use json_schema" if self.text else "needs a text"
            raise UsageError(f"A grammar of kind {self.kind} {needs}.")


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Values out of range or of a wrong type raise a `UsageError`.

    Biases and penalties come first, then temperature, top-k, top-p and min-p, in the order of transformers.
    """

    max_new_tokens: int = described(256, "Maximum length of the answer in tokens.")
    temperature: float = described(0.0, "Divisor of the logits, 1e-30 to 1e30; 0 decodes greedily.")
    top_k: int = described(0, "Keep the k most probable tokens; 0 keeps all.")
    top_p: float = described(1.0, "Keep the most probable tokens that together reach this probability; 1 keeps all.")
    min_p: float = described(0.0, "Keep tokens of at least this share of the best token's probability; 0 keeps all.")
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = described(
        (), "Added to the logits of these token ids before anything else, -100 to 100, as in OpenAI's API."
    )
    repetition_penalty: float = described(
        1.0,
        "Divides the positive and multiplies the negative logits of tokens that occur in prompt or output (arXiv "
        "1909.05858); 1 is none. Penalties change greedy answers too.",
    )
    presence_penalty: float = described(
        0.0, "Subtracted from the logits of tokens that occur in the output, -2 to 2, as in OpenAI's API."
    )
    frequency_penalty: float = described(
        0.0, "Subtracted for each time that a token occurs in the output, -2 to 2, as in OpenAI's API."
    )
    seed: int | None = described(
        None, "The same seed gives the same tokens, with any drafter and block size. If unset, it is random."
    )
    stop_token_ids: tuple[int, ...] = described((), "Tokens that end the answer, besides the target's end tokens.")
    stop: Annotated[Sequence[str], Flag(repeat=True)] = described(
        (), "Text that ends the answer, which is cut before it. Several may be given."
    )
    ignore_eos: bool = described(False, "Go on past the target's end tokens, up to `max_new_tokens`.")
    logprobs: int | None = described(
        None,
        "Report the log probability of each token of the answer, and of this many of the likeliest tokens, 0 to 20. It "
        "is the log-softmax of the target's logits, before biases, penalties, temperature and cuts. None reports "
        "nothing.",
    )
    prompt_logprobs: int | None = described(
        None, "The same for the prompt's tokens. The prompt's cached prefix is then not used."
    )
    grammar: Grammar | None = described(
        None, "A grammar that the answer follows. Once the text is complete, only the target's end tokens are allowed."
    )
    prediction: str | Sequence[int] = described(
        (),
        "Text or token ids that much of the answer is expected to repeat, such as a file before an edit. It is drafted "
        "while the answer agrees with it, and found again after a change. It changes the speed and never the "
        "distribution of the answer.",
    )
    lookup_scope: str | None = described(
        None,
        "Name of the client or conversation whose earlier answers the drafter `lookup` may copy. Answers are never "
        "shared between scopes; None neither copies nor keeps any.",
    )

    def __post_init__(self) -> None:
        def set_field(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        set_field("max_new_tokens", _whole("max_new_tokens", self.max_new_tokens, 1))
        set_field("top_k", _whole("top_k", self.top_k, 0, " (0 keeps all)"))
        if self.seed is not None:
            set_field("seed", _whole("seed", self.seed, 0, " or None", MAX_SEED))
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                set_field(name, _whole(name, value, 0, " or None", MOST_LOGPROBS))
        if not _is_number(self.temperature) or self.temperature != 0:
            _check_range("temperature", self.temperature, prefix="0 (greedy) or ")
        for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _check_range(name, getattr(self, name))
        _check_flag("ignore_eos", self.ignore_eos)
        try:
            biases = dict(self.logit_bias)
        except (TypeError, ValueError) as error:
            raise UsageError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}.") from error
        for token, bias in biases.items():
            _token("keys of logit_bias", token)
            _check_range("logit_bias", bias, suffix=f" for token {token}")
        set_field("logit_bias", tuple((int(token), bias) for token, bias in biases.items()))
        stop_ids = _listed("stop_token_ids", "token ids", self.stop_token_ids)
        set_field("stop_token_ids", tuple(_token("entries of stop_token_ids", token) for token in stop_ids))
        set_field("stop", (self.stop,) if isinstance(self.stop, str) else _listed("stop", "texts", self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise UsageError(f"entries of stop must be texts of at least one character, got {text!r}.")
        if not isinstance(self.prediction, str):
            predicted = _listed("prediction", "token ids, or a text", self.prediction)
            set_field("prediction", tuple(_token("entries of prediction", token) for token in predicted))
        if self.lookup_scope is not None and not isinstance(self.lookup_scope, str):
            raise UsageError(f"lookup_scope must be a text or None, got {self.lookup_scope!r}.")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise UsageError(f"grammar must be a Grammar or None, got {self.grammar!r}.")
        if self.grammar is not None and self.ignore_eos:
            raise UsageError("ignore_eos goes on past the end, where a grammar allows no token; leave out one of them.")


class _ByDefault(str):
    """A default that equals the same text given explicitly, but can be distinguished from it."""


@dataclass(frozen=True)
class Drafting:
    """How far an engine drafts. It changes the speed and never the distribution of the output."""

    block_size: int | Literal["auto"] | None = described(
        cast(Any, _ByDefault("auto")),
        'Maximum number of tokens per block: the last token of the text and the draft tokens after it. "auto" drafts '
        "as many as pay off in each step, or none, and is the default; with a tree budget or sampled draft tokens the "
        "default is the drafter's trained size.",
    )
    tree_budget: int | Literal["auto"] = described(
        0, 'Maximum number of draft tokens per tree; 0 drafts chains. "auto" drafts as many as pay off, or none.'
    )
    sampled: bool = described(
        False,
        "At a temperature, sample draft tokens from the drafter's distribution instead of taking the likeliest. The "
        "distribution of the output is the target's either way, but the tokens of a seed then depend on the drafter.",
    )
    draft_window: int | None = described(
        None, "Number of latest tokens that a draft pass attends to, which bounds its cost in long contexts."
    )
    draft_passes: int | None = described(
        None,
        "Draft passes per block: each one fixes the surest draft tokens for the next. For a flow map, the number of "
        "jumps from noise to tokens. By default what the drafter was made with, usually 1.",
    )

    def __post_init__(self) -> None:
        if isinstance(self.block_size, _ByDefault) and (self.sampled or self.tree_budget not in (0, None)):
            object.__setattr__(self, "block_size", None)
        for name, least, meaning, other in (
            ("block_size", 1, "no drafting", "'auto'"),
            ("tree_budget", 0, "chains", "'auto'"),
            ("draft_window", 1, "the newest token alone", "None"),
            ("draft_passes", 1, "all draft tokens from one pass", "None"),
        ):
            value = getattr(self, name)
            if (value is None and name != "tree_budget") or (value == "auto" and other == "'auto'"):
                continue
            object.__setattr__(self, name, _whole(name, value, least, f" ({meaning}) or {other}"))
        _check_flag("sampled", self.sampled)
        for name in ("block_size", "tree_budget"):
            if self.sampled and self.tree_budget != 0 and getattr(self, name) == "auto":
                raise UsageError(f"{name} must be a number with sampled and a tree budget, got 'auto'.")


@dataclass(frozen=True)
class DraftModel:
    """How drafters run; see `load_drafter`."""

    drafter_device: str | None = described(
        None, "Device of a draft language model, such as cuda:1, or cpu next to a GPU; by default the target's."
    )
    draft_ahead: int = described(
        0,
        "Number of verification outcomes that a draft language model drafts for while the target verifies. It needs a "
        "device of its own.",
    )
    draft_vocab: Annotated[str | None, Flag(metavar="N|FILE")] = described(
        None,
        "Restrict drafting to some tokens, which makes it cheaper for drafters that use the target's output head: the "
        "first N of the vocabulary, or a file with a list of token ids (JSON or .pt).",
    )

    def options(self) -> dict[str, Any]:
        """Return keyword arguments of `load_drafter`."""
        return {"device": self.drafter_device, "ahead": self.draft_ahead, "draft_vocab": self.draft_vocab}


@dataclass(frozen=True)
class RequestDrafting:
    """Draft limits of one request, within those of its engine.

    Like `Drafting`, it changes the speed and never the distribution of the output.

    Attributes:
        enabled: False decodes this request plainly.
        block_size: Most tokens of a block, anchor included; None is the engine's.
        tree_budget: Most draft tokens of a tree, 0 for a chain; None is the engine's. It has no effect on an engine
            that drafts chains.
    """

    enabled: bool = True
    block_size: int | None = None
    tree_budget: int | None = None

    def __post_init__(self) -> None:
        _check_flag("enabled", self.enabled)
        for name, least, meaning in (("block_size", 1, "no drafting"), ("tree_budget", 0, "chains")):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _whole(name, value, least, f" ({meaning}) or None"))


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of one token.

    Attributes:
        logprob: Log-softmax of the target's logits, before biases, penalties, temperature and cuts.
        top: The likeliest tokens at its position with their log probabilities, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class StepTrace:
    """What one step did for one request.

    Attributes:
        tokens: The anchor, which is the last token before the step, and the draft tokens.
        parents: For each token the index in `tokens` of the one that it follows; -1 for the anchor.
        path: Indices of the accepted tokens, from the anchor, 0, on. The bonus, which follows them, is the last of the
            step's new tokens.
        seconds: Time of the step, in which other requests may have taken part.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    seconds: float


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _whole(name: str, value: Any, least: int, other: str = "", most: float = math.inf) -> int:
    if not _is_whole(value) or not least <= value <= most:
        limit = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise UsageError(f"{name} must be a whole number {limit}{other}, got {value!r}.")
    return int(value)


def _token(name: str, value: Any) -> int:
    if not _is_whole(value) or value < 0:
        raise UsageError(f"{name} must be token ids from 0 on, got {value!r}.")
    return int(value)


def _check_range(name: str, value: Any, prefix: str = "", suffix: str = "") -> None:
    low, high = RANGES[name]
    if not _is_number(value) or not low <= value <= high:
        limits = " and ".join(f"{limit:g}".replace("e+", "e") for limit in (low, high))
        number = "" if prefix else "a number "
        raise UsageError(f"{name} must be {prefix}{number}between {limits}, got {value!r}{suffix}.")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, got {value!r}.")


def _listed(name: str, content: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):  # iterates over numbers
        return tuple(value)
    raise UsageError(f"{name} must be a list of {content}, got {value!r}.")
