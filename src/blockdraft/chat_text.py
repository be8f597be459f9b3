"""Conversion of chats to token ids, the same for serving, for Python and for training data.

Only the chat template writes special tokens. A message that spells one, such as `<|im_end|>`, is encoded as text, so
that no message can end its turn or begin another one. In a rendered chat such a spelling is broken by `SHIELD`.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from blockdraft.errors import UsageError, describe

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Markers of messages in responses of gpt-oss, in the format Harmony. They are special tokens, and part of the text.
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
HARMONY_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
TEXT_TYPES = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")  # of parts of contents
ARGUMENTS = ("arguments", "parameters", "input", "args")  # names that programs give the arguments of a call
# Digits survive all that templates do to texts, and no client knows them.
SHIELD = "".join(str(secrets.randbelow(10)) for _ in range(24))
_specials: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, tuple[str, ...]]] = WeakKeyDictionary()


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    **variables: Any,
) -> list[int]:
    """Return the token ids of a chat. Arguments and errors are those of `render_chat`."""
    text = render_chat(
        tokenizer, messages, tools, add_generation_prompt, continue_final_message, chat_template, **variables
    )
    return encode_rendered(tokenizer, text)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    lenient: bool = False,
    **variables: Any,
) -> str:
    """Return the text of a chat, in which `SHIELD` breaks the special tokens that messages spell.

    Leading system messages are joined into one, since many templates refuse a second one.

    Args:
        messages: Messages as OpenAI's API takes them. Arguments of tool calls may be objects or JSON texts.
        tools: OpenAI's function tools.
        add_generation_prompt: Whether the text ends with the header of the next response.
        continue_final_message: Whether the text ends inside of the last message, so that the model continues it. Then
            `add_generation_prompt` must be False.
        chat_template: Template; None is that of the tokenizer.
        lenient: Whether arguments of tool calls that are no JSON object are given to the template as text, and tools
            and calls also to a template that drops them. Otherwise all of these are refused.
        variables: More variables of the template, such as `enable_thinking`.

    Raises:
        UsageError: There is no template, a message is malformed, or the template refuses the chat.
    """
    if chat_template is None and tokenizer.chat_template is None:
        raise UsageError("The target has no chat template; send the prompt as text, or add --chat-template FILE.")
    specials = _special_tokens(tokenizer)
    prepared = _prepare(messages, lenient)
    if not lenient:
        _check_dropped(str(chat_template or tokenizer.chat_template), prepared, tools)
    if harmony_ids(tokenizer):
        prepared = [_as_harmony(message) for message in prepared]
    try:
        text = tokenizer.apply_chat_template(
            _shield(prepared, specials),
            tools=_shield(list(tools or ()), specials) or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tokenize=False,
            **_shield(variables, specials),
        )
        cast(str, text).encode()  # fails at a lone surrogate, which JSON inside JSON may hold
    except Exception as error:  # templates are programs and may raise anything
        reason = describe(error).replace(SHIELD, "")
        raise UsageError(
            f"messages are refused by the chat template: {reason}; change their roles or contents."
        ) from error
    return cast(str, text)


def can_continue(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last message is a text of the assistant, which a response can continue."""
    last = messages[-1]
    return last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text from `render_chat`, which already contains its special tokens."""
    if SHIELD not in text:
        return list(cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"]))
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return list(_encode_pieces(tokenizer, text))
    return encode_with_offsets(tokenizer, text)[0]


def encode_with_offsets(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the token ids of a text from `render_chat`, and for each its first character and the one after its last.

    The tokenizer must be a fast one.
    """
    if SHIELD not in text:
        encoding: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoding["input_ids"]), list(encoding["offset_mapping"])
    twin = _twin_of(tokenizer)
    marked, starts, end = "", list[int](), 0  # starts: index in `text` of each character of `marked`
    for match in _pattern((SHIELD, *twin.marks)).finditer(text):
        mark = twin.marks.get(match[0], "")  # a shield is dropped
        marked += text[end : match.start()] + mark
        starts += [*range(end, match.start()), *[match.start()] * len(mark)]
        end = match.end()
    marked += text[end:]
    starts += range(end, len(text) + 1)
    encoded = twin.tokenizer.encode(marked, add_special_tokens=False)
    ids = [twin.ids.get(token, token) for token in encoded.ids]
    return ids, [(starts[start], starts[stop]) for start, stop in encoded.offsets]


def _prepare(messages: Sequence[Mapping[str, Any]], lenient: bool) -> list[dict[str, Any]]:
    """Return messages as chat templates take them, or raise a UsageError if one is malformed."""
    prepared = list[dict[str, Any]]()
    for number, message in enumerate(messages):
        _check_message(f"messages.{number}", message)
        message = {key: value for key, value in message.items() if value is not None}
        message["role"] = "system" if message["role"] == "developer" else message["role"]
        message["content"] = content_text(f"messages.{number}.content", message.get("content", ""))
        if message.get("tool_calls"):
            place = f"messages.{number}.tool_calls"
            message["tool_calls"] = [_with_object(place, call, lenient) for call in message["tool_calls"]]
        last = prepared[-1] if prepared else {}
        if len(prepared) == 1 and last["role"] == message["role"] == "system":
            prepared[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            prepared.append(message)
    return prepared


def _check_message(place: str, message: Any) -> None:
    """Raise a UsageError if a message lacks a field that every chat template reads."""
    if not isinstance(message, Mapping):
        raise UsageError(
            f'{place} is a {type(message).__name__}; give an object such as {{"role": ..., "content": ...}}.'
        )
    if not isinstance(role := message.get("role"), str):
        raise UsageError(f'{place}.role is missing; give one, such as "user".')
    if message.get("content") is None and role not in ("assistant", "tool"):
        raise UsageError(f"{place}.content is missing; a message of role {role} needs one.")
    if not isinstance(message.get("reasoning_content") or "", str):
        raise UsageError(f"{place}.reasoning_content must be a text, got {str(message['reasoning_content'])[:80]}.")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise UsageError(f"{place}.tool_calls is not a list of calls; give each as an object with function.")


def _check_dropped(template: str, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
    """Raise a UsageError if a chat template would drop tools or tool calls."""
    if tools and "tools" not in template:
        raise UsageError("tools is given, and the chat template takes no tools; leave them out, or use another one.")
    if "tool_calls" not in template and any(message.get("tool_calls") for message in messages):
        raise UsageError("messages hold tool_calls, which the chat template would drop; use one that takes them.")


def content_text(place: str, content: Any) -> str:
    """Return the text of a content, which may be a list of parts.

    Args:
        place: Name of the content in error messages.

    Raises:
        UsageError: The content or one of its parts is no text.
    """
    texts = [_part_text(part) for part in (content if isinstance(content, list | tuple) else [content])]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{place} must be a text, or a list of parts of text, got {str(content)[:80]}.")
    return "\n".join(texts)


def _part_text(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    is_text = part.get("type", "text") in TEXT_TYPES
    return (part.get("text") if part.get("text") is not None else part.get("refusal")) if is_text else None


def call_arguments(place: str, function: Mapping[str, Any]) -> Any:
    """Return the arguments of a tool call, which some programs name otherwise: an object, a text, or {} without any.

    Args:
        place: Name of the call in error messages.
        function: The function of the call, with its name.

    Raises:
        UsageError: There are several arguments, or those of an unknown name.
    """
    present = {key: value for key, value in function.items() if value is not None}
    given = [present[key] for key in ARGUMENTS if present.get(key) not in (None, "", {}, [])]
    unknown = [key for key in present if key not in (*ARGUMENTS, "name", "description", "strict", "index", "call_id")]
    if any(value != given[0] for value in given[1:]):
        raise UsageError(f"{place} holds several of {', '.join(ARGUMENTS)}, which differ; give one of them.")
    if unknown and not any(key in present for key in ARGUMENTS):
        raise UsageError(f"{place} holds {unknown[0]!r} and no arguments; name these so.")
    return given[0] if given else {}


def harmony_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of `HARMONY` of a tokenizer for that format, and none of others."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    ids = [] if backend is None else [backend.token_to_id(token) for token in (*HARMONY, "<|return|>", "<|call|>")]
    known = [token for token in ids if token is not None]
    return frozenset(known[: len(HARMONY)]) if len(known) == len(ids) else frozenset()


def _as_harmony(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the assistant with `content` and `thinking` apart, as templates of gpt-oss take it."""
    content, thinking = message.get("content"), message.get("reasoning_content")
    if message["role"] != "assistant":
        return message
    if isinstance(content, str) and HARMONY[2] in content:
        parts = [part.partition(HARMONY[2]) for part in content.split(HARMONY[0])]
        bodies = [(header, HARMONY_ENDS.split(body)[0]) for header, _, body in parts]
        content = "\n\n".join(
            body for header, body in bodies if body and "analysis" not in header and "to=" not in header
        )
        thinking = "\n\n".join(body for header, body in bodies if "analysis" in header) or thinking
    if thinking and message.get("tool_calls"):
        content = ""  # templates take only one of them beside a call
    return {**message, "content": content} | ({"thinking": thinking} if thinking else {})


def _with_object(place: str, call: Mapping[str, Any], lenient: bool) -> dict[str, Any]:
    """Return a tool call whose arguments are an object instead of a JSON text. Arguments are those of `render_chat`."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = call_arguments(place, function)
    call = {**call, "function": {key: value for key, value in function.items() if key not in ARGUMENTS}}
    call["function"]["arguments"] = arguments
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        if lenient:
            return call
        raise UsageError(f"{place} holds arguments that are not a JSON object; give one, as an object or as text.")
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the texts of all special tokens, longest first. One of a single character could not be broken."""
    size, specials = _specials.get(tokenizer, (0, ()))
    if size != len(tokenizer):  # reading thousands of added tokens takes milliseconds
        texts = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        specials = tuple(sorted((text for text in texts if len(text) > 1), key=lambda text: (-len(text), text)))
        _specials[tokenizer] = len(tokenizer), specials
    return specials


@lru_cache(maxsize=16)
def _pattern(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


def _shield(value: Any, specials: tuple[str, ...]) -> Any:
    """Return a value of JSON in which `SHIELD` breaks all special tokens."""
    if isinstance(value, str):
        while specials and _pattern(specials).search(value):
            value = _pattern(specials).sub(lambda match: match[0][0] + SHIELD + match[0][1:], value)
        return value
    if isinstance(value, Mapping):
        return {_shield(key, specials): _shield(inner, specials) for key, inner in value.items()}
    return [_shield(inner, specials) for inner in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class _Twin:
    """A copy of a tokenizer whose special tokens have other texts.

    Attributes:
        marks: Text of each special token in the copy, by its own text.
        ids: Id of each added token, by its id in the copy.
    """

    tokenizer: Tokenizer
    marks: dict[str, str]
    ids: dict[int, int]


_lock = threading.Lock()
_twins: WeakKeyDictionary[PreTrainedTokenizerBase, _Twin] = WeakKeyDictionary()


def _twin_of(tokenizer: PreTrainedTokenizerBase) -> _Twin:
    """Return the twin of a fast tokenizer, built once because that takes long."""
    from tokenizers import Tokenizer

    with _lock:
        specials = _special_tokens(tokenizer)
        twin = _twins.get(tokenizer)
        if twin is None or tuple(twin.marks) != specials:
            backend: Tokenizer = tokenizer.backend_tokenizer
            marks = {special: f"<{SHIELD}.{number}>" for number, special in enumerate(specials)}
            state = json.loads(backend.to_str())
            for token in state["added_tokens"]:
                if token["content"] in marks:
                    token |= {"content": marks[token["content"]], "normalized": False}
            state |= {"post_processor": None, "truncation": None, "padding": None}
            copy = Tokenizer.from_str(json.dumps(state))
            added = [token.content for token in backend.get_added_tokens_decoder().values()]
            ids: Any = {copy.token_to_id(marks.get(text, text)): backend.token_to_id(text) for text in added}
            twin = _twins[tokenizer] = _Twin(copy, marks, ids)
        return twin


def _encode_pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[int]:
    """Yield the token ids of a rendered chat by a tokenizer in Python."""
    specials = _special_tokens(tokenizer)
    for piece in re.split(f"({_pattern(specials).pattern})", text):
        if piece in specials:
            yield cast(int, tokenizer.convert_tokens_to_ids(piece))
        elif piece := piece.replace(SHIELD, ""):
            yield from cast(Any, tokenizer(piece, add_special_tokens=False, split_special_tokens=True))["input_ids"]
