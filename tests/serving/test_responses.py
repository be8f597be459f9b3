"""/v1/responses: its requests and its responses."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted import ScriptedService, finished, named_events

from blockdraft.engine import Engine
from blockdraft.errors import RequestError
from blockdraft.serving.request import ChatMessages, Event, GenerationRequest, TextDelta, ToolCall, ToolChoice
from blockdraft.types import Grammar

Script = Callable[..., ScriptedService]
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
NOW = {"type": "function", "name": "now"}
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
ITEM = ["output_item.added", "content_part.added", "output_text.delta"]
ITEM_DONE = ["output_text.done", "content_part.done", "output_item.done"]
THOUGHT = [name.replace("output_text", "reasoning_text") for name in ITEM]
THOUGHT_DONE = [name.replace("output_text", "reasoning_text") for name in ITEM_DONE]
CALL = [
    *("output_item.added", "function_call_arguments.delta"),
    *("function_call_arguments.done", "output_item.done"),
]
NAMES: list[tuple[Sequence[Event], list[str]]] = [
    (TEXT, [*THOUGHT, THOUGHT[2], *THOUGHT_DONE, *ITEM, ITEM[2], *ITEM_DONE, "completed"]),
    (CALLS, [*ITEM, *ITEM_DONE, *CALL, *CALL, "completed"]),
    ([TextDelta("Hel"), finished("length")], [*ITEM, *ITEM_DONE, "incomplete"]),
    ([finished()], [*ITEM[:2], *ITEM_DONE, "completed"]),
]


@pytest.fixture
def script(engine: Engine) -> Script:
    """Return a function that makes a service whose model says what a test wants."""
    return lambda events=TEXT, **settings: ScriptedService(engine, events, **settings)


def ask(service: ScriptedService, **body: Any) -> Any:
    return service.client().post("/v1/responses", json={"model": "tiny", "input": "Hi", **body})


def stream(service: ScriptedService, **body: Any) -> list[dict[str, Any]]:
    return named_events(ask(service, stream=True, **body))


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without its ids and times."""
    items = [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]
    times = {"created_at": 0, "completed_at": response["completed_at"] is not None}
    return {**response, **times, "id": "", "output": items}


@pytest.mark.parametrize(("events", "names"), NAMES)
def test_streams_equal_whole_responses(script: Script, events: Sequence[Event], names: list[str]) -> None:
    wires = stream(script(events))
    assert [wire["sequence_number"] for wire in wires] == list(range(len(wires)))
    assert [wire["type"].removeprefix("response.") for wire in wires] == ["created", "in_progress", *names]
    assert wires[0]["response"]["status"] == "in_progress" and wires[0]["response"]["output"] == []
    last = wires[-1]["response"]
    assert comparable(last) == comparable(ask(script(events)).json())
    for number, item in enumerate(last["output"]):
        its = [wire for wire in wires if wire.get("output_index") == number]
        assert its[0]["item"] == {**item, "status": "in_progress"} | (
            {"content": []} if "content" in item else {"arguments": ""}
        )
        assert its[-1]["item"] == item
        output = "".join(wire["delta"] for wire in its if wire["type"].endswith(".delta"))
        assert output == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
        assert {wire["item_id"] for wire in its if "item_id" in wire} == {item["id"]}


def test_a_response(script: Script) -> None:
    body = ask(script(TEXT), metadata={"a": "b"}, temperature=0.5).json()
    thought, message = body["output"]
    assert thought["type"] == "reasoning" and thought["content"] == [{"type": "reasoning_text", "text": "Hm, so."}]
    assert message["role"] == "assistant" and message["status"] == "completed"
    assert message["content"][0]["text"] == "Hello wörld"
    assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
    assert (body["metadata"], body["temperature"], body["tool_choice"]) == ({"a": "b"}, 0.5, "auto")
    usage = body["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (10, 7, 17)
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2
    assert usage["output_tokens_details"]["accepted_prediction_tokens"] == 2


def test_responses_have_all_required_fields(script: Script) -> None:
    """Fields that Open Responses requires in every response."""
    fields = {
        *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "instructions"),
        *("previous_response_id", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls"),
        *("text", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user"),
        *("usage", "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
        *("safety_identifier", "prompt_cache_key"),
    }
    body = ask(script(TEXT), prompt_cache_key="k", user="u", safety_identifier="s").json()
    assert fields <= set(body) and body["completed_at"] >= body["created_at"]
    assert (body["prompt_cache_key"], body["user"], body["safety_identifier"]) == ("k", "u", "s")
    cut = ask(script([TextDelta("Hel"), finished("length")]), presence_penalty=1).json()
    assert fields <= set(cut) and cut["completed_at"] is None and cut["presence_penalty"] == 1


def test_calls(script: Script) -> None:
    body = ask(script(CALLS), tools=[WEATHER, {"type": "web_search"}, NOW]).json()
    _, first, second = body["output"]
    assert (first["type"], first["call_id"], first["name"]) == ("function_call", "call_1", "weather")
    assert (first["arguments"], second["arguments"]) == ('{"city": "Köln"}', "{}")
    assert [tool["name"] for tool in body["tools"]] == ["weather", "now"]


def test_truncated_responses_are_incomplete(script: Script) -> None:
    body = ask(script([TextDelta("Hel"), finished("length")])).json()
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}


def test_failures(script: Script) -> None:
    events = [TextDelta("Hel"), RequestError("The tokenizer failed.")]
    wires = stream(script(events))
    assert wires[-1]["type"] == "response.failed"
    assert wires[-1]["response"]["error"] == {"code": "server_error", "message": "The tokenizer failed."}
    answer = ask(script(events))
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "The tokenizer failed."
    # Before the first event a stream is refused by a status.
    assert ask(script([RequestError("No.")]), stream=True).status_code == 500


def test_statistics_on_request(script: Script) -> None:
    body = {"speculation": {"statistics": True}}
    assert "speculative_decoding" in ask(script(TEXT), **body).json()["metrics"]
    assert "metrics" in stream(script(TEXT), **body)[-1]["response"]
    assert "metrics" not in ask(script(TEXT)).json()


def test_stored_conversations(script: Script) -> None:
    service = script(CALLS)
    client = service.client()

    def turn(output: Any, **more: Any) -> Any:
        return client.post("/v1/responses", json={"model": "tiny", "input": output, **more}).json()

    first = turn("Weather?", tools=[WEATHER, NOW], instructions="Be brief.")
    service.events = list(TEXT)
    outputs = [{"type": "function_call_output", "call_id": f"call_{n}", "output": "Rain."} for n in (1, 2)]
    second = turn(outputs, previous_response_id=first["id"])
    turn("And?", previous_response_id=second["id"], instructions="Be long.", store=False)
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}},
        {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": {}}},
    ]
    assert service.requests[-1].prompt.messages == [
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Calling.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
        {"role": "tool", "tool_call_id": "call_2", "content": "Rain."},
        {"role": "assistant", "content": "Hello wörld", "reasoning_content": "Hm, so."},
        {"role": "user", "content": "And?"},
    ]
    assert client.get(f"/v1/responses/{second['id']}").json() == second
    assert client.delete(f"/v1/responses/{second['id']}").json()["deleted"] is True
    for answer in (
        client.get(f"/v1/responses/{second['id']}"),
        client.delete(f"/v1/responses/{second['id']}"),
        client.post("/v1/responses", json={"model": "tiny", "input": "x", "previous_response_id": second["id"]}),
    ):
        assert answer.status_code == 404 and "is not stored" in answer.json()["error"]["message"]
    assert client.get(f"/v1/responses/{first['id']}?stream=true").status_code == 400


def test_store(script: Script) -> None:
    service = script(TEXT)
    client = service.client()
    for body, status in (({"stream": True}, 200), ({"store": False}, 404)):
        text = client.post("/v1/responses", json={"model": "tiny", "input": "Hi", **body}).text
        response_id = "resp_" + text.split("resp_")[1][:32]
        assert client.get(f"/v1/responses/{response_id}").status_code == status


def test_the_oldest_responses_are_dropped(script: Script) -> None:
    service = script(TEXT, max_stored=7000)
    client = service.client()
    made = [client.post("/v1/responses", json={"model": "tiny", "input": "x" * 1000}).json()["id"] for _ in range(6)]
    known = [client.get(f"/v1/responses/{response_id}").status_code == 200 for response_id in made]
    assert known[-1] and not known[0] and known == sorted(known)
    # A deleted one makes room.
    oldest = made[known.index(True)]
    client.delete(f"/v1/responses/{made[-1]}")
    client.post("/v1/responses", json={"model": "tiny", "input": "x" * 1000})
    assert client.get(f"/v1/responses/{oldest}").status_code == 200


def request_of(service: ScriptedService, **body: Any) -> tuple[GenerationRequest, ChatMessages]:
    answer = ask(service, **body)
    assert answer.status_code == 200, answer.text
    request = service.requests[-1]
    assert isinstance(request.prompt, ChatMessages)
    return request, request.prompt


def test_what_a_request_asks_for(script: Script) -> None:
    request, chat = request_of(
        script(),
        temperature=0,
        top_p=0.5,
        seed=3,
        max_output_tokens=9,
        parallel_tool_calls=False,
        tools=[WEATHER],
        reasoning={"effort": "none", "summary": "auto"},
        speculation={"enabled": False},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"},
        client_metadata={"unknown": 1},
        truncation="auto",
    )
    assert chat.messages == [{"role": "user", "content": "Hi"}]
    assert (request.params.temperature, request.params.top_p, request.params.seed, request.max_tokens) == (0, 0.5, 3, 9)
    assert request.params.grammar == Grammar("json_schema", '{"type": "object"}')
    assert chat.template == {"reasoning_effort": "none", "enable_thinking": False}
    assert not chat.parallel_tool_calls and not request.speculation.enabled
    function = {"name": "weather", "description": "", "parameters": {"type": "object"}}
    assert chat.tools == ({"type": "function", "function": function},)
    request, _ = request_of(script(), text={"format": {"type": "json_object"}})
    assert request.params.grammar == Grammar("json_object") and request.params.temperature == 1.0


@pytest.mark.parametrize(
    ("given", "expected", "names"),
    [
        ("none", ToolChoice("none"), ["weather", "now", "patch"]),
        ("required", ToolChoice("required"), ["weather", "now", "patch"]),
        ({"type": "function", "name": "now"}, ToolChoice("required", "now"), ["weather", "now", "patch"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
            ToolChoice("required"),
            ["now"],
        ),
        ({"type": "custom", "name": "patch"}, ToolChoice("required", "patch"), ["weather", "now", "patch"]),
    ],
)
def test_tool_choice(script: Script, given: Any, expected: ToolChoice, names: list[str]) -> None:
    _, chat = request_of(script(), tools=[WEATHER, NOW, {"type": "custom", "name": "patch"}], tool_choice=given)
    assert chat.tool_choice == expected
    assert [tool["function"]["name"] for tool in chat.tools] == names


def test_items_become_messages(script: Script) -> None:
    texts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    _, chat = request_of(
        script(),
        instructions="One.",
        input=[
            {"role": "developer", "content": "Two."},
            {"type": "message", "role": "user", "content": texts},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "c",
                "name": "now",
                "arguments": "",
                "status": "completed",
            },
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Noon."}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Noon.", "annotations": []}]},
            {"role": "assistant", "content": "It is."},
        ],
    )
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": {}}}
    assert chat.messages == [
        {"role": "system", "content": "One."},
        {"role": "developer", "content": "Two."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Noon."},
        {"role": "assistant", "content": "Noon."},
        {"role": "assistant", "content": "It is."},
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "other"}, "model"),
        ({"input": ""}, "input"),
        ({"input": [{"type": "custom_tool_call", "name": "f"}]}, "input.0"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"input": [{"role": "king", "content": "x"}]}, "input.0.role"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "f", "parameters": [1]}]}, "tools"),
        ({"tools": [NOW], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"background": True}, None),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_bad_fields(script: Script, body: dict[str, Any], param: str | None) -> None:
    for stream in (False, True):
        answer = ask(script(TEXT), **body, stream=stream)
        assert answer.status_code in (400, 404), answer.text
        error = answer.json()["error"]
        assert error["param"] == param and error["type"] == "invalid_request_error", error


MCP = {
    "type": "namespace",
    "name": "mcp__files__",
    "description": "Files.",
    "tools": [{"type": "function", "name": "read"}],
}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"},
}


def test_namespaces_and_custom_tools_are_functions_for_the_model(script: Script) -> None:
    calls = [
        ToolCall(0, "call_1", "mcp__files__read", '{"path": "a"}'),
        ToolCall(1, "call_2", "patch", '{"input": "*** \\"a\\"\\n"}'),
        finished("tool_calls"),
    ]
    service = script(calls)
    body = ask(service, tools=[MCP, PATCH]).json()
    assert body["tools"] == [MCP, PATCH]
    first, second = body["output"]
    assert (first["type"], first["namespace"], first["name"]) == ("function_call", "mcp__files__", "read")
    assert (second["type"], second["name"], second["input"]) == ("custom_tool_call", "patch", '*** "a"\n')
    wires = stream(service, tools=[MCP, PATCH])
    assert comparable(wires[-1]["response"]) == comparable(body)
    custom = [wire for wire in wires if "custom_tool_call_input" in wire["type"]]
    assert [wire["type"].rpartition(".")[2] for wire in custom] == ["delta", "done"]
    assert custom[0]["delta"] == custom[1]["input"] == '*** "a"\n'
    offered = [tool["function"] for tool in service.requests[-1].prompt.tools]
    assert [function["name"] for function in offered] == ["mcp__files__read", "patch"]
    assert list(offered[1]["parameters"]["properties"]) == ["input"] and "start: LINE+" in str(offered[1])
    # Their calls and outputs come back as items.
    outputs = [
        {"type": "function_call_output", "call_id": "call_1", "output": "x"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "y"},
    ]
    for more in ({"input": [*body["output"], *outputs]}, {"input": outputs, "previous_response_id": body["id"]}):
        service.client().post("/v1/responses", json={"model": "tiny", "tools": [MCP, PATCH], **more})
    _, chat = request_of(service, input=[{"role": "user", "content": "Hi"}, *body["output"], *outputs])
    called, *results = chat.messages[1:]
    assert [call["function"] for call in called["tool_calls"]] == [
        {"name": "mcp__files__read", "arguments": {"path": "a"}},
        {"name": "patch", "arguments": {"input": '*** "a"\n'}},
    ]
    assert [result["content"] for result in results] == ["x", "y"]


@pytest.mark.parametrize("streamed", [False, True])
def test_items_and_tools_of_other_servers_are_skipped_and_counted(script: Script, streamed: bool) -> None:
    service = script(TEXT)
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "local_shell_call", "call_id": "c", "action": {}},
        {"type": "item_reference", "id": "msg_unknown"},
        {"type": "compaction", "encrypted_content": "x"},
    ]
    answer = ask(service, input=items, tools=[{"type": "web_search"}, NOW], stream=streamed)
    assert answer.status_code == 200 and answer.headers["X-Blockdraft-Skipped"] == "5"
    assert service.requests[-1].prompt.messages == [{"role": "user", "content": "Hi"}]
    assert "X-Blockdraft-Skipped" not in ask(service, tools=[NOW]).headers


def test_items_of_unknown_types_are_refused(script: Script) -> None:
    answer = ask(script(TEXT), input=[{"role": "user", "content": "Hi"}, {"type": "some_future_item"}])
    assert answer.status_code == 400
    assert "input.1 is of the unknown type 'some_future_item'; use message, " in answer.json()["error"]["message"]


def test_references_stand_for_stored_items(script: Script) -> None:
    service = script(TEXT)
    client = service.client()
    first = client.post("/v1/responses", json={"model": "tiny", "input": "Hi"}).json()
    items = [{"role": "user", "content": "Hi"}]
    items += [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    body = {"model": "tiny", "input": [*items, {"role": "user", "content": "And?"}]}
    assert "X-Blockdraft-Skipped" not in client.post("/v1/responses", json=body).headers
    assert [message["content"] for message in service.requests[-1].prompt.messages] == ["Hi", "Hello wörld", "And?"]
