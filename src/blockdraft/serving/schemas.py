"""Request schemas that all APIs share, and their conversion to a `GenerationRequest`.

Unknown fields are ignored. Known fields that this server lacks are refused if they would change the response.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from blockdraft.chat_text import ARGUMENTS, TEXT_TYPES
from blockdraft.errors import UsageError
from blockdraft.serving.json_schemas import close
from blockdraft.types import MAX, MAX_SEED, Bias, Grammar, Penalty, Positive, SamplingParams, Share, TopP

MAX_STOPS, MAX_STOP_LENGTH = 64, 1000  # editors send dozens of stop strings
MAX_CHOICES = 128
NUM_SEEDS = MAX_SEED + 1
MAX_ITEMS = 10_000  # entries of a list, token ids aside
MAX_TABLE = 1024  # entries of `logit_bias` and `stop_token_ids`, which every decoding step goes through
# Fields in which the APIs and other servers take a schema of the output, each with values that ask for text.
FORMAT_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("format", "output_config", "output_format", "json_schema", "structured_outputs"), ()),
    "guided_json": (),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
}
GRAMMAR_FIELDS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("grammar", "guided_regex", "guided_choice", "guided_grammar"), ()
)
WRAPPERS = ("schema", "json_schema")  # in which an API holds a schema, and which are no keywords of one
STORE = "false keeps the request out of what a server with --record writes."
T = TypeVar("T")


def _limit_table(value: Any, info: ValidationInfo) -> Any:
    """Refuse a large table before its entries are validated, since each wrong entry would add an error."""
    if isinstance(value, dict) and len(value) > MAX_TABLE:
        raise ValueError(f"{info.field_name} has {len(value)} entries; it may have at most {MAX_TABLE}.")
    return value


# Validation stops at the first wrong entry. An error for each would cost minutes and gigabytes for a body of some MiB.
Listed = Annotated[list[T], Field(fail_fast=True, max_length=MAX_ITEMS)]
Table = Annotated[dict[str, T], Field(max_length=MAX_TABLE), BeforeValidator(_limit_table)]
# Clients in languages with one type of numbers write 4 as 4.0.
WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Int = Annotated[int, WHOLE]
Token = Annotated[Int, Field(ge=0, lt=2**63)]
TokenIds = Annotated[list[Token], Field(fail_fast=True)]
MaxTokens = Annotated[Int, Field(ge=1, lt=2**31)]
UNLIMITED = BeforeValidator(lambda value: None if value == -1 else value)  # as programs for llama.cpp ask
NonEmpty = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)]


class Schema(BaseModel):
    """Base of all request schemas.

    Attributes:
        unsupported: Fields that this server lacks, each with the values that change nothing and are accepted.
        alternatives: Supported fields to use in place of some of them.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    alternatives: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, neutral in cls.unsupported.items():
            if values.get(name) not in (None, "", [], {}, *neutral):
                remedy = f"use {cls.alternatives[name]}" if name in cls.alternatives else "leave it out"
                raise ValueError(f"{name} is not supported by this server; {remedy}.")
        return {name: value for name, value in values.items() if value is not None}  # null means not given


def without(unsupported: dict[str, tuple[Any, ...]], *names: str) -> dict[str, tuple[Any, ...]]:
    """Return the unsupported fields of an API that has some of them."""
    return {name: neutral for name, neutral in unsupported.items() if name not in names}


class Speculation(Schema):
    """Draft settings of one request. They change its speed, never the distribution of its output.

    Attributes:
        enabled: False decodes without drafting.
        block_size: Maximum tokens of a block, anchor included; None is the server's limit.
        tree_budget: Maximum draft tokens of a tree; None is the server's limit.
        statistics: Whether the response ends with draft statistics.
        trace: Whether each streamed event reports the draft tokens of its decoding step.
        backend: Name of the backend that decodes; None is the server's first.
    """

    enabled: bool = True
    block_size: Annotated[Int, Field(ge=1, lt=2**31)] | None = None
    tree_budget: Annotated[Int, Field(ge=0, lt=2**31)] | None = None
    statistics: bool = False
    trace: bool = False
    backend: str | None = None


class StreamOptions(Schema):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Part(Schema):
    """A part of a message. Parts other than text are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None


class PredictionSchema(Schema):
    """Predicted output, as in OpenAI's API: a text that much of the output is expected to repeat."""

    type: Literal["content"] = "content"
    content: str | Listed[Part]


class GenerationSchema(Schema):
    """Fields of the requests of all APIs, even where an API does not define them itself.

    Fields named as in `SamplingParams` reach the engine.
    """

    unsupported = {
        **FORMAT_FIELDS,
        **GRAMMAR_FIELDS,
        **dict.fromkeys(("suffix", "functions", "function_call", "audio", "web_search_options", "bad_words"), ()),
        **dict.fromkeys(("allowed_token_ids", "prompt_embeds", "truncate_prompt_tokens"), ()),
        **dict.fromkeys(("logits_processors", "prompt_logprobs", "n_predict"), ()),
        "use_beam_search": (False,),
        "best_of": (1,),
        "length_penalty": (1,),
        "min_tokens": (0,),
        "include_stop_str_in_output": (False,),
        "skip_special_tokens": (True,),
        "modalities": (["text"],),
    }

    model: str = Field("", description="A name that /v1/models lists; without one, the served model.")
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[MaxTokens | None, UNLIMITED] = None
    temperature: Annotated[float, Field(ge=0, le=MAX)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[Int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Positive | None = None
    logit_bias: Table[Bias] | None = None
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[list[Token], Field(fail_fast=True, max_length=MAX_TABLE)] | None = None
    ignore_eos: bool = False
    prediction: PredictionSchema | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation = Speculation()
    store: bool | None = Field(None, description=STORE)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def to_sampling_params(self, default_temperature: float, **more: Any) -> SamplingParams:
        """Return the sampling parameters.

        Args:
            default_temperature: Temperature of requests that name none.
            more: Parameters that other fields set.
        """
        shared = [field.name for field in fields(SamplingParams) if field.name in GenerationSchema.model_fields]
        given = {name: getattr(self, name) for name in shared if getattr(self, name) is not None}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for token in self.logit_bias or {}:
            if not (token.isascii() and token.isdecimal() and len(token) < 19):
                raise UsageError(f"logit_bias names the token {token[:40]!r}; its keys must be token ids from 0 on.")
        parameters = {
            **given,
            "temperature": default_temperature if self.temperature is None else self.temperature,
            "top_k": max(0, self.top_k or 0),  # vLLM's clients send -1 for all tokens
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "seed": None if self.seed is None else self.seed % NUM_SEEDS,
            "stop": tuple(stop),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": self.ignore_eos,
            "prediction": "" if self.prediction is None else join_text("prediction.content", self.prediction.content),
        }
        return SamplingParams(**(parameters | more))


def format_grammar(field: str, kind: str, schema: Any) -> Grammar | None:
    """Return the grammar of an output format, or None for text. Objects have only properties that the schema names.

    Args:
        field: Name of the field that holds the format, for error messages.
        kind: "text", "json_object" or "json_schema".

    Raises:
        UsageError: The schema is missing, stands beside "text", or is wrapped in another object.
    """
    if kind == "text":
        if schema is not None:
            raise UsageError(f"{field} is text with a schema; make it json_schema, or leave the schema out.")
        return None
    if schema is None and kind == "json_object":
        return Grammar("json_object")
    if schema is None:
        raise UsageError(f"{field} is json_schema without a schema; give the schema.")
    if isinstance(schema, dict) and not {"type", "properties", "$ref"} & set(schema):
        for name in WRAPPERS:
            if isinstance(schema.get(name), dict):
                raise UsageError(f'{field} holds a schema inside of "{name}"; give the inner one in its place.')
    return Grammar("json_schema", json.dumps(close(schema)))


def only_schema(schemas: dict[str, Any]) -> Any:
    """Return the schema of the fields that may hold one, or None.

    Args:
        schemas: Value of each field, by its name; None where the field is missing.

    Raises:
        UsageError: Two of them differ.
    """
    given = {name: schema for name, schema in schemas.items() if schema is not None}
    first = next(iter(given.values()), None)
    if any(schema != first for schema in given.values()):
        raise UsageError(f"{' and '.join(given)} hold schemas that differ; give one of them.")
    return first


def join_text(field: str, content: str | Sequence[Part]) -> str:
    """Join the text parts of a message.

    Args:
        field: Name of the field that holds the content, for error messages.

    Raises:
        UsageError: A part is not text.
    """
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in TEXT_TYPES or (part.text is None and part.refusal is None):
            raise UsageError(
                f"{field} holds a part of type {part.type[:40]!r}; this model reads only text, such as "
                f'{{"type": "text", "text": "..."}}.'
            )
    return "\n".join(part.text or part.refusal or "" for part in content)


def parse_arguments(text: str | None) -> dict[str, Any] | str:
    """Return the arguments of an earlier tool call as an object, or as they are if they are none.

    A limit of tokens may have cut them. An empty text is no arguments.
    """
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text or ""
    return arguments if isinstance(arguments, dict) else text or ""


def tool_call(call_id: str, name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    """Return an earlier tool call as chat templates take it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CALL_ARGUMENTS: dict[str, tuple[Any, ...]] = dict.fromkeys(ARGUMENTS[1:], ())  # for what OpenAI's APIs call arguments
# Where Anthropic's API and the Model Context Protocol have the schema of a tool, and OpenAI's APIs `parameters`.
FOREIGN_PARAMETERS = ("input_schema", "inputSchema")


def function_tool(name: str, description: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates take it."""
    function = {"name": name, "description": str(description or ""), "parameters": parameters}
    return {"type": "function", "function": function}


def name_of_tool(tool: dict[str, Any]) -> str:
    """Return the name of a tool in either form of OpenAI's APIs, or "" if it has none."""
    inner = tool.get(str(tool.get("type")), tool)
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else ""


def text_tool(name: str, description: Any, form: Any) -> dict[str, Any]:
    """Return a custom tool, which takes a text instead of JSON, as a function with the text as its only argument.

    Args:
        form: What the request says about the text, such as a grammar.
    """
    text = {"type": "string", "description": "The whole input, as plain text."}
    if isinstance(form, dict) and form.get("type") == "grammar":
        inner = form.get("grammar")  # where chat completions have it
        grammar = inner if isinstance(inner, dict) else form
        text["description"] += f" It follows this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
    return function_tool(name, description, {"type": "object", "properties": {"input": text}, "required": ["input"]})


def tool_text(arguments: str) -> str:
    """Return the text for a custom tool from the arguments of its call."""
    text = json.loads(arguments).get("input")
    return text if isinstance(text, str) else arguments


def template_variables(effort: str | None, more: dict[str, Any] | None) -> dict[str, Any]:
    """Return the variables of the chat template for a reasoning effort. "none" turns reasoning off."""
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        variables["enable_thinking"] = False
    return {**variables, **(more or {})}
