"""Anthropic's Messages API: the routes /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from blockdraft.errors import UsageError
from blockdraft.serving.errors import ANTHROPIC_PATH, ApiError
from blockdraft.serving.metrics import draft_statistics
from blockdraft.serving.request import (
    ChatMessages,
    Event,
    Finished,
    GenerationRequest,
    Started,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    Usage,
)
from blockdraft.serving.schemas import (
    FORMAT_FIELDS,
    GenerationSchema,
    Listed,
    MaxTokens,
    NonEmpty,
    Part,
    Schema,
    Stops,
    format_grammar,
    function_tool,
    join_text,
    only_schema,
    parse_arguments,
    template_variables,
    tool_call,
    without,
)
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import NamedEventsResponse, data, respond, until_disconnect

# The first line of Claude Code's instructions differs in each request and would defeat the prefix cache.
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
# Blocks on tools that only Anthropic's servers run.
FOREIGN = re.compile(r"server_tool_use|mcp_tool_use|\w+_tool_result|container_upload|compaction|fallback")
PING = {"type": "ping"}


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/messages", response_model=None)
    async def messages(http: Request, body: MessagesRequest) -> Response:
        model = service.check_model(body.model)
        request = body.to_request(service.settings.temperature)
        response = MessagesResponse(service, model, request)
        return await respond(http, service, [request], response, body.stream, body.num_skipped)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(http: Request, body: CountRequest) -> dict[str, int]:
        service.check_model(body.model)
        counting = service.in_thread(service.count_tokens, body.to_chat())
        return {"input_tokens": await until_disconnect(http, counting)}

    return routes


class Block(Part):
    """A block of a message. The fields that it needs depend on its type."""

    unsupported = dict.fromkeys(("arguments", "parameters", "args"), ())  # for what this API calls input
    alternatives = dict.fromkeys(unsupported, "input")

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | str | None = None  # a text if a limit of tokens cut it
    tool_use_id: str | None = None
    content: str | Listed[Block] | None = None
    is_error: bool | None = None


class AnthropicMessage(Schema):
    unsupported = {"tool_calls": (), "function_call": ()}
    alternatives = dict.fromkeys(unsupported, "content")

    role: Literal["user", "assistant", "system"]
    content: str | Listed[Block]

    def to_template(self, place: str) -> list[dict[str, Any]]:
        """Return the messages that chat templates take for this one. Tool results become messages of their own.

        Args:
            place: Name of the content in error messages.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        blocks = [block for block in self.content if not FOREIGN.fullmatch(block.type)]
        if self.role == "assistant":
            return [_assistant_message(place, blocks)]
        messages, texts = list[dict[str, Any]](), list[Block]()
        for block in blocks:
            if block.type != "tool_result":
                texts.append(block)
                continue
            if block.tool_use_id is None:
                raise UsageError(f"{place} holds a tool_result without tool_use_id; give it.")
            if texts:
                messages.append({"role": self.role, "content": join_text(place, texts)})
                texts = []
            result = join_text(place, block.content or "")
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
        if texts or not messages:
            messages.append({"role": self.role, "content": join_text(place, texts)})
        return messages


def _assistant_message(place: str, blocks: Sequence[Block]) -> dict[str, Any]:
    texts = [block for block in blocks if block.type not in ("thinking", "redacted_thinking", "tool_use")]
    message: dict[str, Any] = {"role": "assistant", "content": join_text(place, texts)}
    thoughts = [block.thinking for block in blocks if block.type == "thinking" and block.thinking]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = []
    for block in blocks:
        if block.type == "tool_use":
            if block.id is None or block.name is None:
                raise UsageError(f"{place} holds a tool_use without id or name; give both.")
            arguments = parse_arguments(block.input) if isinstance(block.input, str) else block.input or {}
            calls.append(tool_call(block.id, block.name, arguments))
    if calls:
        message["tool_calls"] = calls
    return message


class AnthropicTool(Schema):
    """A tool. Anthropic itself runs types other than "custom"."""

    type: str | None = None
    name: NonEmpty
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    @property
    def known(self) -> bool:
        return self.type in (None, "custom")


class AnthropicToolChoice(Schema):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def to_choice(self) -> ToolChoice:
        if self.type == "tool":
            if not self.name:
                raise UsageError("tool_choice.name is missing; name one of the tools.")
            return ToolChoice("required", self.name)
        return ToolChoice("required" if self.type == "any" else self.type)


class Thinking(Schema):
    type: str


class AnthropicFormat(Schema):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]


class OutputConfig(Schema):
    effort: str | None = None
    format: AnthropicFormat | None = None


class CountRequest(Schema):
    """A chat whose tokens are counted."""

    unsupported = {"mcp_servers": ()}

    model: str
    messages: Annotated[Listed[AnthropicMessage], Field(min_length=1)]
    system: str | Listed[Block] | None = None
    tools: Listed[AnthropicTool] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_chat(self, choice: AnthropicToolChoice | None = None) -> ChatMessages:
        """Convert the chat. As in Anthropic's API, thinking is off unless the request asks for it."""
        messages = list[dict[str, Any]]()
        if system := BILLING.sub("", join_text("system", self.system or "")):
            messages.append({"role": "system", "content": system})
        for number, message in enumerate(self.messages):
            messages += message.to_template(f"messages.{number}.content")
        thinking = self.thinking is not None and self.thinking.type != "disabled"
        effort = self.output_config.effort if self.output_config else None
        return ChatMessages(
            messages,
            tools=self._tools(),
            tool_choice=choice.to_choice() if choice else ToolChoice(),
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            template=template_variables(effort, {"enable_thinking": thinking, **(self.chat_template_kwargs or {})}),
        )

    def _tools(self) -> tuple[dict[str, Any], ...]:
        """Return the tools as chat templates take them, without those that only Anthropic can run."""
        tools = []
        for tool in self.tools or ():
            if not tool.known:
                continue
            if tool.input_schema is None:
                raise UsageError(f"tools holds {tool.name} without input_schema; give the JSON schema of its input.")
            tools.append(function_tool(tool.name, tool.description, tool.input_schema))
        return tuple(tools)

    @property
    def num_skipped(self) -> int:
        """Number of tools and blocks that only Anthropic's servers know."""
        blocks = [
            block for message in self.messages if not isinstance(message.content, str) for block in message.content
        ]
        skipped = sum(FOREIGN.fullmatch(block.type) is not None for block in blocks)
        return skipped + sum(not tool.known for tool in self.tools or ())


class MessagesRequest(CountRequest, GenerationSchema):
    """A chat to continue."""

    alternatives = dict.fromkeys(FORMAT_FIELDS, "output_config.format")
    unsupported = without(GenerationSchema.unsupported, "output_config", "output_format") | CountRequest.unsupported
    unsupported |= {"n": (1,)}

    max_tokens: MaxTokens
    stop_sequences: Stops | None = None
    output_format: AnthropicFormat | None = None  # output_config.format under the name of its beta
    tool_choice: AnthropicToolChoice | None = None

    def to_request(self, default_temperature: float) -> GenerationRequest:
        """Convert the request. Raise a UsageError if a field has an unsupported value."""
        formats = [self.output_config and self.output_config.format, self.output_format]
        schemas = [form and form.schema_ for form in formats]
        schema = only_schema(dict(zip(("output_config.format", "output_format"), schemas, strict=True)))
        grammar = format_grammar("output_config.format", "json_schema", schema) if any(formats) else None
        params = self.to_sampling_params(default_temperature, grammar=grammar)
        return GenerationRequest(
            self.to_chat(self.tool_choice),
            replace(params, stop=(*params.stop, *(self.stop_sequences or ()))),
            max_tokens=self.max_tokens,
            strict_schema=True,  # as in Anthropic's API
            speculation=self.speculation,
            recorded=self.store is not False,
        )


class MessagesResponse(NamedEventsResponse):
    """A message and its content blocks so far."""

    keep_alive = f"event: ping\n{data(PING)}"

    def __init__(self, service: Service, model: str, request: GenerationRequest) -> None:
        self._id, self._model = f"msg_{uuid.uuid4().hex}", model
        self._statistics, self._max_draft_tokens = request.speculation.statistics, service.max_draft_tokens
        self._blocks = list[dict[str, Any]]()
        self._open = False  # whether the last block may still grow
        self._streamed = ""  # arguments of the tool call in the last block
        self._usage = Usage(0, 0)
        self._end: Finished | None = None

    def add(self, index: int, event: Event) -> Sequence[dict[str, Any]]:
        if isinstance(event, Started):
            self._usage = Usage(len(event.prompt_ids), 0)
            return [{"type": "message_start", "message": self.body()}, PING]
        if isinstance(event, Finished):
            self._end, self._usage = event, event.usage
            body = self.body()
            change: dict[str, Any] = {"type": "message_delta", "delta": {}, "usage": body["usage"]}
            change["delta"] = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
            if "metrics" in body:
                change["metrics"] = body["metrics"]
            return [*self._close(), change, {"type": "message_stop"}]
        if isinstance(event, ToolCallDelta | ToolCall):
            events, block = list[dict[str, Any]](), self._blocks[-1] if self._open else {}
            if block.get("id") != event.id:
                block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                events, self._streamed = self._begin(block), ""
            new = event.arguments
            if isinstance(event, ToolCall):
                block["input"], new = json.loads(event.arguments), event.arguments.removeprefix(self._streamed)
            self._streamed += new
            if new:
                events.append(self._delta({"type": "input_json_delta", "partial_json": new}))
            return [*events, *self._close()] if isinstance(event, ToolCall) else events
        return self._add_text(event) if event.text else ()

    def _add_text(self, event: TextDelta) -> list[dict[str, Any]]:
        kind, events = "thinking" if event.reasoning else "text", list[dict[str, Any]]()
        if not self._open or self._blocks[-1]["type"] != kind:
            # A signature proves that thinking comes from Anthropic's own models, so this one is empty.
            events = self._begin({"type": kind, kind: ""} | ({"signature": ""} if event.reasoning else {}))
        self._blocks[-1][kind] += event.text
        return [*events, self._delta({"type": f"{kind}_delta", kind: event.text})]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close()
        self._blocks.append(block)
        self._open = True
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = False
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def body(self) -> dict[str, Any]:
        body = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks),
            "stop_reason": self._end and _stop_reason(self._end),
            "stop_sequence": self._end and self._end.stop,
            "usage": {
                "input_tokens": self._usage.prompt - self._usage.cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": self._usage.cached,
                "output_tokens": self._usage.completion,
            },
        }
        if self._end and self._statistics:
            body["metrics"] = draft_statistics([self._end], self._max_draft_tokens)
        return body

    def fail(self, error: ApiError) -> Sequence[dict[str, Any]]:
        return [error.body(ANTHROPIC_PATH)]


def _stop_reason(end: Finished) -> str:
    if end.stop is not None:
        return "stop_sequence"
    if end.reason == "length":
        return "model_context_window_exceeded" if end.context_full else "max_tokens"
    return "tool_use" if end.reason == "tool_calls" else "end_turn"
