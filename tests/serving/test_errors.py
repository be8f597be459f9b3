"""Bad requests get status 4xx in the shape of their API, with field and remedy, and never 5xx."""

import json
from pathlib import Path
from typing import Any

import pytest
from copies import copy_with
from pydantic import ValidationError
from scripted import ScriptedService

from blockdraft.errors import ClosedError, NumbersError, RequestError, UsageError
from blockdraft.serving.anthropic import MessagesRequest
from blockdraft.serving.backends import Backends
from blockdraft.serving.errors import ApiError
from blockdraft.serving.openai.chat import ChatRequest
from blockdraft.serving.openai.completions import CompletionRequest
from blockdraft.serving.openai.responses import ResponsesRequest
from blockdraft.serving.openai.utilities import DetokenizeRequest
from blockdraft.serving.schemas import Schema

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
HUGE = 10**30


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-1, "hot", True, HUGE * HUGE, [])),
        *(("top_p", value) for value in (0, 1.5, "x")),
        *(("top_k", value) for value in (-2, 1.5, HUGE)),
        *(("min_p", value) for value in (-0.1, 1.1)),
        *(("max_tokens", value) for value in (-2, 1.5, "4", HUGE)),
        *(("n", value) for value in (0, -1, 1000, 1.5, HUGE)),
        *(("seed", value) for value in (1.5, "x", HUGE)),
        *(("stop", value) for value in ("", [""], [1], ["a"] * 65, 5)),
        *(("stop_token_ids", value) for value in ([-1], ["a"], [99999], [HUGE], 3)),
        *(("presence_penalty", value) for value in (-3, 3, "x")),
        *(("frequency_penalty", value) for value in (-3, 3)),
        *(("repetition_penalty", value) for value in (0, -1)),
        *(("logit_bias", value) for value in ({"x": 1}, {"1": 101}, {"-1": 1}, {"99999": 1}, {"9" * 40: 1}, [])),
        *(("speculation", value) for value in (1, {"block_size": 0}, {"tree_budget": -1}, {"enabled": 1})),
        ("speculation", {"backend": "abacus"}),
        ("stream", "yes"),
        ("stream_options", {"include_usage": 3}),
        ("suffix", "the end"),
        ("use_beam_search", True),
        ("guided_json", {"type": "object"}),
    ],
)
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_bad_fields_are_named(shared_client: Any, path: str, body: dict[str, Any], field: str, value: Any) -> None:
    answer = shared_client.post(path, body | {field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field in error["message"] or field == "speculation"
    assert field in str(error["param"]) or error["param"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": "hi"},
        {"messages": None},
        {"messages": [{}]},
        {"messages": [{"role": "wizard", "content": "hi"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"top_logprobs": 2},
        {"top_logprobs": 21, "logprobs": True},
        {"max_completion_tokens": 3},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "yaml"}},
        {"tools": [{"type": "wand"}]},
        {"tools": [{"type": "function", "function": {}}]},
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"chat_template_kwargs": {"tokenize": True}},
        {"model": 3},
    ],
)
def test_bad_chats(shared_client: Any, fields: dict[str, Any]) -> None:
    answer = shared_client.post("/v1/chat/completions", CHAT | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field", "remedy"),
    [
        ("/v1/chat/completions", "guided_json", "use response_format"),
        ("/v1/chat/completions", "json_schema", "use response_format"),
        ("/v1/chat/completions", "functions", "use tools"),
        ("/v1/chat/completions", "grammar", "leave it out"),
        ("/v1/completions", "guided_json", "leave it out"),  # where there is no response_format
    ],
)
def test_unsupported_fields_name_the_alternative(shared_client: Any, path: str, field: str, remedy: str) -> None:
    body = CHAT if "chat" in path else TEXT
    error = shared_client.post(path, body | {field: {"type": "object"}}).json()["error"]
    assert error["message"] == f"{field} is not supported by this server; {remedy}."


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"nonsense", b"[]", b"3", b"null", b'"text"', b"{"),
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "\\udfff": 1}',
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 6000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"model": "tiny", "prompt": ' + b"[" * 200 + b"]" * 200 + b"}",
    ],
)
def test_bad_bodies(shared_client: Any, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        answer = shared_client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"messages": [1] * 2000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 2000}]}),
        (ChatRequest, CHAT | {"tools": [1] * 2000}),
        (ChatRequest, CHAT | {"logit_bias": {str(token): "x" for token in range(2000)}}),
        (ChatRequest, CHAT | {"stop_token_ids": ["x"] * 2000}),
        (CompletionRequest, {"prompt": [1.5] * 2000}),
        (CompletionRequest, {"prompt": [[1.5] * 2000]}),
        (DetokenizeRequest, {"tokens": ["x"] * 2000}),
        (MessagesRequest, {"max_tokens": 1, "messages": [1] * 2000}),
        (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": [1] * 2000}]}),
        (ResponsesRequest, {"input": [1] * 2000}),
        (ResponsesRequest, {"input": "a", "metadata": {str(number): number for number in range(2000)}}),
        (ResponsesRequest, {"input": "a", "tools": [1] * 2000}),
    ],
)
def test_validation_stops_at_the_first_wrong_entry(kind: type[Schema], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        kind.model_validate({"model": "tiny", **fields})
    assert raised.value.error_count() < 5


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": CHAT["messages"] * 10_001},
        {"logit_bias": {str(token): 1 for token in range(1025)}},
        {"stop_token_ids": [1] * 1025},
        {"stop": "x" * 1001},
        {"stop": ["x" * 1001]},
    ],
)
def test_list_sizes_are_limited(shared_client: Any, fields: dict[str, Any]) -> None:
    answer = shared_client.post("/v1/chat/completions", CHAT | fields)
    [field] = fields
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(field)
    assert "at most" in answer.json()["error"]["message"]


def test_too_many_choices_are_refused(client: Any) -> None:
    answer = client.post("/v1/completions", TEXT | {"prompt": ["a"] * 5000, "n": 100})
    assert answer.status_code == 400 and "asks for 500000 choices" in answer.json()["error"]["message"]
    assert "asks for 128" in client.post("/v1/chat/completions", CHAT | {"n": 128}).json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("token", [2**62, 2**32 + 1, 10**6])
def test_unknown_tokens_are_refused(shared_client: Any, token: int, stream: bool) -> None:
    answer = shared_client.post("/v1/completions", TEXT | {"prompt": [token], "echo": True, "stream": stream})
    assert answer.status_code == 400 and f"Token id {token}" in answer.json()["error"]["message"]


def test_other_content_types_are_refused(shared_client: Any) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = shared_client.post("/v1/completions", content=json.dumps(TEXT), headers={"content-type": kind})
        assert answer.status_code == 415, answer.text
    assert shared_client.post("/v1/completions", content=json.dumps(TEXT)).status_code == 415  # without any
    kind = {"content-type": "application/json; charset=utf-8"}
    assert shared_client.post("/v1/completions", content=json.dumps(TEXT), headers=kind).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("HEAD", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/v1/models", 415),
        ("GET", "/v1/models/nothing", 404),
        ("GET", "/../../etc/passwd", 404),
    ],
)
def test_other_methods_and_paths(shared_client: Any, method: str, path: str, status: int) -> None:
    answer = shared_client.send(method, path)
    assert answer.status_code == status
    assert method == "HEAD" or answer.json()["error"]["message"]


def test_a_wrong_base_url_is_explained(shared_client: Any) -> None:
    for path in ("/chat/completions", "/v1/v1/messages"):
        answer = shared_client.post(path, CHAT)
        assert answer.status_code == 404 and "end in /v1" in answer.json()["error"]["message"]


def test_unknown_fields_are_ignored(shared_client: Any) -> None:
    more = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "frobnicate": [1]}
    assert shared_client.post("/v1/completions", TEXT | more).status_code == 200


def test_neutral_values_of_unsupported_fields_are_accepted(shared_client: Any) -> None:
    more = {"suffix": "", "audio": None, "ignore_eos": None, "stream_options": {"include_usage": None}}
    more |= {"best_of": 1, "use_beam_search": False, "min_tokens": 0, "tools": []}
    assert shared_client.post("/v1/completions", TEXT | more).status_code == 200
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        answer = shared_client.post(path, body | {"best_of": 2})
        assert answer.status_code == 400 and "best_of" in answer.text


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/chat/completions", {"temperature": 1e-40}, "temperature", "temperature must be 0 (greedy) or between"),
        ("/v1/chat/completions", {"n": 0}, "n", "n must be at least 1, got 0."),
        ("/v1/chat/completions", {"messages": None}, "messages", "messages is missing; give it."),
        ("/infill", {"input_prefix": "a"}, "input_suffix", "input_suffix is missing; give it."),
        (
            "/infill",
            {"input_prefix": "a", "input_suffix": "b", "input_extra": ["c"]},
            "input_extra.0",
            "input_extra.0 must be an object, got 'c'.",
        ),
    ],
)
def test_messages_give_limit_and_value(
    shared_client: Any, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    error = shared_client.post(path, (CHAT if "chat" in path else {}) | body).json()["error"]
    assert error["param"] == param and error["message"].startswith(message)


def test_responses_reveal_no_paths(client: Any, engine: Any) -> None:
    path = str(engine.target.path)
    error = UsageError(f"{path}/tokenizer.json is odd.")
    assert client.service.backends.public(str(error)) == "target/tokenizer.json is odd."
    assert path not in client.get("/v1/models").text + client.get("/openapi.json").text + client.get("/metrics").text


def test_public_text_replaces_only_paths(engine: Any) -> None:
    for place, text, result in (
        (".", "It is 1.5. See above.", "It is 1.5. See above."),
        ("models/small", f"{Path.cwd()}/models/small/x and models/small/y", "small/x and small/y"),
    ):
        elsewhere = copy_with(engine, target=copy_with(engine.target, path=Path(place)))
        assert Backends(elsewhere).public(text) == result


@pytest.mark.parametrize(
    ("error", "status", "kinds", "message"),
    [
        (UsageError("max_new_tokens is -1."), 400, ("invalid_request_error",) * 2, "max_tokens is -1."),
        (ApiError(429, "Full."), 429, ("rate_limit_error",) * 2, "Full."),
        (NumbersError("NaN everywhere."), 500, ("server_error", "api_error"), "NaN everywhere."),
        (RequestError("The tokenizer failed."), 500, ("server_error", "api_error"), "The tokenizer failed."),
        (ClosedError("Closed."), 503, ("server_error", "overloaded_error"), "The server is shutting down"),
        (KeyError("/secret/place"), 500, ("server_error", "api_error"), "its log has the details"),
    ],
)
def test_errors_have_the_shape_of_their_api(
    engine: Any,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
    kinds: tuple[str, str],
    message: str,
) -> None:
    client = ScriptedService(engine, [error]).client()
    openai, anthropic = client.post("/v1/chat/completions", json=CHAT), client.post("/v1/messages", json=CHAT)
    assert openai.status_code == anthropic.status_code == status
    assert (openai.json()["error"]["type"], anthropic.json()["error"]["type"]) == kinds
    assert openai.json()["error"].keys() == {"message", "type", "param", "code"}
    assert anthropic.json().keys() == {"type", "error"} and anthropic.json()["type"] == "error"
    assert message in openai.json()["error"]["message"] and message in anthropic.json()["error"]["message"]
    if isinstance(error, KeyError):
        assert "secret" not in openai.text + anthropic.text and "secret" in caplog.text
