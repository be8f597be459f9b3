"""llama.cpp's route /infill, as llama.vim and llama.vscode call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from blockdraft.engine import ExtraFile
from blockdraft.serving.openai.choices import RESPONSES
from blockdraft.serving.request import Event, Finished, GenerationRequest, Infill, Started, TextDelta
from blockdraft.serving.schemas import GenerationSchema, Int, Listed, Schema, without
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import ApiResponse, respond

MAX_TOKENS = 128  # of an infill whose request names none
STOP_TYPES = {"length": "limit", "stop": "eos", "tool_calls": "eos"}


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/infill", responses=RESPONSES)
    async def infill(http: Request, body: InfillRequest) -> Response:
        model = service.check_model(body.model)
        return await respond(http, service, [body.to_request()], InfillResponse(model, body), body.stream)

    return routes


class InputExtra(Schema):
    filename: str = "file"
    text: str


class InfillRequest(GenerationSchema):
    """Request of /infill. Fields of llama.cpp that change only how it computes are ignored."""

    unsupported = {
        **without(GenerationSchema.unsupported, "n_predict"),
        "n": (1,),
        "max_tokens": (),
    }
    alternatives = {"max_tokens": "n_predict"}

    input_prefix: str
    input_suffix: str
    input_extra: Listed[InputExtra] = Field(default_factory=list, description="Parts of other files, in order.")
    prompt: str = Field("", description="Text of the middle that is already there.")
    n_predict: Annotated[Int, Field(ge=-1, lt=2**31)] = MAX_TOKENS
    t_max_predict_ms: Annotated[Int, Field(ge=0, lt=2**31)] = Field(
        0, description="Milliseconds after which the infill ends, once it has a line end; 0 is no limit."
    )
    n_indent: Annotated[Int, Field(ge=0, lt=2**31)] = Field(
        0, description="The infill ends before a line that is indented by fewer characters."
    )
    response_fields: Listed[str] = Field(default_factory=list)

    def to_request(self) -> GenerationRequest:
        """Convert the request. Completions of code are greedy unless a temperature is given."""
        return GenerationRequest(
            Infill(
                prefix=self.input_prefix,
                suffix=self.input_suffix,
                extra=tuple(ExtraFile(extra.filename, extra.text) for extra in self.input_extra),
                begun=self.prompt,
                max_seconds=self.t_max_predict_ms / 1000 or None,
                min_indent=self.n_indent,
            ),
            self.to_sampling_params(0.0),
            # The engine generates at least one token. Editors send 0 to have their files read in advance.
            max_tokens=None if self.n_predict < 0 else max(1, self.n_predict),
            speculation=self.speculation,
            recorded=self.store is not False,
        )


class InfillResponse(ApiResponse):
    def __init__(self, model: str, body: InfillRequest) -> None:
        self._model, self._fields = model, body.response_fields
        self._hidden = body.n_predict == 0
        self._text = ""
        self._tokens = list[int]()
        self._prompt_tokens = 0
        self._end: Finished | None = None

    def add(self, index: int, event: Event) -> Sequence[dict[str, Any]]:
        if isinstance(event, Started):
            self._prompt_tokens = len(event.prompt_ids)
        elif isinstance(event, Finished):
            self._end = event
            return (self.body() | {"content": "", "tokens": []},)
        elif isinstance(event, TextDelta) and not self._hidden:
            tokens = list(event.chunk.token_ids) if event.chunk else []
            self._text += event.text
            self._tokens += tokens
            counts = {"tokens_predicted": len(self._tokens), "tokens_evaluated": self._prompt_tokens}
            return ({"index": 0, "content": event.text, "tokens": tokens, "stop": False, "id_slot": 0} | counts,)
        return ()

    def body(self) -> dict[str, Any]:
        assert self._end is not None
        usage, stats = self._end.usage, self._end.stats
        count = 0 if self._hidden else usage.completion
        stop_type = "word" if self._end.stop is not None else STOP_TYPES[self._end.reason]
        read = usage.prompt - usage.cached
        values = {
            "index": 0,
            "content": self._text,
            "tokens": self._tokens,
            "id_slot": 0,
            "stop": True,
            "model": self._model,
            "tokens_predicted": count,
            "tokens_evaluated": usage.prompt,
            "has_new_line": "\n" in self._text,
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": self._end.stop or "",
            "tokens_cached": usage.prompt + count,
            "timings": {
                "cache_n": usage.cached,
                **_speed("prompt", read, stats.prefill_seconds),
                **_speed("predicted", count, stats.total_seconds),
                "draft_n": usage.accepted + usage.rejected,
                "draft_n_accepted": usage.accepted,
            },
        }
        return _selected(values, self._fields) if self._fields else values


def _speed(name: str, count: int, seconds: float) -> dict[str, float]:
    milliseconds = 1000 * seconds
    return {
        f"{name}_n": count,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }


def _selected(values: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the values at these paths, such as "timings/prompt_n", by path. Unknown paths are left out."""
    selected = {}
    for name in names:
        value: Any = values
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            selected[name] = value
    return selected
