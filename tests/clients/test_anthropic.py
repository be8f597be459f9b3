"""The `anthropic` package, unchanged, as Claude Code uses it."""

from typing import Any

import pytest
from served import KEY, MODEL, WEATHER, Server

anthropic = pytest.importorskip("anthropic", reason="make test-clients installs the clients")

QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
GIVEN: dict[str, Any] = {"model": MODEL, "max_tokens": 48, "extra_body": {"temperature": 0}}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": WEATHER}


def client_of(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


def test_message_whole_and_streamed(small: Server) -> None:
    client = client_of(small)
    whole = client.messages.create(messages=QUESTION, **GIVEN)
    assert whole.type == "message" and "7" in whole.content[0].text and whole.stop_reason == "end_turn"
    with client.messages.stream(messages=QUESTION, **GIVEN) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    final = stream.get_final_message()
    assert (final.usage.output_tokens, final.stop_reason) == (whole.usage.output_tokens, "end_turn")
    cut = client.messages.create(messages=QUESTION, **GIVEN | {"max_tokens": 4})
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 4


def test_parts_system_and_stops(small: Server) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    response = client_of(small).messages.create(messages=parts, system=system, stop_sequences=["."], **GIVEN)
    assert response.stop_reason in ("stop_sequence", "end_turn", "max_tokens") and "." not in response.content[0].text


def test_tokens_are_counted(small: Server) -> None:
    client = client_of(small)
    counted = client.messages.count_tokens(messages=QUESTION, model=MODEL).input_tokens
    usage = client.messages.create(messages=QUESTION, **GIVEN).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tools(with_tools: Server, choice: dict[str, Any]) -> None:
    choice = choice | {"disable_parallel_tool_use": True}
    client = client_of(with_tools)
    response = client.messages.create(messages=QUESTION, tools=[TOOL], tool_choice=choice, **GIVEN)
    [call, *_] = [block for block in response.content if block.type == "tool_use"]
    assert response.stop_reason == "tool_use" and call.name == "weather" and call.input.keys() == {"city", "days"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    turns = [*QUESTION, {"role": "assistant", "content": response.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=turns, tools=[TOOL], **GIVEN)
    assert answer.type == "message"
    with client.messages.stream(messages=QUESTION, tools=[TOOL], tool_choice=choice, **GIVEN) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"][0] == call.input


def test_errors_are_typed(small: Server) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=small.url, api_key="another", max_retries=0).messages.create(
            messages=QUESTION, **GIVEN
        )
    with pytest.raises(anthropic.NotFoundError):
        client_of(small).messages.create(messages=QUESTION, **GIVEN | {"model": "claude-9"})
    with pytest.raises(anthropic.BadRequestError) as raised:
        client_of(small).messages.create(messages=[{"role": "user", "content": "x " * 5000}], **GIVEN)
    assert raised.value.body["error"]["type"] == "invalid_request_error"
