"""What the responses of chat completions and completions have in common: a list of choices."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from blockdraft.engine import Chunk
from blockdraft.serving.metrics import draft_statistics
from blockdraft.serving.request import Event, Finished, GenerationRequest, TextDelta
from blockdraft.serving.schemas import GenerationSchema
from blockdraft.serving.service import Service
from blockdraft.serving.streaming import ApiResponse

RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"application/json": {}, "text/event-stream": {}},
        "description": "The response, whole or streamed.",
    }
}


class ChoicesResponse(ApiResponse):
    """Response with a list of choices.

    Args:
        model: Name of the model in the request.
        requests: The requests of this response, each with `n` choices.

    Attributes:
        object_name, chunk_name: Value of `object` in the whole response and in stream events.
        id_prefix: Start of the response's id.
    """

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    id_prefix: ClassVar[str]
    tail = "data: [DONE]\n\n"

    def __init__(
        self, service: Service, model: str, schema: GenerationSchema, requests: Sequence[GenerationRequest]
    ) -> None:
        self._text_of, self._max_draft_tokens = service.token_texts.text, service.max_draft_tokens
        self._n, self._speculation = requests[0].n, requests[0].speculation
        self._num_choices = sum(request.n for request in requests)
        self._include_usage = schema.include_usage
        self._id, self._created, self._model = f"{self.id_prefix}-{uuid.uuid4().hex}", int(time.time()), model
        self._ends: dict[int, Finished] = {}

    @abstractmethod
    def _choice(self, index: int) -> dict[str, Any]:
        """Return the fields of a finished choice, without index and finish reason."""

    def body(self) -> dict[str, Any]:
        choices = [
            {"index": index, **self._choice(index), "finish_reason": self._reason(self._ends[index])}
            for index in range(self._num_choices)
        ]
        return self._object(self.object_name, choices) | {"usage": self._usage()} | self._metrics()

    def end(self) -> Sequence[dict[str, Any]]:
        if not (self._include_usage or self._speculation.statistics):
            return ()
        usage = self._usage() if self._include_usage else None
        return (self._object(self.chunk_name, []) | {"usage": usage} | self._metrics(),)

    def _event(self, index: int, fields: dict[str, Any], event: Event) -> dict[str, Any]:
        """Return the stream event for new fields of a choice."""
        reason = self._reason(event) if isinstance(event, Finished) else None
        value = self._object(self.chunk_name, [{"index": index, **fields, "finish_reason": reason}])
        if self._include_usage:
            value["usage"] = None
        if chunk := self._traced_chunk(event):
            value["trace"] = _trace(chunk, self._text_of)
        return value

    def _traced_chunk(self, event: Event) -> Chunk | None:
        """Return the chunk of an event if the request asks for traces."""
        return event.chunk if self._speculation.trace and isinstance(event, TextDelta) else None

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id, "object": name, "created": self._created, "model": self._model}
        return {**head, "choices": choices}

    def _reason(self, end: Finished) -> str:
        return end.reason

    def _usage(self) -> dict[str, Any]:
        usages = [self._ends[index].usage for index in range(self._num_choices)]
        prompts = usages[:: self._n]  # the choices of a prompt count it once
        prompt, completion = sum(usage.prompt for usage in prompts), sum(usage.completion for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached for usage in prompts)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(usage.reasoning for usage in usages),
                "accepted_prediction_tokens": sum(usage.accepted_prediction for usage in usages),
                "rejected_prediction_tokens": sum(usage.rejected_prediction for usage in usages),
            },
        }

    def _metrics(self) -> dict[str, Any]:
        if not self._speculation.statistics:
            return {}
        ends = [self._ends[index] for index in range(self._num_choices)]
        return {"metrics": draft_statistics(ends, self._max_draft_tokens)}


def _trace(chunk: Chunk, text_of: Callable[[int], str]) -> dict[str, Any]:
    """Return the draft tokens of the decoding step that a chunk came from."""
    step = chunk.step
    tokens = [
        {"id": token, "text": text_of(token), "drafted": drafted}
        for token, drafted in zip(chunk.token_ids, chunk.drafted, strict=True)
    ]
    if step is None:
        return {"tokens": tokens, "step": None}
    tree = {
        "tokens": [{"id": token, "text": text_of(token)} for token in step.tokens],
        "parents": list(step.parents),
        "path": list(step.path),
        "seconds": step.seconds,
    }
    return {"tokens": tokens, "step": tree}


def finite(logprob: float) -> float:
    """Replace minus infinity, which JSON lacks, by -9999 as OpenAI's API does."""
    return max(logprob, -9999.0)
