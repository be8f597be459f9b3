"""A tiny random model behind the server's application."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.serving.app import make_app
from blockdraft.serving.backends import Backends
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings
from blockdraft.targets import load_target
from blockdraft.types import Drafting

sys.path.insert(0, str(Path(__file__).parent))  # for pages.py and scripted_server.py

MODEL = "tiny"


@pytest.fixture(scope="session")
def engine(tiny_target_dir: Path) -> Iterator[Engine]:
    """Drafted for by the target itself, so that guesses are good, and not all of them where it samples."""
    target = load_target(tiny_target_dir, backend="native")
    drafter = load_drafter(tiny_target_dir, target=target)
    with Engine(target, drafter, max_batch_size=4, drafting=Drafting(block_size=8), prefix_tokens=512) as made:
        yield made


class Client:
    """Sends requests to an application in the same process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.app = make_app(service, service.settings)

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            self.service._mail = None  # of the loop before
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                return await work(client)

        return asyncio.run(whole())

    def send(self, method: str, path: str, **how: Any) -> httpx.Response:
        return self.run(lambda client: client.request(method, path, **how))

    def get(self, path: str, **how: Any) -> httpx.Response:
        return self.send("GET", path, **how)

    def post(self, path: str, body: Any = None, **how: Any) -> httpx.Response:
        return self.send("POST", path, json=body, **how)

    def chat(self, text: str = "the ant", **fields: Any) -> Any:
        """A whole chat, greedy unless it says otherwise."""
        messages = [{"role": "user", "content": text}]
        answer = self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat_events(self, text: str = "the ant", **fields: Any) -> list[Any]:
        """The same streamed, as the values of its events."""
        messages = [{"role": "user", "content": text}]
        return self.events(
            "/v1/chat/completions", {"model": MODEL, "messages": messages, "temperature": 0, "stream": True, **fields}
        )

    def complete(self, prompt: Any, **fields: Any) -> Any:
        answer = self.post("/v1/completions", {"model": MODEL, "prompt": prompt, "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, body: Any) -> list[Any]:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        *lines, done = answer.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.fixture
def make_client(engine: Engine) -> Callable[..., Client]:
    """A client of a server with these settings."""

    def make(**given: Any) -> Client:
        return Client(Service(Backends(engine), ServeSettings(served_model_name=(MODEL,), **given)))

    return make


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium of this machine."""
    from pages import CHROMIUM, chromium

    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine; install chromium")
    with chromium() as found:
        yield found


@pytest.fixture
def app() -> FastAPI:
    """The page before scripted answers."""
    from scripted_server import make_app

    return make_app()


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    from pages import serve

    with serve(app) as address:
        yield address


@pytest.fixture
def visit(browser: Any, url: str) -> Iterator[Any]:
    from pages import Visit

    visit = Visit(browser, url)
    yield visit
    visit.close()
