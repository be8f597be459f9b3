"""Anthropic's Messages API: the routes /v1/messages and /v1/messages/count_tokens, their schemas and answers.

Unknown fields of a request are ignored.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from blockdraft.errors import UsageError
from blockdraft.serving.api.schemas import Body, Listed, Sampled, Stops, Tokens, Word, sampling, speculation
from blockdraft.serving.api.streaming import data, stream, until_gone
from blockdraft.serving.core.events import ChatJob, Event, Finished, Reasoning, Text, ToolCall, ToolChoice, Usage
from blockdraft.serving.core.metrics import metrics_of
from blockdraft.serving.core.service import Service
from blockdraft.types import Grammar

PING_SECONDS = 10.0  # without an event, as while a tool call is written, until the client gets a ping
# Claude Code's first line differs in each request, so nothing behind it could be taken from the prefix cache.
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/messages", response_model=None)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        name = service.check_model(body.model)
        job = job_of(body, service.settings.temperature)
        counting = service.in_thread(service.count_tokens, job.messages, job.tools, job.template)
        prompt = await until_gone(request, counting)
        # Clients ask for 32,000 tokens and more. As in Anthropic's API, the context may end the answer earlier.
        fits = prompt + body.max_tokens <= service.context
        job = replace(job, max_new_tokens=body.max_tokens if fits else None)
        answer = Answer(
            model=name,
            prompt=prompt,
            when_cut="max_tokens" if fits else "model_context_window_exceeded",
            max_draft_tokens=service.max_draft_tokens,
        )
        if body.stream:
            return await stream(request, streamed(service, job, answer), service.settings.stall_seconds)
        return JSONResponse(await until_gone(request, whole(service, job, answer)))

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: CountRequest) -> dict[str, int]:
        service.check_model(body.model)
        tools = tools_of(body.tools)
        counting = service.in_thread(service.count_tokens, messages_of(body), tools, template_of(body))
        return {"input_tokens": await until_gone(request, counting)}

    return routes


async def whole(service: Service, job: ChatJob, answer: Answer) -> dict[str, Any]:
    """The answer at once."""
    async with aclosing(service.chat(job)) as events:
        async for event in events:
            answer.add(event)
    return answer.message(job.speculation.statistics)


async def streamed(service: Service, job: ChatJob, answer: Answer) -> AsyncIterator[str]:
    """The same as server-sent events."""
    told = 0.0
    async with aclosing(service.chat(job)) as events:
        async for event in events:
            if not told:
                yield _event({"type": "message_start", "message": answer.message()})
                yield _event({"type": "ping"})
                told = time.monotonic()
            for wire in answer.add(event):
                yield _event(wire)
                told = time.monotonic()
            if time.monotonic() > told + PING_SECONDS:
                yield _event({"type": "ping"})
                told = time.monotonic()
    ended = answer.message(job.speculation.statistics)
    delta = {"stop_reason": ended["stop_reason"], "stop_sequence": ended["stop_sequence"]}
    more = {"metrics": ended["metrics"]} if "metrics" in ended else {}
    yield _event({"type": "message_delta", "delta": delta, "usage": ended["usage"], **more})
    yield _event({"type": "message_stop"})


def _event(wire: dict[str, Any]) -> str:
    return f"event: {wire['type']}\n{data(wire)}"


class Answer:
    """An answer as it grows.

    Args:
        model: Name of the model in the request.
        prompt: Tokens of the prompt.
        when_cut: Stop reason of an answer that reaches its limit of tokens.
        max_draft_tokens: Most guesses of a cycle.
    """

    def __init__(self, model: str, prompt: int, when_cut: str, max_draft_tokens: int) -> None:
        self._id, self._model = f"msg_{uuid.uuid4().hex}", model
        self._when_cut, self._max_draft_tokens = when_cut, max_draft_tokens
        self._blocks = list[dict[str, Any]]()
        self._inputs = dict[int, str]()  # JSON text of a tool's input, by the number of its block
        self._open = False
        self._usage, self._end = Usage(prompt, 0), None

    _end: Finished | None

    def add(self, event: Event) -> list[dict[str, Any]]:
        """The server-sent events that an event of the job becomes."""
        if isinstance(event, Finished):
            self._end, self._usage = event, event.usage
            return self._close()
        if isinstance(event, ToolCall):
            wires = []
            if event.id is not None:
                wires = self._begin({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
                self._inputs[len(self._blocks) - 1] = ""
            self._inputs[len(self._blocks) - 1] += event.arguments
            return [*wires, self._delta({"type": "input_json_delta", "partial_json": event.arguments})]
        return self._grow(event) if event.text else []

    def _grow(self, event: Text | Reasoning) -> list[dict[str, Any]]:
        kind = "thinking" if isinstance(event, Reasoning) else "text"
        wires = []
        if not self._open or self._blocks[-1]["type"] != kind:
            # A signature proves that reasoning comes from Anthropic's own models, so this one is empty.
            wires = self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._blocks[-1][kind] += event.text
        return [*wires, self._delta({"type": f"{kind}_delta", kind: event.text})]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        wires = self._close()
        self._blocks.append(block)
        self._open = True
        return [*wires, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open, last = False, len(self._blocks) - 1
        if last in self._inputs:
            self._blocks[last]["input"] = json.loads(self._inputs[last] or "{}")
        return [{"type": "content_block_stop", "index": last}]

    def message(self, statistics: bool = False) -> dict[str, Any]:
        """The message so far. `statistics` adds those of drafting to a finished one."""
        usage = {
            "input_tokens": self._usage.prompt - self._usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._usage.cached,
            "output_tokens": self._usage.completion,
        }
        end, reason = self._end, None
        if end is not None:
            reason = {"length": self._when_cut, "tool_calls": "tool_use"}.get(end.reason, "end_turn")
            reason = "stop_sequence" if end.stop is not None else reason
        message = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks),
            "stop_reason": reason,
            "stop_sequence": None if end is None else end.stop,
            "usage": usage,
        }
        return message | ({"metrics": metrics_of([end], self._max_draft_tokens)} if statistics and end else {})


class Block(Body):
    """A part of a message. The fields that it needs depend on its type; see `messages_of`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Listed[Block] | None = None
    is_error: bool | None = None


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Listed[Block]


class Tool(Body):
    """A tool. Types other than "custom" are run by Anthropic itself."""

    type: str | None = None
    name: Word
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class Choice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    type: str


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """A chat whose tokens are to be counted."""

    refused = {"mcp_servers": ()}

    model: Word
    messages: Annotated[Listed[Message], Field(min_length=1)]
    system: str | Listed[Block] | None = None
    tools: Listed[Tool] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, Sampled):
    """A chat to answer. Fields of `Sampled` that Anthropic's API lacks are accepted too."""

    refused = Sampled.refused | CountRequest.refused | {"n": (1,)}

    max_tokens: Tokens
    stop_sequences: Stops | None = None
    output_format: OutputFormat | None = None  # output_config.format under the name of its beta
    tool_choice: Choice | None = None


def job_of(body: MessagesRequest, temperature: float) -> ChatJob:
    """The job of a request, without a limit of its tokens.

    Args:
        temperature: Temperature of requests that name none.

    Raises:
        UsageError: A field holds an unsupported value.
    """
    params = sampling(body, temperature)
    tools = tools_of(body.tools)
    form = (body.output_config and body.output_config.format) or body.output_format
    grammar = None if form is None else Grammar("json_schema", json.dumps(form.schema_))
    if body.messages[-1].role == "assistant":
        raise UsageError(
            "messages ends with the role assistant; continuing an answer is not supported, so end with the role user."
        )
    return ChatJob(
        messages=messages_of(body),
        params=replace(params, stop=(*params.stop, *(body.stop_sequences or ())), grammar=grammar),
        tools=tuple(tools),
        tool_choice=_choice(body.tool_choice, tools),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        speculation=speculation(body),
        template=template_of(body),
    )


def template_of(body: CountRequest) -> dict[str, Any]:
    """Variables of the chat template. As in Anthropic's API, thinking is off unless the request asks for it."""
    thinking = body.thinking is not None and body.thinking.type != "disabled"
    effort = body.output_config.effort if body.output_config else None
    given = {} if effort is None else {"reasoning_effort": effort}
    return {"enable_thinking": thinking, **given, **(body.chat_template_kwargs or {})}


def tools_of(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Tools in OpenAI's shape. Those that only Anthropic can run are left out."""
    own = [tool for tool in tools or () if tool.type in (None, "custom")]
    for tool in own:
        if tool.input_schema is None:
            raise UsageError(f"tools holds {tool.name} without input_schema; give the JSON schema of its input.")
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in own
    ]


def _choice(choice: Choice | None, tools: list[dict[str, Any]]) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "none":
        return ToolChoice("none")
    names = [tool["function"]["name"] for tool in tools]
    if not names:
        raise UsageError(f"tool_choice is {choice.type!r} without tools; give tools, or leave tool_choice out.")
    if choice.type == "any":
        return ToolChoice("required")
    if choice.name not in names:
        raise UsageError(f"tool_choice names {str(choice.name)[:80]!r}; the tools are {', '.join(names)[:200]}.")
    return ToolChoice("required", choice.name)


def messages_of(body: CountRequest) -> list[dict[str, Any]]:
    """Messages in the shape of chat templates, the system prompt first.

    Raises:
        UsageError: A block is not a text, or lacks a field that its type needs.
    """
    messages = list[dict[str, Any]]()
    if system := BILLING.sub("", _texts("system", body.system or "")):
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(body.messages):
        place = f"messages.{number}.content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(place, message.content))
        else:
            messages += _said(place, message.role, message.content)
    return messages


def _assistant(place: str, blocks: list[Block]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": ""}
    made["content"] = _texts(
        place, [one for one in blocks if one.type not in ("thinking", "redacted_thinking", "tool_use")]
    )
    thoughts = [one.thinking for one in blocks if one.type == "thinking" and one.thinking]
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    calls = [one for one in blocks if one.type == "tool_use"]
    if any(one.id is None or one.name is None for one in calls):
        raise UsageError(f"{place} holds a tool_use without id or name; give both.")
    if calls:
        made["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.input or {}}}
            for one in calls
        ]
    return made


def _said(place: str, role: str, blocks: list[Block]) -> list[dict[str, Any]]:
    """Messages for a message of the user. Results of tools in it become messages of their own."""
    made, texts = list[dict[str, Any]](), list[Block]()
    for block in blocks:
        if block.type != "tool_result":
            texts.append(block)
            continue
        if block.tool_use_id is None:
            raise UsageError(f"{place} holds a tool_result without tool_use_id; give it.")
        if texts:
            made.append({"role": role, "content": _texts(place, texts)})
            texts = []
        text = _texts(place, block.content or "")
        made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    if texts or not made:
        made.append({"role": role, "content": _texts(place, texts)})
    return made


def _texts(place: str, content: str | Listed[Block]) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise UsageError(
                f"{place} holds a block of the type {block.type[:40]!r}; this model reads only texts, as "
                f'{{"type": "text", "text": "..."}}.'
            )
    return "\n".join(block.text or "" for block in content)
