"""Records in every accepted form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from blockdraft_train.data.chats import response_indices
from blockdraft_train.data.records import (
    ChatRecord,
    check_sources,
    parse_for_continuation,
    parse_record,
    pieces_of,
    read_records,
)
from blockdraft_train.data.settings import RecordSettings

PLAIN = RecordSettings()
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CHAT = ChatRecord(MESSAGES)
CALL = {"name": "weather", "arguments": {"city": "Bergen", "days": None}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS = ChatRecord(
    [
        MESSAGES[0],
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1_0", "type": "function", "function": CALL}]},
    ],
    [TOOL],
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, constants: Callable[..., None]) -> None:
    constants(datasets.config, HF_DATASETS_CACHE=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("raw", "record"),
    [
        ({"messages": MESSAGES, "prompt": "never read"}, CHAT),
        ({"messages": [MESSAGES[0] | {"tool_calls": None}, MESSAGES[1]], "text": None}, CHAT),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, CHAT),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, MESSAGES[1]]}, CHAT),
        (
            {"messages": [{"role": "user", "content": ["q", {"text": "r"}]}]},
            ChatRecord([{"role": "user", "content": "q\nr"}]),
        ),
        ({"prompt": "q", "response": "a", "id": 3}, CHAT),
        ({"prompt": "q"}, ChatRecord([MESSAGES[0], {"role": "assistant", "content": None}])),
        (
            {"turns": ["q", "r"]},
            ChatRecord(
                [
                    {"role": role, "content": text}
                    for role, text in zip(["user", "assistant"] * 2, ["q", None, "r", None], strict=True)
                ]
            ),
        ),
        ({"text": "t"}, "t"),
    ],
)
def test_accepted_forms(raw: dict[str, Any], record: object) -> None:
    assert parse_record(raw, PLAIN) == record


@pytest.mark.parametrize(
    "calls",
    [
        {"tool_calls": [{"type": "function", "function": CALL}], "content": None},
        {"tool_calls": [CALL]},
        {"tool_calls": [{"type": "function", "function": CALL | {"arguments": json.dumps(CALL["arguments"])}}]},
        {"role": None, "from": "function_call", "value": json.dumps(CALL)},
        {"role": None, "from": "function_call", "value": json.dumps([CALL])},
        {"role": "assistant", "from": "gpt", "function_call": CALL, "tool_calls": []},
        {"tool_calls": [{"type": "function", "function": CALL}], "function_call": CALL},
        {"tool_calls": json.dumps([CALL]), "function_call": ""},
        {"tool_calls": [{"function": {"name": "weather"}, "arguments": CALL["arguments"]}]},
        *({"tool_calls": [{"name": "weather", key: CALL["arguments"]}]} for key in ("parameters", "input", "args")),
        {"tool_calls": [{"name": "weather", "arguments": "", "input": CALL["arguments"]}]},
    ],
)
@pytest.mark.parametrize(
    "tools",
    [[TOOL], json.dumps([TOOL]), [TOOL["function"] | {"strict": True, "description": None}]]
    + [[{"name": "weather", key: {"type": "object"}}] for key in ("input_schema", "inputSchema")]
    + [[{"type": "function", "function": {"name": "weather"}, "parameters": '{"type": "object"}'}]],
)
def test_forms_of_tool_calls(calls: dict[str, Any], tools: object) -> None:
    raw = {"messages": [MESSAGES[0], {"role": "assistant", **calls}], "tools": tools}
    assert parse_record(raw, PLAIN) == CALLS


@pytest.mark.parametrize(
    "fields", [{"tools": [TOOL]}, {"functions": [TOOL["function"]]}, {"tools": [TOOL], "functions": []}]
)
def test_tools_belong_to_every_form_of_chat(fields: dict[str, Any]) -> None:
    for raw in ({"prompt": "q", "response": "a"}, {"turns": ["q"]}, {"messages": MESSAGES}):
        record = parse_record(raw | fields, PLAIN)
        assert isinstance(record, ChatRecord) and record.tools == [TOOL], raw
    with pytest.raises(ValueError, match="'tools' and 'functions' differ|the field '(tools|functions)'"):
        parse_record(
            {"text": "t", **fields} if len(fields) == 1 else {"prompt": "q", "tools": [TOOL], "functions": [{}]}, PLAIN
        )


def test_reasoning_beside_a_response() -> None:
    expected = ChatRecord([MESSAGES[0], MESSAGES[1] | {"reasoning_content": "Hm."}])
    for name in ("reasoning", "reasoning_content", "thinking"):
        assert parse_record({"prompt": "q", "response": "a", name: "Hm."}, PLAIN) == expected
        assert parse_record({"messages": [MESSAGES[0], MESSAGES[1] | {name: "Hm."}]}, PLAIN) == expected
    assert parse_record({"prompt": "q", "thinking": "Hm."}, PLAIN).messages[-1]["content"] is None  # type: ignore[union-attr]


CONVERSATION = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def test_conversations_that_are_given_twice() -> None:
    for raw in (
        {"messages": MESSAGES, "conversations": CONVERSATION},
        {"messages": MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES[:1], "prompt": "q"},
        {"messages": MESSAGES, "turns": 1},
    ):
        assert parse_record(raw, PLAIN) == CHAT
    settings = RecordSettings(response_field="chosen")
    assert parse_record({"prompt": "q", "chosen": "a", "rejected": "b"}, settings) == CHAT


SYSTEM = {"role": "system", "content": "Answer in French."}


@pytest.mark.parametrize("name", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "raw",
    [
        {"messages": MESSAGES},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"prompt": "q", "response": "a"},
        {"messages": [SYSTEM, *MESSAGES]},
    ],
)
def test_a_system_message_in_a_field_of_its_own(raw: dict[str, Any], name: str) -> None:
    assert parse_record(raw | {name: SYSTEM["content"]}, PLAIN) == ChatRecord([SYSTEM, *MESSAGES])
    assert parse_record({"turns": ["q"], name: SYSTEM["content"]}, PLAIN).messages[0] == SYSTEM  # type: ignore[union-attr]
    named = {"question": "q", "answer": "a", name: SYSTEM["content"]}
    settings = RecordSettings(prompt_field="question", response_field="answer")
    assert parse_record(named, settings) == ChatRecord([SYSTEM, *MESSAGES])


@pytest.mark.parametrize("arguments", [CALL["arguments"], json.dumps(CALL["arguments"])])
def test_former_names_of_tools_and_calls(arguments: Any) -> None:
    """OpenAI's `functions` and `function_call`: the call must not vanish."""
    call = {"role": "assistant", "content": None, "function_call": CALL | {"arguments": arguments}}
    assert parse_record({"messages": [MESSAGES[0], call], "functions": [TOOL["function"]]}, PLAIN) == CALLS


@pytest.mark.parametrize("name", ["weight", "loss", "loss_mask", "train", "training", "trainable", "learn"])
def test_turns_that_are_not_learned(name: str) -> None:
    for value, learned in (
        (0, []),
        (False, []),
        (1, [1]),
        (True, [1]),
        (1.0, [1]),
        ("0", []),
        ("False", []),
        ("1", [1]),
    ):
        chat = parse_record({"messages": [MESSAGES[0], MESSAGES[1] | {name: value}]}, PLAIN)
        assert response_indices(chat.messages) == learned, (name, value)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=f'"{name}" of a message must be 0, 1, false or true, got 0.5'):
        parse_record({"messages": [MESSAGES[0], MESSAGES[1] | {name: 0.5}]}, PLAIN)
    for raw in ({"messages": MESSAGES}, {"prompt": "q", "response": "a"}, {"text": "t"}):
        for value in (0, 0.0, False, "0", "false"):
            with pytest.raises(ValueError, match=f'"{name}" is false, which marks a response'):
                parse_record(raw | {name: value}, PLAIN)
        with pytest.raises(ValueError, match=f'"{name}" of a record must be 0, 1, false or true, got 0.5'):
            parse_record(raw | {name: 0.5}, PLAIN)
        assert parse_record(raw | {name: 1, "label": 1}, PLAIN) == ("t" if "text" in raw else CHAT)
    assert parse_record({"text": "t", "label": 0}, PLAIN) == "t"  # a class


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"messages": [SYSTEM, *MESSAGES], "system": "Be brief."}, "beside a system message"),
        ({"text": "t", "system": "s"}, "field 'system', which changes what the response means"),
        ({"messages": MESSAGES, "images": ["a.png"]}, "field 'images'"),
        ({"messages": [MESSAGES[0] | {"images": ["a.png"]}, MESSAGES[1]]}, "field 'images'"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}, "field 'chat_template_kwargs'"),
        ({"prompt": "q", "response": "a", "history": [["x", "y"]]}, "field 'history'"),
        ({"prompt": "q", "response": "a", "input": "z"}, "field 'input'"),
        *(({"messages": MESSAGES, "label": label}, '"label" is false') for label in (False, 0, 0.0, "false", "0")),
        ({"messages": MESSAGES, "documents": [{"text": "x"}]}, "field 'documents'"),
        ({"messages": MESSAGES, "mask": [0, 1]}, "field 'mask'"),
        ({"messages": [MESSAGES[0], MESSAGES[1] | {"mask": 0}]}, "field 'mask'"),
        ({"messages": [MESSAGES[0], MESSAGES[1] | {"masked": False}]}, "field 'masked'"),
        ({"messages": [MESSAGES[0], MESSAGES[1] | {"from": "human"}]}, "'role' and 'from' differ"),
        ({"messages": [MESSAGES[0], MESSAGES[1] | {"value": "b"}]}, "'content' and 'value' differ"),
        ({"messages": MESSAGES, "conversations": CONVERSATION[:1]}, "hold different conversations"),
        ({"messages": MESSAGES[:1], "chosen": {"from": "gpt", "value": "a"}, "rejected": "b"}, "field 'chosen'"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "field 'chosen'"),
        ({"prompt": "q", "rejected": "b"}, "field 'rejected'"),
        ({"prompt": "q", "response": "a", "reasoning": "x", "thinking": "y"}, "'reasoning' and 'thinking' differ"),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL], "function_call": {"name": "f"}}]},
            "differ",
        ),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL | {"input": {"a": 1}}]}]}, "which differ"),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"name": "f", "kwargs": {"a": 1}}]}]},
            "holds 'kwargs' and no arguments",
        ),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"name": "f", "code": "1"}]}]}, "holds 'code'"),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": 0}]}]}, "f with 0"),
        ({"messages": [*MESSAGES, {"from": "function_call", "value": "[]"}]}, "function_call holds no call"),
        ({"messages": MESSAGES, "tools": [{"name": "f", "schema": {"type": "object"}}]}, "'schema' and no parameters"),
        ({"messages": MESSAGES, "turns": ["z"]}, "hold different conversations"),
        ({"messages": MESSAGES, "enable_thinking": False}, "field 'enable_thinking'"),
        ({"prompt": "\ud800"}, '"prompt" holds a lone surrogate at character 0'),
        ({"messages": MESSAGES, "tools": [TOOL["function"] | {"parameters": [1]}]}, "must be an object, got"),
        ({"messages": [SYSTEM | {"role": "developer"}, *MESSAGES], "system": "Be brief."}, "beside a system message"),
        ({"messages": [MESSAGES[0], MESSAGES[1] | {"train_detail": [{"begin_offset": 0}]}]}, "field 'train_detail'"),
        ({"messages": [MESSAGES[0], MESSAGES[1] | {"train": True, "loss": 0}]}, "contradict each other"),
        ({"prompt": "q", "system": ["s"]}, '"system" must be a text'),
    ],
)
def test_fields_that_change_the_meaning_are_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_record(raw, PLAIN)


def test_other_fields_are_listed_once(caplog: pytest.LogCaptureFixture) -> None:
    raw = {"messages": MESSAGES, "identifier": 3, "source": "here", "images": [], "system": ""}
    assert [parse_record(raw, PLAIN) for _ in range(3)] == [CHAT] * 3
    assert caplog.text.count("Ignored fields of records: identifier, images, source.") == 1


def test_named_fields() -> None:
    raw = {"question": "q", "answer": "a", "messages": MESSAGES, "code": "x"}
    assert parse_record(raw, RecordSettings(prompt_field="question", response_field="answer")) == CHAT
    assert parse_record(raw, RecordSettings(text_field="code")) == "x"
    with pytest.raises(ValueError, match="either a text or a conversation"):
        RecordSettings(text_field="code", prompt_field="question")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"question": "q"}, r"it has the fields \['question'\] and none that is needed .*--prompt-field"),
        ({"messages": None}, "none that is needed"),
        ({"messages": []}, "must be a list that is not empty"),
        ({"messages": "hi"}, "must be a list"),
        ({"messages": ["hi"]}, "must be a list of messages"),
        (
            {"messages": [{"role": "oracle", "content": "x"}]},
            "role of a message must be one of assistant.*, got 'oracle'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content of a message must be a text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "holds no message of a user"),
        ({"turns": [1]}, '"turns" must be a text.*, got 1'),
        ({"prompt": MESSAGES}, '"prompt" must be a text, got '),
        ("hi", "it is 'hi'; a record is a JSON object"),
        ({"messages": MESSAGES, "tools": "x"}, "tools is 'x', which is no JSON"),
        ({"messages": MESSAGES, "tools": {"name": "f"}}, '"tools" must be a list of tools, got '),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{}]}]}, "needs a function with a name"),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL | {"arguments": "[1]"}]}]}, "an object"),
        ({"prompt": "q", "completion": "a"}, "name it by --response-field"),
        ({"text": 3}, '"text" must be a text, got 3'),
    ],
)
def test_other_forms_are_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_record(raw, PLAIN)


def test_faulty_records_are_skipped_if_wanted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"nothing": 1}\nbroken\n{"text": "two"}\n')
    faults = dict[str, str]()
    result = list(read_records([str(tmp_path / "a.jsonl")], PLAIN, on_fault=faults.setdefault))
    assert [record for _, record in result] == ["one", "two"]
    assert [place.partition("a.jsonl, ")[2] for place in faults] == ["record 2", "record 3"]


def test_all_files_are_tried_before_anything_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.rows.jsonl").write_text('{"text": "one"}\n{"nothing": 1}\n')
    Path("empty.jsonl").touch()
    Path("notes.doc").write_text("text")
    check_sources(["my.rows.jsonl", "owner/name.v2", "owner"], PLAIN)  # the latter two are names on the hub
    wrong = "(?s)4 things .*no absent.jsonl.*no absent.csv.*empty.jsonl is empty.*notes.doc is of no known kind"
    with pytest.raises(ValueError, match=wrong):
        check_sources(["absent.jsonl", "absent.csv", "my.rows.jsonl", "empty.jsonl", "notes.doc"], PLAIN)


def test_texts_that_are_continued_come_in_pieces(tmp_path: Path) -> None:
    raws = [{"text": "one two three four"}, {"prompt": "one two three four", "response": "x"}, {"text": " "}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(raw) + "\n" for raw in raws))
    result = list(read_records([str(tmp_path / "a.jsonl")], PLAIN, piece=8))
    prompt = ChatRecord([{"role": "user", "content": "one two three four"}])
    assert [record for _, record in result] == ["one two ", "three ", "four", prompt, " "]
    assert [place.partition("a.jsonl, ")[2] for place, _ in result[:3]] == [
        "record 1",
        "record 1, piece 2",
        "record 1, piece 3",
    ]
    assert len(list(read_records([str(tmp_path / "a.jsonl")], RecordSettings(limit=2), piece=8))) == 2


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", [""]),
        ("short", ["short"]),
        ("a b\n\nc d\ne f g", ["a b\n\n", "c d\ne f ", "g"]),
        ("a b\n\nc d\ne f g\n", ["a b\n\n", "c d\ne f ", "g\n"]),
        ("abcdefghij" * 2, ["abcdefgh", "ijabcdef", "ghij"]),
        ("abcdefgh \n", ["abcdefgh"]),
    ],
)
def test_pieces(text: str, pieces: list[str]) -> None:
    assert list(pieces_of(text, 8)) == pieces


@pytest.mark.parametrize("raw", [{"messages": MESSAGES}, {"conversations": MESSAGES}, {"turns": ["q", "r"]}])
def test_chats_are_not_continued(raw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="this is a chat, whose roles only a chat template can spell"):
        parse_for_continuation(raw, PLAIN)
    prompt = ChatRecord(MESSAGES[:1])
    assert parse_for_continuation({"turns": ["q"]}, PLAIN) == parse_for_continuation({"prompt": "q"}, PLAIN) == prompt
    assert parse_for_continuation({"q": "q", "messages": MESSAGES}, RecordSettings(prompt_field="q")) == prompt
