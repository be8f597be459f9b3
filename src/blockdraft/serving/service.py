"""The service that all APIs share: it takes generation requests and yields events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase
from typing_extensions import ParamSpec

from blockdraft.engine import Chunk, Engine, Request
from blockdraft.errors import UsageError
from blockdraft.models import model_of
from blockdraft.serving.admission import Admission
from blockdraft.serving.backends import Backends, kind_of, weights_of
from blockdraft.serving.chunks import ChunkDispatcher, ChunkQueue
from blockdraft.serving.errors import ApiError, as_api_error
from blockdraft.serving.infill_limits import InfillLimits
from blockdraft.serving.metrics import Meter, Metrics
from blockdraft.serving.prompts import PreparedChoice, context_of, encode_messages, prepare, tokenizer_of
from blockdraft.serving.request import (
    ChatMessages,
    Event,
    Finished,
    GenerationRequest,
    Infill,
    PrefillProgress,
    Started,
    TextDelta,
    Usage,
)
from blockdraft.serving.request_log import log_responses
from blockdraft.serving.schemas import Speculation
from blockdraft.serving.settings import ServeSettings
from blockdraft.serving.typed_infills import TypedInfill, TypedInfills
from blockdraft.types import RequestDrafting

PROGRESS_SECONDS = 1.0  # between two reports of a prefill
P = ParamSpec("P")
T = TypeVar("T")


class Service:
    """Serves generation requests with the engines of a server.

    Attributes:
        model_names: Names of the model in requests.
        created: Start of the server, in seconds since 1970.
        token_texts: Texts of single tokens.
        max_draft_tokens: Maximum draft tokens of a decoding step.
        parameters: Number of weights of the target.
        family, quantization: Family of the target, such as "qwen2", and type of its weights, such as "Q4_K_M".
    """

    def __init__(self, backends: Backends, settings: ServeSettings) -> None:
        self.backends, self.settings = backends, settings
        catalogued = model_of(backends.usual.target.path)
        default_names = [backends.target] if catalogued is None else [catalogued.id, backends.target]
        self.model_names = list(settings.served_model_name) or default_names
        self.token_texts = TokenTexts(backends.usual.target.tokenizer)
        self.max_draft_tokens = backends.usual.controller.max_draft_tokens
        self.admission = Admission(backends.usual.max_batch_size, settings.places)
        self.metrics = Metrics(
            {
                "num_requests_running": (
                    "Requests that are decoded, prefill included.",
                    lambda: self.admission.active - self.admission.waiting,
                ),
                "num_requests_waiting": (
                    "Requests that wait for the batch.",
                    lambda: self.admission.waiting,
                ),
                "num_prefill_tokens_left": (
                    "Prompt tokens of running requests that have not been read.",
                    lambda: sum(len(request.prompt) - request.num_prefilled for request in backends.usual.running),
                ),
                "drafting_on": (
                    "1 while decoding steps draft; 0 without a drafter, and while drafting would be slower.",
                    lambda: backends.usual.controller.drafts,
                ),
            }
        )
        self._typed_infills = TypedInfills()
        self.created = int(time.time())
        self.parameters, self._drafter_parameters = weights_of(backends.usual)
        self.family, self.quantization = kind_of(backends.usual.target)
        self._stopped = False
        self._prompts_ended = False
        self._running: dict[ChunkQueue, list[_RunningChoice]] = {}  # that have chunks to come
        self._dispatcher: ChunkDispatcher | None = None
        # Loading takes minutes, and would block the threads of `in_thread` for other requests.
        self._loader = ThreadPoolExecutor(1, "blockdraft-load")

    def stop(self) -> None:
        """Refuse new requests and end the running ones with an error."""
        self._stopped = self.admission.draining = True
        for engine in self.backends.engines:
            engine.cancel()
        for queue in self._running:
            queue.fail(_stopped())

    def end_prompts(self) -> list[PrefillProgress]:
        """Refuse new requests, and end those whose prompt is still being read. Return how far each was read."""
        self._prompts_ended = self.admission.draining = True
        reading = {queue: running for queue, running in self._running.items() if not _has_tokens(running)}
        for queue, running in reading.items():
            _cancel(running)
            queue.fail(_stopped())
        return [_prefill_progress(running) for running in reading.values()]

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and output together."""
        return context_of(self.backends.usual)

    def check_model(self, name: str) -> str:
        """Return the model name for the response. An empty name is the served model.

        Raises:
            ApiError: No served model has this name (404).
        """
        if not name:
            return self.model_names[0]
        if name in self.model_names or self.settings.any_model:
            return name
        raise ApiError(
            404,
            f"model must be {' or '.join(self.model_names)}, got {name[:80]!r}. To take other names, start the server "
            f"with --served-model-name or --any-model.",
            kind="invalid_request_error",
            code="model_not_found",
            param="model",
        )

    def card(self, name: str) -> dict[str, Any]:
        """Return the entry of a model in /v1/models. It reveals no local paths."""
        engine = self.backends.usual
        size, tokenizer = engine.drafting.block_size, engine.target.tokenizer
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
                "tree_budget": self.max_draft_tokens if engine.drafting.tree_budget else 0,
                "max_context": self.context,
                "backends": self.backends.names,
                "recording": self.settings.record is not None,
                "has_chat_template": tokenizer is not None and tokenizer.chat_template is not None,
                "parameters": self.parameters,
                "drafter_parameters": self._drafter_parameters,
            },
        }

    def count_tokens(self, chat: ChatMessages) -> int:
        return len(encode_messages(self.backends.usual.target, chat))

    def prompt_text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return str(tokenizer_of(self.backends.usual.target).decode(prompt))

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run slow work outside the event loop. Its `UsageError`s are raised without local paths."""
        return await self._without_paths(asyncio.to_thread(work, *args, **kwargs))

    async def _without_paths(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except UsageError as error:
            raise UsageError(self.backends.public(str(error))) from error

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[tuple[int, Event | PrefillProgress], None]:
        """Yield the events of all choices as they happen, each with the index of its choice.

        While a prefill takes more than `PROGRESS_SECONDS`, its progress is yielded.

        All choices are admitted or none. An error in one choice ends all. Closing the generator cancels them. An infill
        drafts from the completion that its client was offered before, and cancels the one that it replaces.

        Args:
            requests: Requests with the same speculation.

        Raises:
            UsageError, ApiError: The requests cannot be served. Raised before the first event.
            ApiError: A newer infill replaced this one (409), or the server was stopped (503).
            NumbersError, RequestError: Decoding failed.
        """
        arrived, speculation = time.perf_counter(), requests[0].speculation
        try:
            with self.admission.places(sum(request.n for request in requests)):
                engine = await self._engine(speculation.backend)
                requests, typed = self._typed(requests)
                choices = await self.in_thread(
                    lambda: [choice for request in requests for choice in prepare(request, engine, self.settings)]
                )
                meters = [Meter(self.metrics, arrived) for _ in choices]
                queue = ChunkQueue(self.settings.max_unread, not speculation.trace, lambda i, c: meters[i].count(c))
                with self.admission.prompt_logprobs(sum(choice.num_prompt_logprobs for choice in choices)):
                    running = await self._submit(engine, choices, speculation, queue, meters, typed)
                    reason: str | None = "abort"
                    self._running[queue] = running
                    if self._stopped or self._prompts_ended:  # while the requests were submitted
                        queue.fail(_stopped())
                    try:
                        while not all(choice.done for choice in running):
                            started = all(choice.started for choice in running)
                            chunks = await queue.take(None if started else PROGRESS_SECONDS)
                            if not chunks:
                                yield 0, _prefill_progress(running)
                            for index, chunk in chunks:
                                for event in running[index].events(chunk):
                                    yield index, event
                    except Exception:
                        reason = None  # counted below
                        raise
                    finally:
                        del self._running[queue]
                        for choice in running:
                            choice.end(reason)
                        if self.settings.log_requests:
                            log_responses(requests[0].source, [c.request for c in running], arrived, reason)
                        if typed is not None:
                            typed.cancel = None
        except Exception as error:
            self.metrics.count_error(as_api_error(error, quiet=True).status)
            raise

    def _typed(self, requests: Sequence[GenerationRequest]) -> tuple[Sequence[GenerationRequest], TypedInfill | None]:
        """Register a request that is a single infill of a known client, and give it a draft unless it has one."""
        request = requests[0]
        scope, prompt = request.params.lookup_scope, request.prompt
        if len(requests) > 1 or request.n > 1 or scope is None or not isinstance(prompt, Infill):
            return requests, None
        typed = self._typed_infills.begin(scope, prompt)
        if request.params.prediction:
            typed.draft = ""
        prediction = request.params.prediction or typed.draft
        return [replace(request, params=replace(request.params, prediction=prediction))], typed

    async def _engine(self, backend: str | None) -> Engine:
        if backend not in self.backends.names or self.backends.is_loaded(backend):
            return self.backends.engine(backend)
        return await self._without_paths(asyncio.wrap_future(self._loader.submit(self.backends.engine, backend)))

    async def _submit(
        self,
        engine: Engine,
        choices: Sequence[PreparedChoice],
        speculation: Speculation,
        queue: ChunkQueue,
        meters: Sequence[Meter],
        typed: TypedInfill | None,
    ) -> list[_RunningChoice]:
        """Submit choices to the engine. Submit all or none."""
        if self._dispatcher is None or self._dispatcher.loop is not asyncio.get_running_loop():
            self._dispatcher = ChunkDispatcher()
        send = self._dispatcher.send
        drafting = RequestDrafting(speculation.enabled, speculation.block_size, speculation.tree_budget)

        def submit() -> list[_RunningChoice]:
            running = list[_RunningChoice]()
            try:
                for index, (choice, meter) in enumerate(zip(choices, meters, strict=True)):
                    request = engine.submit(
                        choice.prompt,
                        choice.params,
                        listener=partial(send, queue, index),
                        drafting=drafting,
                        trace=speculation.trace,
                        instruction_tokens=choice.instruction_tokens,
                        urgent=isinstance(choice.parser, InfillLimits),
                        recorded=choice.recorded,
                    )
                    running.append(_RunningChoice(choice, request, engine, meter, typed))
            except BaseException:
                _cancel(running)
                raise
            return running

        submitting = asyncio.ensure_future(self.in_thread(submit))
        try:
            running = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(_cancel_result)
            raise
        queue.on_overflow = partial(_cancel, running)
        if typed is not None:
            typed.cancel = partial(_cancel, running)
        if (
            self._stopped or self._prompts_ended or (typed is not None and typed.replaced)
        ):  # while the requests were submitted
            _cancel(running)
        return running


class _RunningChoice:
    """Turns the chunks of one choice into events.

    Attributes:
        started: Whether the first event was returned.
        done: Whether the last event was returned.
    """

    def __init__(
        self, choice: PreparedChoice, request: Request, engine: Engine, meter: Meter, typed: TypedInfill | None
    ) -> None:
        self.request, self.meter = request, meter
        self._choice, self._engine, self._typed = choice, engine, typed
        self.started = False
        self._reasoning_tokens = 0
        self.done = False

    @property
    def _ended(self) -> bool:
        """Whether the output is complete, even if the engine would go on."""
        return self._choice.parser is not None and self._choice.parser.ended

    def events(self, chunk: Chunk) -> Iterator[Event]:
        if chunk.finish_reason == "cancelled" and not self._ended:  # readers that cancel take no more chunks
            if self._typed is not None and self._typed.replaced:
                raise ApiError(
                    409,
                    "A newer infill of this client, for the same line, replaced this one.",
                    headers={"X-Should-Retry": "false"},  # OpenAI's clients would, and replace the newer one
                )
            raise _stopped()
        chunk.checked()
        if not self.started:
            self.started = True
            yield Started(self._choice.prompt, self.request.prompt_logprobs, self._choice.warnings)
        for event in self._parse(chunk):
            if self._typed is not None and isinstance(event, TextDelta):
                self._typed.output += event.text
            yield event
        if chunk.finish_reason is None:
            if self._ended:
                self.request.cancel(complete=True)
            return
        self.done = True
        self.meter.end(self.request, "stop" if self._ended else chunk.finish_reason)
        yield self._finished()

    def end(self, reason: str | None) -> None:
        """Cancel the choice, unless it is done. `reason` is counted in the metrics."""
        if not self.done:
            self.request.cancel()
            self.meter.end(self.request, reason)

    def _parse(self, chunk: Chunk) -> Iterator[Event]:
        """Yield the events of a chunk. The first text among them carries the chunk."""
        parser = self._choice.parser
        if parser is None:
            yield TextDelta(chunk.text, chunk=chunk)
            return
        parts = parser.push(chunk.text)
        if chunk.finish_reason is not None:
            parts += parser.finish(cut=chunk.finish_reason == "length")
        first = next((part for part in parts if isinstance(part, TextDelta)), None)
        if first is None:
            yield TextDelta("", chunk=chunk)
        else:
            self._reasoning_tokens += first.reasoning * len(chunk.token_ids)
        for part in parts:
            yield replace(first, chunk=chunk) if first is not None and part is first else part

    def _finished(self) -> Finished:
        request, parser = self.request, self._choice.parser
        accepted = sum(request.drafted)
        predicted = self._typed is None or not self._typed.draft  # by the client, if at all
        usage = Usage(
            prompt=len(request.prompt),
            completion=len(request.token_ids),
            cached=request.stats.remembered,
            reasoning=self._reasoning_tokens,
            accepted=accepted,
            rejected=max(0, sum(request.stats.drafted) - accepted),
            accepted_prediction=predicted * request.stats.accepted_prediction,
            rejected_prediction=predicted * request.stats.rejected_prediction,
        )
        stop = self._stop_string() if request.text.stopped else None
        if request.finish_reason == "length" and not self._ended:
            return Finished("length", usage, request.stats, stop, context_full=self._choice.clipped)
        called = parser is not None and parser.called
        return Finished("tool_calls" if called else "stop", usage, request.stats, stop)

    def _stop_string(self) -> str | None:
        """Return the stop string that ended the choice. It may consist of special tokens, which the text leaves out."""
        tokenizer = tokenizer_of(self._engine.target)
        for skip in (True, False):
            text = str(tokenizer.decode(self.request.token_ids, skip_special_tokens=skip))
            if stops := [stop for stop in self.request.params.stop if stop in text]:
                return min(stops, key=text.index)
        return None


def _prefill_progress(running: Sequence[_RunningChoice]) -> PrefillProgress:
    requests = [choice.request for choice in running]
    return PrefillProgress(sum(r.num_prefilled for r in requests), sum(len(r.prompt) for r in requests))


def _has_tokens(running: Sequence[_RunningChoice]) -> bool:
    return any(choice.request.token_ids for choice in running)


def _stopped() -> ApiError:
    return ApiError(503, "The server was stopped before the response ended; try again.")


def _cancel(running: Sequence[_RunningChoice]) -> None:
    for choice in running:
        choice.request.cancel()


def _cancel_result(submitting: asyncio.Future[list[_RunningChoice]]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        _cancel(submitting.result())


class TokenTexts:
    """Caches the texts of single tokens.

    Args:
        tokenizer: Tokenizer of the target; without one, the text of a token is its id.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        if token not in self._texts:
            once, twice = (str(self._tokenizer.decode([token] * count)) for count in (1, 2))
            # Some tokenizers drop the space before the first word of a text, so the token is decoded after another.
            self._texts[token] = twice[len(once) :] if twice.startswith(once) else once
        return self._texts[token]
