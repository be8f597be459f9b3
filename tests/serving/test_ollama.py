"""Ollama's routes give the output of the engine, in lines of JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted import ScriptedService, finished
from serving_client import MODEL, Client

from blockdraft.engine import Engine
from blockdraft.serving.backends import Backends
from blockdraft.serving.request import ChatMessages, Infill, TextDelta, ToolCall
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings
from blockdraft.types import SamplingParams

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}

CALL = {"function": {"name": "weather", "arguments": {"a": 1}}}


def lines(answer: Any) -> list[Any]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def ask(client: Client, path: str, **fields: Any) -> Any:
    answer = client.post(path, {"model": MODEL, "stream": False, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest"])
def test_generate_equals_the_engine(client: Client, engine: Engine, name: str) -> None:
    options = {"num_predict": 12, "temperature": 0}
    expected = engine.generate(["the ant"], SamplingParams(12))[0]
    answer = ask(client, "/api/generate", model=name, prompt="the ant", options=options)
    assert answer["response"] == expected.text and answer["model"] == name and answer["done"] is True
    assert answer["done_reason"] == expected.finish_reason
    assert answer["eval_count"] == len(expected.token_ids) and answer["prompt_eval_count"] == expected.prompt_tokens
    assert 0 < answer["eval_duration"] <= answer["total_duration"]


def test_raw_skips_the_chat_template(client: Client, engine: Engine) -> None:
    assert engine.target.tokenizer is not None
    ids = engine.target.tokenizer("the ant")["input_ids"]
    expected = engine.generate([ids], SamplingParams(12))[0]
    answer = ask(client, "/api/generate", prompt="the ant", raw=True, options={"num_predict": 12, "temperature": 0})
    assert answer["response"] == expected.text


def test_streams_are_lines_and_the_default(client: Client) -> None:
    options = {"num_predict": 12, "temperature": 0}
    for path, body in (
        ("/api/generate", {"prompt": "the ant"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "the ant"}]}),
    ):
        whole = ask(client, path, options=options, **body)
        *parts, last = lines(client.post(path, {"model": MODEL, "options": options, **body}))
        assert [part["done"] for part in parts] == [False] * len(parts) and last["done"] is True
        texts = [part.get("response", part.get("message", {}).get("content")) for part in parts]
        assert "".join(texts) == whole.get("response", whole.get("message", {}).get("content"))
        assert last["eval_count"] == whole["eval_count"]


def test_a_form_content_type_as_curl_sends_it(client: Client) -> None:
    body = json.dumps({"model": MODEL, "prompt": "the ant", "stream": False, "options": {"num_predict": 2}})
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = client.send("POST", "/api/generate", content=body, headers=form)
    assert answer.status_code == 200 and answer.json()["done"] is True
    page = client.send("POST", "/api/generate", content=body, headers=form | {"origin": "http://127.0.0.1:8000"})
    assert page.status_code == 415 and isinstance(page.json()["error"], str)
    other = client.send("POST", "/v1/completions", content=body, headers=form)
    assert other.status_code == 415


def test_options_reach_the_engine(engine: Engine) -> None:
    service = ScriptedService(engine, [TextDelta("x"), finished()])
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 11, "stop": ["a", "b"],
        "repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "num_ctx": 4096, "num_thread": 2,
    }  # fmt: skip
    client = service.client()
    client.post("/api/generate", json={"model": MODEL, "prompt": "hi", "options": options, "stream": False})
    [request] = service.requests
    assert request.max_tokens == 7
    params = request.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 3, 0.9, 0.1, 11)
    assert (params.stop, params.repetition_penalty) == (("a", "b"), 1.2)
    assert (params.presence_penalty, params.frequency_penalty) == (0.3, 0.4)


@pytest.mark.parametrize(
    "options, skipped",
    [
        ({"typical_p": 0.5, "mirostat": 2, "mirostat_tau": 5.0, "repeat_last_n": 64, "tfs_z": "x"}, "4"),
        ({"typical_p": 1, "mirostat": 0, "tfs_z": None, "num_ctx": 4096, "num_gpu": 0}, None),
    ],
)
def test_options_that_would_change_the_output_are_counted(
    engine: Engine, options: dict[str, Any], skipped: str | None
) -> None:
    client = ScriptedService(engine, [TextDelta("x"), finished()]).client()
    for path, body in (("/api/generate", {"prompt": "a"}), ("/api/chat", {"messages": [{"role": "user"}]})):
        for stream in (True, False):
            answer = client.post(path, json={"model": MODEL, "options": options, "stream": stream, **body})
            assert answer.status_code == 200 and answer.headers.get("X-Blockdraft-Skipped") == skipped


def test_options_outside_of_options_are_counted(engine: Engine) -> None:
    client = ScriptedService(engine, [TextDelta("x"), finished()]).client()
    body = {"model": MODEL, "prompt": "a", "temperature": 0.5, "seed": 1, "anything": 1}
    answer = client.post("/api/generate", json=body)
    assert answer.status_code == 200 and answer.headers["X-Blockdraft-Skipped"] == "2"


@pytest.mark.parametrize("given, expected", [(-1, None), (-2, None), (0, 1), (1, 1), (None, None)])
def test_negative_limits_are_none(engine: Engine, given: int | None, expected: int | None) -> None:
    service = ScriptedService(engine, [TextDelta("x"), finished()])
    body = {"model": MODEL, "prompt": "a", "options": {"num_predict": given}}
    assert service.client().post("/api/generate", json=body).status_code == 200
    assert service.requests[0].max_tokens == expected


def test_infills_are_greedy_by_default(engine: Engine) -> None:
    service = ScriptedService(engine, [TextDelta("x"), finished()], temperature=0.7)
    for more in ({}, {"suffix": "b"}, {"suffix": "b", "options": {"temperature": 0.3}}):
        service.client().post("/api/generate", json={"model": MODEL, "prompt": "a", **more})
    assert [request.params.temperature for request in service.requests] == [0.7, 0.0, 0.3]


def test_messages_tools_and_formats(engine: Engine) -> None:
    service = ScriptedService(engine, [TextDelta("thought", reasoning=True), TextDelta("x"), finished()])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
    ]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client = service.client()
    body = {"model": MODEL, "messages": messages, "tools": [WEATHER], "stream": False, "think": "low"}
    answer = client.post("/api/chat", json=body).json()
    client.post("/api/chat", json={"model": MODEL, "messages": messages[:2], "format": schema, "think": False})
    client.post("/api/generate", json={"model": MODEL, "prompt": "a", "format": "json", "system": "Be brief."})
    client.post("/api/generate", json={"model": MODEL, "prompt": "a", "suffix": "b"})
    assert answer["message"] == {"role": "assistant", "content": "x", "thinking": "thought"}
    first, second, third, fourth = service.requests
    assert isinstance(first.prompt, ChatMessages) and first.prompt.tools[0]["function"]["name"] == "weather"
    call = first.prompt.messages[2]["tool_calls"][0]["function"]
    assert call == CALL["function"] and first.prompt.messages[2]["reasoning_content"] == "Hm."
    assert first.prompt.messages[3]["name"] == "weather"
    assert first.prompt.template["reasoning_effort"] == "low"
    assert isinstance(second.prompt, ChatMessages) and second.prompt.template == {"enable_thinking": False}
    assert second.params.grammar is not None
    assert json.loads(second.params.grammar.text) == schema | {"additionalProperties": False}
    assert isinstance(third.prompt, ChatMessages) and third.prompt.messages[0] == {
        "role": "system",
        "content": "Be brief.",
    }
    assert third.params.grammar is not None and third.params.grammar.kind == "json_object"
    assert fourth.prompt == Infill("a", "b")


def test_tool_calls(engine: Engine) -> None:
    service = ScriptedService(engine, [ToolCall(0, "call_1", "weather", '{"city": "Rome"}'), finished("tool_calls")])
    client = service.client()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "tools": [WEATHER]}
    first, last = lines(client.post("/api/chat", json=body))
    assert first["message"]["tool_calls"] == [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]
    assert last["done_reason"] == "stop" and last["message"]["content"] == ""


def test_an_error_in_a_stream_is_its_last_line(engine: Engine) -> None:
    service = ScriptedService(engine, [TextDelta("x"), RuntimeError("bug")])
    client = service.client()
    *_, last = lines(client.post("/api/generate", json={"model": MODEL, "prompt": "a"}))
    assert "failed" in last["error"]


def test_models(client: Client, engine: Engine) -> None:
    [model] = client.get("/api/tags").json()["models"]
    assert model["name"] == MODEL and model["size"] > 0 and model["details"]["family"] == "qwen3"
    [running] = client.get("/api/ps").json()["models"]
    assert running["name"] == MODEL and running["context_length"] == client.service.context
    assert client.get("/api/version").json()["version"]
    card = client.post("/api/show", {"model": f"{MODEL}:latest"}).json()
    assert card["capabilities"] == ["completion"]
    assert card["model_info"]["qwen3.context_length"] == client.service.context
    assert client.post("/api/show", {"model": "other"}).status_code == 404


def test_a_model_whose_own_name_ends_in_latest(engine: Engine) -> None:
    client = Client(Service(Backends(engine), ServeSettings(served_model_name=("tiny:latest",))))
    assert client.post("/api/show", {"model": "tiny:latest"}).status_code == 200


def test_requests_to_load_and_unload(client: Client) -> None:
    assert ask(client, "/api/generate")["done_reason"] == "load"
    for keep_alive in (0, "0", "0s", "0m"):
        assert ask(client, "/api/generate", keep_alive=keep_alive)["done_reason"] == "unload"
    assert ask(client, "/api/generate", keep_alive="5m")["done_reason"] == "load"
    assert ask(client, "/api/chat", messages=[])["message"]["content"] == ""


@pytest.mark.parametrize(
    "path, body, expected",
    [
        ("/api/generate", {"model": "other", "prompt": "a"}, "got 'other'. To take other names"),
        ("/api/generate", {"model": MODEL, "prompt": "a", "template": "{{ .Prompt }}"}, "template is not supported"),
        ("/api/generate", {"model": MODEL, "prompt": "a", "images": ["AA=="]}, "images is not supported"),
        ("/api/generate", {"model": MODEL, "prompt": "a", "suffix": "b", "system": "c"}, "suffix excludes"),
        ("/api/generate", {"model": MODEL, "prompt": "a", "raw": True, "system": "c"}, "system needs a chat template"),
        ("/api/generate", {"model": MODEL, "prompt": "a", "suffix": "b"}, "no fill-in-the-middle tokens"),
        ("/api/generate", {"model": MODEL, "prompt": "a", "options": {"top_p": 7}}, "top_p must be at most 1, got 7."),
        ("/api/embed", {"model": MODEL, "input": "a"}, "embeds"),
    ],
)
def test_errors_are_one_text(client: Client, path: str, body: Any, expected: str) -> None:
    answer = client.post(path, body)
    assert answer.status_code >= 400 and expected in answer.json()["error"]
