"""Converts requests to token ids and sampling parameters for the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from blockdraft.chat_text import encode_rendered, render_chat
from blockdraft.engine import Engine, infill_params, infill_prompt
from blockdraft.engine.prefix_store import common_length
from blockdraft.engine.text import encode_prediction, encode_text
from blockdraft.errors import UsageError
from blockdraft.serving.errors import ApiError
from blockdraft.serving.infill_limits import InfillLimits
from blockdraft.serving.request import Chat, GenerationRequest, Infill
from blockdraft.serving.schemas import NUM_SEEDS
from blockdraft.serving.settings import ServeSettings
from blockdraft.serving.tool_calls import HarmonyParser, OutputParser, grammar_of, parser_of
from blockdraft.serving.tool_calls.formats import THINK, THINK_END
from blockdraft.targets import Target, without_tokenizer
from blockdraft.types import SamplingParams

OTHER_MESSAGE = "\ue000"  # a character that no message begins with
INFILL_TOKENS = 256  # room for an infill whose request names no `max_tokens`
RESERVED = {"tokenize", "return_dict", "conversation", "chat_template", "tools", "messages"}
RESERVED |= {"add_generation_prompt", "continue_final_message", "return_tensors", "return_assistant_tokens_mask"}


@dataclass(frozen=True)
class Choice:
    """One choice of a request, ready for the engine.

    Attributes:
        parser: Parses the output of a chat, or ends an infill early; None for plain text.
        clipped: Whether the context shortened the requested `max_tokens`.
        instruction_tokens: Leading tokens of the prompt that are system messages and tools of a chat.
        recorded: As in `GenerationRequest`.
    """

    prompt: list[int]
    params: SamplingParams
    parser: OutputParser | HarmonyParser | InfillLimits | None
    clipped: bool
    instruction_tokens: int = 0
    recorded: bool = True

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of log-probabilities of prompt tokens that the choice asks for."""
        top = self.params.prompt_logprobs
        return 0 if top is None else len(self.prompt) * (1 + top)


def prepare(request: GenerationRequest, engine: Engine, settings: ServeSettings) -> list[Choice]:
    """Return the choices of a request. This is slow for long prompts.

    Raises:
        UsageError, ApiError: The request cannot be served.
    """
    prompt, params, text, content, instructions = request.prompt, request.params, "", None, 0
    if isinstance(prompt, Chat):
        text = render(engine.target, prompt)
        ids = encode_rendered(tokenizer_of(engine.target), text)
        if 0 < engine.stored_prefix_tokens < len(ids):
            instructions = count_instructions(engine.target, prompt, ids)
        if _continues(prompt):  # the reasoning of the last message has ended, unless it ends inside
            last = prompt.messages[-1]["content"]
            text = THINK if last.rfind(THINK) > last.rfind(THINK_END) else THINK_END
        content = params.grammar
        params = replace(params, grammar=grammar_of(tokenizer_of(engine.target), prompt, text, content))
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
    limit, clipped = _token_limit(request, settings, context_of(engine), len(ids))
    # Encoded once for all choices.
    params = replace(
        params, max_new_tokens=limit, prediction=tuple(encode_prediction(params.prediction, engine.target))
    )
    choices = []
    for index in range(request.n):
        seed = None if params.seed is None else (params.seed + index) % NUM_SEEDS
        parser: OutputParser | HarmonyParser | InfillLimits | None = None
        if isinstance(prompt, Chat):
            parser = parser_of(tokenizer_of(engine.target), prompt, text, json_content=content is not None)
        elif isinstance(prompt, Infill):
            parser = InfillLimits(prompt.max_seconds, prompt.min_indent)
        params_of_choice = replace(params, seed=seed)
        choices.append(Choice(ids, params_of_choice, parser, clipped, instructions, request.recorded))
    return choices


def count_instructions(target: Target, chat: Chat, ids: list[int]) -> int:
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


def render(target: Target, chat: Chat) -> str:
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
    return render_chat(
        tokenizer,
        chat.messages,
        chat.tools,
        add_generation_prompt=not continues and chat.add_generation_prompt is not False,
        continue_final_message=continues,
        **chat.template,
    )


def _continues(chat: Chat) -> bool:
    """Return whether the response continues the last message, which is then the assistant's."""
    last = chat.messages[-1]
    can_continue = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    if chat.continue_final_message:
        if not can_continue:
            raise UsageError(
                "continue_final_message is true, and the last message is no text of the assistant; end messages with "
                "one, or leave continue_final_message out."
            )
        if chat.add_generation_prompt:
            raise UsageError("add_generation_prompt is true beside continue_final_message; leave one of them out.")
    return can_continue and chat.continue_final_message is not False and not chat.add_generation_prompt


def encode_messages(target: Target, chat: Chat) -> list[int]:
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
