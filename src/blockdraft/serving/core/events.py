"""Jobs, which all APIs turn their requests into, and events, of which they make their answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from blockdraft.engine import Chunk, Stats
from blockdraft.types import SamplingParams, TokenLogprob


@dataclass(frozen=True)
class Speculation:
    """Drafting of one request. It changes the speed, never the distribution of the answer.

    Attributes:
        enabled: False decodes plainly.
        block_size: Most tokens of a block, anchor included; None is the server's limit.
        tree_budget: Most guesses of a tree; None is the server's limit.
        statistics: Whether the answer ends with statistics of drafting.
        trace: Whether each piece of a streamed answer holds the guesses of its cycle.
        backend: Name of the backend that decodes; None is the server's first.
    """

    enabled: bool = True
    block_size: int | None = None
    tree_budget: int | None = None
    statistics: bool = False
    trace: bool = False
    backend: str | None = None


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
class ChatJob:
    """A chat to answer.

    Attributes:
        messages: Messages in the shape of transformers' chat templates: `role`, `content` (a text) and, if any,
            `tool_calls` (`{"id", "type": "function", "function": {"name", "arguments"}}`, the arguments a dict) or
            `tool_call_id`.
        max_new_tokens: Replaces that of `params`; None allows what the context has room for.
        tools: OpenAI's function tools, `{"type": "function", "function": {"name", "description", "parameters"}}`.
        template: Further variables of the chat template, such as `enable_thinking`.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    max_new_tokens: int | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    speculation: Speculation = Speculation()
    template: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TextJob:
    """A text to continue without a chat template. Other attributes as in `ChatJob`.

    Attributes:
        prompt: A text or token ids.
        add_special_tokens: Whether the tokenizer adds its special tokens to a text.
    """

    prompt: str | list[int]
    params: SamplingParams
    max_new_tokens: int | None = None
    speculation: Speculation = Speculation()
    add_special_tokens: bool = True


@dataclass(frozen=True)
class Text:
    """New text of the answer. It may be empty where only `chunk` is new.

    Attributes:
        chunk: Chunk of the engine that brought the text. Only the first event of a chunk holds it, the others None.
    """

    text: str
    chunk: Chunk | None = None


@dataclass(frozen=True)
class Reasoning:
    """New text of the reasoning before the answer. `chunk` as in `Text`."""

    text: str
    chunk: Chunk | None = None


@dataclass(frozen=True)
class ToolCall:
    """New text of a tool call's arguments. The first event of a call holds its id and name.

    Attributes:
        index: Number of the call in the answer, from 0.
        arguments: Further JSON text of the arguments.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Usage:
    """Token counts of a request.

    Attributes:
        prompt: Tokens of the prompt.
        cached: Tokens of the prompt whose keys and values were still in memory.
        completion: Tokens of the answer, reasoning included.
        reasoning: Tokens of the reasoning, as far as it is told apart.
        accepted: Guesses of the drafter that are part of the answer.
        rejected: Guesses of the drafter that are not.
    """

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0


@dataclass(frozen=True)
class Finished:
    """The last event of an answer.

    Attributes:
        reason: Why the answer ended, in OpenAI's words.
        stop: Stop string that ended the answer, if one did.
    """

    reason: Literal["stop", "length", "tool_calls"]
    usage: Usage
    stats: Stats
    stop: str | None = None


Event: TypeAlias = "Text | Reasoning | ToolCall | Finished"


@dataclass(frozen=True)
class PromptRead:
    """The first event of a text job.

    Attributes:
        ids: Token ids of the prompt.
        logprobs: Log-probability of each of them, if `params` asks for it; the first token has none.
    """

    ids: list[int]
    logprobs: list[TokenLogprob | None]


Answered: TypeAlias = "Event | PromptRead"  # events of a text job
