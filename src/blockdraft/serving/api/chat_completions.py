"""The route /v1/chat/completions, and the shapes that /v1/completions shares with it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from blockdraft.engine import Chunk
from blockdraft.engine.text import REPLACEMENT
from blockdraft.serving.api import openai_requests
from blockdraft.serving.api.openai_requests import ChatRequest
from blockdraft.serving.api.streaming import data, stream, until_gone
from blockdraft.serving.core.events import ChatJob, Event, Finished, Reasoning, Text, ToolCall
from blockdraft.serving.core.metrics import metrics_of
from blockdraft.serving.core.service import Service
from blockdraft.types import TokenLogprob

ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answer, whole or streamed."}
}
DONE = "data: [DONE]\n\n"


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", responses=ANSWERS)
    async def chat(request: Request, body: ChatRequest) -> Response:
        model = service.check_model(body.model)
        service.admission.check(body.n or 1)
        jobs = openai_requests.choices(openai_requests.chat_job(body, service.settings.temperature), body.n)
        if body.stream:
            events = streamed(service, jobs, model, with_usage=openai_requests.with_usage(body))
            return await stream(request, events, service.settings.stall_seconds)
        return JSONResponse(await until_gone(request, whole(service, jobs, model)))

    return routes


async def whole(service: Service, jobs: list[ChatJob], model: str) -> dict[str, Any]:
    """The answer at once, with a choice for each job."""
    choices = [Choice() for _ in jobs]
    async with aclosing(service.answers(jobs)) as answers:
        async for number, event in answers:
            choices[number].add(event)
    how = jobs[0]
    ends = [choice.end for choice in choices if choice.end is not None]
    told = [
        {
            "index": number,
            "message": choice.message,
            "logprobs": None
            if how.params.logprobs is None
            else logprobs_of(choice.logprobs, text_of=service.token_texts.text),
            "finish_reason": choice.end.reason if choice.end else None,
        }
        for number, choice in enumerate(choices)
    ]
    body = Head("chat.completion", "chatcmpl", model).body(told) | {"usage": usage_of(ends, len(jobs))}
    if how.speculation.statistics:
        body["metrics"] = metrics_of(ends, service.max_draft_tokens)
    return body


async def streamed(service: Service, jobs: list[ChatJob], model: str, with_usage: bool) -> AsyncIterator[str]:
    """The same as server-sent events, one for each cycle of the engine."""
    head, how = Head("chat.completion", "chatcmpl", model), jobs[0]
    text_of = service.token_texts.text
    ends = dict[int, Finished]()

    def piece(number: int, delta: dict[str, Any], chunk: Chunk | None = None, reason: str | None = None) -> str:
        logprobs = None if chunk is None or not chunk.logprobs else logprobs_of(chunk.logprobs, text_of=text_of)
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        body = head.body([choice], ".chunk")
        if with_usage:
            body["usage"] = None
        if chunk is not None and how.speculation.trace:
            body["trace"] = trace_of(chunk, text_of=text_of)
        return data(body)

    begun: set[int] = set()
    async with aclosing(service.answers(jobs)) as answers:
        async for number, event in answers:
            if number not in begun:
                begun.add(number)
                yield piece(number, {"role": "assistant", "content": ""})
            if isinstance(event, Finished):
                ends[number] = event
                yield piece(number, {}, reason=event.reason)
            elif isinstance(event, ToolCall):
                yield piece(number, {"tool_calls": [_call(event)]})
            else:
                delta = _delta(event)
                told = delta or (event.chunk is not None and (how.speculation.trace or event.chunk.logprobs))
                yield piece(number, delta, event.chunk) if told else ""
    if how.speculation.statistics or with_usage:
        ordered = [ends[number] for number in sorted(ends)]
        last = head.body([], ".chunk") | {"usage": usage_of(ordered, len(jobs)) if with_usage else None}
        if how.speculation.statistics:
            last["metrics"] = metrics_of(ordered, service.max_draft_tokens)
        yield data(last)
    yield DONE


@dataclass
class Choice:
    """One answer as it grows."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Finished | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.end = event
        elif isinstance(event, ToolCall):
            if event.index == len(self.calls):
                self.calls.append(
                    {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
                )
            self.calls[event.index]["function"]["arguments"] += event.arguments
        else:
            (self.reasoning if isinstance(event, Reasoning) else self.text).append(event.text)
            if event.chunk is not None:
                self.logprobs += event.chunk.logprobs or ()

    @property
    def message(self) -> dict[str, Any]:
        text = "".join(self.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if self.calls else ""),
            "refusal": None,
        }
        if self.reasoning:
            message["reasoning"] = message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _delta(event: Text | Reasoning) -> dict[str, Any]:
    if not event.text:
        return {}
    if isinstance(event, Reasoning):
        return {"reasoning": event.text, "reasoning_content": event.text}
    return {"content": event.text}


def _call(event: ToolCall) -> dict[str, Any]:
    call: dict[str, Any] = {"index": event.index, "function": {"arguments": event.arguments}}
    if event.id is not None:
        call |= {"id": event.id, "type": "function"}
        call["function"]["name"] = event.name
    return call


def logprobs_of(values: Sequence[TokenLogprob], text_of: Callable[[int], str]) -> dict[str, Any]:
    """Log-probabilities in the form of chats. `text_of` gives the text of a token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = text_of(token)
        # A token may hold a part of a character; its text then does not tell its bytes.
        known = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": known}

    content = [
        {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*other) for other in one.top]} for one in values
    ]
    return {"content": content, "refusal": None}


class Head:
    """The fields with which every piece of one answer begins.

    Args:
        kind: Value of `object`.
        prefix: Beginning of the answer's id.
        model: Name by which the request called the model.
    """

    def __init__(self, kind: str, prefix: str, model: str) -> None:
        self._kind, self._model = kind, model
        self._id, self._created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())

    def body(self, choices: Sequence[dict[str, Any]], suffix: str = "") -> dict[str, Any]:
        """A piece with these choices. `suffix` is put behind the kind."""
        return {
            "id": self._id,
            "object": f"{self._kind}{suffix}",
            "created": self._created,
            "model": self._model,
            "choices": list(choices),
        }


def usage_of(ends: Sequence[Finished], n: int) -> dict[str, Any]:
    """Token counts of a request.

    Args:
        ends: Last events of the choices, in their order.
        n: Choices for each prompt, which counts once.
    """
    prompt, cached = (sum(getattr(end.usage, name) for end in ends[::n]) for name in ("prompt", "cached"))
    completion, reasoning, accepted, rejected = (
        sum(getattr(end.usage, name) for end in ends) for name in ("completion", "reasoning", "accepted", "rejected")
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def trace_of(chunk: Chunk, text_of: Callable[[int], str]) -> dict[str, Any]:
    """The guesses of the cycle that a chunk came from. `text_of` gives the text of a token."""
    cycle = chunk.cycle
    return {
        "tokens": [
            {"id": token, "text": text_of(token), "drafted": drafted}
            for token, drafted in zip(chunk.token_ids, chunk.drafted, strict=True)
        ],
        "cycle": None
        if cycle is None
        else {
            "tokens": [{"id": token, "text": text_of(token)} for token in cycle.tokens],
            "parents": list(cycle.parents),
            "path": list(cycle.path),
            "seconds": cycle.seconds,
        },
    }


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's API writes -9999 for the logarithm of 0."""
    return max(logprob, -9999.0)
