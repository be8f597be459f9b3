"""Values that pass between users and the engine, and the letters of tensor shapes.

Letters in names and docstrings: B sequences of the batch, N nodes of a proposal, V vocabulary size, H hidden size, T
cached tokens, D head size, m number of target layers. A tensor named `logits_BNV` has the shape `[B, N, V]`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from blockdraft.errors import UsageError
from blockdraft.settings import Flag, SettingsError, settings

if TYPE_CHECKING:
    import torch

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
KVDtype: TypeAlias = Literal["float32", "bfloat16", "int8"]  # of its keys and values
RECORD_BYTES = 4 * 2**30  # usual limit of recorded conversations
MIN_RECORD_BYTES = 2**20
FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]
GrammarKind: TypeAlias = Literal["json_schema", "json_object", "regex", "lark"]
MIN, MAX = 1e-30, 1e30  # far beyond, float32 rounds to 0 or infinity
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20  # likeliest tokens that may be reported with each token of the answer


def _as_python(value: Any) -> Any:
    """Return a number of another library, such as numpy, as one of Python; anything else unchanged."""
    if isinstance(value, int | float):
        return value
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value


def _as_tuple(value: Any) -> Any:
    """Return the elements of a list, array or iterator as a tuple; anything else unchanged."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping)
    return tuple(map(_as_python, value)) if is_list else value


def _as_texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _as_tuple(value)


def _as_pairs(value: Any) -> Any:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple(map(_as_tuple, _as_tuple(pairs))) if isinstance(pairs, Iterable) else value


Number = BeforeValidator(_as_python)
Positive = Annotated[float, Number, Field(ge=MIN, le=MAX)]
Share = Annotated[float, Number, Field(ge=0, le=1)]
TopP = Annotated[float, Number, Field(ge=MIN, le=1)]
Penalty = Annotated[float, Number, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Count = Annotated[int, Number, Field(ge=1)]
Natural = Annotated[int, Number, Field(ge=0)]
Token = Annotated[int, Field(ge=0)]
NumLogprobs = Annotated[int, Number, Field(ge=0, le=MAX_LOGPROBS)]


@settings
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
        if bool(self.text) == (self.kind == "json_object"):
            needs = "takes no text; leave it out, or use json_schema" if self.text else "needs a text"
            raise UsageError(f"A grammar of kind {self.kind} {needs}.")


def _as_name(value: Any) -> Any:
    """Return a dtype or device of torch as its name; anything else unchanged."""
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(value, torch.dtype | torch.device)
    return str(value).removeprefix("torch.") if is_torch else value


def _as_path(value: Any) -> Any:
    return str(value) if isinstance(value, os.PathLike) else value


TorchName = Annotated[str | None, BeforeValidator(_as_name)]


@settings
class LoadOptions:
    """How a target is loaded: arguments of `load_target`, flags of commands, and what a backend gets.

    A backend gets `dtype` and `device` filled in, and reads them as `torch_dtype` and `torch_device`.
    """

    dtype: Annotated[TorchName, Flag(metavar="float32|bfloat16|float16")] = Field(
        None,
        description="Number format of weights and arithmetic; by default the checkpoint's, or float32 where a CPU "
        "lacks that. GGUF files and quantized weights use float32 on a CPU and bfloat16 elsewhere.",
    )
    device: TorchName = Field(
        None, description="Device of the target, such as cpu or cuda:1; by default the first GPU, else the CPU."
    )
    backend: Annotated[Backend, Flag(metavar="auto|native|hf|NAME")] = Field(
        DEFAULT_BACKEND,
        description="What runs the target: native (our decoder), hf (transformers), mlx (mlx-lm, for Apple silicon; "
        "package blockdraft-mlx), jax (for TPUs; package blockdraft-jax), or auto: mlx on Apple silicon if it is "
        "installed and knows the model, else native where it knows the model, else hf.",
    )
    adapter: Annotated[str | None, BeforeValidator(_as_path), Flag(metavar="DIR")] = Field(
        None,
        description="PEFT adapter, such as a LoRA, to merge into the target: a folder or hub name. It needs "
        "the package peft.",
    )
    revision: Annotated[str | None, Flag(metavar="NAME")] = Field(
        None, description="Branch, tag or commit of the target's repository on the hub."
    )
    threads: int | Literal["auto"] | None = Field(
        None,
        description="Threads on a CPU, from now on; auto measures the fastest number once, unless OMP_NUM_THREADS is "
        "set. None keeps torch's number.",
    )
    compile: Compile = Field(
        DEFAULT_COMPILE,
        description="Compiled forward pass of the native decoder. On a CPU, auto uses the C library of the package or "
        "the machine's compiler, and on fails if there is neither. On an NVIDIA GPU, torch.compile and CUDA graphs; "
        "auto runs uncompiled until they are ready, on waits.",
    )
    quantize: Quantize | None = Field(
        None,
        description="Quantize the target's weights. The output is then that of the quantized model. int4 is for CPUs, "
        "fp8 for NVIDIA GPUs. `blockdraft quantize` writes a model that loses less.",
    )
    kv_dtype: KVDtype | None = Field(
        None,
        description="Type of keys and values in the cache of a forward pass compiled for a CPU; int8 takes half the "
        "memory of bfloat16. By default bfloat16 for GGUF files, and the target's own elsewhere.",
    )
    max_context: Annotated[int | None, Flag("--max-model-len", metavar="TOKENS")] = Field(
        None,
        description="Maximum number of tokens of prompt and answer together; by default the model's own "
        "context, extended by its RoPE scaling. Output beyond that context may be poor.",
    )
    round_drafters: Annotated[bool, Flag("--round-drafter/--keep-drafter")] = Field(
        True,
        description="Quantize the drafter like the target, to 8 bits next to a target in bfloat16, or to fewer after "
        "quantization-aware training. Outputs do not change; slightly fewer tokens are accepted.",
    )
    exact: bool = Field(
        False,
        description="Make greedy answers equal those of plain decoding even at near ties, whatever is drafted and in "
        "any batch. Targets compiled for a CPU always do; others become slower.",
    )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's, where it is filled in."""
        import torch

        return getattr(torch, str(self.dtype))  # type: ignore[no-any-return]

    def store_dtype(self, default: torch.dtype) -> torch.dtype:
        """Return torch's dtype of keys and values."""
        import torch

        return default if self.kv_dtype is None else getattr(torch, self.kv_dtype)

    @property
    def torch_device(self) -> torch.device:
        """`device` as torch's, where it is filled in."""
        import torch

        return torch.device(str(self.device))

    def load_options(self) -> LoadOptions:
        """Return these options alone, without the fields of a subclass."""
        return LoadOptions(**{field.name: getattr(self, field.name) for field in fields(LoadOptions)})


DEFAULT_LOAD_OPTIONS = LoadOptions()


@settings
class SamplingParams:
    """How one request is decoded. Values out of range or of a wrong type raise a `UsageError`.

    Biases and penalties come first, then temperature, top-k, top-p and min-p, in the order of transformers.
    """

    max_new_tokens: Count = Field(256, description="Maximum length of the answer in tokens.")
    temperature: Annotated[float, Number] = Field(
        0.0, description="Divisor of the logits, 1e-30 to 1e30; 0 decodes greedily."
    )
    top_k: Natural = Field(0, description="Keep the k most probable tokens; 0 keeps all.")
    top_p: TopP = Field(
        1.0, description="Keep the most probable tokens that together reach this probability; 1 keeps all."
    )
    min_p: Share = Field(
        0.0, description="Keep tokens of at least this share of the best token's probability; 0 keeps all."
    )
    logit_bias: Annotated[Mapping[Token, Bias] | tuple[tuple[Token, Bias], ...], BeforeValidator(_as_pairs)] = Field(
        (), description="Added to the logits of these token ids before anything else, -100 to 100, as in OpenAI's API."
    )
    repetition_penalty: Positive = Field(
        1.0,
        description="Divides the positive and multiplies the negative logits of tokens that occur in prompt or output "
        "(arXiv 1909.05858); 1 is none. Penalties change greedy answers too.",
    )
    presence_penalty: Penalty = Field(
        0.0, description="Subtracted from the logits of tokens that occur in the output, -2 to 2, as in OpenAI's API."
    )
    frequency_penalty: Penalty = Field(
        0.0, description="Subtracted for each time that a token occurs in the output, -2 to 2, as in OpenAI's API."
    )
    seed: Annotated[int, Number, Field(ge=0, le=MAX_SEED)] | None = Field(
        None,
        description="The same seed gives the same tokens, with any drafter and block size. If unset, it is random.",
    )
    stop_token_ids: Annotated[tuple[Token, ...], BeforeValidator(_as_tuple)] = Field(
        (), description="Tokens that end the answer, besides the target's end tokens."
    )
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...] | str,
        BeforeValidator(_as_texts),
        Flag(repeat=True),
    ] = Field((), description="Text that ends the answer, which is cut before it. Several may be given.")
    ignore_eos: bool = Field(False, description="Go on past the target's end tokens, up to `max_new_tokens`.")
    logprobs: NumLogprobs | None = Field(
        None,
        description="Report the log probability of each token of the answer, and of this many of the likeliest tokens, "
        "0 to 20. It is the log-softmax of the target's logits, before biases, penalties, temperature and cuts. None "
        "reports nothing.",
    )
    prompt_logprobs: NumLogprobs | None = Field(
        None, description="The same for the prompt's tokens. The prompt's cached prefix is then not used."
    )
    grammar: Grammar | None = Field(
        None,
        description="A grammar that the answer follows. Once the text is complete, only the target's end tokens are "
        "allowed.",
    )
    prediction: Annotated[str | tuple[Token, ...], BeforeValidator(_as_tuple)] = Field(
        (),
        description="Text or token ids that much of the answer is expected to repeat, such as a file before an edit. "
        "It is drafted while the answer agrees with it, and found again after a change. It changes the speed and never "
        "the distribution of the answer.",
    )
    lookup_scope: str | None = Field(
        None,
        description="Name of the client or conversation whose earlier answers the drafter `lookup` may copy. Answers "
        "are never shared between scopes; None neither copies nor keeps any.",
    )

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN <= self.temperature <= MAX:
            raise SettingsError.of("temperature", "0 (greedy) or between 1e-30 and 1e30", self.temperature)
        if self.grammar is not None and self.ignore_eos:
            raise UsageError("ignore_eos goes on past the end, where a grammar allows no token; leave out one of them.")


@settings
class Drafting:
    """How far an engine drafts. It changes the speed and never the distribution of the output."""

    block_size: Count | Literal["auto"] | None = Field(
        "auto",
        description="Maximum number of tokens per block: the last token of the text and the draft tokens after it. "
        '"auto" drafts chains as long as pays off in each step, or none; with a tree budget it is the drafter\'s '
        "trained size.",
    )
    tree_budget: Natural | Literal["auto"] = Field(
        0,
        description='Maximum number of draft tokens per tree; 0 drafts chains. "auto" drafts as many as pay off, or '
        "none.",
    )
    sampled: bool = Field(
        False,
        description="At a temperature, sample draft tokens from the drafter's distribution instead of taking the "
        "likeliest. The distribution of the output is the target's either way, but the tokens of a seed then depend on "
        "the drafter.",
    )
    draft_window: Count | None = Field(
        None,
        description="Number of latest tokens that a draft pass attends to, which bounds its cost in long contexts.",
    )
    draft_passes: Count | None = Field(
        None,
        description="Draft passes per block: each one fixes the surest draft tokens for the next. By default "
        "what the drafter was made with, usually 1.",
    )

    def __post_init__(self) -> None:
        if self.sampled and self.tree_budget == "auto":
            raise SettingsError.of("tree_budget", "a number with sampled", "auto")

    @property
    def automatic(self) -> bool:
        """Whether the engine chooses in each step how far to draft."""
        return self.tree_budget == "auto" or (self.tree_budget == 0 and self.block_size == "auto")


@settings
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
    block_size: Count | None = None
    tree_budget: Natural | None = None


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
