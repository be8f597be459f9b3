"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from blockdraft.engine import Chunk
from blockdraft.serving.answers import Head, metrics_of, usage_of
from blockdraft.serving.events import ChatJob, Event, Finished, Reasoning, Text, ToolCall
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import data
from blockdraft.types import TokenLogprob


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


async def whole_chat(service: Service, jobs: list[ChatJob], model: str) -> dict[str, Any]:
    """The answer at once, with a choice for each job."""
    choices = [Choice() for _ in jobs]
    async with aclosing(service.answers(jobs)) as answers:
        async for number, event in answers:
            choices[number].add(event)
    pieces, how = service.pieces, jobs[0]
    ends = [choice.end for choice in choices if choice.end is not None]
    told = [
        {
            "index": number,
            "message": choice.message,
            "logprobs": None if how.params.logprobs is None else pieces.chat_logprobs(choice.logprobs),
            "finish_reason": choice.end.reason if choice.end else None,
        }
        for number, choice in enumerate(choices)
    ]
    body = Head("chat.completion", "chatcmpl", model).body(told) | {"usage": usage_of(ends, len(jobs))}
    if how.speculation.statistics:
        body["metrics"] = metrics_of(ends, service.most_guesses)
    return body


async def streamed_chat(service: Service, jobs: list[ChatJob], model: str, with_usage: bool) -> AsyncIterator[str]:
    """The same as events, a piece a cycle."""
    head, how = Head("chat.completion", "chatcmpl", model), jobs[0]
    pieces = service.pieces
    ends = dict[int, Finished]()

    def piece(number: int, delta: dict[str, Any], chunk: Chunk | None = None, reason: str | None = None) -> str:
        logprobs = None if chunk is None or not chunk.logprobs else pieces.chat_logprobs(chunk.logprobs)
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        body = head.body([choice], ".chunk")
        if with_usage:
            body["usage"] = None
        if chunk is not None and how.speculation.trace:
            body["trace"] = pieces.trace(chunk)
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
            last["metrics"] = metrics_of(ordered, service.most_guesses)
        yield data(last)
    yield "data: [DONE]\n\n"


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
