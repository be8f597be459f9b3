"""The `openai` package, unchanged."""

import asyncio
import json
import time
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel
from served import KEY, MODEL, WEATHER, Server

openai = pytest.importorskip("openai", reason="make test-clients installs the clients")

QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 48}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER}}


@pytest.fixture
def client(small: Server) -> Any:
    return openai.OpenAI(base_url=small.v1, api_key=KEY, max_retries=0)


@pytest.fixture
def tools_client(with_tools: Server) -> Any:
    return openai.OpenAI(base_url=with_tools.v1, api_key=KEY, max_retries=0)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat.completions.create(messages=QUESTION, **GREEDY)
    text = whole.choices[0].message.content
    assert "7" in text and whole.choices[0].finish_reason == "stop" and whole.model == MODEL
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    events = list(
        client.chat.completions.create(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == text
    assert events[0].choices[0].delta.role == "assistant" and len(events) > 3
    assert events[-1].choices == [] and events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [e.choices[0].finish_reason for e in events if e.choices and e.choices[0].finish_reason] == ["stop"]


def test_the_streaming_helper(client: Any) -> None:
    with client.chat.completions.stream(messages=QUESTION, **GREEDY) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert stream.get_final_completion().choices[0].message.content == text


def test_drafting_changes_no_token(client: Any) -> None:
    plain, drafted = (
        client.chat.completions.create(messages=QUESTION, extra_body={"speculation": {"enabled": drafts}}, **GREEDY)
        for drafts in (False, True)
    )
    assert plain.choices[0].message.content == drafted.choices[0].message.content
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_a_predicted_output(client: Any) -> None:
    plain = client.chat.completions.create(messages=QUESTION, **GREEDY)
    text = plain.choices[0].message.content
    predicted = client.chat.completions.create(
        messages=QUESTION, prediction={"type": "content", "content": text}, **GREEDY
    )
    assert predicted.choices[0].message.content == text
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_cancelled_stream(client: Any, small: Server) -> None:
    settings = GREEDY | {"max_tokens": 900}
    stream = client.chat.completions.create(messages=QUESTION, stream=True, extra_body={"ignore_eos": True}, **settings)
    for _, event in zip(range(3), stream, strict=False):
        assert event.choices
    stream.close()
    until = time.monotonic() + 10
    while _running(small) and time.monotonic() < until:
        time.sleep(0.05)
    assert _running(small) == 0


def _running(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).raise_for_status().text
    lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0].endswith("requests_running")]
    assert lines
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_several_choices_with_a_seed(client: Any) -> None:
    def texts() -> list[str]:
        response = client.chat.completions.create(
            messages=QUESTION, model=MODEL, n=3, temperature=3.0, seed=7, max_tokens=24
        )
        return [choice.message.content for choice in response.choices]

    assert texts() == texts() and len(set(texts())) > 1


def test_logprobs(client: Any) -> None:
    response = client.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=3, **GREEDY)
    tokens = response.choices[0].logprobs.content
    assert len(tokens) >= response.usage.completion_tokens - 1  # the end of the answer is no text
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in tokens)
    assert all(token.top_logprobs[0].logprob == pytest.approx(token.logprob, abs=1e-4) for token in tokens)  # greedy
    assert "".join(token.token for token in tokens).startswith(response.choices[0].message.content[:20])


def test_completions(client: Any) -> None:
    response = client.completions.create(prompt="def add(a, b):", echo=True, logprobs=2, **GREEDY | {"max_tokens": 0})
    [choice] = response.choices
    assert choice.text == "def add(a, b):" and "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None and max(choice.logprobs.token_logprobs[1:]) <= 0
    several = client.completions.create(prompt=["one two", "three"], **GREEDY | {"max_tokens": 5})
    assert [choice.index for choice in several.choices] == [0, 1]
    stopped = client.completions.create(prompt="1, 2, 3, 4,", stop=["7"], **GREEDY)
    assert "7" not in stopped.choices[0].text
    parts = client.completions.create(prompt="1, 2, 3, 4,", stop=["7"], stream=True, **GREEDY)
    assert "".join(part.choices[0].text for part in parts if part.choices) == stopped.choices[0].text


def test_errors_are_typed(client: Any, small: Server) -> None:
    stranger = openai.OpenAI(base_url=small.v1, api_key="another", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(messages=QUESTION, **GREEDY)
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(messages=QUESTION, **GREEDY | {"model": "gpt-9"})
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(messages=QUESTION, **GREEDY | {"temperature": -1})
    assert raised.value.param == "temperature" and "-1" in raised.value.message
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(messages=[{"role": "user", "content": "x " * 5000}], **GREEDY)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as raised:
        client.embeddings.create(model=MODEL, input="text")
    assert raised.value.message


def test_many_at_once(small: Server) -> None:
    """The async client, over a few connections."""

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=small.v1, api_key=KEY) as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(messages=QUESTION, **GREEDY) for _ in range(12))
            )
        return [answer.choices[0].message.content for answer in answers]

    assert len(set(asyncio.run(ask()))) == 1


def test_json_schema(client: Any) -> None:
    class Weather(BaseModel):
        city: Literal["Rome", "Oslo"]
        days: Literal[1, 2, 3]

    response = client.chat.completions.parse(messages=QUESTION, response_format=Weather, **GREEDY)
    assert isinstance(response.choices[0].message.parsed, Weather)
    given = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    streamed = client.chat.completions.create(messages=QUESTION, response_format=given, stream=True, **GREEDY)
    text = "".join(event.choices[0].delta.content or "" for event in streamed if event.choices)
    assert json.loads(text).keys() == {"city", "days"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_tools(tools_client: Any, choice: Any) -> None:
    response = tools_client.chat.completions.create(messages=QUESTION, tools=[TOOL], tool_choice=choice, **GREEDY)
    [call, *_] = response.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments).keys() == {"city", "days"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    turns = [*QUESTION, response.choices[0].message, result]
    answer = tools_client.chat.completions.create(messages=turns, tools=[TOOL], tool_choice="none", **GREEDY)
    assert not answer.choices[0].message.tool_calls and answer.usage.prompt_tokens > response.usage.prompt_tokens


def test_tools_with_a_response_format(tools_client: Any) -> None:
    """Agents send both in each request."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    given: dict[str, Any] = {"tools": [TOOL], "parallel_tool_calls": False, "response_format": form}
    [choice] = tools_client.chat.completions.create(messages=QUESTION, **given, **GREEDY).choices
    calls = choice.message.tool_calls or []
    assert len(calls) <= 1 and choice.finish_reason == ("tool_calls" if calls else "stop")
    text = calls[0].function.arguments if calls else choice.message.content
    assert json.loads(text).keys() == {"city", "days"}


def test_tools_streamed(tools_client: Any) -> None:
    with tools_client.chat.completions.stream(
        messages=QUESTION, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **GREEDY
    ) as stream:
        for _ in stream:
            pass
    [choice] = stream.get_final_completion().choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def test_responses(client: Any) -> None:
    given = {"model": MODEL, "temperature": 0, "max_output_tokens": 48, "input": QUESTION[0]["content"]}
    whole = client.responses.create(**given)
    assert "7" in whole.output_text and whole.status == "completed" and whole.usage.output_tokens > 0
    events = list(client.responses.create(stream=True, **given))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with client.responses.stream(**given) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_responses_with_tools(tools_client: Any) -> None:
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    given = {"model": MODEL, "temperature": 0, "max_output_tokens": 64, "store": False}
    response = tools_client.responses.create(
        input="Rain?", tools=[tool, {"type": "web_search"}], tool_choice="required", **given
    )
    [call, *_] = [item for item in response.output if item.type == "function_call"]
    assert call.name == "weather" and json.loads(call.arguments).keys() == {"city", "days"}
    turns = [
        {"role": "user", "content": "Rain?"},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."},
    ]
    answer = tools_client.responses.create(input=turns, instructions="Be short.", tools=[tool], **given)
    assert answer.status in ("completed", "incomplete") and answer.usage.input_tokens > 0


def test_custom_tools_and_namespaces(tools_client: Any) -> None:
    """What Codex sends: tools with text input, namespaces, tools of OpenAI's servers, and their items."""
    custom = {"type": "custom", "name": "patch", "description": "Changes files."}
    space = {
        "type": "namespace",
        "name": "mcp__sky__",
        "description": "The sky.",
        "tools": [
            {"type": "function", "name": "weather", "description": "Of a city.", "parameters": WEATHER, "strict": True}
        ],
    }
    tools: list[Any] = [custom, space, {"type": "web_search"}]
    call: Any = {"max_output_tokens": 200, "model": MODEL, "temperature": 0, "tools": tools}
    forced = tools_client.responses.create(input="Go.", tool_choice={"type": "custom", "name": "patch"}, **call)
    [item] = forced.output
    assert (item.type, item.name) == ("custom_tool_call", "patch") and isinstance(item.input, str)
    choice = {"type": "function", "name": "weather"}
    with tools_client.responses.stream(input="Go.", tool_choice=choice, **call) as stream:
        kinds = [event.type for event in stream]
        [other] = stream.get_final_response().output
    assert (other.type, other.name) == ("function_call", "weather") and json.loads(other.arguments)["city"]
    assert "response.function_call_arguments.done" in kinds
    events = tools_client.responses.create(
        input="Go.", tool_choice={"type": "custom", "name": "patch"}, stream=True, **call
    )
    assert "response.custom_tool_call_input.done" in [event.type for event in events]
    follow = tools_client.responses.create(
        input=[
            {"role": "user", "content": "Go."},
            {"type": "item_reference", "id": item.id},
            {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "Done."},
            {
                "type": "web_search_call",
                "id": "ws_1",
                "status": "completed",
                "action": {"type": "search", "query": "x"},
            },
        ],
        **call | {"max_output_tokens": 8},
    )
    assert follow.output


def test_agents_ask_for_many_tokens_and_prefill(client: Any) -> None:
    many = client.chat.completions.create(messages=QUESTION, **GREEDY | {"max_tokens": 32_000})
    assert many.choices[0].finish_reason in ("stop", "length")
    prefix = {"role": "assistant", "content": "It is"}
    rest = client.chat.completions.create(messages=[*QUESTION, prefix], **GREEDY)
    assert rest.usage.prompt_tokens > many.usage.prompt_tokens and rest.choices[0].message.content
