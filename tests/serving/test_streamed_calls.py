"""Arguments of tool calls come in the three APIs' streams while the model writes them."""

import json
from typing import Any

import pytest
from scripted import ScriptedService, finished, named_events

from blockdraft.engine import Engine
from blockdraft.serving.request import TextDelta, ToolCall, ToolCallDelta

ARGUMENTS = '{"city": "Köln", "unit": "C"}'
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
DELTAS = [ToolCallDelta(0, "call_1", "weather", text) for text in ("", '{"city": "', 'Köln", "unit": "C"')]
CALL = [*DELTAS, ToolCall(0, "call_1", "weather", ARGUMENTS), finished("tool_calls")]
NO_CALL = [*DELTAS, TextDelta("<tool_call> no call"), finished()]
PIECES = ["", '{"city": "', 'Köln", "unit": "C"', "}"]
MESSAGES = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CHAT = MESSAGES | {"tools": [{"type": "function", "function": TOOL}]}
ANTHROPIC = MESSAGES | {"max_tokens": 99, "tools": [{"name": "weather", "input_schema": TOOL["parameters"]}]}
RESPONSES = {"model": "tiny", "input": "hi", "tools": [{"type": "function", **TOOL}]}


def post(engine: Engine, path: str, body: dict[str, Any], events: list[Any]) -> Any:
    return ScriptedService(engine, events).client().post(path, json=body)


def test_chat(engine: Engine) -> None:
    text = post(engine, "/v1/chat/completions", CHAT | {"stream": True}, CALL).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0] == {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    assert calls[1:] == [{"index": 0, "function": {"arguments": text}} for text in PIECES[1:]]


def test_anthropic(engine: Engine) -> None:
    events = named_events(post(engine, "/v1/messages", ANTHROPIC | {"stream": True}, CALL))
    kinds = [event["type"] for event in events if "block" in event["type"]]
    assert kinds == ["content_block_start", *["content_block_delta"] * 3, "content_block_stop"]
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert pieces == PIECES[1:]


def test_responses(engine: Engine) -> None:
    events = named_events(post(engine, "/v1/responses", RESPONSES | {"stream": True}, CALL))
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    [done] = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert deltas == PIECES[1:] and done["arguments"] == ARGUMENTS
    [item] = events[-1]["response"]["output"]
    assert (item["status"], item["arguments"]) == ("completed", ARGUMENTS)


def test_a_begun_call_that_is_text_after_all_ends_and_the_text_follows(engine: Engine) -> None:
    events = named_events(post(engine, "/v1/messages", ANTHROPIC | {"stream": True}, NO_CALL))
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["tool_use", "text"] and events[-2]["delta"]["stop_reason"] == "end_turn"
    events = named_events(post(engine, "/v1/responses", RESPONSES | {"stream": True}, NO_CALL))
    call, message = events[-1]["response"]["output"]
    assert call["status"] == "incomplete" and message["content"][0]["text"] == "<tool_call> no call"


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/messages", ANTHROPIC), ("/v1/responses", RESPONSES)]
)
def test_whole_responses_hold_whole_calls_only(engine: Engine, path: str, body: dict[str, Any]) -> None:
    service = ScriptedService(engine, CALL)
    whole = service.client().post(path, json=body).json()
    service.events = [event for event in CALL if not isinstance(event, ToolCallDelta)]
    assert _content(whole) == _content(service.client().post(path, json=body).json())
    service.events = NO_CALL
    text = json.dumps(service.client().post(path, json=body).json())
    assert "call_1" not in text and "<tool_call> no call" in text


def _content(body: dict[str, Any]) -> list[Any]:
    """Return what a response says, without random ids."""
    parts = body.get("content") or body.get("output") or body["choices"][0]["message"]["tool_calls"]
    return [{name: value for name, value in part.items() if name != "id"} for part in parts]
