"""All APIs on one model give the same output as /v1/chat/completions."""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
from serving_client import Client

from blockdraft.engine import Engine
from blockdraft.serving import streaming
from blockdraft.serving.schemas import GenerationSchema
from blockdraft.types import SamplingParams

USER = {"role": "user", "content": "the ant"}
# Of Hermes' format; earlier calls and reasoning are of no interest here.
TEMPLATE = (
    "{% if tools %}{{ 'In <tool_call>: ' + tools[0]['function']['name'] + '\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}, "required": ["sky"]}


@pytest.fixture
def with_tools(set_template: Callable[[str], None]) -> None:
    set_template(TEMPLATE)


@pytest.fixture
def slow(engine: Engine, slow_down: Any) -> None:
    slow_down(engine, 0.005)


def respond(client: Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/responses", {"model": "tiny", "input": "the ant", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def message(client: Client, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [USER], "max_tokens": 20, "temperature": 0, **body}
    answer = client.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wires(client: Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for block in client.post(path, {**body, "stream": True}).text.strip().split("\n\n"):
        yield json.loads(block.split("data: ")[1])


@pytest.mark.parametrize("enabled", [True, False])
def test_all_apis_give_the_same_output(client: Client, enabled: bool) -> None:
    how: dict[str, Any] = {"speculation": {"enabled": enabled}}
    chat = client.chat(max_tokens=20, **how)
    text, usage = chat["choices"][0]["message"]["content"], chat["usage"]
    assert text
    response = respond(client, max_output_tokens=20, **how)
    assert response["output"][0]["content"][0]["text"] == text
    assert response["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert response["usage"]["output_tokens"] == usage["completion_tokens"]
    claude = message(client, **how)
    assert claude["content"] == [{"type": "text", "text": text}]
    assert claude["usage"]["output_tokens"] == usage["completion_tokens"]
    counted = client.post("/v1/messages/count_tokens", {"model": "tiny", "messages": [USER]}).json()
    assert counted == {"input_tokens": usage["prompt_tokens"]}
    body = {"model": "tiny", "input": "the ant", "temperature": 0, "max_output_tokens": 20, **how}
    deltas = [wire["delta"] for wire in wires(client, "/v1/responses", body) if "delta" in wire]
    assert "".join(deltas) == text
    body = {"model": "tiny", "messages": [USER], "max_tokens": 20, "temperature": 0, **how}
    deltas = [wire["delta"].get("text", "") for wire in wires(client, "/v1/messages", body) if "delta" in wire]
    assert "".join(deltas) == text


def test_a_response_can_be_continued(client: Client) -> None:
    first = respond(client, max_output_tokens=12)
    text = first["output"][0]["content"][0]["text"]
    second = respond(client, input="and?", previous_response_id=first["id"], max_output_tokens=12)
    messages = [USER, {"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
    chat = client.chat(messages=messages, max_tokens=12)
    assert second["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_stop_sequences(client: Client) -> None:
    whole = message(client)["content"][0]["text"]
    end = whole[5:7]
    cut = message(client, stop_sequences=[end])
    assert cut["content"] == [{"type": "text", "text": whole[: whole.index(end)]}]
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", end)


def test_max_tokens_beyond_the_context_is_clipped(client: Client) -> None:
    """Agents ask for 32,000 tokens and more, whatever the model."""
    how: dict[str, Any] = {"ignore_eos": True}
    [choice] = client.chat(max_tokens=32_000, **how)["choices"]
    assert choice["finish_reason"] == "length"
    assert client.chat(max_completion_tokens=32_000, **how)["choices"] == [choice]
    assert client.complete("the ant", max_tokens=32_000, **how)["choices"][0]["finish_reason"] == "length"
    assert respond(client, max_output_tokens=32_000, **how)["status"] == "incomplete"
    assert message(client, max_tokens=32_000, **how)["stop_reason"] == "model_context_window_exceeded"


def test_the_last_message_of_the_assistant_is_continued(client: Client) -> None:
    prefix = {"role": "assistant", "content": "Good"}
    tokens = client.post("/tokenize", {"messages": [USER, prefix]}).json()["tokens"]
    prompt = client.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert prompt.endswith("assistant\nGood")
    text = client.complete(tokens, max_tokens=12)["choices"][0]["text"]
    chat = client.chat(messages=[USER, prefix], max_tokens=12)
    assert chat["choices"][0]["message"]["content"] == text
    assert chat["usage"]["prompt_tokens"] == len(tokens)
    response = respond(client, input=[USER, prefix], max_output_tokens=12)
    assert response["output"][0]["content"][0]["text"] == text
    assert message(client, messages=[USER, prefix], max_tokens=12)["content"][0]["text"] == text
    # vLLM's fields say it otherwise.
    new = client.post("/tokenize", {"messages": [USER, prefix], "add_generation_prompt": True}).json()["tokens"]
    assert len(new) > len(tokens) and new[: len(tokens)] == tokens
    explicit = client.chat(messages=[USER, prefix], continue_final_message=True, max_tokens=12)
    assert explicit["choices"] == chat["choices"]
    for body in ({"messages": [USER]}, {"messages": [USER, prefix], "add_generation_prompt": True}):
        answer = client.post("/v1/chat/completions", {"model": "tiny", "continue_final_message": True, **body})
        assert answer.status_code == 400, answer.text


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.usefixtures("with_tools")
def test_required_tool_calls(client: Client, enabled: bool) -> None:
    """A random model is forced to call a tool too."""
    how = {"speculation": {"enabled": enabled}}
    function = {"name": "paint", "description": "Paints.", "parameters": SCHEMA}
    chat = client.chat(tools=[{"type": "function", "function": function}], tool_choice="required", **how)
    [call, *_] = chat["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["sky"] in ("blue", "grey")
    choice = {"type": "function", "name": "paint"}
    response = respond(client, tools=[{"type": "function", **function}], tool_choice=choice, **how)
    [item] = response["output"]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "paint", arguments)
    tool = {"name": "paint", "description": "Paints.", "input_schema": SCHEMA}
    claude = message(client, tools=[tool], tool_choice={"type": "tool", "name": "paint"}, max_tokens=100, **how)
    [block] = claude["content"]
    assert (block["name"], block["input"], claude["stop_reason"]) == ("paint", arguments, "tool_use")


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.usefixtures("with_tools")
def test_tools_with_a_response_format(client: Client, engine: Engine, enabled: bool) -> None:
    """Agents send tools with every request, together with the form of their final answer."""
    function = {"name": "paint", "parameters": SCHEMA}
    form = {"name": "sky", "schema": {**SCHEMA, "additionalProperties": False}}
    how: dict[str, Any] = {"speculation": {"enabled": enabled}, "max_tokens": 150}
    how |= {"tools": [{"type": "function", "function": function}], "parallel_tool_calls": False}
    how |= {"response_format": {"type": "json_schema", "json_schema": form}}
    for first, called in (("<", True), ("{", False)):
        assert engine.target.tokenizer is not None
        [token] = engine.target.tokenizer.encode(first, add_special_tokens=False)
        [choice] = client.chat(logit_bias={str(token): 100}, **how)["choices"]
        output = choice["message"]
        text = output["tool_calls"][0]["function"]["arguments"] if called else output["content"]
        assert json.loads(text)["sky"] in ("blue", "grey")
        assert choice["finish_reason"] == ("tool_calls" if called else "stop")


@pytest.mark.slow
@pytest.mark.usefixtures("with_tools", "slow")
def test_streams_are_kept_alive_during_tool_calls(client: Client, constants: Callable[..., None]) -> None:
    function = {"name": "paint", "parameters": SCHEMA}
    chat = {"model": "tiny", "messages": [USER], "tools": [{"type": "function", "function": function}]}
    response = {"model": "tiny", "input": "the ant", "tools": [{"type": "function", **function}]}
    how = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "stream": True}
    message = {**chat, "max_tokens": 200, "tools": [{"name": "paint", "input_schema": SCHEMA}]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    for path, body, start, usual in (
        ("/v1/chat/completions", chat | how, ":", 0),
        ("/v1/responses", response | how, ":", 0),
        ("/v1/messages", message | {"tool_choice": choice, "temperature": 0, "stream": True}, "event: ping", 1),
    ):
        for seconds, silent in ((1000.0, True), (-1.0, False)):
            constants(streaming, QUIET_SECONDS=seconds)
            text = client.post(path, body).text
            keep_alives = [block for block in text.split("\n\n") if block.startswith(start)]
            assert "sky" in text and (len(keep_alives) == usual) == silent


@pytest.mark.usefixtures("with_tools")
def test_decoding_ends_with_the_only_call(client: Client, engine: Engine) -> None:
    ends = {str(token): -100 for token in engine.target.eos_token_ids}
    tools = [{"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}]
    how: dict[str, Any] = {"tools": tools, "tool_choice": "required", "max_tokens": 200, "logit_bias": ends}
    [many] = client.chat(**how)["choices"]  # what follows the call is the model's choice
    assert len(many["message"]["tool_calls"]) == 1 and many["finish_reason"] == "length"
    named = {"type": "function", "function": {"name": "paint"}}
    for more in ({"parallel_tool_calls": False}, {"tool_choice": named}):
        whole = client.chat(**how | more)
        [choice] = whole["choices"]
        assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
        assert len(choice["message"]["tool_calls"]) == 1 and whole["usage"]["completion_tokens"] < 100


@pytest.mark.usefixtures("with_tools")
def test_custom_tools_take_text(client: Client) -> None:
    tools = [{"type": "custom", "custom": {"name": "paint", "description": "Paints."}}]
    choice = {"type": "custom", "custom": {"name": "paint"}}
    output = client.chat(tools=tools, tool_choice=choice, max_tokens=200, logit_bias={"5": 30})["choices"][0]["message"]
    [call] = output["tool_calls"]
    assert call["type"] == "custom" and call["custom"]["name"] == "paint" and isinstance(call["custom"]["input"], str)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Done."}
    client.chat(messages=[USER, output, result], tools=tools, max_tokens=3)
    responses = [{"type": "custom", "name": "paint", "description": "Paints."}]
    [item] = respond(
        client,
        tools=responses,
        tool_choice={"type": "custom", "name": "paint"},
        max_output_tokens=200,
        logit_bias={"5": 30},
    )["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", call["custom"]["input"])


@pytest.mark.usefixtures("with_tools")
@pytest.mark.parametrize("stream", [False, True])
def test_required_tools_must_exist(client: Client, stream: bool) -> None:
    function, shared = {"name": "paint", "parameters": SCHEMA}, {"model": "tiny", "stream": stream}
    chat = {**shared, "messages": [USER], "tools": [{"type": "function", "function": function}]}
    response = {**shared, "input": "x", "tools": [{"type": "function", **function}]}
    claude = {**shared, "messages": [USER], "max_tokens": 9, "tools": [{"name": "paint", "input_schema": SCHEMA}]}
    for path, body, named, required in (
        ("/v1/chat/completions", chat, {"type": "function", "function": {"name": "f"}}, "required"),
        ("/v1/responses", response, {"type": "function", "name": "f"}, "required"),
        ("/v1/messages", claude, {"type": "tool", "name": "f"}, {"type": "any"}),
    ):
        unknown = client.post(path, {**body, "tool_choice": named})
        assert unknown.status_code == 400 and "tool_choice names 'f'" in unknown.json()["error"]["message"]
        lacking = client.post(path, {**body, "tool_choice": required, "tools": None})
        assert lacking.status_code == 400 and "without tools" in lacking.json()["error"]["message"]
        if path != "/v1/messages":
            assert unknown.json()["error"]["param"] == lacking.json()["error"]["param"] == "tool_choice"


def test_templates_without_tools_refuse_them(client: Client) -> None:
    tool = {"type": "function", "name": "paint", "parameters": SCHEMA}
    error = client.post("/v1/responses", {"model": "tiny", "input": "x", "tools": [tool]}).json()["error"]
    assert error["param"] == "tools" and "takes no tools" in error["message"]
    body = {"model": "tiny", "max_tokens": 9, "messages": [USER], "tools": [{"name": "paint", "input_schema": SCHEMA}]}
    answer = client.post("/v1/messages", body)
    assert answer.status_code == 400 and "takes no tools" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("with_tools")
def test_template_errors_are_400(client: Client) -> None:
    claude = {"model": "tiny", "max_tokens": 9, "messages": [USER], "system": "Be."}
    for path, body in (
        ("/v1/responses", {"model": "tiny", "input": "x", "instructions": "Be."}),
        ("/v1/messages", claude),
        ("/v1/messages/count_tokens", claude),
    ):
        answer = client.post(path, body)
        assert answer.status_code == 400 and "no system here" in answer.json()["error"]["message"], answer.text


@pytest.mark.usefixtures("with_tools")
def test_lone_surrogates_in_arguments_are_refused(client: Client) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "paint", "arguments": '{"a": "\\ud800"}'}
    answer = client.post("/v1/responses", {"model": "tiny", "input": [call], "max_output_tokens": 3})
    assert answer.status_code == 400 and "chat template" in answer.json()["error"]["message"]


def test_every_sampling_parameter_can_be_requested() -> None:
    # Named otherwise, or set by other fields or the server.
    elsewhere = {"max_new_tokens", "logprobs", "prompt_logprobs", "grammar", "lookup_scope"}
    assert {field.name for field in fields(SamplingParams)} - elsewhere <= set(GenerationSchema.model_fields)
