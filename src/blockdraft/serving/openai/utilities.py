"""Routes for models, tokenization, health and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from blockdraft.errors import UsageError
from blockdraft.serving.openai.chat import ChatMessage, ChatTool, offered_tools, template_messages
from blockdraft.serving.openai.tool_choice import choose_tools
from blockdraft.serving.prompts import encode_messages, encode_plain, tokenizer_of
from blockdraft.serving.request import ChatMessages
from blockdraft.serving.schemas import Listed, Schema, TokenIds
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import until_disconnect


class TokenizeRequest(Schema):
    """Either `prompt`, a text, or `messages`, a chat for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[ChatMessage] | None = None
    tools: Listed[ChatTool] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(Schema):
    model: str | None = None
    tokens: TokenIds


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    target = service.backends.usual.target

    def encode(body: TokenizeRequest) -> dict[str, Any]:
        if (body.prompt is None) == (body.messages is None):
            raise UsageError("prompt and messages are both given or both missing; give exactly one of them.")
        if body.prompt is not None:
            ids = encode_plain(target, body.prompt, body.add_special_tokens)
        else:
            messages, (_, tools) = template_messages(body.messages or []), choose_tools(None, offered_tools(body.tools))
            chat = ChatMessages(
                messages,
                tools,
                template=body.chat_template_kwargs or {},
                continue_final_message=body.continue_final_message,
                add_generation_prompt=body.add_generation_prompt,
            )
            ids = encode_messages(target, chat)
        texts = [service.token_texts.text(token) for token in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": service.context, "tokens": ids, "token_strs": texts}

    def decode(body: DetokenizeRequest) -> dict[str, Any]:
        unknown = next((token for token in body.tokens if token >= target.vocab_size), None)
        if unknown is not None:
            raise UsageError(f"tokens holds {unknown}; token ids must be from 0 to {target.vocab_size - 1}.")
        return {"prompt": tokenizer_of(target).decode(body.tokens)}

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card(name) for name in service.model_names]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return service.card(service.check_model(name))

    @routes.post("/tokenize")
    async def tokenize(http: Request, body: TokenizeRequest) -> Any:
        if body.model is not None:
            service.check_model(body.model)
        return JSONResponse(await until_disconnect(http, service.in_thread(encode, body)))

    @routes.post("/detokenize")
    async def detokenize(http: Request, body: DetokenizeRequest) -> Any:
        if body.model is not None:
            service.check_model(body.model)
        return JSONResponse(await until_disconnect(http, service.in_thread(decode, body)))

    @routes.get("/health")
    async def health() -> Any:
        """Return status 200 while requests are admitted, and 503 while the server ends."""
        if service.admission.draining:
            return JSONResponse({"status": "ending"}, 503)
        return JSONResponse({"status": "ok"})

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes
