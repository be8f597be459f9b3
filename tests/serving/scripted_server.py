"""A server with scripted answers, for behaviour that a real model does not show on demand.

The prompt chooses: `SLOW` waits between steps, `PAUSE` does not draft, `BUSY` is a 429, `BAD` a 400, `BREAK` breaks
off, `FAIL` ends with an error inside the stream, `DIFFER` answers otherwise without drafting, and `SAY text` says just
that. `LONG` first reports the progress of a long prefill.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from blockdraft.serving.web import router

TEXT = "The baker has 4 * 6 = 24 rolls.\nSo there are 24 - 9 = 15 rolls left.\nThe answer is \\boxed{15}."
MODEL: dict[str, Any] = {
    "target": "scripted-target",
    "drafter": "scripted-drafter",
    "block_size": 8,
    "tree_budget": 16,
    "max_context": 1024,
    "backends": ["native", "hf"],
    "has_chat_template": True,
    "parameters": 5_400_000,
    "drafter_parameters": 1_200_000,
}
STEP_SECONDS = 0.004
ACCEPTED = (3, 0, 1, 2, 5, 1, 0)  # draft tokens per step


def make_app(key: str | None = None, has_chat_template: bool = True, drafter: str = MODEL["drafter"]) -> FastAPI:
    """Return an application with the page and scripted responses.

    `app.state.requests` holds the bodies that came, `app.state.running` how many answers are being streamed, and
    `app.state.most_running` how many there were at once.
    """
    app = FastAPI()
    app.state.requests, app.state.running, app.state.most_running = [], 0, 0
    app.include_router(router())
    about = MODEL | {"has_chat_template": has_chat_template, "drafter": drafter}

    @app.middleware("http")
    async def check_key(request: Request, call_next: Any) -> Response:
        if key and request.url.path != "/" and request.headers.get("Authorization") != f"Bearer {key}":
            return _error(401, "No valid key.")
        return await call_next(request)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "scripted", "blockdraft": about}]}

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def answer(request: Request) -> Response:
        body = await request.json()
        app.state.requests.append(body)
        prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        if "BUSY" in prompt:
            return _error(429, "64 requests are waiting.", {"Retry-After": "3"})
        if "BAD" in prompt:
            return _error(400, "max_tokens is 4096; the context holds 1024.")
        return StreamingResponse(_counted(app, _stream(body, prompt)), media_type="text/event-stream")

    return app


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message}}, status, headers)


async def _counted(app: FastAPI, lines: AsyncIterator[str]) -> AsyncIterator[str]:
    app.state.running += 1
    app.state.most_running = max(app.state.most_running, app.state.running)
    try:
        async for line in lines:
            yield line
    finally:
        app.state.running -= 1


async def _stream(body: dict[str, Any], prompt: str) -> AsyncIterator[str]:
    drafting = body["speculation"]["enabled"] and "PAUSE" not in prompt
    if "LONG" in prompt:
        for done in (1024, 2048):
            yield f": prefill {done}/17600\n\n"
        await asyncio.sleep(1)
    text = prompt.split("SAY ", 1)[1] if "SAY " in prompt else TEXT
    if "DIFFER" in prompt and not drafting:
        text = text.replace("15 rolls", "16 rolls")
    for number, trace in enumerate(_steps(text, drafting)):
        await asyncio.sleep(0.15 if "SLOW" in prompt else STEP_SECONDS)
        piece = "".join(token["text"] for token in trace["tokens"])
        choice = {"delta": {"content": piece}} if "messages" in body else {"text": piece}
        yield _event({"choices": [choice], "trace": trace})
        if number == 2 and "BREAK" in prompt:
            return
        if number == 2 and "FAIL" in prompt:
            yield _event({"error": {"message": "The model gave NaN."}})
            return
    rate = 400.0 if drafting else 200.0
    counts = {"num_spec_steps": 8 * drafting, "num_spec_tokens": 15}
    yield _event({"choices": [], "usage": {}, "metrics": {"tokens_per_second": rate, "speculative_decoding": counts}})
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _steps(text: str, drafting: bool) -> Iterator[dict[str, Any]]:
    """Yield the traces of a response: first the token of the prefill, then decoding steps."""
    words = [{"id": i, "text": word} for i, word in enumerate(re.findall(r"\s*\S+", text))]
    yield {"tokens": [words[0] | {"drafted": False}], "step": None}
    at, step = 1, 0
    while at < len(words):
        accepted = min(ACCEPTED[step % len(ACCEPTED)], len(words) - at - 1) if drafting else 0
        new = words[at : at + accepted + 1]
        tokens = [token | {"drafted": i < accepted} for i, token in enumerate(new)]
        yield {"tokens": tokens, "step": _tree(words[at - 1], new[:accepted], drafting)}
        at, step = at + len(new), step + 1


def _tree(anchor: dict[str, Any], accepted: list[dict[str, Any]], drafting: bool) -> dict[str, Any]:
    """Return the accepted chain, a rejected draft token beside each of its nodes, and two after its end."""
    nodes, parents = [anchor, *accepted], [-1, *range(len(accepted))]
    if drafting:
        wrong = [*range(len(accepted) + 1), len(accepted)]
        parents += wrong
        nodes += [{"id": 1000 + i, "text": f" wrong{i}"} for i in range(len(wrong))]
    path = list(range(len(accepted) + 1))
    return {"tokens": nodes, "parents": parents, "path": path, "seconds": STEP_SECONDS}
