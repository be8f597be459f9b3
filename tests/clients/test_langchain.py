"""LangChain's `ChatOpenAI`, unchanged."""

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from served import KEY, MODEL, Server

langchain_openai = pytest.importorskip("langchain_openai", reason="make test-clients installs the clients")

QUESTION = "What is 3 + 4?"


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"] = Field(description="Which city.")
    days: Literal[1, 2, 3]


def model_of(server: Server, **more: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        model=MODEL, base_url=server.v1, api_key=KEY, temperature=0, max_tokens=48, max_retries=0, **more
    )


def test_invoke_and_stream(small: Server) -> None:
    model = model_of(small, stream_usage=True)
    whole = model.invoke(QUESTION)
    assert "7" in whole.content and whole.usage_metadata["output_tokens"] > 0
    parts = list(model.stream(QUESTION))
    assert "".join(part.content for part in parts) == whole.content
    assert (
        sum((part.usage_metadata or {}).get("output_tokens", 0) for part in parts)
        == (whole.usage_metadata["output_tokens"])
    )
    batch = asyncio.run(model.abatch([QUESTION] * 4))
    assert {answer.content for answer in batch} == {whole.content}


def test_the_responses_api(small: Server) -> None:
    response = model_of(small, use_responses_api=True).invoke(QUESTION)
    assert "7" in response.text


@pytest.mark.parametrize("streamed", [False, True])
def test_bound_tools(with_tools: Server, streamed: bool) -> None:
    model = model_of(with_tools).bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    if streamed:
        parts = list(model.stream(QUESTION))
        response = sum(parts[1:], parts[0])
    else:
        response = model.invoke(QUESTION)
    [call] = response.tool_calls
    assert call["name"] == "Weather" and Weather(**call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(with_tools: Server, method: str) -> None:
    response = model_of(with_tools).with_structured_output(Weather, method=method).invoke(QUESTION)
    assert isinstance(response, Weather)
