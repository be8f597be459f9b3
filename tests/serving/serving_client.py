"""A client of the server's application, in the same process."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from blockdraft.serving.app import make_app
from blockdraft.serving.service import Service

MODEL = "tiny"


class Client:
    """Sends requests to an application in the same process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.app = make_app(service, service.settings)

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
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
        """Return the whole response to a chat, greedy by default."""
        messages = [{"role": "user", "content": text}]
        answer = self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat_events(self, text: str = "the ant", **fields: Any) -> list[Any]:
        """Return the values of the events of a streamed chat."""
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
