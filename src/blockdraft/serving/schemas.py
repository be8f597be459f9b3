"""What requests of OpenAI's API hold. Unknown fields are ignored; known ones that would change the answer, and that we
do not have, are refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from blockdraft.serving.events import Speculation
from blockdraft.types import MOST_LOGPROBS

MOST_STOPS, LONGEST_STOP = 64, 1000  # editors send a score of them
MOST_CHOICES = 128
MOST_ITEMS = 10_000  # of a list, token ids aside
MOST_NAMED = 1024  # tokens that may be biased or end an answer, which are looked at in each cycle


def _few(value: Any, about: ValidationInfo) -> Any:
    """Refuse a table that is too long before it is read: each entry that is wrong would be an error of its own."""
    if isinstance(value, dict) and len(value) > MOST_NAMED:
        raise ValueError(f"{about.field_name} has {len(value)} entries; it may have at most {MOST_NAMED}.")
    return value


T = TypeVar("T")
# The first wrong entry ends the reading. With an error for each, a body of some MiB would take minutes and gigabytes.
Listed = Annotated[list[T], Field(fail_fast=True, max_length=MOST_ITEMS)]
Table = Annotated[dict[str, T], Field(max_length=MOST_NAMED), BeforeValidator(_few)]
Token = Annotated[int, Field(ge=0, lt=2**63)]
TokenIds = Annotated[list[Token], Field(fail_fast=True)]
Tokens = Annotated[int, Field(ge=1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Word = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[list[Stop], Field(fail_fast=True, max_length=MOST_STOPS)]


LACKING = (
    *("suffix", "functions", "function_call", "audio", "web_search_options", "guided_json"),
    *("guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "bad_words", "allowed_token_ids"),
    *("prompt_embeds", "grammar", "truncate_prompt_tokens", "logits_processors", "prompt_logprobs"),
    *("json_schema", "n_predict"),  # of llama-server
)


class Body(BaseModel):
    """Attributes:
    refused: Fields that we lack, with the values that change nothing.
    instead: Fields that do what some of them are for.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}
    instead: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name, neutral in cls.refused.items():
                if values.get(name) not in (None, "", [], {}, *neutral):
                    remedy = f"use {cls.instead[name]}" if name in cls.instead else "leave it out"
                    raise ValueError(f"{name} is not supported by this server; {remedy}.")
            return {name: value for name, value in values.items() if value is not None}  # null is nothing given
        return values


class SpeculationFields(Body):
    """How far this request is drafted for; see docs/serve.md."""

    enabled: bool = True
    block_size: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    tree_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    statistics: bool = False
    trace: bool = False
    backend: str | None = None

    def speculation(self) -> Speculation:
        return Speculation(**self.model_dump())


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampled(Body):
    """What chats and completions have in common."""

    refused = dict.fromkeys(LACKING, ()) | {
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "min_tokens": (0,),
        "include_stop_str_in_output": (False,),
        "skip_special_tokens": (True,),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
        "modalities": (["text"],),
    }

    model: Annotated[str, Field(min_length=1, description="A name that /v1/models lists.")]
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    logit_bias: Table[Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[list[Token], Field(fail_fast=True, max_length=MOST_NAMED)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationFields | None = None


class JsonSchema(Body):
    name: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Part(Body):
    """A piece of a message. Only texts are read; others are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Body):
    name: str
    arguments: str = ""


class CalledTool(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    refused = {"function_call": (), "audio": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Listed[Part] | None = None
    name: str | None = None
    tool_calls: Listed[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Function(Body):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(Sampled):
    instead = dict.fromkeys(("guided_json", "structured_outputs", "json_schema"), "response_format") | {
        "functions": "tools",
        "function_call": "tool_choice",
        "n_predict": "max_tokens",
    }

    messages: Annotated[Listed[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Listed[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Sampled):
    refused = Sampled.refused | {"best_of": (1,), "response_format": ({"type": "text"},), "tools": ()}

    prompt: str | Listed[str] | TokenIds | Listed[TokenIds]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool = True


class TokenizeRequest(Body):
    """`prompt`, a text as it is, or `messages`, a chat as it would be answered."""

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
