"""The routes of Anthropic's API."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from blockdraft.serving.answers import metrics_of
from blockdraft.serving.anthropic_schemas import (
    CountRequest,
    MessagesRequest,
    job_of,
    messages_of,
    template_of,
    tools_of,
)
from blockdraft.serving.events import ChatJob, Event, Finished, Reasoning, Text, ToolCall, Usage
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import data, stream, until_gone

PING_SECONDS = 10.0  # of silence, as while a tool call is written, after which a client is told that we are still here


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/messages", response_model=None)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        name = service.check_model(body.model)
        job = job_of(body, service.settings.temperature)
        counting = service.in_thread(service.count_tokens, job.messages, job.tools, job.template)
        prompt = await until_gone(request, counting)
        # As in Anthropic's API, an answer may be cut by the context before max_tokens: clients ask for 32,000 and more.
        fits = prompt + body.max_tokens <= service.context
        job = replace(job, max_new_tokens=body.max_tokens if fits else None)
        answer = Answer(name, prompt, "max_tokens" if fits else "model_context_window_exceeded", service.most_guesses)
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
        prompt: Tokens of the prompt.
        when_cut: Why an answer ends that did not end by itself.
        most_guesses: That a cycle may have.
    """

    def __init__(self, model: str, prompt: int, when_cut: str, most_guesses: int) -> None:
        self._id, self._model = f"msg_{uuid.uuid4().hex}", model
        self._when_cut, self._most_guesses = when_cut, most_guesses
        self._blocks = list[dict[str, Any]]()
        self._inputs = dict[int, str]()  # JSON texts of tools' inputs, by the number of the block
        self._open = False
        self._usage, self._end = Usage(prompt, 0), None

    _end: Finished | None

    def add(self, event: Event) -> list[dict[str, Any]]:
        """The events of a stream that an event becomes."""
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
            # Signatures say that reasoning comes from Anthropic's own models; ours have none.
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
        """The message so far, with the statistics of a finished one if asked for."""
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
        return message | ({"metrics": metrics_of([end], self._most_guesses)} if statistics and end else {})
