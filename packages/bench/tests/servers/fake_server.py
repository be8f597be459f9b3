"""A server that answers as OpenAI's API does and counts as an engine does, from a script.

The prompt chooses: BREAK breaks the answer off, FAIL is a 500, HANG is never answered, HUSH gives no usage, TOGETHER is
answered when three requests have been under way at a time, and DIFFER is answered otherwise by a server that drafts.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

TOGETHER_SECONDS = 10.0  # after which a request is answered alone
WORDS = ["one ", "two ", "three ", "four ", "five ", "six "]  # a token each
METRICS = {
    "vllm": """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",enable_prefix_caching="{caches}"}} 1.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{engine="0"}} {cached}
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {steps}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
""",
    "llamacpp": """# HELP llamacpp:prompt_tokens_cached_total Number of prompt tokens reused from the cache
# TYPE llamacpp:prompt_tokens_cached_total counter
llamacpp:prompt_tokens_cached_total {cached}
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total {steps}
# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter
llamacpp:spec_decode_num_accepted_tokens_total {accepted}
# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {first}
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {second}
""",
    "sglang": """# TYPE sglang:cached_tokens counter
sglang:cached_tokens_total{{cache_source="device"}} {cached}
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{tp_rank="0"}} {length}
sglang:spec_accept_length{{tp_rank="1"}} 0.0
""",
}


class FakeServer:
    """Attributes:
    bodies: Of the requests that came.
    most_at_once: Requests that were under way at a time, at most.
    """

    def __init__(
        self, engine: str | None = "vllm", drafts: bool = True, caches: bool = False, key: str | None = None
    ) -> None:
        self.engine, self.drafts, self.caches, self.key = engine, drafts, caches, key
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_at_once = 0
        self.counts: Counter[str] = Counter()
        self.app = FastAPI()
        self.app.get("/health")(self.health)
        self.app.get("/metrics")(self.metrics)
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/chat/completions")(self.answer)
        self.app.post("/v1/completions")(self.answer)

    def health(self) -> Response:
        return Response()

    def metrics(self) -> Response:
        if self.engine is None:
            return Response(status_code=501)
        names = ("cached", "steps", "accepted", "first", "second")
        counts = {name: self.counts[name] for name in names}
        length = 2.5 if self.drafts else 0.0
        return PlainTextResponse(METRICS[self.engine].format(**counts, caches=self.caches, length=length))

    def models(self, request: Request) -> Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "No valid key."}}, 401)
        return JSONResponse({"data": [{"id": "fake-model"}]})

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        if "FAIL" in prompt:
            return JSONResponse({"error": {"message": "out of memory"}}, 500)
        while "HANG" in prompt and not await request.is_disconnected():
            await asyncio.sleep(0.01)
        return StreamingResponse(self.stream(body, prompt), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any], prompt: str) -> AsyncIterator[str]:
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        until = time.monotonic() + TOGETHER_SECONDS
        while "TOGETHER" in prompt and self.most_at_once < 3 and time.monotonic() < until:
            await asyncio.sleep(0.001)
        words = WORDS[: body["max_tokens"]]
        if "DIFFER" in prompt and self.drafts:
            words = [*words[:2], "many "]
        self.counts["cached"] += 10 * self.caches
        pieces = [words[:1]] + [words[i : i + 1 + 2 * self.drafts] for i in range(1, len(words), 1 + 2 * self.drafts)]
        for piece in pieces:
            await asyncio.sleep(0.002)
            yield event({"choices": [choice(body, "".join(piece))]})
            if "BREAK" in prompt:
                self.running -= 1
                return
        if self.drafts:  # two steps, of which one accepts two draft tokens and the other one
            self.counts.update(steps=2, accepted=3, first=2, second=1)
        yield event({"choices": [choice(body, "") | {"finish_reason": "stop"}]})
        usage = {"completion_tokens": len(words), "prompt_tokens": 12}
        if "HUSH" not in prompt:
            cached = {"prompt_tokens_details": {"cached_tokens": 10 * self.caches}} if self.engine is None else {}
            yield event({"choices": [], "usage": usage | cached})
        self.running -= 1
        yield "data: [DONE]\n\n"

    def served(self) -> AbstractContextManager[str]:
        return serve(self.app)


@contextmanager
def serve(app: FastAPI) -> Iterator[str]:
    """Address of the server, for as long as the context lasts."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def choice(body: dict[str, Any], text: str) -> dict[str, Any]:
    return {"delta": {"content": text}} if "messages" in body else {"text": text}


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
