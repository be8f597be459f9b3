"""The request that every API is converted to, and the events that every response is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from blockdraft.engine import Chunk, ExtraFile, Stats
from blockdraft.serving.schemas import Speculation
from blockdraft.types import SamplingParams, TokenLogprob


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model must call a tool, and which.

    Attributes:
        mode: "auto" lets the model decide, "none" forbids calls, "required" asks for at least one.
        name: Tool that must be called; None lets the model choose.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True)
class ChatMessages:
    """Messages for the chat template of the target.

    Attributes:
        messages: Messages as chat templates take them: `role`, `content` (a string) and optionally `tool_calls`
            (`{"id", "type": "function", "function": {"name", "arguments"}}`, the arguments a dict, or a text that is no
            JSON object) or `tool_call_id`.
        tools: OpenAI's function tools, `{"type": "function", "function": {"name", "description", "parameters"}}`.
        template: More variables of the chat template, such as `enable_thinking`.
        continue_final_message: Whether the response continues the last message; by default it does if that is a text of
            the assistant.
        add_generation_prompt: Whether the header of a new response is added; by default it is unless the last message
            is continued.
    """

    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    template: dict[str, Any] = field(default_factory=dict)
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


@dataclass(frozen=True)
class Infill:
    """Text before and behind a cursor, between which the model writes.

    Attributes:
        extra: Parts of other files, the most important last.
        begun: Text at the cursor that the model continues.
        max_seconds: Seconds after which the infill ends, once it has a line end; None is no limit.
        min_indent: Characters by which each new line must be indented; the infill ends before one that is not.
    """

    prefix: str
    suffix: str
    extra: tuple[ExtraFile, ...] = ()
    begun: str = ""
    max_seconds: float | None = None
    min_indent: int = 0


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and how to continue it.

    Attributes:
        prompt: A chat, an infill, or a text or token ids to continue without a chat template.
        params: Sampling parameters. `max_new_tokens` is ignored.
        n: Number of choices. If `params` has a seed, each choice adds its index to it.
        max_tokens: Maximum tokens of each choice. None, and more than the context has room for, mean as many as fit.
        add_special_tokens: Whether the tokenizer adds its special tokens to a text.
        source: Client and path, for the log.
        strict_schema: Whether keywords of an output schema that no grammar expresses are refused. Otherwise they are
            left out, with a warning.
        recorded: Whether a server that records its requests records this one.
    """

    prompt: ChatMessages | Infill | str | list[int]
    params: SamplingParams
    n: int = 1
    max_tokens: int | None = None
    add_special_tokens: bool = True
    strict_schema: bool = False
    speculation: Speculation = Speculation()
    source: str = ""
    recorded: bool = True


@dataclass(frozen=True)
class Usage:
    """Token counts of one choice.

    Attributes:
        prompt: Tokens of the prompt.
        cached: Prompt tokens that were found in the prefix cache.
        completion: Generated tokens, reasoning included.
        reasoning: Generated tokens that are reasoning.
        accepted: Draft tokens in the output.
        rejected: Draft tokens that were rejected.
        accepted_prediction, rejected_prediction: Those of the request's predicted output alone.
    """

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0
    accepted_prediction: int = 0
    rejected_prediction: int = 0


@dataclass(frozen=True)
class PrefillProgress:
    """Progress of a long prefill, before the first event of the choices.

    Attributes:
        num_prefilled, num_tokens: Prompt tokens of all choices that have been read, and all of them.
    """

    num_prefilled: int
    num_tokens: int


@dataclass(frozen=True)
class Started:
    """First event of a choice, sent after the prefill.

    Attributes:
        prompt_logprobs: Log-probability of each prompt token, if `params` asks for them; None for the first token.
        warnings: Parts of the request that were left out.
    """

    prompt_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None]
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class TextDelta:
    """New text of a choice.

    Attributes:
        text: The text. It may be empty if only `chunk` is new.
        reasoning: Whether the text is reasoning.
        chunk: Engine chunk that brought the text. Only the first event of a chunk has it.
    """

    text: str
    reasoning: bool = False
    chunk: Chunk | None = None


@dataclass(frozen=True)
class ToolCallDelta:
    """New arguments of a tool call that is being written. All of them are the beginning of its `ToolCall`'s.

    If the model goes on with what is no call after all, no `ToolCall` follows, and its text is a `TextDelta`.

    Attributes:
        index, id, name: As of the `ToolCall`.
        arguments: New part of the JSON text; empty in the first delta.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCall:
    """A complete tool call.

    Attributes:
        index: Position among the calls of the choice, from 0.
        arguments: JSON text of an object.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Finished:
    """Last event of a choice.

    Attributes:
        reason: Why the choice ended, in OpenAI's terms.
        stop: Stop string that ended the choice, if one did.
        context_full: Whether the context ended the choice before a clipped `max_tokens`.
    """

    reason: Literal["stop", "length", "tool_calls"]
    usage: Usage
    stats: Stats
    stop: str | None = None
    context_full: bool = False


Event: TypeAlias = "Started | TextDelta | ToolCallDelta | ToolCall | Finished"
