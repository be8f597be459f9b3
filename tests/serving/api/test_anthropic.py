"""/v1/messages: requests to jobs, and events to answers."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from scripted import ScriptedService, app_of, finished, first_of, named_events
from starlette.testclient import TestClient

from blockdraft.errors import RequestError
from blockdraft.serving.api import anthropic
from blockdraft.serving.api.anthropic import MessagesRequest, job_of
from blockdraft.serving.core.events import Event, Reasoning, Text, ToolCall, ToolChoice
from blockdraft.types import Grammar

USER = {"role": "user", "content": "Hi"}
WEATHER = {"name": "weather", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
ANSWER = [Reasoning("Hm, "), Reasoning("so."), Text(""), Text("Hello "), Text("wörld"), finished()]
CALLS = [
    Text("Calling."),
    ToolCall(0, '{"city": ', id="call_1", name="weather"),
    ToolCall(0, '"Köln"}'),
    ToolCall(1, "", id="call_2", name="now"),
    finished("tool_calls"),
]
SCRIPTS: list[tuple[Sequence[Event], list[dict[str, Any]], str]] = [
    (
        ANSWER,
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
    ([Text("Hel"), finished("length")], [{"type": "text", "text": "Hel"}], "max_tokens"),
    ([Text("Hel"), finished("stop", stop="END")], [{"type": "text", "text": "Hel"}], "stop_sequence"),
    ([finished()], [], "end_turn"),
]


def ask(service: ScriptedService, path: str = "/v1/messages", **body: Any) -> Any:
    request = {"model": "tiny", "max_tokens": 20, "messages": [USER], **body}
    return TestClient(app_of(service)).post(path, json=request, headers={"anthropic-beta": "any"})


def told(service: ScriptedService, **body: Any) -> list[dict[str, Any]]:
    """Events of a streamed answer."""
    return named_events(ask(service, stream=True, **body))


def put_together(wires: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream, joined as clients join them."""
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
def test_messages_whole_and_streamed(events: Sequence[Event], blocks: list[dict[str, Any]], reason: str) -> None:
    body = ask(ScriptedService(events)).json()
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "tiny")
    assert body["content"] == blocks
    assert body["stop_reason"] == reason
    assert body["stop_sequence"] == ("END" if reason == "stop_sequence" else None)
    usage = {"input_tokens": 6, "output_tokens": 7, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0}
    assert body["usage"] == usage
    wires = told(ScriptedService(events))
    kinds = [wire["type"] for wire in wires]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    start = wires[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == ([], None, 10)
    assert put_together(wires) == blocks
    assert wires[-2]["delta"] == {"stop_reason": reason, "stop_sequence": body["stop_sequence"]}
    assert wires[-2]["usage"] == usage


def test_what_fails_is_told() -> None:
    events = [Text("Hel"), RequestError("The tokenizer failed.")]
    error = {"type": "error", "error": {"type": "api_error", "message": "The tokenizer failed."}}
    assert told(ScriptedService(events))[-1] == error
    answer = ask(ScriptedService(events))
    assert answer.status_code == 500 and answer.json() == error
    assert ask(ScriptedService([RequestError("No.")]), stream=True).status_code == 500


def test_silence_is_broken_by_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anthropic, "PING_SECONDS", -1.0)
    wires = told(ScriptedService([Text("a"), Text(""), Text(""), finished()]))
    assert [wire["type"] for wire in wires].count("ping") >= 3


def test_answers_may_be_cut_by_the_context() -> None:
    """Clients ask for more tokens than small models have. The API then cuts the answer."""
    service = ScriptedService([Text("Hel"), finished("length")])
    for most, bound, reason in ((90, 90, "max_tokens"), (91, None, "model_context_window_exceeded")):
        assert ask(service, max_tokens=most).json()["stop_reason"] == reason
        assert service.jobs[-1].max_new_tokens == bound


def test_statistics_on_request() -> None:
    body = {"speculation": {"statistics": True}}
    assert "speculative_decoding" in ask(ScriptedService(ANSWER), **body).json()["metrics"]
    assert "metrics" in told(ScriptedService(ANSWER), **body)[-2]
    assert "metrics" not in ask(ScriptedService(ANSWER)).json()


def test_tokens_are_counted() -> None:
    answer = ask(ScriptedService(), "/v1/messages/count_tokens", system="Be.", tools=[WEATHER, SEARCH])
    assert answer.json() == {"input_tokens": 21}
    assert ask(ScriptedService(), "/v1/messages/count_tokens", model="other").status_code == 404


def job(**body: Any) -> Any:
    return job_of(MessagesRequest.model_validate({"model": "tiny", "max_tokens": 9, "messages": [USER], **body}), 1.0)


def test_what_a_request_asks_for() -> None:
    made = job(
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
    params = made.params
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.25, 4, ("END",))
    assert params.grammar == Grammar("json_schema", '{"type": "object"}')
    assert made.template == {"enable_thinking": True, "reasoning_effort": "low"}
    function = {"name": "weather", "description": "", "parameters": {"type": "object"}}
    assert made.tools == ({"type": "function", "function": function},)
    assert not made.speculation.enabled and made.parallel_tool_calls
    assert job().template == job(thinking={"type": "disabled"}).template == {"enable_thinking": False}
    assert job(chat_template_kwargs={"enable_thinking": True}).template == {"enable_thinking": True}


def test_the_form_of_an_answer_had_another_name() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert job(output_format=form).params.grammar == Grammar("json_schema", '{"type": "object"}')


def test_what_differs_in_each_request_is_left_out() -> None:
    """Claude Code's instructions can then stay in the prefix cache."""
    header = "x-anthropic-billing-header: cc_version=2.1.1; cch=1a2b3;"
    for system in (
        f"{header}\nBe brief.",
        [{"type": "text", "text": header}, {"type": "text", "text": "Be brief."}],
    ):
        assert job(system=system).messages[0] == {"role": "system", "content": "Be brief."}
    assert job(system=header).messages == [USER]
    said = f"What is {header}"
    assert job(system=said).messages[0]["content"] == said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "tool", "name": "weather"}, ToolChoice("required", "weather")),
    ],
)
def test_tool_choice(given: dict[str, str], expected: ToolChoice) -> None:
    assert job(tools=[WEATHER], tool_choice=given).tool_choice == expected
    assert not job(tools=[WEATHER], tool_choice={**given, "disable_parallel_tool_use": True}).parallel_tool_calls


def test_blocks_are_messages() -> None:
    made = job(
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
    assert made.messages == [
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
    ("body", "told_of"),
    [
        ({"model": "other"}, "model is 'other'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "messages is []"),
        ({"messages": [USER, {"role": "assistant", "content": "{"}]}, "messages ends with the role assistant"),
        (user({"type": "image", "source": {"type": "url", "url": "x"}}), "a block of the type 'image'"),
        (user({"type": "tool_result", "content": "x"}), "without tool_use_id"),
        (
            user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
            "messages.0.content holds a block of the type 'image'",
        ),
        ({"system": [{"type": "image"}]}, "system holds a block of the type 'image'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 2}, "top_p is 2"),
        ({"top_k": "x"}, "top_k is 'x'"),
        ({"stop_sequences": [""]}, "stop_sequences.0 is ''"),
        ({"tools": [{"name": "f"}]}, "f without input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is 'any' without tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice names 'f'"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type is 'all'"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
    ],
)
def test_bad_fields(body: dict[str, Any], told_of: str) -> None:
    for stream in (False, True):
        answer = ask(ScriptedService(ANSWER), **body, stream=stream)
        assert answer.status_code in (400, 404), answer.text
        error = answer.json()
        assert error["type"] == "error" and error["error"]["type"] in ("invalid_request_error", "not_found_error")
        assert told_of in error["error"]["message"]


def test_a_stream_that_is_closed_ends_its_request() -> None:
    service = ScriptedService(ANSWER)
    first_of(anthropic.streamed(service, job(), anthropic.Answer("tiny", 1, "max_tokens", 7)))  # type: ignore[arg-type]
    assert service.closed == 1
