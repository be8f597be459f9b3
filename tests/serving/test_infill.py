"""Fill-in-the-middle over HTTP: llama.cpp's /infill, and `suffix` in completions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_client import Client
from tiny_models import FIM, write_coder

from blockdraft.engine import Engine, ExtraFile
from blockdraft.serving.backends import Backends
from blockdraft.serving.infill_limits import InfillLimits
from blockdraft.serving.request import Infill
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings
from blockdraft.serving.typed_infills import ANCHOR, MAX_CLIENTS, MAX_INFILLS, MAX_TEXT, MAX_TYPED, TypedInfills
from blockdraft.targets import load_target
from blockdraft.types import SamplingParams


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Iterator[Engine]:
    """Provide an engine whose target has Qwen2.5-Coder's tokens."""
    target = load_target(write_coder(tmp_path_factory.mktemp("coder"), tiny_target_dir))
    with Engine(target, max_batch_size=2, prefix_tokens=256) as engine:
        yield engine


@pytest.fixture
def coder_client(coder: Engine) -> Client:
    return Client(Service(Backends(coder), ServeSettings(served_model_name=("coder",))))


def token(engine: Engine, text: str) -> str:
    assert engine.target.tokenizer is not None
    [number] = engine.target.tokenizer(text)["input_ids"]
    return str(number)


def infill(client: Client, **fields: Any) -> Any:
    answer = client.post("/infill", {"input_prefix": "ab", "input_suffix": "yz", "n_predict": 12, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_infill_equals_the_engine(coder_client: Client, coder: Engine) -> None:
    extra = [{"filename": "f.py", "text": "F = 1"}]
    expected = coder.infill("ab", "yz", [ExtraFile("f.py", "F = 1")], SamplingParams(12))
    answer = infill(coder_client, input_extra=extra)
    assert answer["content"] == expected.text
    assert answer["tokens"] == expected.token_ids and answer["tokens_predicted"] == len(expected.token_ids)
    assert answer["tokens_evaluated"] == expected.prompt_tokens and answer["stop"] is True
    assert answer["stop_type"] == {"length": "limit", "stop": "eos"}[expected.finish_reason]


def test_a_request_of_llama_vim(coder_client: Client) -> None:
    """The fields that the plugin sends; it reads the values by their paths."""
    fields = ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached", "unknown"]
    answer = infill(
        coder_client,
        id_slot=0,
        input_extra=[],
        prompt="x",
        n_indent=0,
        top_k=40,
        top_p=0.9,
        samplers=["top_k", "top_p", "infill"],
        stream=False,
        cache_prompt=True,
        t_max_prompt_ms=500,
        t_max_predict_ms=60_000,
        response_fields=fields,
    )
    assert set(answer) == set(fields) - {"unknown"}
    assert answer["timings/predicted_ms"] >= 0 and answer["truncated"] is False


def test_requests_of_llama_vscode(coder_client: Client, coder: Engine) -> None:
    """The fields that the extension sends to complete, to read files in advance, and to edit a selection."""
    more = {"top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True}
    extra = [{"text": "F = 1", "time": 1764273600000, "filename": "f.py"}]
    expected = coder.infill("ab", "yz", [ExtraFile("f.py", "F = 1")], SamplingParams(12))
    answer = infill(
        coder_client, input_extra=extra, prompt="", t_max_prompt_ms=500, t_max_predict_ms=60_000, n_indent=0, **more
    )
    assert answer["content"] == expected.text
    ahead = infill(
        coder_client, input_prefix="", input_suffix="", input_extra=extra, n_predict=0, samplers=[], t_max_predict_ms=1
    )
    assert ahead["content"] == ""
    edit = {
        "messages": [{"role": "system", "content": "You are an expert coder."}, {"role": "user", "content": "Edit."}],
        "stream": False, "cache_prompt": True, "samplers": "edkypmxt", "temperature": 0.8, "dynatemp_range": 0,
        "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1, "xtc_probability": 0, "repeat_last_n": 64,
        "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "dry_multiplier": 0, "max_tokens": -1,
    }  # fmt: skip
    response = coder_client.post("/v1/chat/completions", edit)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")


def test_requests_of_zed(coder_client: Client, coder: Engine) -> None:
    """Zed writes the fill-in-the-middle prompt itself."""
    expected = coder.infill("ab", "yz", params=SamplingParams(12)).text
    prompt = "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"
    stop = ["<|endoftext|>", "<|file_separator|>", *FIM[:4], "<PRE>", "<SUF>", "<MID>", "[PREFIX]", "[SUFFIX]"]
    body = {"model": "coder", "prompt": prompt, "raw": True, "stream": False}
    body["options"] = {"num_predict": 12, "temperature": 0, "stop": stop}
    assert coder_client.post("/api/generate", body).json()["response"] == expected
    body = {"model": "coder", "prompt": prompt, "max_tokens": 12, "temperature": 0, "stop": stop[:4]}
    assert coder_client.post("/v1/completions", body).json()["choices"][0]["text"] == expected


def test_reading_in_advance_generates_nothing(coder_client: Client, coder: Engine) -> None:
    text = "some text that an editor has read, and sends before it is needed"
    answer = infill(coder_client, input_prefix=text, n_predict=0)
    assert (answer["content"], answer["tokens"], answer["tokens_predicted"]) == ("", [], 0)
    again = infill(coder_client, input_prefix=text)
    timings = again["timings"]
    assert timings["cache_n"] > 40 and timings["cache_n"] + timings["prompt_n"] == again["tokens_evaluated"]


def test_streamed_infills_equal_whole_ones(coder_client: Client) -> None:
    whole = infill(coder_client)
    answer = coder_client.post("/infill", {"input_prefix": "ab", "input_suffix": "yz", "n_predict": 12, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.strip().split("\n\n")]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["tokens_predicted"] == whole["tokens_predicted"]


def test_separators_end_an_infill(coder_client: Client, coder: Engine) -> None:
    assert coder.target.tokenizer is not None
    for name in FIM:
        [end] = coder.target.tokenizer.convert_tokens_to_ids([name])
        answer = infill(coder_client, logit_bias={str(end): 100})
        assert (answer["content"], answer["stop_type"], answer["tokens"]) == ("", "eos", [end])


def test_stop_strings(coder_client: Client, coder: Engine) -> None:
    answer = infill(coder_client, logit_bias={token(coder, "q"): 100}, stop=["qqq"])
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == ("", "word", "qqq")


def test_what_is_too_long_is_cut(coder_client: Client, coder: Engine) -> None:
    context = coder.target.max_context
    answer = infill(coder_client, input_prefix="p" * 2 * context, input_suffix="s" * 2 * context, n_predict=20)
    assert answer["tokens_evaluated"] <= context - 20 and answer["tokens_predicted"] > 0


def test_what_is_too_long_for_the_server_is_cut(coder: Engine) -> None:
    settings = ServeSettings(served_model_name=("coder",), max_prompt_tokens=40)
    answer = infill(Client(Service(Backends(coder), settings)), input_prefix="p" * 100, input_suffix="s" * 100)
    assert answer["tokens_evaluated"] == 40


def test_a_long_file_leaves_room_for_an_infill_without_a_limit(coder_client: Client, coder: Engine) -> None:
    text = "p" * 2 * coder.target.max_context
    answer = infill(coder_client, input_prefix=text, n_predict=-1, logit_bias={token(coder, "q"): 100})
    assert answer["tokens_predicted"] > 64
    body = {"model": "coder", "prompt": text, "suffix": "s", "logit_bias": {token(coder, "q"): 100}}
    assert len(coder_client.post("/v1/completions", body).json()["choices"][0]["text"]) > 64


@pytest.mark.parametrize("field", [{"grammar": 'root ::= "a"'}, {"json_schema": {"type": "object"}}, {"n": 2}])
def test_fields_that_would_change_an_infill_are_refused(coder_client: Client, field: dict[str, Any]) -> None:
    answer = coder_client.post("/infill", {"input_prefix": "ab", "input_suffix": "yz", **field})
    assert answer.status_code == 400 and f"{next(iter(field))} is not supported" in answer.json()["error"]["message"]


def test_suffix_of_completions(coder_client: Client, coder: Engine) -> None:
    expected = coder.infill("ab", "yz", params=SamplingParams(12))
    body = {"model": "coder", "prompt": "ab", "suffix": "yz", "max_tokens": 12}  # greedy by default
    [choice] = coder_client.post("/v1/completions", body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    several = coder_client.post("/v1/completions", body | {"prompt": ["ab", "cd"]}).json()["choices"]
    assert several[0]["text"] == expected.text
    assert several[1]["text"] == coder.infill("cd", "yz", params=SamplingParams(12)).text
    body["temperature"] = 0
    texts = [
        coder_client.post("/v1/completions", body | {"suffix": suffix}).json()["choices"][0]["text"]
        for suffix in ("", None)
    ]
    assert texts[0] == texts[1]


def test_an_infill_at_the_beginning(coder_client: Client, coder: Engine) -> None:
    body = {"model": "coder", "prompt": "", "suffix": "yz", "max_tokens": 12, "temperature": 0}
    [choice] = coder_client.post("/v1/completions", body).json()["choices"]
    assert (
        choice["text"]
        == coder.infill("", "yz", params=SamplingParams(12)).text
        == infill(coder_client, input_prefix="")["content"]
    )
    for wrong in ({"suffix": ""}, {"prompt": []}):
        answer = coder_client.post("/v1/completions", body | wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("more", [{"echo": True}, {"prompt": [1, 2]}])
def test_suffix_excludes(coder_client: Client, more: dict[str, Any]) -> None:
    answer = coder_client.post("/v1/completions", {"model": "coder", "prompt": "ab", "suffix": "yz", **more})
    assert answer.status_code == 400 and "suffix needs prompts of text" in answer.json()["error"]["message"]


def test_a_model_without_infill_is_a_400(client: Client) -> None:
    for path, body in (
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "suffix": "b"}),
    ):
        answer = client.post(path, body)
        assert answer.status_code == 400, path
        assert "no fill-in-the-middle tokens" in answer.json()["error"]["message"]


def push_all(limits: InfillLimits, *texts: str) -> str:
    parts = [part.text for text in texts for part in limits.push(text)]
    return "".join(parts + [part.text for part in limits.finish()])


def test_an_infill_ends_before_a_line_of_less_indentation() -> None:
    for texts in (("x = 1\n    y\n  z\n",), tuple("x = 1\n    y\n  z\n")):
        limits = InfillLimits(None, 4)
        assert push_all(limits, *texts) == "x = 1\n    y" and limits.ended
    limits = InfillLimits(None, 4)
    assert push_all(limits, "x\n\n    y\n") == "x\n\n    y\n" and not limits.ended
    for blanks, ends in (("    ", False), ("   ", True), ("\t\t\t\t", False)):
        limits = InfillLimits(None, 4)
        assert push_all(limits, f"x\n{blanks}y") == ("x" if ends else f"x\n{blanks}y") and limits.ended == ends
    limits = InfillLimits(None, 4)
    assert push_all(limits, "x\r\n\r\n    y\r\nz") == "x\r\n\r\n    y\r" and limits.ended


def test_an_infill_ends_in_time_after_a_line_end() -> None:
    limits = InfillLimits(0.01, 0)
    assert push_all(limits, "one ") == "one "
    time.sleep(0.02)
    assert push_all(limits, "two ") == "two " and not limits.ended
    assert push_all(limits, "three\n", "four", "five") in ("three", "three\n") and limits.ended


def test_time_is_no_limit_within_a_line(coder_client: Client, coder: Engine) -> None:
    answer = infill(coder_client, t_max_predict_ms=1, logit_bias={token(coder, "q"): 100})
    assert answer["content"] == "q" * 12 and answer["stop_type"] == "limit"
    answer = infill(coder_client, t_max_predict_ms=1, logit_bias={token(coder, "\n"): 100}, n_predict=200)
    assert answer["tokens_predicted"] < 200 and answer["content"].strip("\n") == ""


# While typing.


def test_the_completion_that_was_offered_is_drafted(coder_client: Client, coder: Engine) -> None:
    """Typed characters of it leave the rest as the draft, all of which is accepted."""
    letters = {token(coder, letter): 100 for letter in "abcdefg"}
    first = infill(coder_client, n_predict=24, logit_bias=letters)
    for count in (1, 2, 5):
        typed = first["content"][:count]
        later = infill(coder_client, prompt=typed, n_predict=24 - count, logit_bias=letters)
        assert later["content"] == first["content"][count:]
        timings = later["timings"]
        assert timings["draft_n_accepted"] == timings["draft_n"] > 24 - count - 6
    other = infill(coder_client, prompt=first["content"][:3] + "!", logit_bias=letters)
    assert other["timings"]["draft_n"] == 0


def test_a_completion_is_a_draft_for_its_client_only(coder_client: Client, coder: Engine) -> None:
    whole = {"input_prefix": "ab", "input_suffix": "yz", "n_predict": 24}
    keys = [{"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}, {"Authorization": "Bearer a"}]
    answers = [coder_client.post("/infill", whole, headers=key).json() for key in keys]
    assert [answer["timings"]["draft_n"] > 0 for answer in answers] == [False, False, True]
    assert len({answer["content"] for answer in answers}) == 1
    quiet = Client(Service(Backends(coder), ServeSettings(served_model_name=("coder",), lookup_outputs=False)))
    assert [infill(quiet, n_predict=24)["timings"]["draft_n"] for _ in range(2)] == [0, 0]


def test_drafts_of_the_server_are_not_counted_as_predictions_of_the_client(coder_client: Client) -> None:
    body = {"model": "coder", "prompt": "ab", "suffix": "yz", "max_tokens": 24, "temperature": 0}
    answers = [coder_client.post("/v1/completions", body).json() for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]
    details = answers[1]["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0


@pytest.mark.parametrize(
    "fields, key, status",
    [
        ({"input_prefix": "abc"}, "", 409),
        ({"input_prefix": "a"}, "", 409),
        ({"prompt": "c"}, "", 409),
        ({"input_prefix": "abc"}, "other", 200),
        ({"input_prefix": "ab\nc"}, "", 200),
        ({"input_prefix": "ab"}, "", 200),
        ({"input_prefix": "xb"}, "", 200),
        ({"input_prefix": "abc", "input_suffix": "z"}, "", 200),
    ],
)
def test_a_newer_infill_of_the_same_line_replaces_the_older_one(
    coder_client: Client, coder: Engine, slow_down: Callable[[Engine, float], None], fields: Any, key: str, status: int
) -> None:
    slow_down(coder, 0.01)
    bias = {token(coder, "q"): 100}
    older = {"input_prefix": "ab", "input_suffix": "yz", "n_predict": 60, "logit_bias": bias}

    async def both(http: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        first = asyncio.ensure_future(http.post("/infill", json=older))
        await asyncio.sleep(0.2)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        second = await http.post("/infill", json={**older, "n_predict": 3, **fields}, headers=headers)
        return await first, second

    first, second = coder_client.run(both)
    assert (first.status_code, second.status_code) == (status, 200)
    if status == 409:
        assert "newer infill" in first.json()["error"]["message"]
        assert first.headers["x-should-retry"] == "false"  # OpenAI's clients would replace the newer one
    else:
        assert first.json()["content"] == "q" * 60
    assert coder_client.service.admission.active == 0


def test_which_infills_go_on() -> None:
    infills, client = TypedInfills(), "client"
    first = infills.begin(client, Infill("line\nx = ", "\n"))
    first.output = "foo(bar)"
    second = infills.begin(client, Infill("line\n", "\n", begun="x = fo"))
    assert second.draft == "o(bar)"
    second.output = "o(b"  # and it was cancelled
    assert infills.begin(client, Infill("line\nx = foo(", "\n")).draft == "bar)"
    assert infills.begin(client, Infill("line\nx = fob", "\n")).draft == ""
    assert infills.begin("another", Infill("line\nx = foo(", "\n")).draft == ""
    window = "0123456789" * 4  # of a file, which begins elsewhere after a line end
    infills.begin(client, Infill(f"a\nb\n{window}", "\n")).output = "xyz\nend"
    assert infills.begin(client, Infill(f"b\n{window}xyz\ne", "\n")).draft == "nd"


def test_bounds_of_typing() -> None:
    infills = TypedInfills()
    older = infills.begin("client", Infill("a", "b"))
    infills.begin("client", Infill("a" + "x" * (MAX_TYPED + 1), "b"))
    assert not older.replaced
    infills.begin("client", Infill("a" + "x" * MAX_TYPED, "b"))
    assert older.replaced
    older.output = "yes"
    for number in range(MAX_CLIENTS):
        infills.begin(str(number), Infill("a", "b"))
    assert infills.begin("client", Infill("a", "b")).draft == ""
    for deleted, draft in ((MAX_TYPED, "x" * MAX_TYPED + "yes"), (MAX_TYPED + 1, ""), (999, "")):
        infills = TypedInfills()
        infills.begin("client", Infill("x" * 999, "b")).output = "yes"
        assert infills.begin("client", Infill("x" * (999 - deleted), "")).draft == draft


def offer(infills: TypedInfills, before: str, output: str, after: str = "\n") -> None:
    infills.begin("client", Infill(before, after)).output = output


def draft(infills: TypedInfills, before: str) -> str:
    return infills.begin("client", Infill(before, "\n")).draft


def test_a_window_that_begins_elsewhere_is_recognized_near_the_cursor_only() -> None:
    early, late = "0123456789" * 4, "abcdefghij" * 4
    near, far = "-" * (MAX_TYPED - len(late)), "-" * MAX_TYPED
    for between, expected in ((near, near + late), (far, "")):
        infills = TypedInfills()
        offer(infills, f"a\n{early}{between}{late}", "")
        assert draft(infills, f"b\n{early}") == expected
    infills = TypedInfills()
    offer(infills, "a\nx = ", "foo" + "(" * ANCHOR)
    assert draft(infills, "x = foo") == ""  # too short to be sure


def test_few_infills_are_kept() -> None:
    infills = TypedInfills()
    offer(infills, "x = ", "foo")
    for number in range(MAX_INFILLS - 1):
        offer(infills, f"y{number}", "")
    assert draft(infills, "x = f") == "oo"
    for number in range(MAX_INFILLS):
        offer(infills, f"z{number}", "")
    assert draft(infills, "x = f") == ""
    for length, expected in ((MAX_TEXT, "foo"), (MAX_TEXT + 1, "")):
        infills = TypedInfills()
        offer(infills, "x" * (length - 1), "foo")
        assert draft(infills, "x" * (length - 1)) == expected


def test_clients_that_went_on_are_kept() -> None:
    infills = TypedInfills()
    offer(infills, "x = ", "foo")
    for number in range(2 * MAX_CLIENTS):
        infills.begin(str(number), Infill("a", "b"))
        assert draft(infills, "x = f") == "oo"
