"""Converts requests to token ids and sampling parameters for the engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from blockdraft.chat_text import can_continue, encode_rendered, render_chat
from blockdraft.engine import Engine, infill_params, infill_prompt
from blockdraft.engine.grammar import relax
from blockdraft.engine.prefix_store import common_length
from blockdraft.engine.text import encode_prediction, encode_text
from blockdraft.errors import UsageError
from blockdraft.serving.errors import ApiError
from blockdraft.serving.infill_limits import InfillLimits
from blockdraft.serving.request import ChatMessages, GenerationRequest, Infill
from blockdraft.serving.schemas import NUM_SEEDS
from blockdraft.serving.settings import ServeSettings
from blockdraft.serving.tool_calls import HarmonyParser, OutputParser, grammar_of, parser_of
from blockdraft.serving.tool_calls.formats import THINK, THINK_END, template_of
from blockdraft.targets import Target, without_tokenizer
from blockdraft.types import Grammar, SamplingParams

log = logging.getLogger(__name__)
OTHER_MESSAGE = "\ue000"  # a character that no message begins with
INFILL_TOKENS = 256  # room for an infill whose request names no `max_tokens`
RESERVED = {"tokenize", "return_dict", "conversation", "chat_template", "tools", "messages"}
RESERVED |= {
    "lenient",
    "add_generation_prompt",
    "continue_final_message",
    "return_tensors",
    "return_assistant_tokens_mask",
}


@dataclass(frozen=True)
class PreparedChoice:
    """One choice of a request, ready for the engine.

    Attributes:
        parser: Parses the output of a chat, or ends an infill early; None for plain text.
        clipped: Whether the context shortened the requested `max_tokens`.
        instruction_tokens: Leading tokens of the prompt that are system messages and tools of a chat.
        warnings: Parts of the request that are left out.
        recorded: As in `GenerationRequest`.
    """

    prompt: list[int]
    params: SamplingParams
    parser: OutputParser | HarmonyParser | InfillLimits | None
    clipped: bool
    instruction_tokens: int = 0
    warnings: Sequence[str] = ()
    recorded: bool = True

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of log-probabilities of prompt tokens that the choice asks for."""
        top = self.params.prompt_logprobs
        return 0 if top is None else len(self.prompt) * (1 + top)


def prepare(request: GenerationRequest, engine: Engine, settings: ServeSettings) -> list[PreparedChoice]:
    """Return the choices of a request. This is slow for long prompts.

    Raises:
        UsageError, ApiError: The request cannot be served.
    """
    prompt, text, content, instructions, warnings = request.prompt, "", None, 0, list[str]()
    params = request.params if request.strict_schema else relax_schema(request.params, warnings)
    if isinstance(prompt, ChatMessages):
        text = render(engine.target, prompt)
        warnings += [
            f"messages: the arguments of an earlier call of {name[:80]} are not a JSON object; the model reads them as "
            f"they are, or none if its chat template needs an object."
            for name in _text_calls(prompt.messages)
        ]
        if "tool_calls" not in template_of(tokenizer_of(engine.target)):
            warnings += [
                "messages: the model does not see earlier tool calls, since its chat template takes none."
                for message in prompt.messages
                if "tool_calls" in message
            ][:1]
        ids = encode_rendered(tokenizer_of(engine.target), text)
        if 0 < engine.stored_prefix_tokens < len(ids):
            instructions = count_instructions(engine.target, prompt, ids)
        if _continues(prompt):  # the reasoning of the last message has ended, unless it ends inside
            last = prompt.messages[-1]["content"]
            text = THINK if last.rfind(THINK) > last.rfind(THINK_END) else THINK_END
        content = params.grammar
        params = replace(params, grammar=grammar_of(tokenizer_of(engine.target), prompt, text, content, warnings))
    elif isinstance(prompt, Infill):
        room = context_of(engine) - min(request.max_tokens or INFILL_TOKENS, context_of(engine) // 2)
        ids = infill_prompt(
            tokenizer_of(engine.target),
            prompt.prefix,
            prompt.suffix,
            prompt.extra,
            begun=prompt.begun,
            max_tokens=min(room, settings.max_prompt_tokens or room),
        )
        params = infill_params(engine.target.tokenizer, params)
    elif isinstance(prompt, str):
        ids = encode_plain(engine.target, prompt, request.add_special_tokens)
    else:
        ids = prompt
    for warning in warnings:
        log.warning("%s", warning)
    limit, clipped = _token_limit(request, settings, context_of(engine), len(ids))
    # Encoded once for all choices.
    params = replace(
        params, max_new_tokens=limit, prediction=tuple(encode_prediction(params.prediction, engine.target))
    )
    choices = []
    for index in range(request.n):
        seed = None if params.seed is None else (params.seed + index) % NUM_SEEDS
        parser: OutputParser | HarmonyParser | InfillLimits | None = None
        if isinstance(prompt, ChatMessages):
            parser = parser_of(tokenizer_of(engine.target), prompt, text, json_content=content is not None)
        elif isinstance(prompt, Infill):
            parser = InfillLimits(prompt.max_seconds, prompt.min_indent)
        prepared = replace(params, seed=seed)
        choices.append(PreparedChoice(ids, prepared, parser, clipped, instructions, warnings, request.recorded))
    return choices


def relax_schema(params: SamplingParams, warnings: list[str]) -> SamplingParams:
    """Return parameters whose output schema has only keywords that a grammar expresses.

    Args:
        warnings: Receives a line for each keyword that is left out.

    Raises:
        UsageError: The schema is wrong.
    """
    if params.grammar is None or params.grammar.kind != "json_schema":
        return params
    try:
        text, left_out = relax(params.grammar.text)
    except ValueError as error:
        raise UsageError(f"The grammar of kind json_schema is refused: {error}.") from error
    warnings += [f"The output's schema: {keyword} is not enforced." for keyword in left_out]
    return replace(params, grammar=Grammar("json_schema", text)) if left_out else params


def count_instructions(target: Target, chat: ChatMessages, ids: list[int]) -> int:
    """Return how many leading tokens of a chat's prompt `ids` are its system messages and tools.

    They are the tokens that the prompt shares with that of another chat, which differs in all other messages. Lists in
    template variables may be documents of a user, which templates put first; then none are.
    """
    if any(isinstance(value, list | dict) for value in chat.template.values()):
        return 0
    system = list(takewhile(lambda message: message["role"] in ("system", "developer"), chat.messages))
    other = [*system, {"role": "user", "content": OTHER_MESSAGE}]
    try:
        text = render(target, replace(chat, messages=other, continue_final_message=None, add_generation_prompt=None))
    except UsageError:  # a template that wants other messages
        return 0
    return common_length(_encode_once(tokenizer_of(target), text), ids)


@lru_cache(maxsize=4)
def _encode_once(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return encode_rendered(tokenizer, text)


def tokenizer_of(target: Target) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a target, or raise a UsageError if it has none."""
    if target.tokenizer is None:
        raise UsageError(f"{without_tokenizer(target)}, so prompts must be lists of token ids.")
    return target.tokenizer


def render(target: Target, chat: ChatMessages) -> str:
    """Render a chat with the chat template of the target, up to the start of the response.

    Raises:
        UsageError: The target has no chat template, the template refuses the chat, or no message can be continued.
    """
    tokenizer = tokenizer_of(target)
    if tokenizer.chat_template is None:
        raise UsageError("The target has no chat template; send the prompt as text to /v1/completions.")
    if not chat.messages:
        raise UsageError("messages is empty; give at least one message.")
    if reserved := RESERVED & set(chat.template):
        raise UsageError(f"chat_template_kwargs names {sorted(reserved)}, which the server sets; leave them out.")
    continues = _continues(chat)

    def rendered(messages: Sequence[dict[str, Any]]) -> str:
        return render_chat(
            tokenizer,
            messages,
            chat.tools,
            add_generation_prompt=not continues and chat.add_generation_prompt is not False,
            continue_final_message=continues,
            lenient=True,
            **chat.template,
        )

    try:
        return rendered(chat.messages)
    except UsageError:
        if not _text_calls(chat.messages):
            raise
    return rendered([_without_text_arguments(message) for message in chat.messages])


def _text_calls(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of earlier tool calls whose arguments are a text, since a limit of tokens cut them."""
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return [function["name"] for function in functions if isinstance(function["arguments"], str)]


def _without_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have no arguments where these are a text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = {} if isinstance(function["arguments"], str) else function["arguments"]
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _continues(chat: ChatMessages) -> bool:
    """Return whether the response continues the last message, which is then the assistant's."""
    possible = can_continue(chat.messages)
    if chat.continue_final_message:
        if not possible:
            raise UsageError(
                "continue_final_message is true, and the last message is no text of the assistant; end messages with "
                "one, or leave continue_final_message out."
            )
        if chat.add_generation_prompt:
            raise UsageError("add_generation_prompt is true beside continue_final_message; leave one of them out.")
    return possible and chat.continue_final_message is not False and not chat.add_generation_prompt


def encode_messages(target: Target, chat: ChatMessages) -> list[int]:
    return encode_rendered(tokenizer_of(target), render(target, chat))


def encode_plain(target: Target, text: str, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text without a chat template."""
    tokenizer = tokenizer_of(target)
    return encode_text(text, tokenizer) if add_special_tokens else encode_rendered(tokenizer, text)


def context_of(engine: Engine) -> int:
    """Return the maximum tokens of prompt and output together."""
    return min(engine.target.max_context, engine.cache_tokens - engine.slots_behind)


def _token_limit(request: GenerationRequest, settings: ServeSettings, context: int, prompt: int) -> tuple[int, bool]:
    """Return the maximum number of new tokens, and whether the context clipped `max_tokens`.

    Clients ask for 32,000 tokens and more, so a large `max_tokens` is no error.

    Args:
        prompt: Number of prompt tokens.
    """
    room, code = context - prompt, "context_length_exceeded"
    max_prompt = settings.max_prompt_tokens
    if max_prompt is not None and prompt > max_prompt:
        raise ApiError(400, f"The prompt has {prompt} tokens; shorten it to at most {max_prompt}.", code=code)
    if room < 1:
        raise ApiError(
            400,
            f"The prompt has {prompt} tokens, and this model's maximum context length is {context} tokens, "
            f"output included; shorten the prompt.",
            code=code,
        )
    limit = min(filter(None, (request.max_tokens, settings.max_answer_tokens, room)))
    return limit, request.max_tokens is not None and limit == room < request.max_tokens
