"""Predicted outputs and lookup scopes over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import ScriptedService, finished
from serving_client import MODEL, Client
from starlette.testclient import TestClient

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.serving.app import make_app
from blockdraft.serving.backends import Backends
from blockdraft.serving.request import TextDelta
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings

MESSAGES = [{"role": "user", "content": "the ant"}]


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_a_prediction_is_drafted_and_counted(engine: Engine, drafter: str, parts: bool) -> None:
    target = engine.target
    with Engine(target, load_drafter(drafter, target=target)) as plain:
        client = Client(Service(Backends(plain), ServeSettings(served_model_name=(MODEL,))))
        alone = client.chat(max_tokens=24)
        text = alone["choices"][0]["message"]["content"]
        content: Any = [{"type": "text", "text": text}] if parts else text
        answer = client.chat(max_tokens=24, prediction={"type": "content", "content": content})
    assert answer["choices"] == alone["choices"]
    details, without = (one["usage"]["completion_tokens_details"] for one in (answer, alone))
    assert without["accepted_prediction_tokens"] == without["rejected_prediction_tokens"] == 0
    assert details["accepted_prediction_tokens"] > 0


@pytest.mark.parametrize(
    "prediction, message",
    [
        ("text", "prediction must be an object, got 'text'."),
        ({"type": "code", "content": "x"}, "prediction.type must be 'content', got 'code'."),
        ({"type": "content"}, "prediction.content is missing"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "reads only text"),
    ],
)
def test_a_malformed_prediction_is_refused(client: Client, prediction: Any, message: str) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "prediction": prediction}
    answer = client.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "the ant"}),
        ("/v1/responses", {"input": "the ant"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
    ],
)
def test_all_apis_take_predictions(engine: Engine, path: str, body: dict[str, Any]) -> None:
    service = ScriptedService(engine, [TextDelta("x"), finished()])
    answer = service.client().post(
        path, json={"model": MODEL, "prediction": {"type": "content", "content": "seen"}, **body}
    )
    assert answer.status_code == 200, answer.text
    assert service.requests[0].params.prediction == "seen"


def test_scopes_are_apart_by_key_and_off_by_a_setting(engine: Engine) -> None:
    body = {"model": MODEL, "messages": MESSAGES}
    scopes = []
    for settings, headers in (
        ({}, {}),
        ({}, {"x-api-key": "a"}),
        ({}, {"x-api-key": "b"}),
        ({"lookup_outputs": False}, {}),
    ):
        service = ScriptedService(engine, [TextDelta("x"), finished()], **settings)
        service.client().post("/v1/chat/completions", json=body, headers=headers)
        scopes.append(service.requests[0].params.lookup_scope)
    assert scopes[3] is None and len(set(scopes)) == 4


def test_scopes_are_apart_by_address(engine: Engine) -> None:
    service = ScriptedService(engine, [TextDelta("x"), finished()])
    app = make_app(service, service.settings)
    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.1"):
        client = TestClient(app, base_url="http://127.0.0.1:8000", client=(address, 5000))
        assert client.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES}).status_code == 200
    first, second, third = (request.params.lookup_scope for request in service.requests)
    assert first == third != second


def test_long_keys_make_no_long_scopes(engine: Engine) -> None:
    """The names of thousands of scopes are kept."""
    service = ScriptedService(engine, [TextDelta("x"), finished()])
    for key in ("k" * 9000, "k" * 9001):
        headers = {"authorization": f"Bearer {key}"}
        service.client().post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES}, headers=headers)
    scopes = {request.params.lookup_scope for request in service.requests}
    assert len(scopes) == 2 and all(scope is not None and len(scope) < 100 for scope in scopes)


def test_choices_share_a_prediction(engine: Engine) -> None:
    with Engine(engine.target) as plain:
        client = Client(Service(Backends(plain), ServeSettings(served_model_name=(MODEL,))))
        fields: dict[str, Any] = {"max_tokens": 24, "n": 3, "seed": 1, "temperature": 1}
        alone = client.chat(**fields)
        text = alone["choices"][1]["message"]["content"]
        answer = client.chat(**fields, prediction={"type": "content", "content": text})
    assert answer["choices"] == alone["choices"]
