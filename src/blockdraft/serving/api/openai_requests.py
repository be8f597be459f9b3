"""Requests of /v1/chat/completions and /v1/completions: their schemas, and the jobs that they mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.serving.api.schemas import (
    SEEDS,
    Body,
    Listed,
    Sampled,
    TokenIds,
    sampling,
    speculation,
)
from blockdraft.serving.core.events import ChatJob, TextJob, ToolChoice
from blockdraft.types import MOST_LOGPROBS, Grammar

Job = TypeVar("Job", ChatJob, TextJob)


class JsonSchema(Body):
    name: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Part(Body):
    """A part of a message. Parts other than texts are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Body):
    name: str
    arguments: str = ""


class CalledTool(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    refused = {"function_call": (), "audio": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Listed[Part] | None = None
    name: str | None = None
    tool_calls: Listed[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Function(Body):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(Sampled):
    instead = dict.fromkeys(("guided_json", "structured_outputs", "json_schema"), "response_format") | {
        "functions": "tools",
        "function_call": "tool_choice",
        "n_predict": "max_tokens",
    }

    messages: Annotated[Listed[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Listed[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Sampled):
    refused = Sampled.refused | {"best_of": (1,), "response_format": ({"type": "text"},), "tools": ()}

    prompt: str | Listed[str] | TokenIds | Listed[TokenIds]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool = True


def choices(job: Job, n: int | None) -> list[Job]:
    """A job for each of `n` choices. Their seeds are the given one and those after it."""
    seed = job.params.seed
    return [
        replace(job, params=replace(job.params, seed=None if seed is None else (seed + number) % SEEDS))
        for number in range(n or 1)
    ]


def chat_job(body: ChatRequest, temperature: float) -> ChatJob:
    params = sampling(body, temperature)
    if body.top_logprobs and not body.logprobs:
        raise UsageError(f"top_logprobs is {body.top_logprobs} without logprobs; set logprobs to true.")
    if body.logprobs:
        params = replace(params, logprobs=body.top_logprobs or 0)
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise UsageError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}; give one of them."
        )
    return ChatJob(
        messages=messages(body.messages),
        params=replace(params, grammar=_grammar(body.response_format)),
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        tools=tuple(tools(body.tools)),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        speculation=speculation(body),
        template=template(body),
    )


def count(body: CompletionRequest) -> int:
    """Number of jobs of a completion, to be checked before they are made: a small body may ask for millions."""
    return len(_prompts(body.prompt)) * (body.n or 1)


def text_jobs(body: CompletionRequest, temperature: float) -> list[TextJob]:
    """Jobs of a completion: the choices of the first prompt, those of the second, and so on."""
    params = sampling(body, temperature)
    if body.logprobs is not None:
        params = replace(params, logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None)
    most = 1 if body.max_tokens == 0 else body.max_tokens  # the engine decodes at least one
    how = speculation(body)
    return [
        choice
        for prompt in _prompts(body.prompt)
        for choice in choices(
            TextJob(
                prompt=prompt,
                params=params,
                max_new_tokens=most,
                speculation=how,
                add_special_tokens=body.add_special_tokens,
            ),
            body.n,
        )
    ]


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    if not given:
        raise UsageError("prompt is empty; give at least one token.")
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return given


def with_usage(body: Sampled) -> bool:
    """Whether a stream ends with token counts."""
    return body.stream_options is not None and body.stream_options.include_usage


def template(body: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    if body.reasoning_effort == "none":
        effort["enable_thinking"] = False  # type: ignore[assignment]
    return {**effort, **(body.chat_template_kwargs or {})}


def tools(given: list[Tool] | None) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in given or []]


def messages(given: list[Message]) -> list[dict[str, Any]]:
    """Messages in the shape of chat templates."""
    return [_message(number, message) for number, message in enumerate(given)]


def _message(number: int, message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    made["content"] = _content(number, message)
    reasoning = message.reasoning_content or message.reasoning
    others = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    made |= {name: value for name, value in others.items() if value is not None}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id or f"call_{number}_{place}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(number, call.function.arguments)},
            }
            for place, call in enumerate(message.tool_calls)
        ]
    return made


def _content(number: int, message: Message) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise UsageError(f"messages.{number}.content is missing; a message of the role {message.role} needs one.")
        return ""
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type not in ("text", "input_text", "output_text", "refusal") or (part.refusal or part.text) is None:
            raise UsageError(
                f"messages.{number}.content holds a part of the type {part.type[:40]!r}; this model reads only texts, "
                f'as {{"type": "text", "text": "..."}}.'
            )
    return "\n".join(part.refusal or part.text or "" for part in message.content)


def _arguments(number: int, text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise UsageError(f"messages.{number}.tool_calls holds arguments that are not a JSON object; give one as text.")
    return arguments


def _tool_choice(body: ChatRequest) -> ToolChoice:
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return ToolChoice("none" if choice == "none" else "auto")
    if not body.tools:
        raise UsageError("tool_choice is given without tools; give tools, or leave tool_choice out.")
    if isinstance(choice, str):
        return ToolChoice("required")
    assert choice is not None
    names = [tool.function.name for tool in body.tools]
    if choice.function.name not in names:
        raise UsageError(f"tool_choice names {choice.function.name[:80]!r}; the tools are {', '.join(names)[:200]}.")
    return ToolChoice("required", choice.function.name)


def _grammar(given: ResponseFormat | None) -> Grammar | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Grammar("json_object")
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise UsageError("response_format is json_schema without a schema; give json_schema.schema.")
    return Grammar("json_schema", json.dumps(given.json_schema.schema_))
