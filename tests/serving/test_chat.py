"""/v1/chat/completions gives the output of the engine."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from blockdraft.engine import Engine
from blockdraft.serving.openai.chat import chat_logprobs
from blockdraft.serving.service import TokenTexts
from blockdraft.types import SamplingParams, TokenLogprob

CHAT = [{"role": "user", "content": "the ant"}]


def expected(engine: Engine, **params: Any) -> Any:
    [completion] = engine.generate([CHAT], SamplingParams(**{"max_new_tokens": 40} | params))
    return completion.checked()


def test_greedy_chat_equals_the_engine(client: Any, engine: Engine) -> None:
    completion = expected(engine)
    answer = client.chat(max_tokens=40)
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": completion.text, "refusal": None}
    assert choice["finish_reason"] == completion.finish_reason
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny" and answer["id"].startswith("chatcmpl-")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == completion.prompt_tokens
    assert usage["completion_tokens"] == len(completion.token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0  # of predicted outputs alone


def test_streamed_chat_equals_the_engine(client: Any, engine: Engine) -> None:
    events = client.chat_events(max_tokens=40)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == expected(engine).text
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)


def test_include_usage(client: Any) -> None:
    *events, last = client.chat_events(max_tokens=20, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 20
    assert all(event["usage"] is None for event in events)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "seed": 5, "top_p": 0.5},
        {"temperature": 1.0, "seed": 5, "top_k": 2},
        {"temperature": 1.0, "seed": 5, "min_p": 0.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"70": 50.0}},
    ],
)
def test_every_parameter_reaches_the_engine(client: Any, engine: Engine, fields: dict[str, Any]) -> None:
    params = dict(fields)
    if "logit_bias" in params:
        params["logit_bias"] = {70: 50.0}
    completion = expected(engine, **params)
    assert client.chat(max_tokens=40, **fields)["choices"][0]["message"]["content"] == completion.text
    if "seed" not in fields:
        assert completion.text != expected(engine).text  # so that the parameter shows


def test_default_temperature(make_client: Callable[..., Any], engine: Engine) -> None:
    greedy = make_client(temperature=0.0).chat(max_tokens=40, temperature=None)
    assert greedy["choices"][0]["message"]["content"] == expected(engine).text
    sampled = make_client().chat(max_tokens=40, temperature=None, seed=1)
    assert sampled["choices"][0]["message"]["content"] == expected(engine, temperature=1.0, seed=1).text


def test_choices_use_consecutive_seeds(client: Any, engine: Engine) -> None:
    answer = client.chat(max_tokens=30, temperature=1.0, seed=7, n=3)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert texts == [expected(engine, max_new_tokens=30, temperature=1.0, seed=7 + i).text for i in range(3)]
    assert answer["usage"]["prompt_tokens"] == expected(engine).prompt_tokens  # once
    assert answer["usage"]["completion_tokens"] > 30
    streamed = client.chat_events(max_tokens=30, temperature=1.0, seed=7, n=3)
    for number, text in enumerate(texts):
        mine = [event["choices"][0] for event in streamed if event["choices"][0]["index"] == number]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert [choice["finish_reason"] is None for choice in mine] == [True] * (len(mine) - 1) + [False]


def test_negative_seeds_are_seeds(client: Any) -> None:
    one, same, other = (client.chat(max_tokens=30, temperature=1.0, seed=seed) for seed in (-1, -1, -2))
    assert one["choices"] == same["choices"] != other["choices"]


def test_stop_strings(client: Any, engine: Engine) -> None:
    text = expected(engine).text
    stop = text[5:8]
    for given in (stop, [stop, "never said"]):
        [choice] = client.chat(max_tokens=40, stop=given)["choices"]
        assert choice["message"]["content"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"


def test_without_max_tokens_the_context_is_the_limit(client: Any, engine: Engine) -> None:
    usage = client.chat(ignore_eos=True)["usage"]
    assert usage["total_tokens"] == client.service.context
    assert client.service.context == engine.target.max_context


def test_the_next_turn_uses_the_prefix_cache(client: Any) -> None:
    first = client.chat("a" * 50, max_tokens=20)
    messages = [
        {"role": "user", "content": "a" * 50},
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "more"},
    ]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 5}
    usage = client.post("/v1/chat/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([{"type": "text", "text": "the"}, {"type": "text", "text": "ant"}], "the\nant"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
def test_content_parts_are_joined(client: Any, parts: list[dict[str, str]], text: str) -> None:
    chats = [[*CHAT, {"role": "assistant", "content": content}] for content in (parts, text)]
    ours, expected = (client.chat(messages=chat, max_tokens=20)["choices"] for chat in chats)
    assert ours == expected


def test_leading_system_messages_are_joined(client: Any) -> None:
    """Clients send several system messages, and many templates take only one."""
    rest = [*CHAT, {"role": "system", "content": "c"}]
    chats = [
        [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, *rest],
        [{"role": "system", "content": "a\n\nb"}, *rest],
    ]
    counts = [client.post("/tokenize", {"messages": chat}).json()["tokens"] for chat in chats]
    assert counts[0] == counts[1]
    answers = [client.chat(messages=chat, max_tokens=20) for chat in chats]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == len(counts[0])


def test_logprobs_equal_the_engine(client: Any, engine: Engine) -> None:
    completion = expected(engine, max_new_tokens=10, logprobs=2)
    assert completion.logprobs is not None
    [choice] = client.chat(max_tokens=10, logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx([token.logprob for token in completion.logprobs])
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 10
    assert [entry["token"] for entry in content] == [entry["top_logprobs"][0]["token"] for entry in content]  # greedy
    whole = [entry for entry in content if entry["bytes"] is not None]  # others are parts of characters
    assert whole and all(bytes(entry["bytes"]).decode() == entry["token"] for entry in whole)
    events = client.chat_events(max_tokens=10, logprobs=True, top_logprobs=2)
    result = [event["choices"][0]["logprobs"] for event in events]
    assert [entry for part in result if part for entry in part["content"]] == content


def test_drafting_does_not_change_the_output(client: Any) -> None:
    drafted = client.chat(max_tokens=40, speculation={"statistics": True})
    plain = client.chat(max_tokens=40, speculation={"enabled": False, "statistics": True})
    assert drafted["choices"] == plain["choices"]
    spoken = drafted["metrics"]["speculative_decoding"]
    assert spoken["num_spec_steps"] > 0
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert plain["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 1.0


def test_statistics_are_consistent(client: Any) -> None:
    answer = client.chat("abab" * 8, max_tokens=60, speculation={"statistics": True})
    result = answer["metrics"]["speculative_decoding"]
    accepted = result["num_accepted_draft_tokens"]
    histogram = result["acceptance_histogram"]
    assert sum(histogram) == result["num_spec_steps"]
    assert sum(count * steps for count, steps in enumerate(histogram)) == accepted
    assert 0 < accepted <= result["num_draft_tokens"]
    assert result["draft_acceptance_rate"] == pytest.approx(accepted / result["num_draft_tokens"])
    assert result["mean_acceptance_length"] == pytest.approx(1 + accepted / result["num_spec_steps"])
    assert result["num_spec_tokens"] == 7
    assert set(answer["metrics"]["seconds"]) == {"prompt", "draft", "verify", "total"}
    *_, last = client.chat_events("abab" * 8, max_tokens=60, speculation={"statistics": True})
    assert last["metrics"]["speculative_decoding"] == result and last["choices"] == []


def test_draft_limits_of_a_request(client: Any) -> None:
    result = client.chat(max_tokens=40, speculation={"statistics": True, "block_size": 2})
    spoken = result["metrics"]["speculative_decoding"]
    assert spoken["num_draft_tokens"] == spoken["num_spec_steps"] > 0
    assert result["choices"] == client.chat(max_tokens=40)["choices"]


def test_traces(client: Any, engine: Engine) -> None:
    completion = expected(engine)
    events = client.chat_events(max_tokens=40, speculation={"trace": True})
    traces = [event["trace"] for event in events if "trace" in event]
    tokens = [token for trace in traces for token in trace["tokens"]]
    assert [token["id"] for token in tokens] == completion.token_ids
    assert [token["drafted"] for token in tokens] == completion.drafted
    assert traces[0]["step"] is None  # the prompt's own token
    before = traces[0]["tokens"][-1]["id"]
    for trace in traces[1:]:
        step = trace["step"]
        assert step["tokens"][0]["id"] == before
        assert step["parents"][0] == -1 and step["path"][0] == 0
        output = [step["tokens"][place]["id"] for place in step["path"][1:]]
        assert output == [token["id"] for token in trace["tokens"]][: len(output)]
        before = trace["tokens"][-1]["id"]


def test_unknown_models_get_404(client: Any, make_client: Callable[..., Any]) -> None:
    body = {"model": "gpt-4", "messages": CHAT}
    answer = client.post("/v1/chat/completions", body)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "tiny" in answer.json()["error"]["message"]
    assert make_client(any_model=True).chat(model="gpt-4", max_tokens=1)["model"] == "gpt-4"


def test_requests_of_llama_vim(client: Any) -> None:
    """The plugin leaves the model name empty and sends `n_predict: 0` while its user types an instruction."""
    body = {"model": "", "messages": CHAT, "temperature": 0}
    read = client.post("/v1/chat/completions", body | {"n_predict": 0}).json()
    assert read["model"] == "tiny"
    assert read["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}
    asked = client.post("/v1/chat/completions", body | {"n_predict": 20}).json()
    assert asked["choices"] == client.chat(max_tokens=20)["choices"]
    assert asked["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    events = client.chat_events(n_predict=0)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == ""
    unlimited = client.chat(n_predict=-1)["usage"]["completion_tokens"]
    assert unlimited == client.chat()["usage"]["completion_tokens"]


def test_prompts_beyond_the_context_are_refused(client: Any) -> None:
    messages = [{"role": "user", "content": "a" * 300}]
    answer = client.post("/v1/chat/completions", {"model": "tiny", "messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    # by which LiteLLM knows it
    assert "this model's maximum context length is" in answer.json()["error"]["message"]


def test_token_limits_of_the_settings(make_client: Callable[..., Any]) -> None:
    client = make_client(max_prompt_tokens=30, max_answer_tokens=5)
    assert client.chat(ignore_eos=True)["usage"]["completion_tokens"] == 5
    assert client.chat(ignore_eos=True, max_tokens=6)["usage"]["completion_tokens"] == 5
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a" * 40}]}
    answer = client.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and "at most 30" in answer.json()["error"]["message"]


SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "clouds": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["sky", "clouds"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_json_schema_format(client: Any, temperature: float) -> None:
    how = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    fields = {"response_format": how, "max_tokens": 150, "temperature": temperature, "seed": 3}
    statistics = {"speculation": {"statistics": True}}
    answer = client.chat(**fields, **statistics)
    [choice] = answer["choices"]
    output = json.loads(choice["message"]["content"])
    assert output["sky"] in ("blue", "grey") and 0 <= output["clouds"] <= 9
    assert choice["finish_reason"] == "stop"
    plain = client.chat(**fields, speculation={"enabled": False})
    assert plain["choices"] == answer["choices"]
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def test_unlisted_properties_are_not_written(client: Any) -> None:
    schema = {**SCHEMA, "additionalProperties": None}
    closed, default = (
        client.chat(
            response_format={"type": "json_schema", "json_schema": {"schema": given}},
            max_tokens=150,
            logit_bias={"13": 50},  # ","
        )["choices"]
        for given in (SCHEMA, schema)
    )
    assert closed == default and set(json.loads(default[0]["message"]["content"])) == {"sky", "clouds"}


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_schemas_as_clients_of_llama_cpp_send_them(client: Any, kind: str) -> None:
    usual, other = (
        client.chat(response_format=form, max_tokens=150)["choices"]
        for form in (
            {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}},
            {"type": kind, "schema": SCHEMA},
        )
    )
    assert other == usual


def test_json_object_format(client: Any) -> None:
    text = client.chat(response_format={"type": "json_object"}, max_tokens=20)["choices"][0]["message"]["content"]
    assert text.lstrip().startswith("{")


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "#/nowhere"}, False])
def test_impossible_schemas_are_refused(client: Any, schema: Any) -> None:
    how = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": "tiny", "messages": CHAT, "response_format": how}
    answer = client.post("/v1/chat/completions", body)
    assert answer.status_code == 400, answer.text


def test_two_schemas_of_a_format_must_agree(client: Any) -> None:
    one, other = {"type": "object"}, {"type": "array"}
    form = {"type": "json_schema", "json_schema": {"schema": one}}
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 4}
    answer = client.post("/v1/chat/completions", body | {"response_format": form | {"schema": other}})
    assert answer.status_code == 400
    assert "response_format.json_schema.schema and response_format.schema hold" in answer.text
    answer = client.post("/v1/chat/completions", body | {"response_format": form | {"schema": one}})
    assert answer.status_code == 200


def test_reasoning_has_both_names(client: Any, engine: Engine, set_template: Callable[[str], None]) -> None:
    tokenizer: Any = engine.target.tokenizer
    opened = tokenizer.chat_template.replace("assistant\\n", "assistant\\n<think>\\n")
    assert opened != tokenizer.chat_template
    set_template(opened)
    answer = client.chat(max_tokens=20)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert message["content"] == ""
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 20
    deltas = [event["choices"][0]["delta"] for event in client.chat_events(max_tokens=20)]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message["reasoning"]
    # What has to be JSON is the text, and not what comes before it.
    how = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    formed = client.chat(max_tokens=20, response_format=how)["choices"][0]["message"]
    assert formed["content"] == "" and not formed["reasoning"].startswith("{")


def test_partial_characters_have_no_bytes() -> None:
    words = Tokenizer(models.BPE({"a": 0, "\u00e3": 1}, []))
    words.decoder = decoders.ByteLevel()
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=words))
    result = chat_logprobs([TokenLogprob(token, -1.0) for token in (0, 1)], text_of=texts.text)["content"]
    assert [(entry["token"], entry["bytes"]) for entry in result] == [("a", [97]), ("\ufffd", None)]
