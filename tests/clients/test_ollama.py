"""Ollama's Python client against `blockdraft serve`."""

from __future__ import annotations

from typing import Any

import pytest
from served import KEY, MODEL, Server

ollama = pytest.importorskip("ollama")
OPTIONS = {"temperature": 0, "num_predict": 24}


@pytest.fixture
def client(small: Server) -> Any:
    return ollama.Client(small.url, headers={"Authorization": f"Bearer {KEY}"})


def test_models(client: Any) -> None:
    assert [model.model for model in client.list().models] == [MODEL]
    assert client.ps().models[0].model == MODEL
    card = client.show(MODEL)
    assert "completion" in card.capabilities and card.details.parameter_size


def test_streams_equal_whole_answers(client: Any) -> None:
    messages = [{"role": "user", "content": "Tom has 3 boxes with 4 apples each. How many apples?"}]
    whole = client.chat(MODEL, messages, options=OPTIONS)
    assert whole.message.content and whole.done and whole.eval_count <= 24
    parts = list(client.chat(MODEL, messages, options=OPTIONS, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    generated = client.generate(MODEL, messages[0]["content"], options=OPTIONS)
    assert generated.response == whole.message.content


def test_a_format(client: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    messages = [{"role": "user", "content": "How much is 3 * 4?"}]
    answer = client.chat(MODEL, messages, format=schema, options={"temperature": 0, "num_predict": 60})
    assert answer.message.content.lstrip().startswith("{")


def test_errors(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="model must be small") as error:
        client.generate("other", "a")
    assert error.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="fill-in-the-middle"):
        client.generate(MODEL, "a", suffix="b")
