"""Ollama's routes under /api, which answer in lines of JSON."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError
from starlette.responses import JSONResponse, Response

from blockdraft.engine import InfillTokens
from blockdraft.errors import UsageError
from blockdraft.serving.errors import ApiError
from blockdraft.serving.openai.chat import ChatTool, offered_tools
from blockdraft.serving.openai.tool_choice import AnyToolChoice, choose_tools
from blockdraft.serving.request import (
    ChatMessages,
    Event,
    Finished,
    GenerationRequest,
    Infill,
    Started,
    TextDelta,
    ToolCall,
)
from blockdraft.serving.schemas import (
    CALL_ARGUMENTS,
    FORMAT_FIELDS,
    GRAMMAR_FIELDS,
    STORE,
    GenerationSchema,
    Int,
    Listed,
    Schema,
    Stop,
    Stops,
    format_grammar,
    parse_arguments,
    template_variables,
    tool_call,
    without,
)
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import ApiResponse, json_line, respond

VERSION = "0.12.0"  # of Ollama's API, which clients compare with what they need
LATEST = ":latest"  # tag that clients add to names without one
NANOSECONDS = 1e9


def router(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/api")
    started = datetime.now(timezone.utc)

    def check_model(name: str) -> str:
        if name in service.model_names:
            return name
        model = service.check_model(name.removesuffix(LATEST))
        return name or model

    def entry(name: str) -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "modified_at": _time(started),
            "size": service.backends.usual.target.weight_bytes(),
            "digest": "",
            "details": _details(service),
        }

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @routes.get("/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [entry(name) for name in service.model_names]}

    @routes.get("/ps")
    async def running() -> dict[str, Any]:
        forever = _time(datetime.max.replace(tzinfo=timezone.utc))
        more = {"expires_at": forever, "size_vram": 0, "context_length": service.context}
        return {"models": [entry(name) | more for name in service.model_names]}

    @routes.post("/show")
    async def show(body: ShowRequest) -> Any:
        check_model(body.model or body.name or "")
        tokenizer = service.backends.usual.target.tokenizer
        template = str(tokenizer.chat_template or "") if tokenizer else ""
        capabilities = ["completion"]
        if InfillTokens.of(tokenizer) is not None:
            capabilities.append("insert")
        if "tools" in template:
            capabilities.append("tools")
        if any(word in template for word in ("enable_thinking", "reasoning_content", "message.thinking")):
            capabilities.append("thinking")
        details = _details(service)
        family = details["family"]
        return {
            "modelfile": "",
            "parameters": "",
            "template": template,
            "details": details,
            "model_info": {"general.architecture": family, f"{family}.context_length": service.context},
            "capabilities": capabilities,
            "modified_at": _time(started),
        }

    @routes.post("/generate")
    async def generate(http: Request, body: GenerateRequest) -> Response:
        model = check_model(body.model)
        if not body.prompt and not body.suffix:
            return JSONResponse(_loaded(model, body.keep_alive) | {"response": ""})
        response = GenerateResponse(model)
        return await _respond(http, service, body, response)

    @routes.post("/chat")
    async def chat(http: Request, body: OllamaChatRequest) -> Response:
        model = check_model(body.model)
        if not body.messages:
            message = {"role": "assistant", "content": ""}
            return JSONResponse(_loaded(model, body.keep_alive) | {"message": message})
        response = OllamaChatResponse(model)
        return await _respond(http, service, body, response)

    @routes.post("/embed")
    @routes.post("/embeddings")
    @routes.post("/pull")
    @routes.post("/create")
    @routes.post("/copy")
    @routes.post("/push")
    async def missing() -> Response:
        raise ApiError(501, "This server neither embeds nor manages models; use `blockdraft pull`.")

    return routes


async def _respond(
    http: Request, service: Service, body: GenerateRequest | OllamaChatRequest, response: OllamaResponse
) -> Response:
    requests = [body.to_request(service)]
    return await respond(http, service, requests, response, body.stream is not False, body.num_skipped)


def _time(moment: datetime | None = None) -> str:
    return (moment or datetime.now(timezone.utc)).isoformat().replace("+00:00", "Z")


def _details(service: Service) -> dict[str, Any]:
    target = service.backends.usual.target
    is_gguf = target.path is not None and target.path.suffix.lower() == ".gguf"
    billions = service.parameters / 1e9
    size = f"{billions:.1f}B" if billions >= 1 else f"{1000 * billions:.0f}M"
    family = service.family
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": size,
        "quantization_level": service.quantization,
    }


def _loaded(model: str, keep_alive: Any) -> dict[str, Any]:
    """Return the response to a request without a prompt, which asks to load the model, or to unload it."""
    reason = "unload" if keep_alive in (0, "0", "0s", "0m") else "load"
    return {"model": model, "created_at": _time(), "done": True, "done_reason": reason}


class ShowRequest(Schema):
    model: str | None = None
    name: str | None = None


# Options that would change the output and are skipped, each with the values that change nothing.
SKIPPED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "repeat_last_n": (-1,),
    "tfs_z": (1,),
    "typical_p": (1,),
}


class Options(Schema):
    """Options of Ollama. Those that say how to compute, such as `num_ctx` and `num_thread`, are ignored.

    Fields named as in `GenerationSchema` reach the engine.
    """

    model_config = ConfigDict(extra="allow")

    num_predict: Annotated[Int, Field(ge=-2, lt=2**31)] | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: Stop | Stops | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @property
    def num_skipped(self) -> int:
        """Number of options that this server lacks and that would change the output."""
        given = self.model_extra or {}
        return sum(name in given and given[name] not in neutral for name, neutral in SKIPPED_OPTIONS.items())


class OllamaSchema(Schema):
    """Fields that /api/generate and /api/chat share."""

    model_config = ConfigDict(extra="allow")
    unsupported = without(FORMAT_FIELDS, "format") | GRAMMAR_FIELDS | {"functions": (), "function_call": ()}
    alternatives = dict.fromkeys(FORMAT_FIELDS, "format") | {"functions": "tools", "function_call": "tool_choice"}

    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options = Options()
    keep_alive: str | float | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    store: bool | None = Field(None, description=STORE)

    @property
    def num_skipped(self) -> int:
        """Number of fields and options that are skipped and would change the output.

        As in Ollama, options such as `temperature` have no effect outside of `options`.
        """
        return self.options.num_skipped + len((self.model_extra or {}).keys() & Options.model_fields.keys())

    def _request(self, service: Service, prompt: ChatMessages | Infill | str) -> GenerationRequest:
        options, grammar = self.options, None
        if self.format not in (None, ""):
            schema = None if isinstance(self.format, str) else self.format
            grammar = format_grammar("format", "json_object" if schema is None else "json_schema", schema)
        shared = Options.model_fields.keys() & GenerationSchema.model_fields.keys()
        schema_fields = {name: getattr(options, name) for name in shared}
        schema_fields["repetition_penalty"] = options.repeat_penalty
        try:
            sampling = GenerationSchema.model_validate({"model": self.model, **schema_fields})
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        temperature = 0.0 if isinstance(prompt, Infill) else service.settings.temperature
        limit = options.num_predict
        return GenerationRequest(
            prompt,
            sampling.to_sampling_params(temperature, grammar=grammar),
            max_tokens=None if limit is None or limit < 0 else max(1, limit),
            recorded=self.store is not False,
        )

    def _variables(self) -> dict[str, Any]:
        if isinstance(self.think, str):
            return template_variables(self.think, None)
        return {} if self.think is None else {"enable_thinking": self.think}


class GenerateRequest(OllamaSchema):
    unsupported = OllamaSchema.unsupported | dict.fromkeys(("images", "template", "context", "messages", "tools"), ())
    alternatives = OllamaSchema.alternatives | {"template": "raw"}
    alternatives |= dict.fromkeys(("context", "messages", "tools"), "/api/chat")

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool = False

    def to_request(self, service: Service) -> GenerationRequest:
        if self.suffix:
            if self.system or self.format not in (None, ""):
                raise UsageError("suffix excludes system and format; leave them out.")
            return self._request(service, Infill(prefix=self.prompt, suffix=self.suffix))
        tokenizer = service.backends.usual.target.tokenizer
        if self.raw or tokenizer is None or tokenizer.chat_template is None:
            if self.system:
                raise UsageError("system needs a chat template, which raw skips and some targets lack; leave it out.")
            return self._request(service, self.prompt)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.prompt})
        return self._request(service, ChatMessages(messages, template=self._variables()))


class OllamaFunction(Schema):
    unsupported = CALL_ARGUMENTS
    alternatives = dict.fromkeys(CALL_ARGUMENTS, "arguments")

    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)

    @property
    def parsed(self) -> dict[str, Any] | str:
        return parse_arguments(self.arguments) if isinstance(self.arguments, str) else self.arguments


class OllamaToolCall(Schema):
    function: OllamaFunction


class OllamaMessage(Schema):
    unsupported = {"images": ()}

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Listed[OllamaToolCall] | None = None
    tool_name: str | None = None


class OllamaChatRequest(OllamaSchema):
    unsupported = OllamaSchema.unsupported | {"prompt": (), "system": ()}
    alternatives = OllamaSchema.alternatives | {"prompt": "messages", "system": "messages"}

    messages: Listed[OllamaMessage] = Field(default_factory=list)
    tools: Listed[ChatTool] | None = None
    tool_choice: AnyToolChoice | None = Field(None, description="As in OpenAI's API; Ollama's has no such field.")

    def to_request(self, service: Service) -> GenerationRequest:
        messages = []
        for number, message in enumerate(self.messages):
            entry: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.thinking:
                entry["reasoning_content"] = message.thinking
            if message.tool_name:
                entry["name"] = message.tool_name
            if message.tool_calls:
                entry["tool_calls"] = [
                    tool_call(f"call_{number}_{index}", call.function.name, call.function.parsed)
                    for index, call in enumerate(message.tool_calls)
                ]
            messages.append(entry)
        choice, tools = choose_tools(self.tool_choice, offered_tools(self.tools))
        return self._request(service, ChatMessages(messages, tools, choice, template=self._variables()))


class OllamaResponse(ApiResponse):
    """A response in lines of JSON. Durations are in nanoseconds."""

    media_type = "application/x-ndjson"
    has_comments = False

    def __init__(self, model: str) -> None:
        self._model = model
        self._text, self._thinking = "", ""
        self._calls = list[dict[str, Any]]()
        self._prompt_ids = list[int]()
        self._arrived = time.perf_counter()
        self._end: Finished | None = None

    @abstractmethod
    def _content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields that hold the output."""

    @property
    def keep_alive(self) -> str:  # type: ignore[override]
        return self.frame(self._line(self._content("", "", [])))

    def add(self, index: int, event: Event) -> Sequence[dict[str, Any]]:
        text, thinking, calls = "", "", list[dict[str, Any]]()
        if isinstance(event, Started):
            self._prompt_ids = event.prompt_ids
        elif isinstance(event, TextDelta) and event.reasoning:
            thinking = event.text
        elif isinstance(event, TextDelta):
            text = event.text
        elif isinstance(event, ToolCall):
            calls = [{"function": {"name": event.name, "arguments": json.loads(event.arguments)}}]
        elif isinstance(event, Finished):
            self._end = event
            return (self._line(self._content("", "", [])) | self._statistics(),)
        self._text += text
        self._thinking += thinking
        self._calls += calls
        return (self._line(self._content(text, thinking, calls)),) if text or thinking or calls else ()

    def body(self) -> dict[str, Any]:
        return self._line(self._content(self._text, self._thinking, self._calls)) | self._statistics()

    def fail(self, error: ApiError) -> Sequence[dict[str, Any]]:
        return ({"error": error.message},)

    def frame(self, value: dict[str, Any]) -> str:
        return json_line(value) + "\n"

    def _line(self, content: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._model, "created_at": _time(), **content, "done": False}

    def _statistics(self) -> dict[str, Any]:
        assert self._end is not None
        usage, stats = self._end.usage, self._end.stats
        return {
            "done": True,
            "done_reason": "length" if self._end.reason == "length" else "stop",
            "total_duration": int(NANOSECONDS * (time.perf_counter() - self._arrived)),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": int(NANOSECONDS * stats.prefill_seconds),
            "eval_count": usage.completion,
            "eval_duration": int(NANOSECONDS * stats.total_seconds),
        }


class GenerateResponse(OllamaResponse):
    def _content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": text} | ({"thinking": thinking} if thinking else {})


class OllamaChatResponse(OllamaResponse):
    def _content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        message |= {"thinking": thinking} if thinking else {}
        message |= {"tool_calls": calls} if calls else {}
        return {"message": message}
