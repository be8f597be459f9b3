"""The routes of the page in `blockdraft serve`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from blockdraft.serving.web import page_response
from blockdraft_radar.page import Query, answer, page


def router() -> APIRouter:
    """Return the routes of the page and of the rows that it asks for."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("")
    def index() -> HTMLResponse:
        return page_response(page())

    @routes.post("/rows")
    def rows(query: Query) -> dict[str, Any]:
        return answer(query)

    return routes
