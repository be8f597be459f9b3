"""The route /v1/chat/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from blockdraft.engine.text import REPLACEMENT
from blockdraft.errors import UsageError
from blockdraft.serving.openai.choices import RESPONSES, ChoicesResponse, finite
from blockdraft.serving.openai.tool_choice import AnyToolChoice, OfferedTool, choose_tools
from blockdraft.serving.request import (
    ChatMessages,
    Event,
    Finished,
    GenerationRequest,
    Started,
    ToolCall,
    ToolCallDelta,
)
from blockdraft.serving.schemas import (
    CALL_ARGUMENTS,
    FOREIGN_PARAMETERS,
    FORMAT_FIELDS,
    UNLIMITED,
    GenerationSchema,
    Int,
    Listed,
    MaxTokens,
    NonEmpty,
    Part,
    Schema,
    format_grammar,
    join_text,
    only_schema,
    parse_arguments,
    template_variables,
    text_tool,
    tool_call,
    tool_text,
    without,
)
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import respond
from blockdraft.types import MAX_LOGPROBS, TokenLogprob


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", responses=RESPONSES)
    async def chat(http: Request, body: ChatRequest) -> Response:
        model = service.check_model(body.model)
        requests = [body.to_request(service.settings.temperature)]
        response = ChatResponse(service, model, body, requests)
        return await respond(http, service, requests, response, body.stream)

    return routes


class JsonSchema(Schema):
    name: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None  # where llama.cpp's clients put it


class FunctionCall(Schema):
    unsupported = CALL_ARGUMENTS
    alternatives = dict.fromkeys(CALL_ARGUMENTS, "arguments")

    name: str
    arguments: str = ""


class CustomCall(Schema):
    name: str
    input: str = ""


class EarlierToolCall(Schema):
    id: str | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None

    def to_template(self, place: str, number: int) -> dict[str, Any]:
        call_id = self.id or f"call_{place.removeprefix('messages.')}_{number}"
        if self.custom is not None:
            return tool_call(call_id, self.custom.name, {"input": self.custom.input})
        if self.function is None:
            raise UsageError(f"{place}.tool_calls holds a call without function; give its name and arguments.")
        return tool_call(call_id, self.function.name, parse_arguments(self.function.arguments))


class ChatMessage(Schema):
    unsupported = {"function_call": (), "audio": ()}
    alternatives = {"function_call": "tool_calls"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Listed[Part] | None = None
    name: str | None = None
    tool_calls: Listed[EarlierToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def to_template(self, place: str) -> dict[str, Any]:
        """Return the message as chat templates take it.

        Args:
            place: Name of the message in error messages.
        """
        if self.content is None and self.role not in ("assistant", "tool"):
            raise UsageError(f"{place}.content is missing; a message of role {self.role} needs one.")
        message: dict[str, Any] = {
            "role": self.role,
            "content": join_text(f"{place}.content", self.content or ""),
        }
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        message |= {name: value for name, value in optional.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [call.to_template(place, number) for number, call in enumerate(self.tool_calls)]
        return message


class Function(Schema):
    unsupported = dict.fromkeys(FOREIGN_PARAMETERS, ())
    alternatives = dict.fromkeys(FOREIGN_PARAMETERS, "parameters")

    name: NonEmpty
    description: str | None = None
    parameters: dict[str, Any] | None = None


class CustomTool(Schema):
    name: NonEmpty
    description: str | None = None
    format: dict[str, Any] | None = None


class ChatTool(Schema):
    unsupported = dict.fromkeys(("parameters", *FOREIGN_PARAMETERS), ())
    alternatives = dict.fromkeys(unsupported, "function.parameters")

    type: Literal["function", "custom"]
    function: Function | None = None
    custom: CustomTool | None = None

    def offer(self) -> OfferedTool:
        inner = self.custom if self.type == "custom" else self.function
        if inner is None:
            raise UsageError(f"tools holds a {self.type} tool without {self.type}; give it.")
        if isinstance(inner, CustomTool):
            template = text_tool(inner.name, inner.description, inner.format)
        else:
            template = {"type": "function", "function": inner.model_dump(exclude_none=True)}
        return OfferedTool(inner.name, template, self.type == "custom", {"name": inner.name})


class ChatRequest(GenerationSchema):
    alternatives = dict.fromkeys(FORMAT_FIELDS, "response_format") | {
        "functions": "tools",
        "function_call": "tool_choice",
    }
    unsupported = without(GenerationSchema.unsupported, "n_predict", "response_format")

    messages: Annotated[Listed[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[MaxTokens | None, UNLIMITED] = None
    n_predict: Annotated[Int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="llama.cpp's name of max_tokens; 0 only reads the prompt, as llama.vim asks, -1 is no limit."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Listed[ChatTool] | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def to_request(self, default_temperature: float) -> GenerationRequest:
        """Convert the request. Raise a UsageError if fields contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise UsageError(f"top_logprobs is {self.top_logprobs} without logprobs; set logprobs to true.")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise UsageError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; give one of "
                f"them."
            )
        grammar = None
        if (form := self.response_format) is not None:
            inner = form.json_schema and form.json_schema.schema_
            schema = only_schema({"response_format.json_schema.schema": inner, "response_format.schema": form.schema_})
            grammar = format_grammar("response_format", form.type, schema)
        choice, tools = choose_tools(self.tool_choice, offered_tools(self.tools))
        return GenerationRequest(
            prompt=ChatMessages(
                messages=template_messages(self.messages),
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=self.parallel_tool_calls is not False,
                template=template_variables(self.reasoning_effort, self.chat_template_kwargs),
                continue_final_message=self.continue_final_message,
                add_generation_prompt=self.add_generation_prompt,
            ),
            params=self.to_sampling_params(
                default_temperature, logprobs=(self.top_logprobs or 0) if self.logprobs else None, grammar=grammar
            ),
            n=self.n or 1,
            max_tokens=self.max_completion_tokens or self.max_tokens or self._num_predicted,
            strict_schema=bool(form and form.json_schema and form.json_schema.strict),
            speculation=self.speculation,
            recorded=self.store is not False,
        )

    @property
    def _num_predicted(self) -> int | None:
        if self.n_predict is None or self.n_predict < 0:
            return None
        return max(1, self.n_predict)  # the engine generates at least one token


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    return [message.to_template(f"messages.{number}") for number, message in enumerate(messages)]


def offered_tools(tools: Sequence[ChatTool] | None) -> list[OfferedTool]:
    return [tool.offer() for tool in tools or ()]


@dataclass
class ChatChoice:
    """Parts of a choice so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    streamed: dict[int, str] = field(default_factory=dict)  # arguments of calls that are being written, by index
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ChatResponse(ChoicesResponse):
    object_name, chunk_name, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, service: Service, model: str, body: ChatRequest, requests: Sequence[GenerationRequest]) -> None:
        super().__init__(service, model, body, requests)
        self._logprobs = bool(body.logprobs)
        self._no_output = body.n_predict == 0  # hides the one token that the engine generates
        self._text_tools = {tool.custom.name for tool in body.tools or () if tool.type == "custom" and tool.custom}
        self._choices: defaultdict[int, ChatChoice] = defaultdict(ChatChoice)

    def add(self, index: int, event: Event) -> Sequence[dict[str, Any]]:
        choice, delta, logprobs = self._choices[index], dict[str, Any](), None
        if isinstance(event, Started):
            delta = {"role": "assistant", "content": ""}
        elif isinstance(event, Finished):
            self._ends[index] = event
        elif self._no_output:
            return ()
        elif isinstance(event, ToolCallDelta):
            if event.name in self._text_tools:  # their text is inside of the arguments
                return ()
            new: dict[str, Any] = {"function": {"arguments": event.arguments}}
            if event.index not in choice.streamed:
                new = {"id": event.id, "type": "function", "function": {"name": event.name, **new["function"]}}
            choice.streamed[event.index] = choice.streamed.get(event.index, "") + event.arguments
            delta = {"tool_calls": [{"index": event.index, **new}]}
        elif isinstance(event, ToolCall):
            call: dict[str, Any] = {"function": {"name": event.name, "arguments": event.arguments}}
            if event.name in self._text_tools:
                call = {"custom": {"name": event.name, "input": tool_text(event.arguments)}}
            choice.calls.append({"id": event.id, "type": next(iter(call)), **call})
            delta = {"tool_calls": [{"index": event.index, **choice.calls[-1]}]}
            if event.index in choice.streamed:
                rest = event.arguments.removeprefix(choice.streamed[event.index])
                delta = {"tool_calls": [{"index": event.index, "function": {"arguments": rest}}]}
        else:
            (choice.reasoning if event.reasoning else choice.text).append(event.text)
            if event.text:
                delta = _reasoning(event.text) if event.reasoning else {"content": event.text}
            if event.chunk and event.chunk.logprobs:
                choice.logprobs += event.chunk.logprobs
                logprobs = chat_logprobs(event.chunk.logprobs, self._text_of)
            if not (delta or logprobs or self._traced_chunk(event)):
                return ()
        return [self._event(index, {"delta": delta, "logprobs": logprobs}, event)]

    def _choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        text = "".join(choice.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if choice.calls else ""),
            "refusal": None,
        }
        if choice.reasoning:
            message |= _reasoning("".join(choice.reasoning))
        if choice.calls:
            message["tool_calls"] = choice.calls
        logprobs = chat_logprobs(choice.logprobs, self._text_of) if self._logprobs else None
        return {"message": message, "logprobs": logprobs}


def _reasoning(text: str) -> dict[str, str]:
    return {"reasoning": text, "reasoning_content": text}  # vLLM's name and DeepSeek's


def chat_logprobs(logprobs: Sequence[TokenLogprob], text_of: Callable[[int], str]) -> dict[str, Any]:
    """Return log-probabilities as chat completions report them. `text_of` returns the text of a token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = text_of(token)
        # The text of a token that holds part of a character does not determine its bytes.
        known_bytes = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": known_bytes}

    content = [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*top) for top in token.top]}
        for token in logprobs
    ]
    return {"content": content, "refusal": None}
