"""Requests of OpenAI's API to jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from blockdraft.errors import UsageError
from blockdraft.serving.events import ChatJob, Speculation, TextJob, ToolChoice
from blockdraft.serving.schemas import ChatRequest, CompletionRequest, Message, ResponseFormat, Sampled, Tool
from blockdraft.types import Grammar, SamplingParams

NAMES = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
SEEDS = 2**63  # number of them; negative ones, which OpenAI's API has too, come behind the others
Job = TypeVar("Job", ChatJob, TextJob)


def sampling(body: Sampled, temperature: float) -> SamplingParams:
    """How a request is decoded. `temperature` is that of requests which name none."""
    given = {name: getattr(body, name) for name in NAMES if getattr(body, name) is not None}
    stop = () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    return SamplingParams(
        **given,
        temperature=temperature if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),  # -1 is what vLLM's clients send for all
        logit_bias=_biases(body.logit_bias or {}),
        seed=None if body.seed is None else body.seed % SEEDS,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
    )


def choices(job: Job, n: int | None) -> list[Job]:
    """The jobs of `n` choices: each has a seed of its own, the given one and those after it."""
    seed = job.params.seed
    return [
        replace(job, params=replace(job.params, seed=None if seed is None else (seed + number) % SEEDS))
        for number in range(n or 1)
    ]


def chat_job(body: ChatRequest, temperature: float) -> ChatJob:
    params = sampling(body, temperature)
    if body.top_logprobs and not body.logprobs:
        raise UsageError(f"top_logprobs is {body.top_logprobs} without logprobs; set logprobs to true.")
    if body.logprobs:
        params = replace(params, logprobs=body.top_logprobs or 0)
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise UsageError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}; give one of them."
        )
    return ChatJob(
        messages=messages(body.messages),
        params=replace(params, grammar=_grammar(body.response_format)),
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        tools=tuple(tools(body.tools)),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        speculation=speculation(body),
        template=template(body),
    )


def count(body: CompletionRequest) -> int:
    """How many jobs a completion has, known before they are made: a small body may ask for millions."""
    return len(_prompts(body.prompt)) * (body.n or 1)


def text_jobs(body: CompletionRequest, temperature: float) -> list[TextJob]:
    """The jobs of a completion: the choices of the first prompt, those of the second, and so on."""
    params = sampling(body, temperature)
    if body.logprobs is not None:
        params = replace(params, logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None)
    most = 1 if body.max_tokens == 0 else body.max_tokens  # the engine decodes one at least
    how = speculation(body)
    return [
        choice
        for prompt in _prompts(body.prompt)
        for choice in choices(TextJob(prompt, params, most, how, body.add_special_tokens), body.n)
    ]


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    if not given:
        raise UsageError("prompt is empty; give at least one token of text.")
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return given


def with_usage(body: Sampled) -> bool:
    """Whether a stream ends with the tokens that were used."""
    return body.stream_options is not None and body.stream_options.include_usage


def speculation(body: Sampled) -> Speculation:
    return Speculation() if body.speculation is None else body.speculation.speculation()


def template(body: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    if body.reasoning_effort == "none":
        effort["enable_thinking"] = False  # type: ignore[assignment]
    return {**effort, **(body.chat_template_kwargs or {})}


def tools(given: list[Tool] | None) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in given or []]


def messages(given: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them."""
    return [_message(number, message) for number, message in enumerate(given)]


def _message(number: int, message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    made["content"] = _content(number, message)
    reasoning = message.reasoning_content or message.reasoning
    others = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    made |= {name: value for name, value in others.items() if value is not None}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id or f"call_{number}_{place}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(number, call.function.arguments)},
            }
            for place, call in enumerate(message.tool_calls)
        ]
    return made


def _content(number: int, message: Message) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise UsageError(f"messages.{number}.content is missing; a message of the role {message.role} needs one.")
        return ""
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type not in ("text", "input_text", "output_text", "refusal") or (part.refusal or part.text) is None:
            raise UsageError(
                f"messages.{number}.content holds a part of the type {part.type[:40]!r}; this model reads texts alone, "
                f'as {{"type": "text", "text": "..."}}.'
            )
    return "\n".join(part.refusal or part.text or "" for part in message.content)


def _arguments(number: int, text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise UsageError(f"messages.{number}.tool_calls holds arguments that are no JSON object; give one as a text.")
    return arguments


def _tool_choice(body: ChatRequest) -> ToolChoice:
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return ToolChoice("none" if choice == "none" else "auto")
    if not body.tools:
        raise UsageError("tool_choice is given, and there are no tools; give tools, or leave it out.")
    if isinstance(choice, str):
        return ToolChoice("required")
    assert choice is not None
    names = [tool.function.name for tool in body.tools]
    if choice.function.name not in names:
        raise UsageError(f"tool_choice names {choice.function.name[:80]!r}; the tools are {', '.join(names)[:200]}.")
    return ToolChoice("required", choice.function.name)


def _grammar(given: ResponseFormat | None) -> Grammar | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Grammar("json_object")
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise UsageError("response_format is json_schema without a schema; give json_schema.schema.")
    return Grammar("json_schema", json.dumps(given.json_schema.schema_))


def _biases(given: dict[str, float]) -> dict[int, float]:
    for token in given:
        if not (token.isascii() and token.isdecimal() and len(token) < 19):
            raise UsageError(f"logit_bias names the token {token[:40]!r}; its keys must be token ids, 0 or more.")
    return {int(token): bias for token, bias in given.items()}
