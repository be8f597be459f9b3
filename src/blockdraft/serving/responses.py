"""The routes of /v1/responses."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from blockdraft.serving.errors import ApiError, as_api_error
from blockdraft.serving.events import ChatJob, Event
from blockdraft.serving.responses_output import Answer
from blockdraft.serving.responses_schemas import ResponseRequest, job_of, messages_of
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import data, stream, until_gone


def router(service: Service) -> APIRouter:
    routes, settings = APIRouter(), service.settings
    store = Store(settings.max_stored)

    @routes.post("/v1/responses", response_model=None)
    async def respond(request: Request, body: ResponseRequest) -> Response:
        name = service.check_model(body.model)
        before = store.get(body.previous_response_id).messages if body.previous_response_id else []
        said = [*before, *messages_of(body.input)]
        job = job_of(body, said, settings.temperature)
        most_guesses = service.most_guesses if job.speculation.statistics else None
        answer = Answer(body, name, settings.temperature, most_guesses)

        def keep() -> None:
            if body.store is not False:
                store.put(answer.id, Stored(answer.body(), [*said, *messages_of(answer.output.as_input())]))

        if body.stream:
            return await stream(request, streamed(service, job, answer, keep), settings.stall_seconds)
        return JSONResponse(await until_gone(request, whole(service, job, answer, keep)))

    @routes.get("/v1/responses/{response_id}")
    async def stored(response_id: str, stream: bool = False) -> dict[str, Any]:
        if stream:
            raise ApiError(400, "stream is true; a stored response is sent whole, so leave it out.", param="stream")
        return store.get(response_id).body

    @routes.delete("/v1/responses/{response_id}")
    async def forget(response_id: str) -> dict[str, Any]:
        store.remove(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return routes


@dataclass(frozen=True)
class Stored:
    """A response, and the conversation up to its end, without instructions."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]

    @property
    def size(self) -> int:
        """About its bytes."""
        return len(json.dumps(self.body)) + len(json.dumps(self.messages))


class Store:
    """The last responses, in memory. The oldest are forgotten where there is no room for all.

    Args:
        room: Bytes, about.
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
        """Raises:
        ApiError: It is not there.
        """
        if response_id not in self._kept:
            raise ApiError(
                404,
                f"There is no response {response_id[:80]!r}, or no more: the server keeps but the latest, in memory. "
                f"Send the whole conversation as input.",
                kind="invalid_request_error",
                param="previous_response_id",
            )
        return self._kept[response_id][0]

    def remove(self, response_id: str) -> None:
        """Raises:
        ApiError: It is not there.
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
                    keep()  # who reads the last event may go on from it at once
                yield "".join(map(_wire, wires))
    except Exception as error:
        if not begun:  # it can still be told by a status of HTTP
            raise
        for wire in answer.fail(as_api_error(error).message):
            yield _wire(wire)


async def _events(service: Service, job: ChatJob) -> AsyncGenerator[Event, None]:
    """Those of the service, whose errors call a field as chats do."""
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
