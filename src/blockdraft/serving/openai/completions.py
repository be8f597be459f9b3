"""The route /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from blockdraft.engine.text import REPLACEMENT, text_decoder
from blockdraft.errors import UsageError
from blockdraft.serving.openai.choices import RESPONSES, ChoicesResponse, finite
from blockdraft.serving.request import Event, Finished, GenerationRequest, Infill, Started, TextDelta
from blockdraft.serving.schemas import UNLIMITED, GenerationSchema, Int, Listed, TokenIds, without
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import respond
from blockdraft.types import MAX_LOGPROBS, TokenLogprob

CONTEXT = 8  # tokens; no character has more, and decoders look no further back


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", responses=RESPONSES)
    async def complete(http: Request, body: CompletionRequest) -> Response:
        model = service.check_model(body.model)
        requests = body.to_requests(service.settings.temperature)
        response = CompletionResponse(service, model, body, requests)
        return await respond(http, service, requests, response, body.stream)

    return routes


class CompletionRequest(GenerationSchema):
    unsupported = without(GenerationSchema.unsupported, "suffix") | {"tools": ()}

    prompt: str | Listed[str] | TokenIds | Listed[TokenIds]
    max_tokens: Annotated[Annotated[Int, Field(ge=0, lt=2**31)] | None, UNLIMITED] = None
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool = True
    suffix: str | None = Field(None, description="Text behind the completion; the prompt is the text before it.")

    def to_requests(self, default_temperature: float) -> list[GenerationRequest]:
        """Return one request for each prompt."""
        if not self.prompt and not (self.suffix and self.prompt == ""):  # an infill may begin a text
            raise UsageError("prompt is empty; give at least one token.")
        params = self.to_sampling_params(
            0.0 if self.suffix else default_temperature,  # infills of all routes are greedy by default
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: Any = [self.prompt] if single else self.prompt
        if self.suffix:
            if self.echo or not all(isinstance(prompt, str) for prompt in prompts):
                raise UsageError("suffix needs prompts of text, and excludes echo; change these.")
            prompts = [Infill(prefix=prompt, suffix=self.suffix) for prompt in prompts]
        return [
            GenerationRequest(
                prompt,
                params,
                n=self.n or 1,
                max_tokens=1 if self.max_tokens == 0 else self.max_tokens,  # the engine generates at least one
                add_special_tokens=self.add_special_tokens,
                speculation=self.speculation,
                recorded=self.store is not False,
            )
            for prompt in prompts
        ]


class CompletionResponse(ChoicesResponse):
    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self, service: Service, model: str, body: CompletionRequest, requests: Sequence[GenerationRequest]
    ) -> None:
        super().__init__(service, model, body, requests)
        self._service, self._requests = service, requests
        self._tokenizer = service.backends.usual.target.tokenizer
        self._echo, self._logprobs = body.echo, body.logprobs is not None
        self._no_output = body.max_tokens == 0  # hides the one token that the engine generates
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._offsets = dict[int, TextOffsets]()
        self._all_logprobs: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)

    def add(self, index: int, event: Event) -> Sequence[dict[str, Any]]:
        text, tokens, logprobs = "", list[tuple[int, TokenLogprob | None]](), None
        if isinstance(event, Finished):
            self._ends[index] = event
        elif isinstance(event, Started):
            self._offsets[index] = TextOffsets(self._tokenizer, event.prompt_ids)
            if self._echo:
                prompt: Any = self._requests[index // self._n].prompt
                text = self._service.prompt_text(prompt)
                prompt_logprobs = event.prompt_logprobs or [None] * len(event.prompt_ids)
                tokens = list(zip(event.prompt_ids, prompt_logprobs, strict=True))
        elif isinstance(event, TextDelta) and not self._no_output:
            text = event.text
            tokens = [(token.token_id, token) for token in (event.chunk and event.chunk.logprobs) or ()]
        if self._logprobs and (text or tokens):
            offsets = self._offsets[index]
            places = offsets.of_prompt(text) if isinstance(event, Started) else offsets.add(tokens)
            logprobs = self._format_logprobs(tokens, places)
            self._all_logprobs[index].append(logprobs)
        self._texts[index].append(text)
        if not (text or tokens or isinstance(event, Finished) or self._traced_chunk(event)):
            return ()
        return [self._event(index, {"text": text, "logprobs": logprobs}, event)]

    def _choice(self, index: int) -> dict[str, Any]:
        parts = self._all_logprobs[index]
        logprobs = {name: [value for part in parts for value in part[name]] for name in parts[0]} if parts else None
        return {"text": "".join(self._texts[index]), "logprobs": logprobs}

    def _reason(self, end: Finished) -> str:
        return "length" if self._no_output else end.reason

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._no_output:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _format_logprobs(
        self, tokens: Sequence[tuple[int, TokenLogprob | None]], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """Return log-probabilities as completions report them.

        Args:
            tokens: Tokens with their log-probabilities; None for the first token of a prompt, which has none.
            offsets: Place of each token in the text, in characters.
        """
        return {
            "tokens": [self._text_of(token) for token, _ in tokens],
            "token_logprobs": [logprob and finite(logprob.logprob) for _, logprob in tokens],
            "top_logprobs": [logprob and self._top(logprob) for _, logprob in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """Return the top log-probabilities by token text. Of tokens with equal text, the likeliest counts."""
        top: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            top.setdefault(self._text_of(token_id), finite(logprob))
        return top


class TextOffsets:
    """Places of tokens in a text, in characters. Of tokens that share a character, the first one has it.

    Args:
        tokenizer: Tokenizer of the target; without one there is no text.
        prompt: Token ids before the output.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, prompt: list[int]) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self._context, self._pending = prompt[-CONTEXT:], list[int]()  # tokens decoded before, and those in progress
        self._length = 0  # of the text before `_pending`
        self._without_special = None if tokenizer is None else text_decoder(tokenizer)

    def of_prompt(self, text: str) -> list[int]:
        """Return the places of the prompt's tokens, if the text begins with the prompt."""
        self._length = len(text)
        if self._tokenizer is None:
            return [0] * len(self._prompt)
        if self._tokenizer.is_fast:
            for special in (True, False):
                encoding: Any = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
                if encoding["input_ids"] == self._prompt:
                    return [start for start, _ in encoding["offset_mapping"]]
        whole = TextOffsets(self._tokenizer, [])  # token ids that their own text does not give
        return whole.add([(token, None) for token in self._prompt], skip_special_tokens=False)

    def add(self, tokens: Sequence[tuple[int, TokenLogprob | None]], skip_special_tokens: bool = True) -> list[int]:
        """Return the places of the next tokens."""
        places, known = [], self._text(skip_special_tokens)
        for token, _ in tokens:
            places.append(self._length + len(known.rstrip(REPLACEMENT)))
            self._pending.append(token)
            known = self._text(skip_special_tokens)
            if not known.endswith(REPLACEMENT) or len(self._pending) == CONTEXT:
                self._length += len(known)
                self._context, self._pending, known = [*self._context, *self._pending][-CONTEXT:], [], ""
        return places

    def _text(self, skip_special_tokens: bool) -> str:
        if self._tokenizer is None or self._without_special is None or not self._pending:
            return ""
        decode: Callable[[list[int]], Any] = self._without_special if skip_special_tokens else self._tokenizer.decode
        return str(decode([*self._context, *self._pending]))[len(decode(self._context)) :]
