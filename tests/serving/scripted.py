"""A service with scripted events, for tests of the answers that an API makes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from blockdraft.engine import Stats
from blockdraft.errors import BlockdraftError
from blockdraft.serving.api import anthropic, responses
from blockdraft.serving.core.errors import ApiError, as_api_error
from blockdraft.serving.core.events import ChatJob, Event, Finished, Usage
from blockdraft.serving.settings import ServeSettings

USAGE = Usage(prompt=10, completion=7, cached=4, reasoning=2, accepted=3, rejected=1)


def finished(reason: Any = "stop", stop: str | None = None) -> Finished:
    return Finished(reason, USAGE, Stats(), stop)


class ScriptedService:
    """Answers every chat with `events`; an exception among them is raised in its place.

    Attributes:
        jobs: Jobs received so far.
        closed: How many answers were closed before their end.
    """

    def __init__(self, events: Sequence[Event | Exception] = (), **settings: Any) -> None:
        self.events, self.settings = list(events), ServeSettings(**settings)
        self.model_names, self.max_draft_tokens = ["tiny"], 7
        self.jobs = list[ChatJob]()
        self.closed = 0

    def check_model(self, name: str) -> str:
        if name != "tiny":
            raise ApiError(404, f"model is {name!r}; this server has tiny.", "invalid_request_error", param="model")
        return name

    @property
    def context(self) -> int:
        return 100

    async def in_thread(self, work: Any, *arguments: Any) -> Any:
        return work(*arguments)

    def count_tokens(self, messages: Any, tools: Any = (), template: Any = None) -> int:
        return 10 * len(messages) + len(tools)

    async def chat(self, job: ChatJob) -> AsyncGenerator[Event, None]:
        self.jobs.append(job)
        done = False
        try:
            for event in self.events:
                if isinstance(event, Exception):
                    raise event
                yield event
            done = True
        finally:
            self.closed += not done


def app_of(service: Any) -> FastAPI:
    """The routes of /v1/responses and /v1/messages, with errors answered as in `make_app`."""
    app = FastAPI()

    async def fail(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.url.path)

    for kind in (ApiError, BlockdraftError, RequestValidationError, Exception):
        app.add_exception_handler(kind, fail)
    app.include_router(responses.router(service))
    app.include_router(anthropic.router(service))
    return app


def named_events(answer: Any) -> list[dict[str, Any]]:
    """Events of a streamed HTTP answer, each of which is named by its type."""
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    wires = []
    for block in answer.text.strip().split("\n\n"):
        name, line = block.split("\n")
        wires.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {wires[-1]['type']}"
    return wires


def first_of(stream: Any) -> str:
    """The first event of a stream. The stream is then closed."""

    async def first() -> str:
        event: str = await anext(stream)
        await stream.aclose()
        return event

    return asyncio.run(first())
