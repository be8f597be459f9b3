"""The ASGI application: the routes of all APIs and the responses to errors."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from blockdraft.errors import BlockdraftError
from blockdraft.serving import anthropic, infill, ollama, web
from blockdraft.serving.errors import ApiError, as_api_error
from blockdraft.serving.openai import chat, completions, responses, utilities
from blockdraft.serving.security import Guard, allowed_origins
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings
from blockdraft.serving.streaming import ClientDisconnected


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetails


def make_app(service: Service, settings: ServeSettings) -> FastAPI:
    """Return the ASGI application of a service."""
    app = FastAPI(
        title="blockdraft",
        docs_url=None,  # its page loads scripts from the network
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.add_middleware(Guard, settings=settings)
    if settings.allow_origin:  # outside the guard: browsers send no key with a preflight request
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins(settings),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )

    async def fail(http: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            error = ApiError(
                404,
                f"The path {http.url.path[:80]} does not exist; /openapi.json lists all paths. Base URLs end in /v1 "
                f"for clients of OpenAI's API, and omit /v1 for those of Anthropic's.",
            )
        if isinstance(error, HTTPException) and error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"The method of {http.url.path[:80]} must be {allowed}, got {http.method}."
            error = ApiError(405, message, headers=error.headers or {})
        return as_api_error(error).response(http.url.path)

    async def disconnected(http: Request, error: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(ClientDisconnected, disconnected)
    for kind in (ApiError, BlockdraftError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, fail)
    for api in (chat, completions, responses, anthropic, infill, ollama, utilities):
        app.include_router(api.router(service))
    app.include_router(web.router())
    return app
