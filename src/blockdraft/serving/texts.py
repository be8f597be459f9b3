"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from blockdraft.engine import Chunk
from blockdraft.serving.answers import Head, metrics_of, usage_of
from blockdraft.serving.events import Finished, PromptRead, Text, TextJob
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import data
from blockdraft.types import TokenLogprob


class Growing:
    """One choice: what of it is shown, and how far its text has come.

    Args:
        silent: Whether the answer is not shown, for no token was asked for; one is decoded all the same.
    """

    def __init__(self, service: Service, job: TextJob, silent: bool) -> None:
        self._service, self._job, self._silent = service, job, silent
        self._length = 0

    def prompt(self, read: PromptRead) -> tuple[str, dict[str, Any] | None]:
        """Text of the prompt, with log-probabilities if they are shown; takes long where there are many."""
        known: list[TokenLogprob | None] = read.logprobs or [None] * len(read.ids)
        return self._shown(self._service.text_of(self._job.prompt), list(zip(read.ids, known, strict=True)))

    def answer(self, text: str, chunk: Chunk | None) -> tuple[str, dict[str, Any] | None]:
        """The same of a piece of the answer."""
        if self._silent:
            return "", None
        values = [] if chunk is None else [(one.token_id, one) for one in chunk.logprobs or ()]
        return self._shown(text, values)

    def _shown(self, text: str, values: Any) -> tuple[str, dict[str, Any] | None]:
        shows = self._job.params.logprobs is not None
        logprobs = self._service.pieces.text_logprobs(values, self._length) if shows else None
        self._length += len(text)
        return text, logprobs


def _usage(ends: list[Finished], n: int, silent: bool) -> dict[str, Any]:
    usage = usage_of(ends, n)
    if silent:
        usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    return usage


async def whole_text(
    service: Service, jobs: list[TextJob], model: str, n: int, echo: bool, silent: bool
) -> dict[str, Any]:
    """The answer at once, with a choice for each job; `n` of them each have the same prompt."""
    growing = [Growing(service, job, silent) for job in jobs]
    shown: list[list[tuple[str, dict[str, Any] | None]]] = [[] for _ in jobs]
    ends: dict[int, Finished] = {}
    async with aclosing(service.answers(jobs)) as answers:
        async for number, event in answers:
            if isinstance(event, PromptRead):
                if echo:
                    shown[number].append(await service.in_thread(growing[number].prompt, event))
            elif isinstance(event, Text):
                shown[number].append(growing[number].answer(event.text, event.chunk))
            elif isinstance(event, Finished):
                ends[number] = event
    choices = [
        {
            "index": number,
            "text": "".join(text for text, _ in shown[number]),
            "logprobs": _joined([logprobs for _, logprobs in shown[number] if logprobs]),
            "finish_reason": "length" if silent else ends[number].reason,
        }
        for number in range(len(jobs))
    ]
    ordered = [ends[number] for number in range(len(jobs))]
    body = Head("text_completion", "cmpl", model).body(choices) | {"usage": _usage(ordered, n, silent)}
    if jobs[0].speculation.statistics:
        body["metrics"] = metrics_of(ordered, service.most_guesses)
    return body


async def streamed_text(
    service: Service, jobs: list[TextJob], model: str, n: int, echo: bool, silent: bool, with_usage: bool
) -> AsyncIterator[str]:
    """The same as events, a piece a cycle."""
    head, how = Head("text_completion", "cmpl", model), jobs[0].speculation
    growing = [Growing(service, job, silent) for job in jobs]
    ends: dict[int, Finished] = {}
    async with aclosing(service.answers(jobs)) as answers:
        async for number, event in answers:
            text, logprobs, reason, chunk = "", None, None, None
            if isinstance(event, PromptRead):
                if echo:
                    text, logprobs = await service.in_thread(growing[number].prompt, event)
            elif isinstance(event, Text):
                text, logprobs = growing[number].answer(event.text, event.chunk)
                chunk = event.chunk if how.trace else None
            elif isinstance(event, Finished):
                ends[number], reason = event, "length" if silent else event.reason
            if not (text or (logprobs and logprobs["tokens"]) or reason or chunk):
                continue
            body = head.body([{"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}])
            if with_usage:
                body["usage"] = None
            if chunk is not None:
                body["trace"] = service.pieces.trace(chunk)
            yield data(body)
    ordered = [ends[number] for number in range(len(jobs))]
    if with_usage or how.statistics:
        last = head.body([]) | {"usage": _usage(ordered, n, silent) if with_usage else None}
        if how.statistics:
            last["metrics"] = metrics_of(ordered, service.most_guesses)
        yield data(last)
    yield "data: [DONE]\n\n"


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    return {name: [one for part in parts for one in part[name]] for name in parts[0]} if parts else None
