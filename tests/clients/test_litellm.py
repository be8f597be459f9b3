"""LiteLLM, unchanged."""

import json
from typing import Any

import pytest
from served import KEY, MODEL, WEATHER, Server

litellm = pytest.importorskip("litellm", reason="make test-clients installs the clients")

QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]


def given(server: Server, provider: str = "openai") -> dict[str, Any]:
    return {
        "model": f"{provider}/{MODEL}",
        "api_base": server.v1,
        "api_key": KEY,
        "temperature": 0,
        "max_tokens": 48,
        "num_retries": 0,
    }


def test_chat_whole_and_streamed(small: Server) -> None:
    whole = litellm.completion(messages=QUESTION, **given(small))
    text = whole.choices[0].message.content
    assert "7" in text
    parts = list(
        litellm.completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **given(small))
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions(small: Server) -> None:
    response = litellm.text_completion(prompt="1, 2, 3,", **given(small, "text-completion-openai"))
    assert response.choices[0].text and response.usage.completion_tokens > 0


def test_messages_of_anthropic(small: Server) -> None:
    asked = given(small, "anthropic") | {"api_base": small.url}
    assert "7" in litellm.completion(messages=QUESTION, **asked).choices[0].message.content


def test_tools(with_tools: Server) -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER}}
    response = litellm.completion(messages=QUESTION, tools=[tool], tool_choice="required", **given(with_tools))
    [call, *_] = response.choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"city", "days"}


def test_errors_are_typed(small: Server) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=QUESTION, **given(small) | {"api_key": "another"})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=QUESTION, **given(small) | {"model": "openai/gpt-9"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "x " * 5000}], **given(small))
