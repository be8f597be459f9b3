"""The route /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from blockdraft.engine import Chunk
from blockdraft.serving.api import openai_requests
from blockdraft.serving.api.chat_completions import ANSWERS, DONE, Head, finite, trace_of, usage_of
from blockdraft.serving.api.openai_requests import CompletionRequest
from blockdraft.serving.api.streaming import data, stream, until_gone
from blockdraft.serving.core.events import Finished, PromptRead, Text, TextJob
from blockdraft.serving.core.metrics import metrics_of
from blockdraft.serving.core.service import Service
from blockdraft.types import TokenLogprob

# New text of a choice, and its log-probabilities where they are shown.
Shown: TypeAlias = "tuple[str, dict[str, Any] | None]"


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", responses=ANSWERS)
    async def complete(request: Request, body: CompletionRequest) -> Response:
        model = service.check_model(body.model)
        service.admission.check(openai_requests.count(body))
        jobs = openai_requests.text_jobs(body, service.settings.temperature)
        answer = Answer(service, jobs, model, n=body.n or 1, echo=bool(body.echo), silent=body.max_tokens == 0)
        if body.stream:
            events = answer.streamed(with_usage=openai_requests.with_usage(body))
            return await stream(request, events, service.settings.stall_seconds)
        return JSONResponse(await until_gone(request, answer.whole()))

    return routes


class Answer:
    """The answer to one request, with a choice for each job.

    Args:
        model: Name by which the request called the model.
        n: Choices for each prompt.
        echo: Whether each choice begins with its prompt.
        silent: Whether the tokens of the answer are hidden: the request asked for none, and the engine decodes one at
            least.
    """

    def __init__(self, service: Service, jobs: list[TextJob], model: str, n: int, echo: bool, silent: bool) -> None:
        self._service, self._jobs = service, jobs
        self._n, self._echo, self._silent = n, echo, silent
        self._head = Head("text_completion", "cmpl", model)
        self._lengths = [0] * len(jobs)  # characters shown of each choice
        self._ends: dict[int, Finished] = {}

    async def whole(self) -> dict[str, Any]:
        """The answer at once."""
        shown: list[list[Shown]] = [[] for _ in self._jobs]
        async with aclosing(self._service.answers(self._jobs)) as answers:
            async for number, event in answers:
                if isinstance(event, Finished):
                    self._ends[number] = event
                elif isinstance(event, Text):
                    shown[number].append(self._piece(number, event.text, event.chunk))
                elif isinstance(event, PromptRead) and self._echo:
                    shown[number].append(await self._service.in_thread(self._prompt, number, event))
        choices = [
            {
                "index": number,
                "text": "".join(text for text, _ in shown[number]),
                "logprobs": _joined([logprobs for _, logprobs in shown[number] if logprobs]),
                "finish_reason": self._reason(self._ends[number]),
            }
            for number in range(len(self._jobs))
        ]
        body = self._head.body(choices) | {"usage": self._usage()}
        if self._jobs[0].speculation.statistics:
            body["metrics"] = self._metrics()
        return body

    async def streamed(self, with_usage: bool) -> AsyncIterator[str]:
        """The same as server-sent events, one for each cycle of the engine."""
        how = self._jobs[0].speculation
        async with aclosing(self._service.answers(self._jobs)) as answers:
            async for number, event in answers:
                text, logprobs, reason, chunk = "", None, None, None
                if isinstance(event, Finished):
                    self._ends[number], reason = event, self._reason(event)
                elif isinstance(event, Text):
                    text, logprobs = self._piece(number, event.text, event.chunk)
                    chunk = event.chunk if how.trace else None
                elif isinstance(event, PromptRead) and self._echo:
                    text, logprobs = await self._service.in_thread(self._prompt, number, event)
                if not (text or (logprobs and logprobs["tokens"]) or reason or chunk):
                    continue
                choice = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}
                body = self._head.body([choice])
                if with_usage:
                    body["usage"] = None
                if chunk is not None:
                    body["trace"] = trace_of(chunk, text_of=self._service.token_texts.text)
                yield data(body)
        if with_usage or how.statistics:
            last = self._head.body([]) | {"usage": self._usage() if with_usage else None}
            if how.statistics:
                last["metrics"] = self._metrics()
            yield data(last)
        yield DONE

    def _prompt(self, number: int, read: PromptRead) -> Shown:
        """The prompt of a choice. Long prompts with log-probabilities take long."""
        known: list[TokenLogprob | None] = read.logprobs or [None] * len(read.ids)
        text = self._service.text_of(self._jobs[number].prompt)
        return self._shown(number, text, list(zip(read.ids, known, strict=True)))

    def _piece(self, number: int, text: str, chunk: Chunk | None) -> Shown:
        """A piece of the answer."""
        if self._silent:
            return "", None
        values = [] if chunk is None else [(one.token_id, one) for one in chunk.logprobs or ()]
        return self._shown(number, text, values)

    def _shown(self, number: int, text: str, values: Sequence[tuple[int, TokenLogprob | None]]) -> Shown:
        logprobs = None
        if self._jobs[number].params.logprobs is not None:
            logprobs = logprobs_of(values, self._lengths[number], text_of=self._service.token_texts.text)
        self._lengths[number] += len(text)
        return text, logprobs

    def _reason(self, end: Finished) -> str:
        return "length" if self._silent else end.reason

    def _ordered(self) -> list[Finished]:
        return [self._ends[number] for number in range(len(self._jobs))]

    def _usage(self) -> dict[str, Any]:
        usage = usage_of(self._ordered(), self._n)
        if self._silent:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _metrics(self) -> dict[str, Any]:
        return metrics_of(self._ordered(), self._service.max_draft_tokens)


def logprobs_of(
    values: Sequence[tuple[int, TokenLogprob | None]], offset: int, text_of: Callable[[int], str]
) -> dict[str, Any]:
    """Log-probabilities in the form of /v1/completions.

    Args:
        values: Tokens, each with its log-probability; None for the first token of a prompt, which has none.
        offset: Characters of the text before them.
        text_of: Text of a token.
    """
    tokens = [text_of(token) for token, _ in values]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [None if one is None else finite(one.logprob) for _, one in values],
        "top_logprobs": [None if one is None else _likeliest(one, text_of) for _, one in values],
        "text_offset": offsets,
    }


def _likeliest(one: TokenLogprob, text_of: Callable[[int], str]) -> dict[str, float]:
    """Log-probabilities by the text of the token; among tokens of the same text, the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token_id, one.logprob)):
        found.setdefault(text_of(token), finite(logprob))
    return found


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    return {name: [one for part in parts for one in part[name]] for name in parts[0]} if parts else None
