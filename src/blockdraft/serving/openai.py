"""The routes of OpenAI's API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from blockdraft.serving import jobs
from blockdraft.serving.chats import streamed_chat, whole_chat
from blockdraft.serving.schemas import ChatRequest
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import stream, until_gone


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card(name) for name in service.model_names]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return service.card(service.check_model(name))

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request, body: ChatRequest) -> Response:
        name = service.check_model(body.model)
        several = jobs.choices(jobs.chat_job(body, service.settings.temperature), body.n)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            events = streamed_chat(service, several, name, with_usage)
            return await stream(request, events, service.settings.stall_seconds)
        return JSONResponse(await until_gone(request, whole_chat(service, several, name)))

    return routes
