"""Routes beside the answers: models, tokens, health, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from blockdraft.errors import UsageError
from blockdraft.serving.api import openai_requests
from blockdraft.serving.api.openai_requests import Message, Tool
from blockdraft.serving.api.schemas import Body, Listed, TokenIds
from blockdraft.serving.api.streaming import until_gone
from blockdraft.serving.core.prepare import chat_ids, chat_text, text_ids, tokenizer_of
from blockdraft.serving.core.service import Service


class TokenizeRequest(Body):
    """Either `prompt`, a text, or `messages`, a chat that gets the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[Message] | None = None
    tools: Listed[Tool] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    target = service.backends.usual.target

    def tokenized(body: TokenizeRequest) -> dict[str, Any]:
        if (body.prompt is None) == (body.messages is None):
            raise UsageError("prompt and messages are both given or both missing; give exactly one of them.")
        if body.prompt is not None:
            ids = text_ids(target, body.prompt, body.add_special_tokens)
        else:
            told = openai_requests.messages(body.messages or [])
            text = chat_text(target, told, openai_requests.tools(body.tools), body.chat_template_kwargs)
            ids = chat_ids(target, text)
        names = [service.token_texts.text(token) for token in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": service.context, "tokens": ids, "token_strs": names}

    def detokenized(body: DetokenizeRequest) -> dict[str, Any]:
        outside = next((token for token in body.tokens if token >= target.vocab_size), None)
        if outside is not None:
            raise UsageError(f"tokens holds {outside}; token ids must be from 0 to {target.vocab_size - 1}.")
        return {"prompt": tokenizer_of(target).decode(body.tokens)}

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card(name) for name in service.model_names]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return service.card(service.check_model(name))

    @routes.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> Any:
        if body.model is not None:
            service.check_model(body.model)
        return JSONResponse(await until_gone(request, service.in_thread(tokenized, body)))

    @routes.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> Any:
        if body.model is not None:
            service.check_model(body.model)
        return JSONResponse(await until_gone(request, service.in_thread(detokenized, body)))

    @routes.get("/health")
    async def health() -> Any:
        """Status 200 while requests are admitted, 503 while the server ends."""
        ending = service.admission.draining
        return JSONResponse({"status": "ending" if ending else "ok"}, 503 if ending else 200)

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes
