"""Chats to text and text to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from blockdraft.engine.text import encode_text
from blockdraft.errors import UsageError, describe
from blockdraft.targets import Target, without_tokenizer


def tokenizer_of(target: Target) -> PreTrainedTokenizerBase:
    """The tokenizer of a target.

    Raises:
        UsageError: It has none.
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
    """The text that the target's chat template makes of a chat, up to where the answer begins. The system's first
    messages become one, since many templates take no second.

    Raises:
        UsageError: There is no template, or it refuses the chat.
    """
    tokenizer = tokenizer_of(target)
    if tokenizer.chat_template is None:
        raise UsageError("The target has no chat template; call /v1/completions with the prompt as text.")
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
        cast(str, text).encode()  # fails at half a character, which JSON inside of JSON may hold
    except Exception as error:  # templates are programs, and fail in all ways at chats that they were not made for
        raise UsageError(
            f"messages cannot be put into the target's chat template: {describe(error)}; change roles or contents."
        ) from error
    return cast(str, text)


def _together(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    count = next((n for n, one in enumerate(messages) if one["role"] != "system"), len(messages))
    rest = [dict(one) for one in messages[count:]]
    if count == 0:
        return rest
    return [{**messages[0], "content": "\n\n".join(one["content"] for one in messages[:count])}, *rest]


def chat_ids(target: Target, text: str) -> list[int]:
    """Token ids of what a chat template wrote, which has its special tokens already."""
    return list(cast("list[int]", tokenizer_of(target)(text, add_special_tokens=False)["input_ids"]))


def text_ids(target: Target, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text as it is."""
    tokenizer = tokenizer_of(target)
    return encode_text(text, tokenizer) if add_special_tokens else chat_ids(target, text)
