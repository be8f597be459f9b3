"""OpenAI's Responses API: the routes of /v1/responses."""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from blockdraft.errors import UsageError
from blockdraft.serving.errors import ApiError
from blockdraft.serving.metrics import draft_statistics
from blockdraft.serving.request import Chat, Event, Finished, GenerationRequest, Started, ToolCall, ToolChoice
from blockdraft.serving.schemas import (
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
    tool_call,
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
        messages = [*before, *template_messages(body.input)]
        request = body.to_request(messages, settings.temperature)

        def save(response: ResponsesResponse) -> None:
            if body.store is not False:
                store.put(response.id, StoredResponse(response.body(), [*messages, *response.output_messages()]))

        response = ResponsesResponse(service, model, body, request, on_end=save)
        return await respond(http, service, [request], response, body.stream)

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

    def remove(self, response_id: str) -> None:
        """Remove a response, or raise an ApiError (404) if it is not stored."""
        self.get(response_id)
        self._bytes -= self._responses.pop(response_id)[1]


class Item(Schema):
    """A message, a tool call, its result, or reasoning. The fields that it needs depend on its type."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Listed[Part] | None = None
    summary: Listed[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Listed[Part] | None = None

    def to_template(self, place: str) -> dict[str, Any]:
        """Return the item as a message for chat templates.

        Args:
            place: Name of the item in error messages.

        Raises:
            UsageError: The type is unsupported, or a field that it needs is missing.
        """
        if self.type == "message" and self.role is not None and self.content is not None:
            role = "system" if self.role == "developer" else self.role
            return {"role": role, "content": join_text(f"{place}.content", self.content)}
        if self.type == "function_call" and self.call_id and self.name:
            call = tool_call(self.call_id, self.name, parse_arguments(f"{place}.arguments", self.arguments))
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "function_call_output" and self.call_id and self.output is not None:
            output = join_text(f"{place}.output", self.output)
            return {"role": "tool", "tool_call_id": self.call_id, "content": output}
        if self.type == "reasoning":
            reasoning = join_text(place, self.content or self.summary or "")
            return {"role": "assistant", "content": "", "reasoning_content": reasoning}
        if self.type in REQUIRED_FIELDS:
            raise UsageError(f"{place} is a {self.type} with a missing field; it needs {REQUIRED_FIELDS[self.type]}.")
        raise UsageError(
            f"{place} is of type {self.type[:40]!r}; it must be one of {', '.join(REQUIRED_FIELDS)}, reasoning."
        )


REQUIRED_FIELDS = {
    "message": "role and content",
    "function_call": "call_id, name and arguments",
    "function_call_output": "call_id and output",
}


def template_messages(items: str | Sequence[Item]) -> Messages:
    """Return the input as messages for chat templates.

    Consecutive reasoning, text and calls of the assistant, in this order, become one message.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}] if items else []
    messages: Messages = []
    for number, item in enumerate(items):
        message = item.to_template(f"input.{number}")
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


class ResponsesToolChoice(Schema):
    """A choice of tools. The type `allowed_tools` restricts it to some of the tools."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Listed[dict[str, Any]] = []

    @property
    def echo(self) -> dict[str, Any]:
        """The choice as responses repeat it."""
        return self.model_dump(include={"type", "name"} if self.type == "function" else {"type", "mode", "tools"})


class TextFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Schema):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Schema):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(GenerationSchema):
    unsupported = GenerationSchema.unsupported | {
        "n": (1,),
        "max_tokens": (),
        "background": (False,),
        "conversation": (),
        "top_logprobs": (0,),
    }

    input: str | Listed[Item] = ""
    instructions: str | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
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

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The function tools, as responses repeat them.

        Other tools are left out: OpenAI's servers run them, or their calls have a format that chat templates lack.
        """
        functions = []
        for tool in self.tools or ():
            if tool.get("type") != "function":
                continue
            name, parameters = tool.get("name"), tool.get("parameters") or {"type": "object", "properties": {}}
            if not isinstance(name, str) or not name:
                raise UsageError(f"tools holds {str(tool)[:80]}; every function needs a name.")
            if not isinstance(parameters, dict):
                raise UsageError(
                    f"tools holds parameters of {name} that are not the JSON schema of an object; give one."
                )
            function = function_tool(name, tool.get("description"), parameters)["function"]
            functions.append({"type": "function", **function, "strict": tool.get("strict") is True})
        return functions

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
        choice, functions = self._choose_tools()
        return GenerationRequest(
            prompt=Chat(
                messages=[*instructions, *messages],
                tools=tuple(function_tool(tool["name"], tool["description"], tool["parameters"]) for tool in functions),
                tool_choice=choice,
                parallel_tool_calls=self.parallel_tool_calls is not False,
                template=template_variables(self.reasoning.effort, self.chat_template_kwargs),
            ),
            params=self.to_sampling_params(
                default_temperature, grammar=format_grammar("text.format", self.format.type, self.format.schema_)
            ),
            max_tokens=self.max_output_tokens,
            speculation=self.speculation,
        )

    def _choose_tools(self) -> tuple[ToolChoice, list[dict[str, Any]]]:
        """Return the tool choice and the tools to choose from."""
        choice, functions = self.tool_choice or "auto", self.functions
        if isinstance(choice, str):
            return ToolChoice(choice), functions
        if choice.type == "function":
            return ToolChoice("required", choice.name or ""), functions
        if choice.type != "allowed_tools":
            raise UsageError(f"tool_choice is of type {choice.type[:40]!r}; give a function, auto or required.")
        allowed = [tool.get("name") for tool in choice.tools if tool.get("type") == "function"]
        return ToolChoice(choice.mode), [tool for tool in functions if tool["name"] in allowed]


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
            "tool_choice": choice.echo if isinstance(choice, ResponsesToolChoice) else choice or "auto",
            "tools": body.functions,
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
        return template_messages([Item.model_validate(item) for item in self._items])

    def add(self, index: int, event: Event) -> Sequence[dict[str, Any]]:
        if isinstance(event, Started):
            return [self._response("created"), self._response("in_progress")]
        if isinstance(event, ToolCall):
            call = {"call_id": event.id, "name": event.name, "arguments": ""}
            events = self._begin("function_call", "fc", call)
            self._items[-1]["arguments"] = event.arguments
            return [*events, self._event("function_call_arguments.delta", delta=event.arguments), *self._close()]
        if isinstance(event, Finished):
            return self._finish(event)
        if not event.text:
            return ()
        kind = "reasoning" if event.reasoning else "message"
        events = [] if self._open and self._items[-1]["type"] == kind else self._begin_text(kind)
        self._items[-1]["content"][0]["text"] += event.text
        return [*events, self._text_event("delta", delta=event.text)]

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
        events = self._close()
        self._items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields})
        self._open = True
        return [*events, self._item_event("added")]

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """Return the last events of the open item, if there is one."""
        if not self._open:
            return []
        self._open, item = False, self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = [self._event("function_call_arguments.done", arguments=item["arguments"])]
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


def _usage(end: Finished) -> dict[str, Any]:
    usage = end.usage
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.rejected,
        },
        "total_tokens": usage.prompt + usage.completion,
    }
