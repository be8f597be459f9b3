"""Jobs to token ids and sampling parameters for the engine, and the engine's chunks to events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from blockdraft.engine import Chunk, Engine, Request
from blockdraft.engine.text import encode_text
from blockdraft.errors import UsageError, describe
from blockdraft.serving.core.backends import Backends
from blockdraft.serving.core.errors import ApiError
from blockdraft.serving.core.events import ChatJob, Event, Finished, Text, TextJob, ToolCall, Usage
from blockdraft.serving.parsing import AnswerParser, grammar_of, parser_of, takes_several_calls
from blockdraft.serving.settings import ServeSettings
from blockdraft.targets import Target, without_tokenizer
from blockdraft.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_of(target: Target) -> PreTrainedTokenizerBase:
    """The tokenizer of a target.

    Raises:
        UsageError: The target has none.
    """
    if target.tokenizer is None:
        raise UsageError(f"{without_tokenizer(target)}, so prompts must be lists of token ids.")
    return target.tokenizer


def chat_text(
    target: Target,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    template: Mapping[str, Any] | None = None,
) -> str:
    """A chat as text by the target's chat template, up to the beginning of the answer.

    Consecutive system messages at the beginning become one, since many templates refuse a second one.

    Args:
        template: Further variables of the template.

    Raises:
        UsageError: The target has no chat template, or the template refuses the chat.
    """
    tokenizer = tokenizer_of(target)
    if tokenizer.chat_template is None:
        raise UsageError("The target has no chat template; send the prompt as text to /v1/completions.")
    named = dict(template or {})
    reserved = {"tokenize", "return_dict", "conversation", "chat_template", "tools", "add_generation_prompt"} & set(
        named
    )
    if reserved:
        raise UsageError(f"chat_template_kwargs names {sorted(reserved)}, which the server sets; leave them out.")
    try:
        text = tokenizer.apply_chat_template(
            _together(messages),
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
            **named,
        )
        cast(str, text).encode()  # fails at half of a surrogate pair, which JSON inside JSON may hold
    except Exception as error:  # templates are programs, and may raise anything
        raise UsageError(
            f"messages are refused by the target's chat template: {describe(error)}; change their roles or contents."
        ) from error
    return cast(str, text)


def _together(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    count = next((n for n, one in enumerate(messages) if one["role"] != "system"), len(messages))
    rest = [dict(one) for one in messages[count:]]
    if count == 0:
        return rest
    return [{**messages[0], "content": "\n\n".join(one["content"] for one in messages[:count])}, *rest]


def chat_ids(target: Target, text: str) -> list[int]:
    """Token ids of the text of a chat template, which already holds its special tokens."""
    return list(cast("list[int]", tokenizer_of(target)(text, add_special_tokens=False)["input_ids"]))


def text_ids(target: Target, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text without a chat template."""
    tokenizer = tokenizer_of(target)
    return encode_text(text, tokenizer) if add_special_tokens else chat_ids(target, text)


@dataclass(frozen=True)
class Prepared:
    """A job as the engine takes it.

    Attributes:
        parser: Splits the answer of a chat; None for texts.
    """

    engine: Engine
    prompt: list[int]
    params: SamplingParams
    parser: AnswerParser | None = None

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, even if the engine would go on."""
        return self.parser is not None and self.parser.ended

    @property
    def scores(self) -> int:
        """Number of log-probabilities of prompt tokens that the job asks for."""
        likely = self.params.prompt_logprobs
        return 0 if likely is None else len(self.prompt) * (1 + likely)


def context_of(engine: Engine) -> int:
    """Most tokens of prompt and answer together."""
    return min(engine.target.max_context, engine.cache_tokens - engine.slots_behind)


def prepare(job: ChatJob | TextJob, backends: Backends, settings: ServeSettings) -> Prepared:
    """A job as the engine takes it. Takes long for long texts, and where it loads a backend.

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
        parser = parser_of(tokenizer, tools=job.tools, tool_choice=job.tool_choice, prompt_text=text, parallel=parallel)
        grammar = grammar_of(
            tokenizer,
            tools=job.tools,
            tool_choice=job.tool_choice,
            prompt_text=text,
            parallel=parallel,
            content=params.grammar,
        )
        params = replace(params, grammar=grammar)
    elif isinstance(job.prompt, str):
        prompt = text_ids(engine.target, job.prompt, job.add_special_tokens)
    else:
        prompt = job.prompt
    most = _most_new_tokens(settings, context_of(engine), len(prompt), job.max_new_tokens)
    return Prepared(engine=engine, prompt=prompt, params=replace(params, max_new_tokens=most), parser=parser)


def _most_new_tokens(settings: ServeSettings, context: int, prompt: int, wanted: int | None) -> int:
    """Most tokens of an answer."""
    limit, most = settings.max_prompt_tokens, settings.max_answer_tokens
    room = context - prompt
    code = "context_length_exceeded"
    if limit is not None and prompt > limit:
        raise ApiError(400, f"The prompt has {prompt} tokens; shorten it to at most {limit}.", code=code)
    if room < 1:
        raise ApiError(
            400,
            f"The prompt has {prompt} tokens, and this model's maximum context length is {context} tokens, "
            f"answer included; shorten the prompt.",
            code=code,
        )
    if wanted is None:
        return min(room, most or room)
    if most is not None and wanted > most:
        raise ApiError(400, f"max_tokens is {wanted}; it must be at most {most} on this server.", param="max_tokens")
    if wanted > room:
        raise ApiError(
            400,
            f"max_tokens is {wanted}, the prompt has {prompt} tokens, and this model's maximum context length is "
            f"{context} tokens; lower max_tokens to {room}, or leave it out.",
            code=code,
            param="max_tokens",
        )
    return wanted


def events_of(chunk: Chunk, parser: AnswerParser | None) -> list[Event]:
    """Events of a chunk. The first text among them holds the chunk."""
    if parser is None:
        return [Text(chunk.text, chunk)]
    parts = parser.push(chunk.text)
    if chunk.finish_reason is not None:
        parts += parser.finish()
    events: list[Event] = list(parts)
    for number, part in enumerate(parts):
        if not isinstance(part, ToolCall):
            events[number] = replace(part, chunk=chunk)
            return events
    return [Text("", chunk), *events]


def finished(request: Request, ready: Prepared, thought: int) -> Finished:
    """The last event of an answer. `thought` counts the tokens of its reasoning."""
    accepted = sum(request.drafted)
    usage = Usage(
        prompt=len(request.prompt),
        completion=len(request.token_ids),
        cached=request.stats.remembered,
        reasoning=thought,
        accepted=accepted,
        rejected=max(0, sum(request.stats.drafted) - accepted),
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
    return Finished(reason, usage=usage, stats=request.stats, stop=stop)
