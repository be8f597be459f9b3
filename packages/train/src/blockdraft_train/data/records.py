"""Records of conversations or text, in the forms that datasets have."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from blockdraft.chat_text import call_arguments, content_text
from blockdraft.errors import UsageError
from blockdraft_train.complaints import Complaints
from blockdraft_train.data.record_files import names_file, numbered
from blockdraft_train.data.settings import RecordSettings

log = logging.getLogger(__name__)
Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class ChatRecord:
    """Messages of a conversation, as chat templates take them.

    Attributes:
        messages: Messages with `role` and `content`, a text. The content of a response is None if it is still to be
            written. A response of `weight` 0 is context and not learned.
        tools: OpenAI's function tools, which the assistant may call.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


Record: TypeAlias = "str | ChatRecord"

ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool", "function": "tool"}
ROLES |= {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ACCEPTED = (
    '{"messages": [{"role", "content"}, ...]}, {"conversations": [{"from", "value"}, ...]}, {"prompt", "response"}, '
    '{"turns": ["prompt", ...]} or {"text"}'
)

CHATS = ("messages", "conversations", "turns")
TOOLS = ("tools", "functions")
SYSTEM = ("system", "system_prompt")
REASONING = ("reasoning_content", "reasoning", "thinking")
# Fields of records and turns by which other programs say whether a response is learned.
LEARNED = ("weight", "loss", "loss_mask", "train", "training", "trainable", "learn")
MARKS = {"0": False, "false": False, "1": True, "true": True}
# Fields that change what a response means and cannot be kept: of records and turns, of records alone, and of pairs.
# Only some spans are learned, or a message is not.
MASKS = ("mask", "masked", "ignore", "loss_scale", "train_detail", "training_detail")
LOST = ("image", "images", "video", "videos", "audio", "audios", *MASKS)
TEMPLATE_ARGS = ("enable_thinking", "reasoning_effort")  # which --template-args sets for all
LOST_IN_RECORDS = (*LOST, "chosen", "rejected", "documents", "chat_template", "chat_template_kwargs", *TEMPLATE_ARGS)
LOST_IN_PAIRS = ("history", "instruction", "input", "context", "suffix")


def raise_fault(place: str, fault: str) -> None:
    raise UsageError(f"{place}: {fault}")


def read_records(
    sources: Sequence[str],
    settings: RecordSettings,
    piece: int | None = None,
    on_fault: Callable[[str, str], object] = raise_fault,
) -> Iterator[tuple[str, Record]]:
    """Read the records of all sources, one source after the other, each with its place for error messages.

    Args:
        sources: JSON, JSON-lines and Parquet files, text files (one record each), folders of such files or of a saved
            dataset, or names on the hub.
        piece: Characters of a piece. Given when texts are continued without a chat template: records are then those of
            `parse_for_continuation`, and each piece of a text is a record.
        on_fault: Called with the place and the fault of a record that has none of the accepted forms. If it returns,
            the record is skipped.

    Raises:
        UsageError: A source cannot be read, or a record has none of the accepted forms.
    """

    def parsed(place: str, raw: Any) -> Iterator[tuple[str, Record]]:
        try:
            if isinstance(raw, UsageError):
                raise raw
            record = parse_record(raw, settings) if piece is None else parse_for_continuation(raw, settings)
        except ValueError as error:
            on_fault(place, str(error))
            return
        pieces = [record] if piece is None or not isinstance(record, str) else pieces_of(record, piece)
        for number, part in enumerate(pieces, 1):
            yield place if number == 1 else f"{place}, piece {number}", part

    raws = itertools.chain.from_iterable(numbered(source, settings) for source in sources)
    records = itertools.chain.from_iterable(parsed(place, raw) for place, raw in raws)
    return itertools.islice(records, settings.limit)


def check_sources(sources: Sequence[str], settings: RecordSettings) -> None:
    """Check the first record of each source that is a file or a folder. Sources on the hub are not checked.

    Raises UsageError as `read_records` does, with the faults of all sources together.
    """
    complaints = Complaints()
    for source in filter(names_file, sources):
        with complaints.noting():
            next(read_records([source], settings, on_fault=lambda place, fault: None), None)
    complaints.check()


def parse_record(raw: Any, settings: RecordSettings) -> Record:
    """Parse a record, an object of JSON, into a text or a chat. Raise UsageError if it has none of the accepted forms.

    Fields that are None count as absent, because Parquet files fill absent fields with None.
    """
    if not isinstance(raw, dict):
        raise UsageError(f"it is {_short(raw)}; a record is a JSON object.")
    present = {name: value for name, value in raw.items() if value is not None}
    if settings.text_field is not None:
        return _text(present, settings.text_field)
    record, used = _parse_form(present, settings)
    lost = {*LOST_IN_RECORDS} if isinstance(record, ChatRecord) else {*LOST, *SYSTEM, *TOOLS}
    if isinstance(record, ChatRecord) and not used & {*CHATS}:
        lost |= {*LOST_IN_PAIRS}
    refuse_fields(present, lost - used)
    marks = {name: present[name] for name in LEARNED if name in present}
    if isinstance(record, ChatRecord) and str(present.get("label")).lower() in ("0", "0.0", "false"):
        marks["label"] = False  # other labels are classes
    if unlearned := [name for name, value in marks.items() if not _is_learned(name, value, "a record")]:
        raise UsageError(f'"{unlearned[0]}" is false, which marks a response that must not be learned; leave it out.')
    _log_ignored(frozenset(present) - used - {*marks})
    return record


def _parse_form(present: dict[str, Any], settings: RecordSettings) -> tuple[Record, set[str]]:
    """Return the record, and the fields that it was made of."""
    prompt, response = settings.prompt_field or "prompt", settings.response_field or "response"
    if settings.prompt_field is None and settings.response_field is None:
        for name in CHATS[:2]:
            if name in present:
                chat = _chat(name, present[name])
                used = _check_others(chat, name, present)
                return _with_more(chat, present), {name, *used, *SYSTEM, *TOOLS}
        if "turns" in present:
            return _with_more(_turns(present["turns"]), present), {"turns", *SYSTEM, *TOOLS}
        if "prompt" not in present and "text" in present:
            return _text(present, "text"), {"text"}
    if prompt not in present:
        raise UsageError(
            f"it has the fields {sorted(present)} and none that is needed ({ACCEPTED}); name its fields by "
            f"--text-field, or by --prompt-field and --response-field."
        )
    if response not in present and (settings.response_field is not None or "completion" in present):
        raise UsageError(f"it has the fields {sorted(present)} and no {response!r}; name it by --response-field.")
    chat = _pair(_text(present, prompt), _text(present, response) if response in present else None)
    if response in present and (reasoning := _only(present, REASONING)):
        chat[1]["reasoning_content"] = content_text("the reasoning of a record", reasoning)
    used = {prompt, response, *REASONING, *SYSTEM, *TOOLS}
    return _with_more(chat, present), used | ({"rejected"} if response == "chosen" else set())


def _check_others(chat: list[Message], name: str, present: Mapping[str, Any]) -> set[str]:
    """Return the fields that repeat a conversation. Raise a UsageError if one holds another conversation."""
    others = [other for other in (*CHATS[:2], "chosen") if other != name and isinstance(present.get(other), list)]
    for other in others:
        if _chat(other, present[other]) != chat:
            raise UsageError(f'"{name}" and "{other}" hold different conversations; leave one of them out.')
    if isinstance(turns := present.get("turns"), list):
        others.append("turns")
        if turns != [message["content"] for message in chat if message["role"] == "user"]:
            raise UsageError(f'"{name}" and "turns" hold different conversations; leave one of them out.')
    return {*others, "rejected"} if "chosen" in others else {*others}


def refuse_fields(present: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise a UsageError if a record has one of these fields, unless it is empty."""
    for name in sorted(names):
        if present.get(name) not in (None, "", [], {}):
            raise UsageError(
                f"it has the field {name!r}, which changes what the response means and cannot be kept; put it into the "
                f"messages, or leave the record out."
            )


@cache
def _log_ignored(names: frozenset[str]) -> None:
    if names:
        log.warning("Ignored fields of records: %s.", ", ".join(sorted(names)))


def _only(present: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the fields with one meaning, or None if all are empty.

    Raises:
        UsageError: They have different values.
    """
    given = {name: present[name] for name in names if present.get(name) not in (None, "", [], {})}
    value = next(iter(given.values()), None)
    if any(other != value for other in given.values()):
        raise UsageError(f"{' and '.join(map(repr, given))} differ, and have one meaning; leave one of them out.")
    return value


def _with_more(chat: list[Message], present: Mapping[str, Any]) -> ChatRecord:
    """Return a chat with the tools and the system message that fields of their own hold.

    Raises:
        UsageError: One of them is malformed, or the chat has another system message.
    """
    tools = _tools(_only(present, TOOLS))
    text = _only(present, SYSTEM)
    if text is None:
        return ChatRecord(chat, tools)
    if not isinstance(text, str):
        raise UsageError(f'"system" must be a text, got {_short(text)}.')
    own = [message["content"] for message in chat if message["role"] in ("system", "developer")]
    if own and own != [text]:
        raise UsageError("a system message is given beside a system message in the conversation; leave one out.")
    return ChatRecord(chat if own else [{"role": "system", "content": text}, *chat], tools)


def parse_for_continuation(raw: Any, settings: RecordSettings) -> Record:
    """Parse a record whose text will be continued as it is: a text, or a prompt as the only message of a user.

    Raises UsageError if the record has none of the accepted forms, or is a chat.
    """
    record = parse_record(raw, settings)
    if isinstance(record, str):
        return record
    named = settings.prompt_field is not None or settings.response_field is not None
    is_chat = any(raw.get(name) is not None for name in ("messages", "conversations"))
    if len(record.messages) > 2 or (not named and is_chat):
        raise UsageError(
            "this is a chat, whose roles only a chat template can spell, and none is used here (the target has none, "
            'or --continue does without). Give {"text"} or {"prompt"} records or .txt files to have them continued. '
            "To generate the responses of chats, leave out --continue, and add --chat-template FILE if the target has "
            "none."
        )
    return ChatRecord(record.messages[:1])


def pieces_of(text: str, size: int) -> Iterator[str]:
    """Cut a text into pieces of at most `size` characters, each as long as possible.

    Cuts fall at the end of a paragraph, else of a line, else of a word, as long as the piece has at least half of
    `size`.
    """
    begin = 0
    while len(text) - begin > size:
        least, most = begin + size // 2, begin + size
        places = (text.rfind(mark, least, most) + len(mark) for mark in ("\n\n", "\n", " "))
        end = next((place for place in places if place > least), most)
        yield text[begin:end]
        begin = end
    if begin == 0 or text[begin:].strip():
        yield text[begin:]


def _pair(prompt: str, response: str | None = None) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _turns(turns: Any) -> list[Message]:
    texts = [_text({"turns": text}, "turns") for text in _list("turns", turns)]
    return [message for text in texts for message in _pair(text)]


def _chat(name: str, messages: Any) -> list[Message]:
    chat = [_message(name, i, message) for i, message in enumerate(_list(name, messages))]
    if not any(message["role"] == "user" for message in chat):
        raise UsageError(f'"{name}" holds no message of a user; a conversation needs one.')
    return chat


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    tools = _from_json("tools", tools)
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UsageError(f'"tools" must be a list of tools, got {_short(tools)}.')
    return [_tool(tool) for tool in tools]


def _function(raw: Any) -> dict[str, Any]:
    """Return the fields of a tool or a tool call, which may be those of `function`, or {} without a name."""
    inner = raw.get("function", raw) if isinstance(raw, dict) else raw
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        return {}
    fields = {**{key: value for key, value in raw.items() if key != "function"}, **inner}
    return {key: value for key, value in fields.items() if value is not None}


def _tool(raw: Any) -> dict[str, Any]:
    """Return a tool as the server passes it to chat templates."""
    function = _function(raw)
    if not function:
        raise UsageError(f'"tools" holds {_short(raw)}; a tool needs a function with a name.')
    parameters = _from_json("parameters of a tool", _only(function, ("parameters", "input_schema", "inputSchema")))
    if not isinstance(parameters, dict | None):
        raise UsageError(f"the parameters of {function['name']} must be an object, got {_short(parameters)}.")
    others = [
        key for key, value in function.items() if isinstance(value, dict | list) and value and key != "parameters"
    ]
    if not {"parameters", "input_schema", "inputSchema"} & {*function} and others:
        raise UsageError(f"the tool {function['name']} holds {others[0]!r} and no parameters; name these so.")
    names = ("name", "description")
    present = {name: function[name] for name in names if name in function}
    if parameters or function.get("parameters") == {}:
        present["parameters"] = parameters or {}
    return {"type": "function", "function": present}


def _message(name: str, index: int, raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise UsageError(f'"{name}" must be a list of messages, got {_short(raw)} in it.')
    present = {key: value for key, value in raw.items() if value is not None}
    roles = {key: present.pop(key) for key in ("role", "from") if key in present}
    for role in roles.values() or [None]:
        if not isinstance(role, str) or role not in ROLES:
            raise UsageError(f"the role of a message must be one of {', '.join(sorted(ROLES))}, got {role!r}.")
    role = _only({key: ROLES[value] for key, value in roles.items()}, ("role", "from"))
    contents = {key: present.pop(key) for key in ("content", "value") if key in present}
    content = _only(contents, ("content", "value"))
    content = next(iter(contents.values()), None) if content is None else content
    calls = [present.pop("tool_calls", None), present.pop("function_call", None)]
    if "function_call" in roles.values():
        calls.append(content)
        content = ""
    refuse_fields(present, LOST)
    learned = {_is_learned(key, present.pop(key), "a message") for key in LEARNED if key in present}
    if len(learned) > 1:
        raise UsageError(f"the fields {', '.join(LEARNED)} of a message contradict each other; give one of them.")
    if learned == {False}:
        present["weight"] = 0
    tool_calls = _tool_calls(index, calls)
    if "function_call" in roles.values() and not tool_calls:
        raise UsageError("a message of role function_call holds no call; give its name and arguments.")
    if tool_calls:
        present["tool_calls"] = tool_calls
        content = "" if content is None else content
    reasoning = _only(present, REASONING)
    for key in REASONING:
        present.pop(key, None)
    if reasoning is not None:
        present["reasoning_content"] = content_text("the reasoning of a message", reasoning)
    return {"role": role, "content": content_text("the content of a message", content), **present}


def _is_learned(name: str, value: Any, place: str) -> bool:
    """Return whether a record or a turn is learned, by a field such as `train` or `weight`."""
    text = str(int(value) if isinstance(value, bool | float) and value in (0, 1) else value).strip().lower()
    if text not in MARKS:
        raise UsageError(f'"{name}" of {place} must be 0, 1, false or true, got {_short(value)}.')
    return MARKS[text]


def _tool_calls(index: int, fields: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a message as the server passes them to chat templates.

    Args:
        index: Index of the message.
        fields: Calls from the fields that may hold them: a list, one call, a JSON text, or nothing.

    Raises:
        UsageError: A call is malformed, or the fields hold different calls.
    """
    calls = list[dict[str, Any]]()
    for field in fields:
        value = _from_json("a tool call", field) if field else None
        made = [_tool_call(call) for call in (value if isinstance(value, list) else [value])] if value else []
        if calls and made and [call["function"] for call in made] != [call["function"] for call in calls]:
            raise UsageError('"tool_calls" and "function_call" of a message differ; leave one of them out.')
        calls = calls or made
    return [{**call, "id": call["id"] or f"call_{index}_{number}"} for number, call in enumerate(calls)]


def _tool_call(raw: Any) -> dict[str, Any]:
    function = _function(raw)
    if not function:
        raise UsageError(f"a message has the tool call {_short(raw)}; it needs a function with a name.")
    name = function["name"]
    given = {key: value for key, value in function.items() if key not in ("id", "type")}
    arguments = _from_json("the arguments of a tool call", call_arguments(f"the call of {name}", given))
    if not isinstance(arguments, dict):
        raise UsageError(f"a message calls {name} with {_short(arguments)}; give an object.")
    return {"id": raw.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _from_json(name: str, value: Any) -> Any:
    """Return a value, parsed if it is a text of JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is {_short(value)}, which is no JSON ({error}).") from error


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UsageError(f'"{name}" must be a list that is not empty, got {_short(value)}.')
    return value


def _text(present: dict[str, Any], name: str) -> str:
    value = present.get(name)
    if not isinstance(value, str):
        actual = "but is absent" if value is None else f"got {_short(value)}"
        raise UsageError(f'"{name}" must be a text, {actual}.')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f'"{name}" holds a lone surrogate at character {error.start}; give valid Unicode.') from error
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
