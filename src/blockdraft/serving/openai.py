"""The routes of OpenAI's API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from blockdraft.serving import jobs
from blockdraft.serving.chats import streamed_chat, whole_chat
from blockdraft.serving.schemas import ChatRequest, CompletionRequest
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import stream, until_gone
from blockdraft.serving.texts import streamed_text, whole_text

ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answer, whole or streamed."}
}


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card(name) for name in service.model_names]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return service.card(service.check_model(name))

    @routes.post("/v1/chat/completions", responses=ANSWERS)
    async def chat(request: Request, body: ChatRequest) -> Response:
        name = service.check_model(body.model)
        service.admission.check(body.n or 1)
        several = jobs.choices(jobs.chat_job(body, service.settings.temperature), body.n)
        if body.stream:
            events = streamed_chat(service, several, name, jobs.with_usage(body))
            return await stream(request, events, service.settings.stall_seconds)
        return JSONResponse(await until_gone(request, whole_chat(service, several, name)))

    @routes.post("/v1/completions", responses=ANSWERS)
    async def complete(request: Request, body: CompletionRequest) -> Response:
        name = service.check_model(body.model)
        service.admission.check(jobs.count(body))
        several = jobs.text_jobs(body, service.settings.temperature)
        how = body.n or 1, bool(body.echo), body.max_tokens == 0
        if body.stream:
            events = streamed_text(service, several, name, *how, jobs.with_usage(body))
            return await stream(request, events, service.settings.stall_seconds)
        return JSONResponse(await until_gone(request, whole_text(service, several, name, *how)))

    return routes
