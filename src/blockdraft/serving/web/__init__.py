"""The page at `/`: a chat with the model, and the race. One file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse


def router() -> APIRouter:
    """`/`, which needs no key: it holds nothing of the model, and asks the user for the key where the API wants one."""
    page = files(__name__).joinpath("index.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",  # a newer server never meets an older page
    }
    routes = APIRouter()

    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    def index() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    return routes


def _policy(page: str) -> str:
    """Only the page's own script and styles run, only its own server is asked, and nobody frames it."""
    rules = {
        "default-src": "'none'",
        "script-src": _hash(page, "script"),
        "style-src": _hash(page, "style"),
        "img-src": "data:",  # the empty icon, which saves a request
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(page: str, tag: str) -> str:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
