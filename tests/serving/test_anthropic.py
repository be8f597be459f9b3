"""/v1/messages: its requests and its responses."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted import ScriptedService, finished, named_events

from blockdraft.engine import Engine
from blockdraft.errors import RequestError
from blockdraft.serving.request import ChatMessages, Event, GenerationRequest, TextDelta, ToolCall, ToolChoice
from blockdraft.types import Grammar

Script = Callable[..., ScriptedService]
USER = {"role": "user", "content": "Hi"}
WEATHER = {"name": "weather", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
TEXT = [
    *(TextDelta("Hm, ", reasoning=True), TextDelta("so.", reasoning=True)),
    *(TextDelta(""), TextDelta("Hello "), TextDelta("wörld"), finished()),
]
CALLS = [
    TextDelta("Calling."),
    ToolCall(0, "call_1", "weather", '{"city": "Köln"}'),
    ToolCall(1, "call_2", "now", "{}"),
    finished("tool_calls"),
]
SCRIPTS: list[tuple[Sequence[Event], list[dict[str, Any]], str]] = [
    (
        TEXT,
        [{"type": "thinking", "thinking": "Hm, so.", "signature": ""}, {"type": "text", "text": "Hello wörld"}],
        "end_turn",
    ),
    (
        CALLS,
        [
            {"type": "text", "text": "Calling."},
            {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Köln"}},
            {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
        ],
        "tool_use",
    ),
    ([TextDelta("Hel"), finished("length")], [{"type": "text", "text": "Hel"}], "max_tokens"),
    (
        [TextDelta("Hel"), finished("length", context_full=True)],
        [{"type": "text", "text": "Hel"}],
        "model_context_window_exceeded",
    ),
    ([TextDelta("Hel"), finished("stop", stop="END")], [{"type": "text", "text": "Hel"}], "stop_sequence"),
    ([finished()], [], "end_turn"),
]


@pytest.fixture
def script(engine: Engine) -> Script:
    """Return a function that makes a service whose model says what a test wants."""
    return lambda events=TEXT, **settings: ScriptedService(engine, events, **settings)


def ask(service: ScriptedService, path: str = "/v1/messages", **body: Any) -> Any:
    request = {"model": "tiny", "max_tokens": 20, "messages": [USER], **body}
    return service.client().post(path, json=request, headers={"anthropic-beta": "any"})


def stream(service: ScriptedService, **body: Any) -> list[dict[str, Any]]:
    return named_events(ask(service, stream=True, **body))


def put_together(wires: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the blocks of a stream as clients do."""
    blocks = list[dict[str, Any]]()
    open_block = False
    for wire in wires:
        if wire["type"].startswith("content_block"):
            assert wire["index"] == len(blocks) - (wire["type"] != "content_block_start")
        if wire["type"] == "content_block_start":
            assert not open_block
            open_block = True
            blocks.append({**wire["content_block"], "json": ""})
        elif wire["type"] == "content_block_delta":
            (name, more) = list(wire["delta"].items())[1]
            blocks[-1]["json" if name == "partial_json" else name] += more
        elif wire["type"] == "content_block_stop":
            assert open_block
            open_block = False
    assert not open_block
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(text or "{}")
    return blocks


@pytest.mark.parametrize(("events", "blocks", "reason"), SCRIPTS)
def test_messages_whole_and_streamed(
    script: Script, events: Sequence[Event], blocks: list[dict[str, Any]], reason: str
) -> None:
    body = ask(script(events)).json()
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "tiny")
    assert body["content"] == blocks
    assert body["stop_reason"] == reason
    assert body["stop_sequence"] == ("END" if reason == "stop_sequence" else None)
    usage = {"input_tokens": 6, "output_tokens": 7, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0}
    assert body["usage"] == usage
    wires = stream(script(events))
    kinds = [wire["type"] for wire in wires]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    start = wires[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == ([], None, 10)
    assert put_together(wires) == blocks
    assert wires[-2]["delta"] == {"stop_reason": reason, "stop_sequence": body["stop_sequence"]}
    assert wires[-2]["usage"] == usage


def test_failures(script: Script) -> None:
    events = [TextDelta("Hel"), RequestError("The tokenizer failed.")]
    error = {"type": "error", "error": {"type": "api_error", "message": "The tokenizer failed."}}
    assert stream(script(events))[-1] == error
    answer = ask(script(events))
    assert answer.status_code == 500 and answer.json() == error
    assert ask(script([RequestError("No.")]), stream=True).status_code == 500


def test_statistics_on_request(script: Script) -> None:
    body = {"speculation": {"statistics": True}}
    assert "speculative_decoding" in ask(script(TEXT), **body).json()["metrics"]
    assert "metrics" in stream(script(TEXT), **body)[-2]
    assert "metrics" not in ask(script(TEXT)).json()


def request_of(service: ScriptedService, **body: Any) -> tuple[GenerationRequest, ChatMessages]:
    answer = ask(service, **body)
    assert answer.status_code == 200, answer.text
    request = service.requests[-1]
    assert isinstance(request.prompt, ChatMessages)
    return request, request.prompt


def test_what_a_request_asks_for(script: Script) -> None:
    request, chat = request_of(
        script(),
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        stop_sequences=["END"],
        tools=[WEATHER, SEARCH],
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "x"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        speculation={"enabled": False},
        context_management={"edits": []},
    )
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.25, 4, ("END",))
    assert params.grammar == Grammar("json_schema", '{"type": "object"}')
    assert chat.template == {"enable_thinking": True, "reasoning_effort": "low"}
    function = {"name": "weather", "description": "", "parameters": {"type": "object"}}
    assert chat.tools == ({"type": "function", "function": function},)
    assert not request.speculation.enabled and chat.parallel_tool_calls
    for body, thinking in (
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
    ):
        assert request_of(script(), **body)[1].template == {"enable_thinking": thinking}


def test_output_format_is_an_alias(script: Script) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert request_of(script(), output_format=form)[0].params.grammar == Grammar("json_schema", '{"type": "object"}')
    other = {"type": "json_schema", "schema": {"type": "array"}}
    answer = ask(script(), output_format=form, output_config={"format": other})
    assert answer.status_code == 400
    assert "output_config.format and output_format hold schemas that differ" in answer.text


def test_billing_headers_are_dropped(script: Script) -> None:
    """Claude Code's instructions can then stay in the prefix cache."""
    header = "x-anthropic-billing-header: cc_version=2.1.1; cch=1a2b3;"
    for system in (
        f"{header}\nBe brief.",
        [{"type": "text", "text": header}, {"type": "text", "text": "Be brief."}],
    ):
        assert request_of(script(), system=system)[1].messages[0] == {"role": "system", "content": "Be brief."}
    assert request_of(script(), system=header)[1].messages == [USER]
    said = f"What is {header}"
    assert request_of(script(), system=said)[1].messages[0]["content"] == said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "tool", "name": "weather"}, ToolChoice("required", "weather")),
    ],
)
def test_tool_choice(script: Script, given: dict[str, str], expected: ToolChoice) -> None:
    _, chat = request_of(script(), tools=[WEATHER], tool_choice=given)
    assert chat.tool_choice == expected and chat.parallel_tool_calls
    choice = {**given, "disable_parallel_tool_use": True}
    assert not request_of(script(), tools=[WEATHER], tool_choice=choice)[1].parallel_tool_calls


def test_blocks_become_messages(script: Script) -> None:
    _, chat = request_of(
        script(),
        system=[{"type": "text", "text": "One."}, {"type": "text", "text": "Two.", "cache_control": {"type": "x"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Calling."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}},
                    {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain."}]},
                    {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}},
        {"id": "t2", "type": "function", "function": {"name": "now", "arguments": {}}},
    ]
    assert chat.messages == [
        {"role": "system", "content": "One.\nTwo."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "Calling.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "Rain."},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "And?"},
    ]


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model": "other"}, "got 'other'. To take other names"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "messages must be a list that is not empty, got []."),
        (user({"type": "image", "source": {"type": "url", "url": "x"}}), "a part of type 'image'"),
        (user({"type": "tool_result", "content": "x"}), "without tool_use_id"),
        (
            user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
            "messages.0.content holds a part of type 'image'",
        ),
        ({"system": [{"type": "image"}]}, "system holds a part of type 'image'"),
        ({"temperature": -1}, "temperature must be at least 0, got -1."),
        ({"top_p": 2}, "top_p must be at most 1, got 2."),
        ({"top_k": "x"}, "top_k must be a whole number, got 'x'."),
        ({"stop_sequences": [""]}, "stop_sequences.0 must be a text that is not empty, got ''."),
        ({"tools": [{"name": "f"}]}, "f without input_schema"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type must be "),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
    ],
)
def test_bad_fields(script: Script, body: dict[str, Any], message: str) -> None:
    for stream in (False, True):
        answer = ask(script(TEXT), **body, stream=stream)
        assert answer.status_code in (400, 404), answer.text
        error = answer.json()
        assert error["type"] == "error" and error["error"]["type"] in ("invalid_request_error", "not_found_error")
        assert message in error["error"]["message"]


def test_blocks_and_tools_of_other_servers_are_skipped_and_counted(script: Script) -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    earlier = {"role": "assistant", "content": [search, result, {"type": "text", "text": "Rain."}]}
    service = script(TEXT)
    answer = ask(service, messages=[USER, earlier, USER], tools=[SEARCH, WEATHER])
    assert answer.status_code == 200 and answer.headers["X-Blockdraft-Skipped"] == "3"
    assert service.requests[-1].prompt.messages[1] == {"role": "assistant", "content": "Rain."}
    assert "X-Blockdraft-Skipped" not in ask(service).headers
