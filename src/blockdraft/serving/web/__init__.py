"""The page at `/`, a chat and a race against plain decoding, and the pages of plugins.

Each page is sent as one file that loads no others.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from blockdraft.plugins import PAGES, load_all

SCRIPTS = ("page.js", "recording.js", "chat.js", "race.js", "tree.js", "editors.js", "controls.js")


def router() -> APIRouter:
    """Return the route `/`, and those of each plugin's page at `/NAME`.

    The pages need no key: they hold no secrets, and ask for the API's key. See `security.Guard`.
    """
    chat = _chat_page()
    routes = APIRouter()

    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    def index() -> HTMLResponse:
        return page_response(chat)

    for name, page_router in load_all(PAGES).items():
        routes.include_router(page_router(), prefix=f"/{name}")
    return routes


def _chat_page() -> str:
    """Return the page of this folder, with its styles and scripts inside."""
    texts = {file.name: file.read_text(encoding="utf-8") for file in files(__name__).iterdir() if file.is_file()}
    script = "\n".join(texts[name] for name in SCRIPTS)
    page = texts["index.html"].replace("<style></style>", f"<style>\n{texts['style.css']}</style>")
    return page.replace("<script></script>", f"<script>\n{script}</script>")


def page_response(page: str) -> HTMLResponse:
    """Return the response with a page, whose policy allows requests to this server and nothing else.

    Args:
        page: HTML with one `<script>` and one `<style>`, both without attributes.
    """
    headers = {
        "Content-Security-Policy": _policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",  # so that a newer server never gets requests from an older page
    }
    return HTMLResponse(page, headers=headers)


def _policy(page: str) -> str:
    """Return a policy that allows the page's own script and styles, requests to its own server, and no frames."""
    rules = {
        "default-src": "'none'",
        "script-src": _hash(page, "script"),
        "style-src": _hash(page, "style"),
        "img-src": "data:",  # the empty icon, which saves a request for one
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(page: str, tag: str) -> str:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
