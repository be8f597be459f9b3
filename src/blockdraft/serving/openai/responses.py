"""OpenAI's Responses API: the routes of /v1/responses."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from blockdraft.errors import UsageError
from blockdraft.serving.errors import ApiError
from blockdraft.serving.metrics import draft_statistics
from blockdraft.serving.openai.tool_choice import AnyToolChoice, NamedChoice, OfferedTool, choose_tools
from blockdraft.serving.request import (
    ChatMessages,
    Event,
    Finished,
    GenerationRequest,
    Started,
    ToolCall,
    ToolCallDelta,
)
from blockdraft.serving.schemas import (
    FOREIGN_PARAMETERS,
    FORMAT_FIELDS,
    GenerationSchema,
    Listed,
    MaxTokens,
    Part,
    Schema,
    Table,
    format_grammar,
    function_tool,
    join_text,
    parse_arguments,
    template_variables,
    text_tool,
    tool_call,
    tool_text,
    without,
)
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import NamedEventsResponse, respond

Messages = list[dict[str, Any]]
# Fields that responses repeat from the request, and those that are the same in each.
ECHOED_FIELDS = (
    *("instructions", "max_output_tokens", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
)
ECHOED_PARAMS = ("frequency_penalty", "presence_penalty", "temperature", "top_p")
CALL_EVENTS = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}
FIXED_FIELDS = {
    "background": False,
    "max_tool_calls": None,
    "service_tier": "default",
    "top_logprobs": 0,
    "truncation": "disabled",
}


def router(service: Service) -> APIRouter:
    routes, settings = APIRouter(), service.settings
    store = ResponseStore(settings.max_stored)

    @routes.post("/v1/responses", response_model=None)
    async def create(http: Request, body: ResponsesRequest) -> Response:
        model = service.check_model(body.model)
        before = store.get(body.previous_response_id).messages if body.previous_response_id else []
        items = body.input
        if not isinstance(items, str):
            items = [store.item(item.id) or item if item.type == "item_reference" else item for item in items]
        messages = [*before, *template_messages(items)]
        request = body.to_request(messages, settings.temperature)

        def save(response: ResponsesResponse) -> None:
            if body.store is not False:
                store.put(response.id, StoredResponse(response.body(), [*messages, *response.output_messages()]))

        response = ResponsesResponse(service, model, body, request, on_end=save)
        skipped = body.num_skipped_tools + sum(isinstance(item, Item) and not item.known for item in items)
        return await respond(http, service, [request], response, body.stream, skipped)

    @routes.get("/v1/responses/{response_id}")
    async def read(response_id: str, stream: bool = False) -> dict[str, Any]:
        if stream:
            raise ApiError(400, "stream is true; stored responses are sent whole, so leave it out.", param="stream")
        return store.get(response_id).body

    @routes.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> dict[str, Any]:
        store.remove(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return routes


class StoredResponse(NamedTuple):
    """A finished response.

    Attributes:
        body: The response as JSON.
        messages: The conversation up to its end, without instructions.
    """

    body: dict[str, Any]
    messages: Messages


class ResponseStore:
    """The latest responses, in memory.

    Args:
        max_bytes: Approximate size limit. The oldest responses are dropped to stay below it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._bytes = 0

    def put(self, response_id: str, response: StoredResponse) -> None:
        size = len(json.dumps(response))
        self._responses[response_id] = response, size
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= self._responses.popitem(last=False)[1][1]

    def get(self, response_id: str) -> StoredResponse:
        """Return a response, or raise an ApiError (404) if it is not stored."""
        if response_id not in self._responses:
            raise ApiError(
                404,
                f"The response {response_id[:80]!r} is not stored; the server keeps only the latest, in memory. "
                f"Send the whole conversation as input.",
                kind="invalid_request_error",
                param="previous_response_id",
            )
        return self._responses[response_id][0]

    def item(self, item_id: str | None) -> Item | None:
        """Return an output item of a stored response, or None if there is none of this id."""
        outputs = (item for response, _ in self._responses.values() for item in response.body["output"])
        return next((Item.model_validate(item) for item in outputs if item["id"] == item_id), None)

    def remove(self, response_id: str) -> None:
        """Remove a response, or raise an ApiError (404) if it is not stored."""
        self.get(response_id)
        self._bytes -= self._responses.pop(response_id)[1]


class Item(Schema):
    """A message, a tool call, its result, or reasoning. The fields that it needs depend on its type."""

    type: str = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Listed[Part] | None = None
    summary: Listed[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Listed[Part] | None = None

    @property
    def known(self) -> bool:
        """Whether a chat template can take the item. Others say what OpenAI's servers did."""
        return self.type == "reasoning" or self.type in REQUIRED_FIELDS

    def to_template(self, place: str) -> dict[str, Any] | None:
        """Return the item as a message for chat templates, or None if it is skipped.

        Args:
            place: Name of the item in error messages.

        Raises:
            UsageError: A field that its type needs is missing, or its type is unknown.
        """
        if not self.known:
            if FOREIGN_ITEMS.fullmatch(self.type) is None:
                raise UsageError(
                    f"{place} is of the unknown type {self.type[:40]!r}; use {', '.join(REQUIRED_FIELDS)}."
                )
            return None
        if self.type == "message" and self.role is not None and self.content is not None:
            return {"role": self.role, "content": join_text(f"{place}.content", self.content)}
        if self.type == "function_call" and self.call_id and self.name and (self.arguments or not self.input):
            return self._call(self.call_id, _full_name(self.namespace, self.name), parse_arguments(self.arguments))
        if self.type == "custom_tool_call" and self.call_id and self.name and self.input is not None:
            return self._call(self.call_id, _full_name(self.namespace, self.name), {"input": self.input})
        if (
            self.type in ("function_call_output", "custom_tool_call_output")
            and self.call_id
            and self.output is not None
        ):
            output = join_text(f"{place}.output", self.output)
            return {"role": "tool", "tool_call_id": self.call_id, "content": output}
        if self.type == "reasoning":
            reasoning = join_text(place, self.content or self.summary or "")
            return {"role": "assistant", "content": "", "reasoning_content": reasoning}
        raise UsageError(f"{place} is a {self.type} with a missing field; it needs {REQUIRED_FIELDS[self.type]}.")

    @staticmethod
    def _call(call_id: str, name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": [tool_call(call_id, name, arguments)]}


# Items on what OpenAI's servers or a client did that no chat template takes.
FOREIGN_ITEMS = re.compile(
    r"item_reference|compaction\w*|ghost_snapshot|image_generation_call|mcp_\w+"
    r"|(?:apply_patch|code_interpreter|computer|file_search|\w*shell|tool_search|web_search)_(?:call|output|call_output)"
)
REQUIRED_FIELDS = {
    "message": "role and content",
    "function_call": "call_id, name and arguments",
    "function_call_output": "call_id and output",
    "custom_tool_call": "call_id, name and input",
    "custom_tool_call_output": "call_id and output",
}


def template_messages(items: str | Sequence[Item]) -> Messages:
    """Return the input as messages for chat templates.

    Consecutive reasoning, text and calls of the assistant, in this order, become one message. Items that no
    template takes are skipped.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}] if items else []
    messages: Messages = []
    for number, item in enumerate(items):
        message = item.to_template(f"input.{number}")
        if message is None:
            continue
        last: dict[str, Any] = messages[-1] if messages else {"role": None}
        if message["role"] != "assistant" or last["role"] != "assistant":
            messages.append(message)
        elif "tool_calls" in message:
            messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
        elif "reasoning_content" not in message and not last["content"] and "tool_calls" not in last:
            messages[-1] = {**last, "content": message["content"]}
        else:
            messages.append(message)
    return messages


def _full_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def _offer(tool: dict[str, Any], namespace: str | None = None) -> list[OfferedTool]:
    """Return the tools that a tool of a request stands for, or none if only OpenAI's servers can run it."""
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom", "namespace"):
        return []
    if not isinstance(name, str) or not name:
        raise UsageError(f"tools holds {str(tool)[:80]}; every {kind} needs a name.")
    if kind == "namespace":
        inner = tool.get("tools")
        if namespace is not None or not isinstance(inner, list) or not all(isinstance(tool, dict) for tool in inner):
            raise UsageError(f"tools holds the namespace {name} without a list of tools; give its functions.")
        return [offered for tool in inner for offered in _offer(tool, name)]
    full, call = _full_name(namespace, name), {"name": name} | ({"namespace": namespace} if namespace else {})
    if kind == "custom":
        return [OfferedTool(full, text_tool(full, tool.get("description"), tool.get("format")), True, call)]
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    if foreign := next((key for key in FOREIGN_PARAMETERS if tool.get(key)), None):
        raise UsageError(f"tools holds {name} with {foreign}, which this API lacks; use parameters.")
    if not isinstance(parameters, dict):
        raise UsageError(f"tools holds parameters of {name} that are not the JSON schema of an object; give one.")
    return [OfferedTool(full, function_tool(full, tool.get("description"), parameters), False, call)]


class TextFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Schema):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Schema):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(GenerationSchema):
    alternatives = dict.fromkeys(FORMAT_FIELDS, "text.format") | {"max_tokens": "max_output_tokens"}
    unsupported = without(GenerationSchema.unsupported, "text") | {
        "n": (1,),
        "max_tokens": (),
        "background": (False,),
        "conversation": (),
        "top_logprobs": (0,),
    }

    input: str | Listed[Item] = ""
    instructions: str | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    max_output_tokens: MaxTokens | None = None
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    include: Listed[str] | None = None
    metadata: Table[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def format(self) -> TextFormat:
        return self.text.format or TextFormat(type="text")

    @cached_property
    def offered(self) -> list[OfferedTool]:
        """The tools that the model may call."""
        return [offered for tool in self.tools or () for offered in _offer(tool)]

    @property
    def num_skipped_tools(self) -> int:
        return sum(not _offer(tool) for tool in self.tools or ())

    def to_request(self, messages: Messages, default_temperature: float) -> GenerationRequest:
        """Convert the request.

        Args:
            messages: The conversation, including the input of this request.

        Raises:
            UsageError: A field has an unsupported value.
        """
        if "message.output_text.logprobs" in (self.include or ()):
            raise UsageError(
                "include names logprobs, which /v1/responses lacks; leave them out, or use /v1/chat/completions."
            )
        if not messages:
            raise UsageError("input is empty; give a text, or a list of items.")
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        choice, tools = choose_tools(self.tool_choice, self.offered)
        return GenerationRequest(
            prompt=ChatMessages(
                messages=[*instructions, *messages],
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=self.parallel_tool_calls is not False,
                template=template_variables(self.reasoning.effort, self.chat_template_kwargs),
            ),
            params=self.to_sampling_params(
                default_temperature, grammar=format_grammar("text.format", self.format.type, self.format.schema_)
            ),
            max_tokens=self.max_output_tokens,
            strict_schema=self.format.strict is True,
            speculation=self.speculation,
            recorded=self.store is not False,
        )


class ResponsesResponse(NamedEventsResponse):
    """A response and its output items so far.

    Args:
        model: Name of the model in the request.
        on_end: Called with the finished response before its last event, whose reader may continue from it at once.
    """

    def __init__(
        self,
        service: Service,
        model: str,
        body: ResponsesRequest,
        request: GenerationRequest,
        on_end: Callable[[ResponsesResponse], None],
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._on_end = on_end
        self._statistics, self._max_draft_tokens = request.speculation.statistics, service.max_draft_tokens
        self._status, self._sequence_number = "in_progress", 0
        self._completed: int | None = None
        self._error: dict[str, Any] | None = None
        self._end: Finished | None = None
        self._items = list[dict[str, Any]]()
        self._open = False  # whether the last item may still grow
        choice = body.tool_choice
        self._tools = {tool.name: tool for tool in body.offered}
        self._echo = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **FIXED_FIELDS,
            **{name: getattr(body, name) for name in ECHOED_FIELDS},
            **{name: getattr(request.params, name) for name in ECHOED_PARAMS},
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
            "store": body.store is not False,
            "text": {"format": body.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice.echo if isinstance(choice, NamedChoice) else choice or "auto",
            "tools": [_tool_echo(tool) for tool in body.tools or () if _offer(tool)],
        }

    def body(self) -> dict[str, Any]:
        body = {
            **self._echo,
            "status": self._status,
            "completed_at": self._completed,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": list(self._items),
            "usage": self._end and _usage(self._end),
        }
        if self._end and self._statistics:
            body["metrics"] = draft_statistics([self._end], self._max_draft_tokens)
        return body

    def output_messages(self) -> Messages:
        """Return the output as messages of the next request."""
        items = [item for item in self._items if item["status"] != "incomplete" or item["type"] not in CALL_EVENTS]
        return template_messages([Item.model_validate(item) for item in items])

    def add(self, index: int, event: Event) -> Sequence[dict[str, Any]]:
        if isinstance(event, Started):
            return [self._response("created"), self._response("in_progress")]
        if isinstance(event, ToolCallDelta | ToolCall):
            return self._add_call(event)
        if isinstance(event, Finished):
            return self._finish(event)
        if not event.text:
            return ()
        kind = "reasoning" if event.reasoning else "message"
        events = [] if self._open and self._items[-1]["type"] == kind else self._begin_text(kind)
        self._items[-1]["content"][0]["text"] += event.text
        return [*events, self._text_event("delta", delta=event.text)]

    def _add_call(self, event: ToolCallDelta | ToolCall) -> list[dict[str, Any]]:
        tool = self._tools.get(event.name)
        kind, field, text = "function_call", "arguments", event.arguments
        if tool is not None and tool.is_text:
            if isinstance(event, ToolCallDelta):  # its text is inside of the arguments
                return []
            kind, field, text = "custom_tool_call", "input", tool_text(event.arguments)
        events = list[dict[str, Any]]()
        if not self._open or self._items[-1].get("call_id") != event.id:
            call = tool.call if tool else {"name": event.name}
            prefix = "ctc" if field == "input" else "fc"
            events = self._begin(kind, prefix, {"call_id": event.id, **call, field: ""})
        item = self._items[-1]
        if isinstance(event, ToolCall):
            text = text.removeprefix(item[field])
        item[field] += text
        if text:
            events.append(self._event(f"{CALL_EVENTS[kind]}.delta", delta=text))
        return [*events, *self._close()] if isinstance(event, ToolCall) else events

    def fail(self, error: ApiError) -> Sequence[dict[str, Any]]:
        self._status, self._error = "failed", {"code": "server_error", "message": error.message}
        return [self._response("failed")]

    def _finish(self, end: Finished) -> list[dict[str, Any]]:
        self._end = end
        events = [] if self._items else self._begin_text("message")
        self._status = "incomplete" if end.reason == "length" else "completed"
        events += self._close(self._status)
        self._completed = int(time.time()) if self._status == "completed" else None
        self._on_end(self)
        return [*events, self._response(self._status)]

    def _begin_text(self, kind: str) -> list[dict[str, Any]]:
        if kind == "message":
            events = self._begin(kind, "msg", {"role": "assistant", "content": []})
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            events = self._begin(kind, "rs", {"summary": [], "content": []})
            part = {"type": "reasoning_text", "text": ""}
        self._items[-1]["content"].append(part)
        return [*events, self._part_event("added")]

    def _begin(self, kind: str, prefix: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        unfinished = self._open and self._items[-1]["type"] in CALL_EVENTS  # the model went on with something else
        events = self._close("incomplete" if unfinished else "completed")
        self._items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields})
        self._open = True
        return [*events, self._item_event("added")]

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """Return the last events of the open item, if there is one."""
        if not self._open:
            return []
        self._open, item = False, self._items[-1]
        item["status"] = status
        if item["type"] in CALL_EVENTS:
            field = "input" if "input" in item else "arguments"
            done = [self._event(f"{CALL_EVENTS[item['type']]}.done", **{field: item[field]})]
        else:
            done = [self._text_event("done", text=item["content"][0]["text"]), self._part_event("done")]
        return [*done, self._item_event("done")]

    def _response(self, status: str) -> dict[str, Any]:
        return self._numbered(f"response.{status}", response=self.body())

    def _item_event(self, status: str) -> dict[str, Any]:
        item = dict(self._items[-1])
        if "content" in item:
            item["content"] = [dict(part) for part in item["content"]]
        return self._numbered(f"response.output_item.{status}", output_index=len(self._items) - 1, item=item)

    def _part_event(self, status: str) -> dict[str, Any]:
        return self._event(f"content_part.{status}", content_index=0, part=dict(self._items[-1]["content"][0]))

    def _text_event(self, status: str, **fields: Any) -> dict[str, Any]:
        kind = self._items[-1]["content"][0]["type"]
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        return self._event(f"{kind}.{status}", content_index=0, **fields, **logprobs)

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        item = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._numbered(f"response.{name}", **item, **fields)

    def _numbered(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number - 1, **fields}


def _tool_echo(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as responses repeat it."""
    if tool["type"] != "function":
        return tool
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    function = function_tool(tool["name"], tool.get("description"), parameters)["function"]
    return {"type": "function", **function, "strict": tool.get("strict") is True}


def _usage(end: Finished) -> dict[str, Any]:
    usage = end.usage
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.accepted_prediction,
            "rejected_prediction_tokens": usage.rejected_prediction,
        },
        "total_tokens": usage.prompt + usage.completion,
    }
