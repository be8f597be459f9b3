"""A chat that is to be answered, and what its answer consists of, whatever format either of them came or goes in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from blockdraft.engine import Chunk, Stats
from blockdraft.types import SamplingParams, TokenLogprob


@dataclass(frozen=True)
class Speculation:
    """How far one request is drafted for; it changes the speed and never the distribution of the answer.

    Attributes:
        enabled: False decodes plainly.
        block_size: Most tokens of a block, anchor included; None is what the server drafts.
        tree_budget: Most guesses of a tree; None is what the server drafts.
        statistics: Whether the answer ends with the counts of its cycles.
        trace: Whether each piece of a streamed answer says what was guessed in its cycle.
        backend: Which of the server's backends decodes; None is its first.
    """

    enabled: bool = True
    block_size: int | None = None
    tree_budget: int | None = None
    statistics: bool = False
    trace: bool = False
    backend: str | None = None


@dataclass(frozen=True)
class ToolChoice:
    """Attributes:
    mode: "auto" leaves it to the model, "none" forbids calls, "required" asks for one at least.
    name: The tool that must be called; None leaves it to the model.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True)
class ChatJob:
    """A chat to answer.

    Attributes:
        messages: As chat templates of transformers take them: `role`, `content` (a text), and where there are any
            `tool_calls` (`{"id", "type": "function", "function": {"name", "arguments"}}`, the arguments a dict) or
            `tool_call_id`.
        max_new_tokens: Takes the place of that of `params`; None is what the context has room for.
        tools: OpenAI's function tools, `{"type": "function", "function": {"name", "description", "parameters"}}`.
        template: More variables of the chat template, such as `enable_thinking`.
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
    """A text to go on from, as it is. Attributes as in `ChatJob`.

    Attributes:
        prompt: A text or token ids.
        add_special_tokens: Whether a text gets those that the tokenizer puts around.
    """

    prompt: str | list[int]
    params: SamplingParams
    max_new_tokens: int | None = None
    speculation: Speculation = Speculation()
    add_special_tokens: bool = True


@dataclass(frozen=True)
class Text:
    """New text of the answer, maybe empty where only `chunk` is new.

    Attributes:
        chunk: The engine's piece that it came with, the first time that something of it is handed on; else None.
    """

    text: str
    chunk: Chunk | None = None


@dataclass(frozen=True)
class Reasoning:
    """New text of what the model thinks before it answers. `chunk` as in `Text`."""

    text: str
    chunk: Chunk | None = None


@dataclass(frozen=True)
class ToolCall:
    """New text of a tool call's arguments; the first piece of a call has its id and name.

    Attributes:
        index: Which call of the answer, from 0.
        arguments: More of the JSON text of its arguments.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens of a request.

    Attributes:
        prompt: Of the prompt; `cached` of them were remembered and not read again.
        completion: Of the answer; `reasoning` of them before it, as far as that is known.
        accepted: Guesses of the drafter that are part of the answer; `rejected` are those that are not.
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
        stop: The stop string that ended it, if one did.
    """

    reason: Literal["stop", "length", "tool_calls"]
    usage: Usage
    stats: Stats
    stop: str | None = None


Event: TypeAlias = "Text | Reasoning | ToolCall | Finished"


@dataclass(frozen=True)
class PromptRead:
    """The first event of a text job: its prompt, with what is known of each token where `params` asks for it."""

    ids: list[int]
    logprobs: list[TokenLogprob | None]


Answered: TypeAlias = "Event | PromptRead"  # of a text job
