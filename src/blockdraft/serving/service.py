"""Chats and texts in, events out: what the routes of all APIs stand on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from blockdraft.engine import Engine, Request
from blockdraft.serving.admission import Admission
from blockdraft.serving.answers import Pieces
from blockdraft.serving.backends import Backends, weights_of
from blockdraft.serving.errors import ApiError
from blockdraft.serving.events import ChatJob, Event, Finished, Speculation, Text, Usage
from blockdraft.serving.mailbox import Mailbox, Mailroom
from blockdraft.serving.merging import merged
from blockdraft.serving.prompts import chat_ids, chat_text, tokenizer_of
from blockdraft.serving.settings import ServeSettings
from blockdraft.types import RequestDrafting, SamplingParams


@dataclass(frozen=True)
class TextJob:
    """Token ids to go on from, as they are. Attributes as in `ChatJob`."""

    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int | None = None
    speculation: Speculation = Speculation()


@dataclass(frozen=True)
class Prepared:
    """A job as the engine takes it. `text` is what the chat template made of a chat."""

    engine: Engine
    prompt: list[int]
    params: SamplingParams
    text: str | None = None


class Service:
    """Answers jobs with the engines of a server.

    Attributes:
        model_names: Names that requests may give the model, the first of them in answers.
        created: When the server began, in seconds since 1970.
        pieces: What single tokens look like.
        most_guesses: That a cycle may have.
    """

    def __init__(self, backends: Backends, settings: ServeSettings) -> None:
        self.backends, self.settings = backends, settings
        self.model_names = list(settings.served_model_name) or [backends.target]
        self.pieces = Pieces(backends.usual.target.tokenizer)
        self.most_guesses = backends.usual.controller.most_guesses
        self._weights = weights_of(backends.usual)
        self.admission = Admission(backends.usual.max_batch_size, settings.places)
        self.created = int(time.time())
        self._mail: Mailroom | None = None

    def stop(self) -> None:
        """Take no more, and end what still runs; who waits for it is told."""
        self.admission.draining = True
        for engine in self.backends.engines:
            engine.scheduler.cancel()

    def check_model(self, name: str) -> str:
        """The name by which an answer calls the model that a request named so.

        Raises:
            ApiError: There is no such model.
        """
        if name in self.model_names or self.settings.any_model:
            return name
        raise ApiError(
            404,
            f"model is {name[:80]!r}; this server has {', '.join(self.model_names)}. Name one of these, or start it with "
            f"--served-model-name or --any-model.",
            kind="invalid_request_error",
            code="model_not_found",
            param="model",
        )

    def card(self, name: str) -> dict[str, Any]:
        """What /v1/models tells of a model. No path of this machine is in it."""
        engine = self.backends.usual
        size, tokenizer = engine.drafting.block_size, engine.target.tokenizer
        weights, drafter_weights = self._weights
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "blockdraft",
            "max_model_len": self.context(),
            "blockdraft": {
                "target": self.backends.target,
                "drafter": self.backends.drafter,
                "block_size": size if isinstance(size, int) else engine.drafter.block_size,
                "max_context": self.context(),
                "backends": self.backends.names,
                "has_chat_template": tokenizer is not None and tokenizer.chat_template is not None,
                "parameters": weights,
                "drafter_parameters": drafter_weights,
            },
        }

    def context(self, engine: Engine | None = None) -> int:
        """Tokens that prompt and answer may have together."""
        engine = engine or self.backends.usual
        return min(engine.target.max_context, engine.cache_tokens - 1 - engine.controller.most_guesses)

    def count_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> int:
        """Tokens of a chat, as it would be answered."""
        target = self.backends.usual.target
        return len(chat_ids(target, chat_text(target, messages, tools, template)))

    async def chat(self, job: ChatJob) -> AsyncGenerator[Event, None]:
        """Answer a chat. Closing the iterator ends the request.

        Raises:
            UsageError, ApiError: The job cannot be answered; before the first event.
            NumbersError, RequestError: Decoding failed.
        """
        async with aclosing(self.answers([job])) as answers:
            async for _, event in answers:
                yield event

    async def answers(self, jobs: Sequence[ChatJob | TextJob]) -> AsyncGenerator[tuple[int, Event], None]:
        """Answer several jobs, all of them or none; events come with the number of the job. Errors as in `chat`; one of
        a job ends all of them."""
        with self.admission.places(len(jobs)):
            async with aclosing(merged([self._answer(job) for job in jobs])) as events:
                async for event in events:
                    yield event

    async def _answer(self, job: ChatJob | TextJob) -> AsyncGenerator[Event, None]:
        ready = await asyncio.to_thread(self._prepare, job)
        async with self._decoding(ready, job.speculation) as (request, box):
            while True:
                chunk = await box.take()
                if chunk.finish_reason == "cancelled":  # by none of those who listen
                    raise ApiError(503, "The server was stopped before the answer ended; ask again.")
                chunk.checked()
                yield Text(chunk.text, chunk)
                if chunk.finish_reason is not None:
                    break
            yield _finished(request, ready.engine)

    def _prepare(self, job: ChatJob | TextJob) -> Prepared:
        """In a thread, for templates, long texts and loading take long."""
        engine = self.backends.engine(job.speculation.backend)
        text = None
        if isinstance(job, ChatJob):
            text = chat_text(engine.target, job.messages, job.tools, job.template)
            prompt = chat_ids(engine.target, text)
        else:
            prompt = job.prompt
        most = self._most_new_tokens(engine, len(prompt), job.max_new_tokens)
        return Prepared(engine, prompt, replace(job.params, max_new_tokens=most), text)

    def _most_new_tokens(self, engine: Engine, prompt: int, wanted: int | None) -> int:
        """How many tokens an answer may have."""
        limit, most = self.settings.max_prompt_tokens, self.settings.max_answer_tokens
        room = self.context(engine) - prompt
        code = "context_length_exceeded"
        if limit is not None and prompt > limit:
            raise ApiError(400, f"The prompt has {prompt} tokens; this server takes at most {limit}.", code=code)
        if room < 1:
            raise ApiError(
                400,
                f"The prompt has {prompt} tokens, and there is room for {prompt + room}, answer included; shorten it.",
                code=code,
            )
        if wanted is None:
            return min(room, most or room)
        if most is not None and wanted > most:
            raise ApiError(400, f"max_tokens is {wanted}; this server allows at most {most}.", param="max_tokens")
        if wanted > room:
            raise ApiError(
                400,
                f"max_tokens is {wanted}, and the prompt's {prompt} tokens leave room for {room}; ask for at most "
                f"{room}, or leave it out.",
                code=code,
                param="max_tokens",
            )
        return wanted

    @asynccontextmanager
    async def _decoding(self, ready: Prepared, how: Speculation) -> AsyncIterator[tuple[Request, Mailbox]]:
        """A request while it is decoded, and where its chunks arrive. It is cancelled at the end."""
        self._mail = self._mail or Mailroom()
        box = Mailbox(self.settings.max_unread, joined=not how.trace)
        drafting = RequestDrafting(how.enabled, how.block_size, how.tree_budget)
        listener = partial(self._mail.send, box)
        start = partial(ready.engine.submit, ready.prompt, ready.params, listener, drafting, how.trace)
        starting = asyncio.ensure_future(asyncio.to_thread(start))
        try:
            request = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_cancel_started)
            raise
        try:
            yield request, box
        finally:
            request.cancel()


def _cancel_started(starting: asyncio.Future[Request]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().cancel()


def _finished(request: Request, engine: Engine) -> Finished:
    accepted = sum(request.drafted)
    usage = Usage(
        len(request.prompt),
        len(request.token_ids),
        request.stats.remembered,
        accepted=accepted,
        rejected=max(0, sum(request.stats.drafted) - accepted),
    )
    reason: Literal["stop", "length"] = "stop" if request.finish_reason == "stop" else "length"
    stop = None
    if request.text.stopped:
        text = tokenizer_of(engine.target).decode(request.token_ids, skip_special_tokens=True)
        stop = min(filter(text.__contains__, request.params.stop), key=text.index)
    return Finished(reason, usage, request.stats, stop)
