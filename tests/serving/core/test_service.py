"""Admission, cancellation, failures and metrics of the service."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from blockdraft.engine import Engine, Request
from blockdraft.errors import RequestError, UsageError
from blockdraft.models import known
from blockdraft.serving.core import service as service_module
from blockdraft.serving.core.backends import Backends
from blockdraft.serving.core.errors import ApiError
from blockdraft.serving.core.events import ChatJob, Finished, Speculation, Text, TextJob
from blockdraft.serving.core.service import Service, TokenTexts
from blockdraft.serving.settings import ServeSettings
from blockdraft.types import SamplingParams

ENDLESS = SamplingParams(ignore_eos=True)
JOB = TextJob([5, 6, 7], ENDLESS)


def in_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(work())  # type: ignore[arg-type]


def service(engine: Engine, **given: Any) -> Service:
    return Service(Backends(engine), ServeSettings(**given))


async def settle(engine: Engine) -> None:
    """Wait until the engine is idle."""
    ends = time.monotonic() + 20
    while not engine.scheduler.idle:
        assert time.monotonic() < ends, "a row is still taken"
        await asyncio.sleep(0.01)


@pytest.fixture
def submitted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """All requests submitted to the engine."""
    found: list[Request] = []
    submit = engine.submit

    def noted(*arguments: Any, **named: Any) -> Request:
        found.append(submit(*arguments, **named))
        return found[-1]

    monkeypatch.setattr(engine, "submit", noted)
    return found


def test_closing_an_answer_frees_its_row(engine: Engine, submitted: list[Request]) -> None:
    async def work() -> None:
        served = service(engine)
        answer = served.chat(ChatJob([{"role": "user", "content": "hi"}], ENDLESS))
        await anext(answer)
        assert served.admission.active == 1
        await answer.aclose()
        assert served.admission.active == 0
        await settle(engine)

    in_loop(work)
    [request] = submitted
    assert request.cancelled and request.finish_reason == "cancelled"


def test_being_called_off_while_it_is_submitted_frees_the_row(
    engine: Engine, submitted: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine.submit

    def slow(*arguments: Any, **named: Any) -> Request:
        time.sleep(0.2)
        return submit(*arguments, **named)

    monkeypatch.setattr(engine, "submit", slow)

    async def work() -> None:
        served = service(engine)
        task = asyncio.ensure_future(anext(served.answers([JOB])))
        await asyncio.sleep(0.1)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.3)
        await settle(engine)

    in_loop(work)
    assert [request.cancelled for request in submitted] == [True]


def test_what_is_submitted_while_the_server_stops_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, submit = threading.Event(), engine.submit

    def slow(*arguments: Any, **named: Any) -> Request:
        begun.set()
        time.sleep(0.2)
        return submit(*arguments, **named)

    monkeypatch.setattr(engine, "submit", slow)

    async def work() -> None:
        served = service(engine)

        async def whole() -> None:
            async for _ in served.answers([JOB]):
                pass

        answer = asyncio.ensure_future(whole())
        await asyncio.to_thread(begun.wait, 20)
        served.stop()
        with pytest.raises(ApiError, match="was stopped"):
            await answer
        await settle(engine)

    in_loop(work)


def test_stopping_makes_no_stores(engine: Engine) -> None:
    with Engine(engine.target) as unused:
        service(unused).stop()
        assert unused._scheduler is None


def test_a_full_queue_is_told_with_when_to_come_again(engine: Engine) -> None:
    async def work() -> None:
        served = service(engine, max_batch_size=1, max_queue=2)
        answers = [served.answers([JOB]), served.answers([JOB, JOB])]
        for answer in answers:
            await anext(answer)
        with pytest.raises(ApiError, match="room for 3") as full:
            await anext(served.answers([JOB]))
        assert full.value.status == 429 and int(full.value.headers["Retry-After"]) >= 1
        await answers[0].aclose()
        with pytest.raises(ApiError) as full:
            await anext(served.answers([JOB, JOB]))  # all or none
        assert full.value.status == 429
        again = served.answers([JOB])
        await anext(again)
        with pytest.raises(ApiError, match="asks for 4 answers") as never:
            await anext(served.answers([JOB] * 4))
        assert never.value.status == 400
        for answer in (again, answers[1]):
            await answer.aclose()
        await settle(engine)

    in_loop(work)


def test_scores_of_prompts_are_bounded(make_client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockdraft.serving.core.admission.MOST_SCORES", 12)
    client = make_client()
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "echo": True, "logprobs": 2}
    for fields, status in (
        ({}, 200),
        ({"n": 2}, 429),
        ({"logprobs": 4}, 400),
        ({"n": 2, "logprobs": 1}, 200),
        ({}, 200),
    ):
        answer = client.post("/v1/completions", body | fields)
        assert answer.status_code == status, answer.text
        assert status == 200 or "logprobs" in answer.text or "log-probabilities" in answer.text
    assert client.post("/v1/completions", body | {"echo": False, "logprobs": 20}).status_code == 200


def test_429_has_retry_after(make_client: Callable[..., Any]) -> None:
    client = make_client()
    client.service.admission.active = client.service.settings.places
    answer = client.post("/v1/completions", {"model": "tiny", "prompt": "a"})
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"


def test_a_server_that_ends_takes_no_more_and_tells_those_it_stops(engine: Engine) -> None:
    async def work() -> None:
        served = service(engine)
        answer = served.answers([JOB])
        await anext(answer)
        served.stop()
        with pytest.raises(ApiError, match="stopped before") as told:
            async for _ in answer:
                pass
        assert told.value.status == 503
        with pytest.raises(ApiError, match="shutting down") as told:
            await anext(served.answers([JOB]))
        assert told.value.status == 503
        await settle(engine)

    in_loop(work)


def test_a_reader_that_is_too_slow_is_ended(engine: Engine, submitted: list[Request]) -> None:
    async def work() -> None:
        served = service(engine, max_unread=20)
        ends = time.monotonic() + 20
        with pytest.raises(ApiError, match="read faster"):
            async for _ in served.answers([JOB]):
                while not submitted[0].finished:  # nobody reads meanwhile
                    assert time.monotonic() < ends
                    await asyncio.sleep(0.01)
        await settle(engine)

    in_loop(work)
    assert submitted[0].finish_reason == "cancelled" and len(submitted[0].token_ids) < 200


def test_an_answer_that_fails_leaves_the_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        served = service(engine)
        job = replace(JOB, params=replace(ENDLESS, stop=["\0"]), max_new_tokens=240)  # text is read for the stop string
        good, bad = (served.answers([job]) for _ in range(2))
        await anext(good)
        await anext(bad)
        victim = engine.scheduler.running[-1]
        monkeypatch.setattr(victim.text, "read", lambda: 1 / 0)
        with pytest.raises(RequestError, match="ZeroDivisionError"):
            async for _ in bad:
                pass
        assert [event async for event in good][-1][1].usage.completion == 240
        assert served.metrics._ended == {"error_500": 1, "length": 1}
        await settle(engine)

    in_loop(work)


def test_text_that_fails_while_it_is_sent_ends_the_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        answer = service(engine).answers([replace(JOB, max_new_tokens=100)])
        await anext(answer)
        monkeypatch.setattr(engine.scheduler.running[-1].text, "take", lambda: 1 / 0)

        async def rest() -> None:
            async for _ in answer:
                pass

        with pytest.raises(RequestError, match="tokenizer failed.*ZeroDivisionError"):
            await asyncio.wait_for(rest(), 20)
        await settle(engine)

    in_loop(work)


def test_a_stop_string_is_named(engine: Engine) -> None:
    async def events(*stop: str) -> list[Any]:
        job = TextJob([5, 6, 7], SamplingParams(stop=stop), max_new_tokens=60)
        return [event async for _, event in service(engine).answers([job])]

    whole = in_loop(events)
    text = "".join(event.text for event in whole if isinstance(event, Text))
    assert whole[-1].stop is None
    first, later = text[4:7], text[12:15]
    end = in_loop(lambda: events(later, "never said", first))[-1]
    assert isinstance(end, Finished) and end.reason == "stop" and end.stop == first


def test_metrics_add_up(make_client: Callable[..., Any]) -> None:
    client = make_client()
    usages = [client.complete(prompt, max_tokens=30)["usage"] for prompt in ("the ant", "abababab")]
    client.complete("the ant", max_tokens=30, speculation={"enabled": False})
    client.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 9999})
    told = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    values = {name.removeprefix("blockdraft:"): float(value) for name, value in told.items()}
    assert values["generation_tokens_total"] == 90
    assert values["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages) + usages[0]["prompt_tokens"]
    assert values['requests_total{finished_reason="length"}'] == 3
    assert values['requests_total{finished_reason="error_400"}'] == 1
    assert values["time_to_first_token_seconds_count"] == 3
    assert values["inter_token_latency_seconds_count"] == 87
    assert values["e2e_request_latency_seconds_count"] == 3
    accepted = sum(usage["completion_tokens_details"]["accepted_prediction_tokens"] for usage in usages)
    assert values["spec_decode_num_accepted_tokens_total"] == accepted
    assert values["num_cycle_tokens_total"] == 87
    tau = values["spec_decode_mean_acceptance_length"]
    assert tau == pytest.approx(87 / values["num_cycles_total"])
    shares = [value for name, value in values.items() if name.startswith("spec_decode_acceptance_per_pos")]
    assert tau == pytest.approx(1 + sum(shares)) and tau > 1
    assert len(shares) == 7 and shares == sorted(shares, reverse=True)
    assert values["verify_seconds_total"] > 0
    assert values["drafting_on"] == 1
    assert values["num_requests_running"] == values["num_requests_waiting"] == 0


def test_other_backends_are_loaded_when_they_are_named(engine: Engine) -> None:
    loaded: list[str] = []

    def load() -> Engine:
        loaded.append("hf")
        return engine

    served = Service(Backends(engine, {"hf": load, "native": load}), ServeSettings())
    assert served.backends.names == ["native", "hf"]

    async def work(backend: str | None) -> None:
        job = TextJob([5, 6], SamplingParams(), 3, Speculation(backend=backend))
        assert len([event async for event in served.answers([job])]) > 1

    for backend in (None, "native"):
        in_loop(lambda backend=backend: work(backend))
    assert loaded == []
    in_loop(lambda: work("hf"))
    in_loop(lambda: work("hf"))
    assert loaded == ["hf"]
    with pytest.raises(UsageError, match="must be one of native, hf"):
        in_loop(lambda: work("abacus"))


def test_who_waits_for_a_backend_is_in_nobodys_way(engine: Engine) -> None:
    """More requests wait for the backend than there are threads."""
    loaded = threading.Event()

    def load() -> Engine:
        assert loaded.wait(20)
        return engine

    served = Service(Backends(engine, {"hf": load}), ServeSettings())

    async def whole(backend: str | None) -> int:
        job = TextJob([5, 6], SamplingParams(), 3, Speculation(backend=backend))
        return len([event async for event in served.answers([job])])

    async def work() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        waiting = [asyncio.ensure_future(whole("hf")) for _ in range(4)]
        await asyncio.sleep(0.05)
        try:
            assert await asyncio.wait_for(whole(None), 10)
            with pytest.raises(UsageError, match="abacus"):
                await asyncio.wait_for(whole("abacus"), 10)
            waiting.pop().cancel()
        finally:
            loaded.set()
        assert all(await asyncio.gather(*waiting))

    in_loop(work)


def test_a_service_outlives_its_event_loop(engine: Engine) -> None:
    served = service(engine)

    async def work() -> Any:
        return [event async for _, event in served.answers([replace(JOB, max_new_tokens=3)])][-1]

    for _ in range(2):
        assert in_loop(lambda: asyncio.wait_for(work(), 20)).usage.completion == 3


def test_chunks_that_wait_are_taken_as_one(engine: Engine) -> None:
    async def work(trace: bool) -> list[Any]:
        job = replace(JOB, max_new_tokens=60, speculation=Speculation(trace=trace))
        answer = service(engine).answers([job])
        events = [(await anext(answer))[1]]
        await asyncio.sleep(0.5)
        return events + [event async for _, event in answer]

    joined, traced = (
        [event for event in in_loop(lambda trace=trace: work(trace)) if isinstance(event, Text)]
        for trace in (False, True)
    )
    assert len(joined) < len(traced)
    assert "".join(event.text for event in joined) == "".join(event.text for event in traced)
    assert all(event.chunk.cycle for event in traced[1:])
    ids, drafted = (
        [one for event in joined for one in getattr(event.chunk, name)] for name in ("token_ids", "drafted")
    )
    assert ids == [token for event in traced for token in event.chunk.token_ids]
    assert len(drafted) == 60


def test_tokens_keep_their_spaces() -> None:
    """Decoders like that of Llama 2 drop the space at the beginning of a text."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "\u2581the": 1, "\u2581ant": 2, "s": 3}, "[UNK]"))
    words.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1, 2, 3]) == "the ants"
    texts = TokenTexts(tokenizer)
    assert [texts.text(token) for token in (1, 2, 3)] == [" the", " ant", "s"]


def test_a_model_of_the_catalogue_has_its_name_there_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    [usual] = service(engine).model_names
    monkeypatch.setattr(service_module, "model_of", lambda path: known("smollm2"))
    assert service(engine).model_names == [usual, "smollm2"]
    assert service(engine, served_model_name=("other",)).model_names == ["other"]
