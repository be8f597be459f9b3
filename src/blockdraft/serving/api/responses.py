"""OpenAI's Responses API: the routes of /v1/responses, their schemas and answers.

Unknown fields of a request are ignored.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from blockdraft.errors import UsageError
from blockdraft.serving.api.schemas import Body, Listed, Sampled, Table, Tokens, sampling, speculation
from blockdraft.serving.api.streaming import data, stream, until_gone
from blockdraft.serving.core.errors import ApiError, as_api_error
from blockdraft.serving.core.events import ChatJob, Event, Finished, Reasoning, Text, ToolCall, ToolChoice, Usage
from blockdraft.serving.core.metrics import metrics_of
from blockdraft.serving.core.service import Service
from blockdraft.types import Grammar

TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def router(service: Service) -> APIRouter:
    routes, settings = APIRouter(), service.settings
    store = Store(settings.max_stored)

    @routes.post("/v1/responses", response_model=None)
    async def respond(request: Request, body: ResponseRequest) -> Response:
        name = service.check_model(body.model)
        before = store.get(body.previous_response_id).messages if body.previous_response_id else []
        said = [*before, *messages_of(body.input)]
        job = job_of(body, said, settings.temperature)
        max_draft_tokens = service.max_draft_tokens if job.speculation.statistics else None
        answer = Answer(body, model=name, temperature=settings.temperature, max_draft_tokens=max_draft_tokens)

        def keep() -> None:
            if body.store is not False:
                store.put(answer.id, Stored(answer.body(), [*said, *messages_of(answer.output.as_input())]))

        if body.stream:
            return await stream(request, streamed(service, job, answer, keep), settings.stall_seconds)
        return JSONResponse(await until_gone(request, whole(service, job, answer, keep)))

    @routes.get("/v1/responses/{response_id}")
    async def stored(response_id: str, stream: bool = False) -> dict[str, Any]:
        if stream:
            raise ApiError(400, "stream is true; stored responses are sent whole, so leave it out.", param="stream")
        return store.get(response_id).body

    @routes.delete("/v1/responses/{response_id}")
    async def forget(response_id: str) -> dict[str, Any]:
        store.remove(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return routes


@dataclass(frozen=True)
class Stored:
    """A finished response.

    Attributes:
        body: The response as JSON.
        messages: The conversation up to its end, without instructions.
    """

    body: dict[str, Any]
    messages: list[dict[str, Any]]

    @property
    def size(self) -> int:
        """Bytes of it, about."""
        return len(json.dumps(self.body)) + len(json.dumps(self.messages))


class Store:
    """The latest responses, in memory. The oldest are forgotten to make room.

    Args:
        room: Most bytes, about.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept = OrderedDict[str, tuple[Stored, int]]()
        self._size = 0

    def put(self, response_id: str, stored: Stored) -> None:
        size = stored.size
        self._kept[response_id] = stored, size
        self._size += size
        while self._size > self._room:
            self._size -= self._kept.popitem(last=False)[1][1]

    def get(self, response_id: str) -> Stored:
        """The response of this id.

        Raises:
            ApiError: The store does not hold it.
        """
        if response_id not in self._kept:
            raise ApiError(
                404,
                f"The response {response_id[:80]!r} is not stored; the server keeps only the latest, in memory. "
                f"Send the whole conversation as input.",
                kind="invalid_request_error",
                param="previous_response_id",
            )
        return self._kept[response_id][0]

    def remove(self, response_id: str) -> None:
        """Forget the response of this id.

        Raises:
            ApiError: The store does not hold it.
        """
        self.get(response_id)
        self._size -= self._kept.pop(response_id)[1]


async def whole(service: Service, job: ChatJob, answer: Answer, keep: Callable[[], None]) -> dict[str, Any]:
    """The response at once. `keep` is called when it is complete."""
    async with aclosing(_events(service, job)) as events:
        async for event in events:
            answer.add(event)
    keep()
    return answer.body()


async def streamed(service: Service, job: ChatJob, answer: Answer, keep: Callable[[], None]) -> AsyncIterator[str]:
    """The same as server-sent events."""
    begun = False
    try:
        async with aclosing(_events(service, job)) as events:
            async for event in events:
                wires = [*([] if begun else answer.begin()), *answer.add(event)]
                begun = True
                if answer.end is not None:
                    keep()  # before the last event, since its reader may continue from it at once
                yield "".join(map(_wire, wires))
    except Exception as error:
        if not begun:  # the HTTP status can still tell it
            raise
        for wire in answer.fail(as_api_error(error).message):
            yield _wire(wire)


async def _events(service: Service, job: ChatJob) -> AsyncGenerator[Event, None]:
    """Events of a chat. Errors name max_output_tokens in the place of max_tokens."""
    try:
        async with aclosing(service.chat(job)) as events:
            async for event in events:
                yield event
    except ApiError as error:
        if error.param != "max_tokens":
            raise
        message = error.message.replace("max_tokens", "max_output_tokens")
        raise replace(error, message=message, param="max_output_tokens") from error


def _wire(wire: dict[str, Any]) -> str:
    return f"event: {wire['type']}\n{data(wire)}"


class Output:
    """The output of a response as it grows.

    Attributes:
        items: Items of the output so far.
    """

    def __init__(self) -> None:
        self.items = list[dict[str, Any]]()
        self._open = False

    def add(self, event: Text | Reasoning | ToolCall) -> list[dict[str, Any]]:
        """The server-sent events that an event of the job becomes, without their numbers."""
        if isinstance(event, ToolCall):
            wires = []
            if event.id is not None:
                wires = self._begin("function_call", "fc", {"call_id": event.id, "name": event.name, "arguments": ""})
            self.items[-1]["arguments"] += event.arguments
            return [*wires, self._wire("function_call_arguments.delta", delta=event.arguments)]
        if not event.text:
            return []
        kind = "reasoning" if isinstance(event, Reasoning) else "message"
        wires = [] if self._open and self.items[-1]["type"] == kind else self._begin_text(kind)
        self.items[-1]["content"][0]["text"] += event.text
        return [*wires, self._said("delta", delta=event.text)]

    def end(self, whole: bool) -> list[dict[str, Any]]:
        """The last events of the items. `whole` tells that the last item was not cut."""
        begun = [] if self.items else self._begin_text("message")
        return begun + self._close("completed" if whole else "incomplete")

    def as_input(self) -> list[Item]:
        """The items as input of the next request."""
        return [Item.model_validate(item) for item in self.items]

    def _begin_text(self, kind: str) -> list[dict[str, Any]]:
        if kind == "message":
            wires = self._begin(kind, "msg", {"role": "assistant", "content": []})
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            wires = self._begin(kind, "rs", {"summary": [], "content": []})
            part = {"type": "reasoning_text", "text": ""}
        self.items[-1]["content"].append(part)
        return [*wires, self._part("added")]

    def _begin(self, kind: str, prefix: str, item: dict[str, Any]) -> list[dict[str, Any]]:
        wires = self._close("completed")
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **item}
        self.items.append(item)
        self._open = True
        return [*wires, self._item("added")]

    def _close(self, status: str) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = [self._wire("function_call_arguments.done", arguments=item["arguments"])]
        else:
            done = [self._said("done", text=item["content"][0]["text"]), self._part("done")]
        return [*done, self._item("done")]

    def _said(self, what: str, **more: Any) -> dict[str, Any]:
        kind = self.items[-1]["content"][0]["type"]
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        return self._wire(f"{kind}.{what}", content_index=0, **more, **logprobs)

    def _part(self, what: str) -> dict[str, Any]:
        return self._wire(f"content_part.{what}", content_index=0, part=dict(self.items[-1]["content"][0]))

    def _item(self, what: str) -> dict[str, Any]:
        item = dict(self.items[-1])
        if "content" in item:
            item["content"] = [dict(part) for part in item["content"]]
        return {"type": f"response.output_item.{what}", "output_index": len(self.items) - 1, "item": item}

    def _wire(self, name: str, **more: Any) -> dict[str, Any]:
        at = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{name}", **at, **more}


class Answer:
    """A response as it grows.

    Args:
        body: The request.
        model: Name of the model in the answer.
        temperature: Temperature of requests that name none.
        max_draft_tokens: Most guesses of a cycle; None leaves out the statistics of drafting.

    Attributes:
        end: Last event of the answer, with token counts and reason; None before.
    """

    end: Finished | None = None

    def __init__(
        self, body: ResponseRequest, model: str, temperature: float, max_draft_tokens: int | None = None
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.output = Output()
        self._status, self._number = "in_progress", 0
        self._error: dict[str, Any] | None = None
        self._completed: int | None = None
        self._max_draft_tokens = max_draft_tokens
        self._fixed = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": body.presence_penalty or 0.0,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": body.reasoning.summary if body.reasoning else None,
            },
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": temperature if body.temperature is None else body.temperature,
            "text": {"format": body.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": _echo(body),
            "tools": tools_of(body.tools),
            "top_logprobs": 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def begin(self) -> list[dict[str, Any]]:
        return [self._about("created"), self._about("in_progress")]

    def add(self, event: Event) -> list[dict[str, Any]]:
        """The server-sent events that an event of the job becomes."""
        if not isinstance(event, Finished):
            return [self._numbered(wire) for wire in self.output.add(event)]
        self.end = event
        self._status = "incomplete" if event.reason == "length" else "completed"
        self._completed = int(time.time()) if self._status == "completed" else None
        wires = [self._numbered(wire) for wire in self.output.end(whole=event.reason != "length")]
        return [*wires, self._about(self._status)]

    def fail(self, message: str) -> list[dict[str, Any]]:
        """The server-sent events that an error becomes."""
        self._status, self._error = "failed", {"code": "server_error", "message": message}
        return [self._about("failed")]

    def body(self) -> dict[str, Any]:
        """The response so far."""
        cut = self._status == "incomplete"
        more: dict[str, Any] = {}
        if self.end is not None and self._max_draft_tokens is not None:
            more["metrics"] = metrics_of([self.end], self._max_draft_tokens)
        return {
            **self._fixed,
            "status": self._status,
            "completed_at": self._completed,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": list(self.output.items),
            "usage": usage_of(self.end.usage) if self.end else None,
            **more,
        }

    def _about(self, what: str) -> dict[str, Any]:
        return self._numbered({"type": f"response.{what}", "response": self.body()})

    def _numbered(self, wire: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        return {"type": wire["type"], "sequence_number": self._number - 1, **wire}


def usage_of(usage: Usage) -> dict[str, Any]:
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


def _echo(body: ResponseRequest) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if choice.type == "function":
        return {"type": "function", "name": choice.name}
    return {"type": choice.type, "mode": choice.mode, "tools": choice.tools}


class Part(Body):
    """A part of a message. Parts other than texts are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Body):
    """A message, a call, its result, or reasoning. The fields that it needs depend on its type; see `messages_of`."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Listed[Part] | None = None
    summary: Listed[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Listed[Part] | None = None


class Choice(Body):
    """A choice of tools. The type `allowed_tools` limits it to some of the tools."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Listed[dict[str, Any]] = []


class Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Body):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Body):
    effort: str | None = None
    summary: str | None = None


class ResponseRequest(Sampled):
    """A request. Fields of `Sampled` that OpenAI's API lacks are accepted too."""

    refused = Sampled.refused | {
        "n": (1,),
        "max_tokens": (),
        "background": (False,),
        "conversation": (),
        "top_logprobs": (0,),
    }

    input: str | Listed[Item] = ""
    instructions: str | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Tokens | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Listed[str] | None = None
    metadata: Table[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Answers repeat these fields; nothing else reads them.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def format(self) -> Format:
        return (self.text and self.text.format) or Format(type="text")


def job_of(body: ResponseRequest, said: Sequence[dict[str, Any]], temperature: float) -> ChatJob:
    """The job of a request.

    Args:
        said: Messages of the conversation, the request's own included.
        temperature: Temperature of requests that name none.

    Raises:
        UsageError: A field holds an unsupported value.
    """
    if "message.output_text.logprobs" in (body.include or ()):
        raise UsageError(
            "include names logprobs, which /v1/responses lacks; leave them out, or use /v1/chat/completions."
        )
    tools = tools_of(body.tools)
    choice, tools = _choice(body.tool_choice, tools)
    if not said:
        raise UsageError("input is empty; give a text, or a list of items.")
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return ChatJob(
        messages=[*instructions, *said],
        params=replace(sampling(body, temperature), grammar=_grammar(body.format)),
        max_new_tokens=body.max_output_tokens,
        tools=tuple({"type": "function", "function": _without_type(tool)} for tool in tools),
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        speculation=speculation(body),
        template=_template(body),
    )


def messages_of(given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """Messages in the shape of chat templates. Consecutive items of the assistant become one message.

    Raises:
        UsageError: An item is of an unsupported type, or lacks a field that its type needs.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    messages = list[dict[str, Any]]()
    for number, item in enumerate(given):
        place = f"input.{number}"
        if item.type == "message" and item.role is not None and item.content is not None:
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _texts(f"{place}.content", item.content)})
        elif item.type == "function_call" and item.call_id and item.name:
            function = {"name": item.name, "arguments": _arguments(place, item.arguments or "{}")}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif item.type == "function_call_output" and item.call_id and item.output is not None:
            text = _texts(f"{place}.output", item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        elif item.type == "reasoning":
            text = _texts(place, item.content or item.summary or "")
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        elif item.type in NEEDED:
            raise UsageError(f"{place} is a {item.type} with a missing field; it needs {NEEDED[item.type]}.")
        else:
            raise UsageError(
                f"{place} is of the type {item.type[:40]!r}; it must be one of {', '.join(NEEDED)}, reasoning."
            )
    return _joined(messages)


NEEDED = {
    "message": "role and content",
    "function_call": "call_id, name and arguments",
    "function_call_output": "call_id and output",
}


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with reasoning, text and calls of the assistant, consecutive and in this order, joined into one."""
    joined = list[dict[str, Any]]()
    for message in messages:
        last: dict[str, Any] = joined[-1] if joined else {"role": None}
        if message["role"] != "assistant" or last["role"] != "assistant":
            joined.append(message)
        elif "tool_calls" in message:
            joined[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
        elif "reasoning_content" not in message and not last["content"] and "tool_calls" not in last:
            joined[-1] = {**last, "content": message["content"]}
        else:
            joined.append(message)
    return joined


def _texts(place: str, content: str | Sequence[Part]) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in TEXTS or (part.text is None and part.refusal is None):
            raise UsageError(
                f"{place} holds a part of the type {part.type[:40]!r}; this model reads only texts, as "
                f'{{"type": "input_text", "text": "..."}}.'
            )
    return "\n".join(part.text or part.refusal or "" for part in content)


def _arguments(place: str, text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise UsageError(f"{place}.arguments is not a JSON object; give one as text.")
    return arguments


def tools_of(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The functions among the tools, as answers repeat them.

    Tools of other types are left out: OpenAI's servers run them, or their calls have a format that chat templates lack.
    """
    functions = [tool for tool in tools or () if tool.get("type") == "function"]
    for tool in functions:
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise UsageError(f"tools holds {str(tool)[:80]}; every function needs a name.")
        if not isinstance(tool.get("parameters") or {}, dict):
            raise UsageError(
                f"tools holds parameters of {tool['name']} that are not the JSON schema of an object; give one."
            )
    return [
        {
            "type": "function",
            "name": tool["name"],
            "description": str(tool.get("description") or ""),
            "parameters": tool.get("parameters") or {"type": "object", "properties": {}},
            "strict": tool.get("strict") is True,
        }
        for tool in functions
    ]


def _without_type(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in ("name", "description", "parameters")}


def _choice(given: str | Choice | None, tools: list[dict[str, Any]]) -> tuple[ToolChoice, list[dict[str, Any]]]:
    """The choice, and the tools to choose from."""
    if given in (None, "auto", "none"):
        return ToolChoice("none" if given == "none" else "auto"), tools
    names = [tool["name"] for tool in tools]
    if isinstance(given, Choice) and given.type not in ("function", "allowed_tools"):
        raise UsageError(f"tool_choice is of the type {given.type[:40]!r}; give a function, auto or required.")
    if isinstance(given, Choice) and given.type == "allowed_tools":
        allowed = [tool.get("name") for tool in given.tools if tool.get("type") == "function"]
        tools = [tool for tool in tools if tool["name"] in allowed]
        if given.mode == "auto":
            return ToolChoice(), tools
    if not tools:
        raise UsageError("tool_choice is given without functions; give tools of the type function.")
    if isinstance(given, str) or given is None or given.type == "allowed_tools":
        return ToolChoice("required"), tools
    if given.name not in names:
        raise UsageError(f"tool_choice names {str(given.name)[:80]!r}; the tools are {', '.join(names)[:200]}.")
    return ToolChoice("required", given.name), tools


def _grammar(form: Format) -> Grammar | None:
    if form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar("json_object")
    if form.schema_ is None:
        raise UsageError("text.format is json_schema without a schema; give text.format.schema.")
    return Grammar("json_schema", json.dumps(form.schema_))


def _template(body: ResponseRequest) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning else None
    given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        given["enable_thinking"] = False
    return {**given, **(body.chat_template_kwargs or {})}
