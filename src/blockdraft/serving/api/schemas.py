"""Schemas that the requests of all APIs share, and the sampling parameters that they mean.

Unknown fields are ignored. Known fields that this server lacks are refused if they would change the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from blockdraft.errors import UsageError
from blockdraft.serving.core.events import Speculation
from blockdraft.types import SamplingParams

MOST_STOPS, LONGEST_STOP = 64, 1000  # stop strings, which editors send by the score, and characters of one
MOST_CHOICES = 128
MOST_ITEMS = 10_000  # entries of a list, token ids aside
MOST_NAMED = 1024  # biased tokens, or tokens that end an answer; each cycle goes through all of them
NAMES = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
SEEDS = 2**63  # number of seeds; negative seeds of OpenAI's API are taken modulo this


def _few(value: Any, about: ValidationInfo) -> Any:
    """Refuse a table of too many entries before it is read, since each wrong entry would be an error of its own."""
    if isinstance(value, dict) and len(value) > MOST_NAMED:
        raise ValueError(f"{about.field_name} has {len(value)} entries; it may have at most {MOST_NAMED}.")
    return value


T = TypeVar("T")
# Reading ends at the first wrong entry: with an error for each, a body of some MiB would take minutes and gigabytes.
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
    """Base of all schemas of requests.

    Attributes:
        refused: Fields that this server lacks, each with the values that change nothing and are therefore accepted.
        instead: Fields to use in the place of some of them.
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
            return {name: value for name, value in values.items() if value is not None}  # null means not given
        return values


class SpeculationFields(Body):
    """Drafting of this request; see docs/serve.md."""

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
    """Fields that the requests of all APIs share."""

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


def sampling(body: Sampled, temperature: float) -> SamplingParams:
    """Sampling parameters of a request. `temperature` is for requests that name none."""
    given = {name: getattr(body, name) for name in NAMES if getattr(body, name) is not None}
    stop = () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    return SamplingParams(
        **given,
        temperature=temperature if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),  # vLLM's clients send -1 for all tokens
        logit_bias=_biases(body.logit_bias or {}),
        seed=None if body.seed is None else body.seed % SEEDS,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
    )


def _biases(given: dict[str, float]) -> dict[int, float]:
    for token in given:
        if not (token.isascii() and token.isdecimal() and len(token) < 19):
            raise UsageError(f"logit_bias names the token {token[:40]!r}; its keys must be token ids from 0 on.")
    return {int(token): bias for token, bias in given.items()}


def speculation(body: Sampled) -> Speculation:
    return Speculation() if body.speculation is None else body.speculation.speculation()
