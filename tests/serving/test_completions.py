"""/v1/completions gives the output of the engine."""

from typing import Any

import pytest
from serving_client import MODEL

from blockdraft.engine import Engine
from blockdraft.types import SamplingParams


def ids_of(engine: Engine, text: str) -> list[int]:
    assert engine.target.tokenizer is not None
    return list(engine.target.tokenizer(text)["input_ids"])


def text_after(engine: Engine, ids: list[int], **params: Any) -> str:
    [completion] = engine.generate([ids], SamplingParams(**{"max_new_tokens": 20} | params))
    return completion.checked().text


def test_completion_equals_the_engine(client: Any, engine: Engine) -> None:
    answer = client.complete("the ant", max_tokens=20)
    [choice] = answer["choices"]
    assert answer["object"] == "text_completion" and choice["logprobs"] is None
    assert choice["text"] == text_after(engine, ids_of(engine, "the ant"))
    assert answer["usage"]["prompt_tokens"] == len(ids_of(engine, "the ant"))


def test_four_forms_of_prompts(client: Any, engine: Engine) -> None:
    one, two = ids_of(engine, "the ant"), ids_of(engine, "an ox")
    texts = [text_after(engine, one), text_after(engine, two)]
    assert [choice["text"] for choice in client.complete(["the ant", "an ox"], max_tokens=20)["choices"]] == texts
    assert [choice["text"] for choice in client.complete([one, two], max_tokens=20)["choices"]] == texts
    assert [choice["text"] for choice in client.complete(one, max_tokens=20)["choices"]] == texts[:1]


def test_choices_are_ordered_by_prompt(client: Any, engine: Engine) -> None:
    one, two = ids_of(engine, "the ant"), ids_of(engine, "an ox")
    answer = client.complete([one, two], max_tokens=20, n=2, temperature=1.0, seed=4)
    assert [choice["text"] for choice in answer["choices"]] == [
        text_after(engine, prompt, temperature=1.0, seed=seed) for prompt in (one, two) for seed in (4, 5)
    ]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == len(one) + len(two)


def test_streamed_completions_equal_whole_ones(client: Any) -> None:
    body = {"model": "tiny", "prompt": ["the ant", "an ox"], "temperature": 0, "max_tokens": 20, "echo": True}
    whole = client.post("/v1/completions", body).json()
    *events, last = client.events("/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(event["text"] for event in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert len(mine) > 2


def test_echo(client: Any, engine: Engine) -> None:
    output = client.complete("the ant", max_tokens=20)["choices"][0]["text"]
    assert client.complete("the ant", max_tokens=20, echo=True)["choices"][0]["text"] == "the ant" + output
    ids = ids_of(engine, "the ant")
    assert client.complete(ids, max_tokens=20, echo=True)["choices"][0]["text"] == "the ant" + output


def test_echo_with_prompt_logprobs(client: Any, engine: Engine) -> None:
    """The request that lm-eval sends."""
    ids = ids_of(engine, "the ant saw the ox")
    [completion] = engine.generate([ids], SamplingParams(max_new_tokens=1, prompt_logprobs=1))
    assert completion.prompt_logprobs is not None
    for length in (0, 1):
        answer = client.complete(ids, max_tokens=length, echo=True, logprobs=1)
        result = answer["choices"][0]["logprobs"]
        assert len(result["tokens"]) == len(ids) + length
        assert "".join(result["tokens"][: len(ids)]) == "the ant saw the ox"
        assert result["token_logprobs"][0] is None and result["top_logprobs"][0] is None
        for place, one in enumerate(completion.prompt_logprobs[1:], start=1):
            assert one is not None
            assert result["token_logprobs"][place] == pytest.approx(one.logprob)
            assert max(result["top_logprobs"][place].values()) == pytest.approx(one.top[0][1])
            assert result["token_logprobs"][place] in result["top_logprobs"][place].values()
        text = answer["choices"][0]["text"]
        for place, token in zip(result["text_offset"], result["tokens"][: len(ids)], strict=False):
            assert text[place : place + len(token)] == token
        assert answer["usage"]["completion_tokens"] == length
        assert answer["choices"][0]["finish_reason"] == "length"


def test_text_offsets_count_characters(client: Any, engine: Engine) -> None:
    """A character of several tokens counts once, however the prompt is given."""
    text = "the \u00e9\u8a9e ant \u8a9e"
    letters = [token for letter in text for token in ids_of(engine, letter)]  # other tokens than those of the text
    assert letters != ids_of(engine, text)
    for prompt in (text, ids_of(engine, text), letters):
        ids = prompt if isinstance(prompt, list) else ids_of(engine, prompt)
        [choice] = client.complete(prompt, max_tokens=20, echo=True, logprobs=1)["choices"]
        result, whole = choice["logprobs"], choice["text"]
        offsets = result["text_offset"]
        assert offsets == sorted(offsets) and offsets[-1] <= len(whole) and offsets[len(ids)] == len(text)
        for offset, token in zip(offsets[: len(ids)], result["tokens"], strict=False):
            assert whole[offset : offset + len(token)] == token or "\ufffd" in token
        assert [offsets[ids.index(token)] for token in ids_of(engine, "\u8a9e")[:1]] == [text.index("\u8a9e")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "the ant"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the ant"}]}),
    ],
)
def test_programs_for_llama_cpp_name_no_model_and_no_limit(client: Any, path: str, body: dict[str, Any]) -> None:
    texts = []
    for limit in ({"max_tokens": -1}, {}):
        answer = client.post(path, {**body, "temperature": 0, **limit}).json()
        assert answer["model"] == MODEL
        texts.append(answer["choices"][0].get("text", answer["choices"][0].get("message")))
    assert texts[0] == texts[1]


def test_max_tokens_zero_without_echo(client: Any) -> None:
    answer = client.complete("the ant", max_tokens=0)
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 0


def test_logprobs(client: Any) -> None:
    [choice] = client.complete("the ant", max_tokens=8, logprobs=3)["choices"]
    result = choice["logprobs"]
    assert len(result["tokens"]) == len(result["token_logprobs"]) == 8
    assert all(len(top) + 1 >= 3 for top in result["top_logprobs"])
    assert result["text_offset"][0] == 0
    events = client.events(
        "/v1/completions",
        {"model": "tiny", "prompt": "the ant", "temperature": 0, "max_tokens": 8, "logprobs": 3, "stream": True},
    )
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [token for part in parts if part for token in part["tokens"]] == result["tokens"]


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [[1], []], ["", "a"], [99999], [[1, 99999]], [True], ["a", 1], {}, None]
)
def test_invalid_prompts(client: Any, prompt: Any) -> None:
    answer = client.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 4})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
