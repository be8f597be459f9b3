"""Jobs to what the engine decodes, and what it decoded to events."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from blockdraft.engine import Chunk, Engine, Request
from blockdraft.serving.backends import Backends
from blockdraft.serving.errors import ApiError
from blockdraft.serving.events import ChatJob, Event, Finished, Text, TextJob, ToolCall, Usage
from blockdraft.serving.parsing import AnswerParser, grammar_of, parser_of, takes_several_calls
from blockdraft.serving.prompts import chat_ids, chat_text, text_ids, tokenizer_of
from blockdraft.serving.settings import ServeSettings
from blockdraft.types import SamplingParams


@dataclass(frozen=True)
class Prepared:
    """A job as the engine takes it; the parser is of chats."""

    engine: Engine
    prompt: list[int]
    params: SamplingParams
    parser: AnswerParser | None = None

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, though the engine may go on."""
        return self.parser is not None and self.parser.ended

    @property
    def scores(self) -> int:
        """Log-probabilities of the prompt's tokens that are asked for."""
        likely = self.params.prompt_logprobs
        return 0 if likely is None else len(self.prompt) * (1 + likely)


def context_of(engine: Engine) -> int:
    """Tokens that prompt and answer may have together."""
    return min(engine.target.max_context, engine.cache_tokens - engine.slots_behind)


def prepare(job: ChatJob | TextJob, backends: Backends, settings: ServeSettings) -> Prepared:
    """What the engine is to decode. Templates, long texts and loading a backend take long.

    Raises:
        UsageError, ApiError: The job cannot be answered.
    """
    engine = backends.engine(job.speculation.backend)
    params, parser = job.params, None
    if isinstance(job, ChatJob):
        text = chat_text(engine.target, job.messages, job.tools, job.template)
        prompt = chat_ids(engine.target, text)
        tokenizer = tokenizer_of(engine.target)
        parallel = job.parallel_tool_calls and takes_several_calls(tokenizer)
        parser = parser_of(tokenizer, job.tools, job.tool_choice, text, parallel)
        grammar = grammar_of(tokenizer, job.tools, job.tool_choice, parallel, text, params.grammar)
        params = replace(params, grammar=grammar)
    elif isinstance(job.prompt, str):
        prompt = text_ids(engine.target, job.prompt, job.add_special_tokens)
    else:
        prompt = job.prompt
    most = _most_new_tokens(settings, context_of(engine), len(prompt), job.max_new_tokens)
    return Prepared(engine, prompt, replace(params, max_new_tokens=most), parser)


def _most_new_tokens(settings: ServeSettings, context: int, prompt: int, wanted: int | None) -> int:
    """How many tokens an answer may have."""
    limit, most = settings.max_prompt_tokens, settings.max_answer_tokens
    room = context - prompt
    code = "context_length_exceeded"
    if limit is not None and prompt > limit:
        raise ApiError(400, f"The prompt has {prompt} tokens; this server takes at most {limit}.", code=code)
    if room < 1:
        raise ApiError(
            400,
            f"The prompt has {prompt} tokens, and this model's maximum context length is {context} tokens, "
            f"answer included; shorten it.",
            code=code,
        )
    if wanted is None:
        return min(room, most or room)
    if most is not None and wanted > most:
        raise ApiError(400, f"max_tokens is {wanted}; this server allows at most {most}.", param="max_tokens")
    if wanted > room:
        raise ApiError(
            400,
            f"max_tokens is {wanted}, the prompt has {prompt} tokens, and this model's maximum context length is "
            f"{context} tokens; ask for at most {room}, or leave it out.",
            code=code,
            param="max_tokens",
        )
    return wanted


def events_of(chunk: Chunk, parser: AnswerParser | None) -> list[Event]:
    """What a chunk adds to an answer; the first of its texts carries it."""
    if parser is None:
        return [Text(chunk.text, chunk)]
    parts = parser.push(chunk.text)
    if chunk.finish_reason is not None:
        parts += parser.finish()
    events: list[Event] = list(parts)
    for place, part in enumerate(parts):
        if not isinstance(part, ToolCall):
            events[place] = replace(part, chunk=chunk)
            return events
    return [Text("", chunk), *events]


def finished(request: Request, ready: Prepared, thought: int) -> Finished:
    accepted = sum(request.drafted)
    usage = Usage(
        len(request.prompt),
        len(request.token_ids),
        request.stats.remembered,
        thought,
        accepted,
        max(0, sum(request.stats.drafted) - accepted),
    )
    stop = None
    if request.text.stopped:
        text = tokenizer_of(ready.engine.target).decode(request.token_ids, skip_special_tokens=True)
        stop = min(filter(text.__contains__, request.params.stop), key=text.index)
    reason: Literal["stop", "length", "tool_calls"] = "stop"
    if request.finish_reason == "length" and not ready.ended:
        reason = "length"
    elif ready.parser is not None and ready.parser.called:
        reason = "tool_calls"
    return Finished(reason, usage, request.stats, stop)
