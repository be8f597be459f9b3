"""The application: routes, and who answers when they fail."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from blockdraft.serving.errors import as_api_error
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings
from blockdraft.serving.streaming import ClientGone

ROUTERS = ("openai", "responses", "anthropic")


def make_app(service: Service, settings: ServeSettings) -> FastAPI:
    """The application that serves a service."""
    app = FastAPI(title="blockdraft", docs_url=None, redoc_url=None)  # whose pages load scripts from the network

    async def fail(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.url.path)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    handlers: dict[Any, Any] = {ClientGone: gone, Exception: fail, HTTPException: fail, RequestValidationError: fail}
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    for name in ROUTERS:
        if find_spec(f"blockdraft.serving.{name}"):
            app.include_router(import_module(f"blockdraft.serving.{name}").router(service))
    return app
