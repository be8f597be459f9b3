"""The service under the routes of all APIs: it takes jobs and gives events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from typing_extensions import ParamSpec

from blockdraft.engine import Request
from blockdraft.errors import UsageError
from blockdraft.models import model_of
from blockdraft.serving.core.admission import Admission
from blockdraft.serving.core.backends import Backends, weights_of
from blockdraft.serving.core.chunk_queue import ChunkDispatcher, ChunkQueue
from blockdraft.serving.core.errors import ApiError, as_api_error
from blockdraft.serving.core.events import Answered, ChatJob, Event, PromptRead, Reasoning, Speculation, TextJob
from blockdraft.serving.core.merge_streams import merge_streams
from blockdraft.serving.core.metrics import Meter, Metrics
from blockdraft.serving.core.prepare import (
    Prepared,
    chat_ids,
    chat_text,
    context_of,
    events_of,
    finished,
    prepare,
    tokenizer_of,
)
from blockdraft.serving.settings import ServeSettings
from blockdraft.types import RequestDrafting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = ParamSpec("P")
T = TypeVar("T")


class Service:
    """Answers jobs with the engines of a server.

    Attributes:
        model_names: Names of the model in requests.
        created: Seconds from 1970 to the start of the server.
        metrics: Counters over all requests.
        token_texts: Texts of single tokens.
        max_draft_tokens: Most guesses of a cycle.
    """

    def __init__(self, backends: Backends, settings: ServeSettings) -> None:
        self.backends, self.settings = backends, settings
        known = model_of(backends.usual.target.path)
        usual_names = [backends.target] if known is None else [backends.target, known.id]
        self.model_names = list(settings.served_model_name) or usual_names
        self.token_texts = TokenTexts(backends.usual.target.tokenizer)
        self.max_draft_tokens = backends.usual.controller.max_draft_tokens
        self._weights = weights_of(backends.usual)
        self.metrics = Metrics(
            {
                "num_requests_running": (
                    "Requests that are being decoded, their prompts included.",
                    lambda: self.admission.active - self.admission.waiting,
                ),
                "num_requests_waiting": ("Requests that wait for a row.", lambda: self.admission.waiting),
                "drafting_on": (
                    "1 while cycles draft; 0 without a drafter, and while drafting would not pay.",
                    lambda: backends.usual.controller.drafts,
                ),
            }
        )
        self.admission = Admission(backends.usual.max_batch_size, settings.places)
        self.created = int(time.time())
        self._stopped = False
        self._dispatcher: ChunkDispatcher | None = None
        # Loading takes minutes; in the threads of `in_thread` it would hold up other requests.
        self._loader = ThreadPoolExecutor(1, "blockdraft-load")

    def stop(self) -> None:
        """Admit no more requests, and end those that run with an error."""
        self._stopped = self.admission.draining = True
        for engine in self.backends.engines:
            engine.cancel()

    def check_model(self, name: str) -> str:
        """The name of the model in an answer, which is the one in the request.

        Raises:
            ApiError: The server has no model of this name.
        """
        if name in self.model_names or self.settings.any_model:
            return name
        raise ApiError(
            404,
            f"model is {name[:80]!r}; it must be one of {', '.join(self.model_names)}. To take other names, start the "
            f"server with --served-model-name or --any-model.",
            kind="invalid_request_error",
            code="model_not_found",
            param="model",
        )

    def card(self, name: str) -> dict[str, Any]:
        """The entry of a model in /v1/models, without paths of this machine."""
        engine = self.backends.usual
        size, tokenizer = engine.drafting.block_size, engine.target.tokenizer
        weights, drafter_weights = self._weights
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "blockdraft",
            "max_model_len": self.context,
            "blockdraft": {
                "target": self.backends.target,
                "drafter": self.backends.drafter,
                "block_size": size if isinstance(size, int) else engine.drafter.block_size,
                "tree_budget": engine.controller.max_draft_tokens if engine.drafting.tree_budget else 0,
                "max_context": self.context,
                "backends": self.backends.names,
                "has_chat_template": tokenizer is not None and tokenizer.chat_template is not None,
                "parameters": weights,
                "drafter_parameters": drafter_weights,
            },
        }

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        return context_of(self.backends.usual)

    def count_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
    ) -> int:
        """Number of tokens of a chat as a prompt. Arguments as in `ChatJob`."""
        target = self.backends.usual.target
        return len(chat_ids(target, chat_text(target, messages, tools, template)))

    async def chat(self, job: ChatJob) -> AsyncGenerator[Event, None]:
        """Answer a chat. Closing the iterator ends the request.

        Raises:
            UsageError, ApiError: The job cannot be answered; raised before the first event.
            NumbersError, RequestError: Decoding failed.
        """
        async with aclosing(self.answers([job])) as answers:
            async for _, event in answers:
                yield event

    async def in_thread(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run slow work outside the event loop. Its `UsageError`s are raised without paths of this machine."""
        return await self._public(asyncio.to_thread(work, *arguments, **named))

    async def _load(self, backend: str | None) -> None:
        """Load a backend, unless it is loaded."""
        if backend in self.backends.names and not self.backends.is_loaded(backend):
            await self._public(asyncio.wrap_future(self._loader.submit(self.backends.engine, backend)))

    async def _public(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except UsageError as error:
            raise UsageError(self.backends.public(str(error))) from error

    def text_of(self, prompt: str | list[int]) -> str:
        """A prompt as text."""
        if isinstance(prompt, str):
            return prompt
        return str(tokenizer_of(self.backends.usual.target).decode(prompt))

    @overload
    def answers(self, jobs: Sequence[ChatJob]) -> AsyncGenerator[tuple[int, Event], None]: ...

    @overload
    def answers(self, jobs: Sequence[TextJob]) -> AsyncGenerator[tuple[int, Answered], None]: ...

    async def answers(self, jobs: Sequence[ChatJob | TextJob]) -> AsyncGenerator[tuple[int, Any], None]:
        """Answer several jobs, with the number of its job beside each event.

        Either all jobs are admitted or none. Errors as in `chat`; an error in one job ends all of them.
        """
        try:
            with self.admission.places(len(jobs)):
                async with aclosing(merge_streams([self._answer(job) for job in jobs])) as events:
                    async for event in events:
                        yield event
        except Exception as error:
            self.metrics.refused(as_api_error(error, quiet=True).status)
            raise

    async def _answer(self, job: ChatJob | TextJob) -> AsyncGenerator[Answered, None]:
        meter = self.metrics.begin()
        await self._load(job.speculation.backend)
        ready = await self.in_thread(prepare, job, self.backends, self.settings)
        reason: str | None = "abort"
        thought, begun = 0, False
        async with self._decoding(ready, job.speculation, meter) as (request, queue):
            try:
                while True:
                    chunk = await queue.take()
                    # Readers that cancel take no further chunk, so `stop` has cancelled this request.
                    if chunk.finish_reason == "cancelled" and not ready.ended:
                        raise ApiError(503, "The server was stopped before the answer ended; ask again.")
                    chunk.checked()
                    if isinstance(job, TextJob) and not begun:
                        yield PromptRead(ready.prompt, request.prompt_logprobs)
                    begun = True
                    for event in events_of(chunk, ready.parser):
                        if isinstance(event, Reasoning) and event.chunk is not None:
                            thought += len(event.chunk.token_ids)
                        yield event
                    if chunk.finish_reason is not None:
                        break
                    if ready.ended:
                        request.cancel()
                reason = "stop" if ready.ended else chunk.finish_reason
            except Exception:
                reason = None  # counted by `answers`
                raise
            finally:
                meter.end(request, reason)
            yield finished(request, ready, thought)

    @asynccontextmanager
    async def _decoding(
        self, ready: Prepared, how: Speculation, meter: Meter
    ) -> AsyncIterator[tuple[Request, ChunkQueue]]:
        """A request while it is decoded, and the queue of its chunks. It is cancelled when the context ends."""
        if self._dispatcher is None or self._dispatcher.loop is not asyncio.get_running_loop():
            self._dispatcher = ChunkDispatcher()
        queue = ChunkQueue(most=self.settings.max_unread, joined=not how.trace, seen=meter.chunk)
        start = partial(
            ready.engine.submit,
            ready.prompt,
            ready.params,
            listener=partial(self._dispatcher.send, queue),
            drafting=RequestDrafting(enabled=how.enabled, block_size=how.block_size, tree_budget=how.tree_budget),
            trace=how.trace,
        )
        with self.admission.scores(ready.scores):
            starting = asyncio.ensure_future(self.in_thread(start))
            try:
                request = await asyncio.shield(starting)
            except asyncio.CancelledError:
                starting.add_done_callback(_cancel_started)
                raise
            queue.full = request.cancel
            if self._stopped:  # while the request was submitted
                request.cancel()
            try:
                yield request, queue
            finally:
                request.cancel()


def _cancel_started(starting: asyncio.Future[Request]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().cancel()


class TokenTexts:
    """Texts of single tokens, kept once they are known.

    Args:
        tokenizer: That of the target; without one, the text of a token is its id.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        if token not in self._known:
            once, twice = (str(self._tokenizer.decode([token] * count)) for count in (1, 2))
            # Some tokenizers drop the space before the first word of a text, so the token is decoded behind another.
            self._known[token] = twice[len(once) :] if twice.startswith(once) else once
        return self._known[token]
