"""A service whose model says what a test wants."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.testclient import TestClient

from blockdraft.engine import Engine, Stats
from blockdraft.serving.app import make_app
from blockdraft.serving.backends import Backends
from blockdraft.serving.request import Event, Finished, GenerationRequest, Started, Usage
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings

USAGE = Usage(prompt=10, completion=7, cached=4, reasoning=2, accepted=3, rejected=1, accepted_prediction=2)


def finished(reason: Any = "stop", stop: str | None = None, context_full: bool = False) -> Finished:
    return Finished(reason, USAGE, Stats(), stop, context_full)


class ScriptedService(Service):
    """Generates `events` for every request. An exception among them is raised in its place.

    Attributes:
        requests: Requests received so far.
    """

    def __init__(self, engine: Engine, events: Sequence[Event | Exception] = (), **settings: Any) -> None:
        super().__init__(Backends(engine), ServeSettings(served_model_name=("tiny",), **settings))
        self.events = list(events)
        self.requests = list[GenerationRequest]()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Event], None]:
        self.requests += requests
        started = False
        for event in self.events:
            if isinstance(event, Exception):
                raise event
            if not started:
                yield 0, Started([0] * 10, [])
            started = True
            yield 0, event

    def client(self) -> TestClient:
        app = make_app(self, self.settings)
        return TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


def named_events(answer: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed HTTP response, each of which is named by its type."""
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, line = block.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events
