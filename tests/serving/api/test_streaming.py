"""Server-sent events, and clients that disconnect."""

import asyncio
import json
from typing import Any

import pytest
from scripted import ScriptedService, app_of

from blockdraft.serving.api.streaming import ClientGone, data


def test_no_character_of_a_text_ends_the_line_of_an_event() -> None:
    text = "".join(map(chr, (*range(1, 0x300), *range(0x2000, 0x2100), 0x1F600)))
    line, empty = data({"text": text}).splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": text} and empty == ""


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_nothing_is_counted_for_a_client_that_has_gone(path: str) -> None:
    class Slow(ScriptedService):
        called_off = False

        async def in_thread(self, work: Any, *arguments: Any) -> Any:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.called_off = True
                raise

    service = Slow()
    body = json.dumps({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}).encode()
    messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        pass

    async def work() -> None:
        try:
            await asyncio.wait_for(app_of(service)(scope, receive, send), 10)
        finally:
            assert service.called_off

    with pytest.raises(ClientGone):  # which the whole application answers
        asyncio.run(work())
