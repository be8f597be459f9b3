"""The service: admission, cancellation, backends and metrics."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from blockdraft.engine import Engine, Request
from blockdraft.errors import UsageError
from blockdraft.models import known
from blockdraft.serving.backends import Backends
from blockdraft.serving.errors import ApiError
from blockdraft.serving.request import Event, Finished, GenerationRequest, TextDelta
from blockdraft.serving.schemas import Speculation
from blockdraft.serving.service import Service, TokenTexts
from blockdraft.serving.settings import ServeSettings
from blockdraft.types import SamplingParams

REQUEST = GenerationRequest([5, 6, 7], SamplingParams(ignore_eos=True))


def in_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 60))


def make_service(engine: Engine, **given: Any) -> Service:
    return Service(Backends(engine), ServeSettings(**given))


async def settle(engine: Engine) -> None:
    """Wait until the engine is idle."""
    deadline = time.monotonic() + 20
    while not engine.scheduler.idle:
        assert time.monotonic() < deadline, "the engine still decodes"
        await asyncio.sleep(0.01)


async def drain(events: AsyncGenerator[tuple[int, Any], None]) -> list[Any]:
    return [event async for _, event in events]


@pytest.fixture
def submitted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """All requests submitted to the engine, each after a pause."""
    requests: list[Request] = []
    submit = engine.submit

    def slow_submit(*arguments: Any, **named: Any) -> Request:
        time.sleep(0.2)
        requests.append(submit(*arguments, **named))
        return requests[-1]

    monkeypatch.setattr(engine, "submit", slow_submit)
    return requests


def test_closing_a_generation_cancels_its_choices(
    engine: Engine, submitted: list[Request], slow_down: Callable[[Engine, float], None]
) -> None:
    slow_down(engine, 0.02)

    async def work() -> None:
        service = make_service(engine)
        events = service.generate([replace(REQUEST, n=2)])
        await anext(events)
        assert service.admission.active == 2
        await events.aclose()
        assert service.admission.active == 0
        await settle(engine)

    in_loop(work)
    assert [request.finish_reason for request in submitted] == ["cancelled"] * 2


def test_cancelling_during_submission_cancels_the_request(engine: Engine, submitted: list[Request]) -> None:
    async def work() -> None:
        task = asyncio.ensure_future(anext(make_service(engine).generate([REQUEST])))
        await asyncio.sleep(0.1)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.3)
        await settle(engine)

    in_loop(work)
    assert [request.cancelled for request in submitted] == [True]


@pytest.mark.usefixtures("submitted")
def test_stopping_during_submission_ends_the_request(engine: Engine) -> None:
    async def work() -> None:
        service = make_service(engine)
        generation = asyncio.ensure_future(drain(service.generate([REQUEST])))
        await asyncio.sleep(0.1)
        service.stop()
        with pytest.raises(ApiError, match="was stopped"):
            await generation
        await settle(engine)

    in_loop(work)


def test_a_stopped_service_ends_running_requests_and_refuses_new_ones(engine: Engine) -> None:
    async def work() -> None:
        service = make_service(engine)
        events = service.generate([REQUEST])
        await anext(events)
        service.stop()
        with pytest.raises(ApiError, match="stopped before") as stopped:
            await drain(events)
        assert stopped.value.status == 503
        with pytest.raises(ApiError, match="shutting down") as refused:
            await anext(service.generate([REQUEST]))
        assert refused.value.status == 503
        await settle(engine)

    in_loop(work)


def test_a_full_queue_is_refused_with_a_time_to_retry(engine: Engine) -> None:
    async def work() -> None:
        service = make_service(engine, max_batch_size=1, max_queue=2)
        first, second = service.generate([REQUEST]), service.generate([replace(REQUEST, n=2)])
        await anext(first)
        await anext(second)
        with pytest.raises(ApiError, match="room for 3") as full:
            await anext(service.generate([REQUEST]))
        assert full.value.status == 429 and int(full.value.headers["Retry-After"]) >= 1
        await first.aclose()
        with pytest.raises(ApiError) as full:
            await anext(service.generate([REQUEST, REQUEST]))  # all or none
        assert full.value.status == 429
        third = service.generate([REQUEST])
        await anext(third)
        with pytest.raises(ApiError, match="asks for 4 choices") as never:
            await anext(service.generate([replace(REQUEST, n=4)]))
        assert never.value.status == 400
        for events in (second, third):
            await events.aclose()
        await settle(engine)

    in_loop(work)


def test_429_over_http(make_client: Callable[..., Any]) -> None:
    client = make_client(max_batch_size=1, max_queue=1)
    with client.service.admission.places(2):
        answer = client.post("/v1/completions", {"model": "tiny", "prompt": "a"})
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"


def test_prompt_logprobs_of_all_requests_are_limited(
    make_client: Callable[..., Any], constants: Callable[..., None]
) -> None:
    constants("blockdraft.serving.admission", MAX_PROMPT_LOGPROBS=12)
    client = make_client()
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "echo": True, "logprobs": 2}
    with client.service.admission.prompt_logprobs(3):
        for fields, status in (({}, 200), ({"logprobs": 3}, 429), ({"logprobs": 4}, 400), ({"n": 2}, 400)):
            answer = client.post("/v1/completions", body | fields)
            assert answer.status_code == status, answer.text
            assert status == 200 or "logprobs" in answer.text or "log-probabilities" in answer.text
    assert client.post("/v1/completions", body | {"logprobs": 3}).status_code == 200
    assert client.post("/v1/completions", body | {"echo": False, "logprobs": 20}).status_code == 200


def test_a_slow_reader_is_disconnected(engine: Engine, submitted: list[Request]) -> None:
    async def work() -> None:
        deadline = time.monotonic() + 20
        with pytest.raises(ApiError, match="read faster"):
            async for _ in make_service(engine, max_unread=20).generate([REQUEST]):
                while not submitted[0].finished:  # read nothing meanwhile
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.01)
        await settle(engine)

    in_loop(work)
    assert submitted[0].finish_reason == "cancelled" and len(submitted[0].token_ids) < 200


def test_metrics_add_up(make_client: Callable[..., Any]) -> None:
    client = make_client()
    answers = [
        client.complete(prompt, max_tokens=30, speculation={"statistics": True}) for prompt in ("the ant", "abababab")
    ]
    usages = [answer["usage"] for answer in answers]
    client.complete("the ant", max_tokens=30, speculation={"enabled": False})
    client.post("/v1/completions", {"model": "tiny", "prompt": "a" * 999})
    samples = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    values = {name.removeprefix("blockdraft:"): float(value) for name, value in samples.items()}
    assert values["generation_tokens_total"] == 90
    assert values["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages) + usages[0]["prompt_tokens"]
    assert values['requests_total{finished_reason="length"}'] == 3
    assert values['requests_total{finished_reason="error_400"}'] == 1
    assert values["time_to_first_token_seconds_count"] == 3
    assert values["inter_token_latency_seconds_count"] == 87
    assert values["e2e_request_latency_seconds_count"] == 3
    accepted = sum(answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] for answer in answers)
    assert values["spec_decode_num_accepted_tokens_total"] == accepted
    assert values["num_step_tokens_total"] == 87
    tau = values["spec_decode_mean_acceptance_length"]
    assert tau == pytest.approx(87 / values["num_steps_total"])
    shares = [value for name, value in values.items() if name.startswith("spec_decode_acceptance_per_pos")]
    assert tau == pytest.approx(1 + sum(shares)) and tau > 1
    assert len(shares) == 7 and shares == sorted(shares, reverse=True)
    assert values["verify_seconds_total"] > 0
    assert values["drafting_on"] == 1
    assert values["num_requests_running"] == values["num_requests_waiting"] == 0


def test_a_backend_is_loaded_when_a_request_names_it(engine: Engine) -> None:
    loaded: list[str] = []

    def load() -> Engine:
        loaded.append("hf")
        return engine

    service = Service(Backends(engine, {"hf": load, "native": load}), ServeSettings())
    assert service.backends.names == ["native", "hf"]

    def generate(backend: str | None) -> list[Event]:
        request = replace(REQUEST, max_tokens=3, speculation=Speculation(backend=backend))
        return in_loop(lambda: drain(service.generate([request])))  # type: ignore[no-any-return]

    assert generate(None) and generate("native") and loaded == []
    assert generate("hf") and generate("hf") and loaded == ["hf"]
    with pytest.raises(UsageError, match="must be one of native, hf"):
        generate("abacus")


def test_loading_a_backend_does_not_block_other_requests(engine: Engine) -> None:
    """More requests wait for the backend than there are threads."""
    loaded = threading.Event()

    def load() -> Engine:
        assert loaded.wait(20)
        return engine

    service = Service(Backends(engine, {"hf": load}), ServeSettings())

    async def generate(backend: str | None) -> list[Event]:
        request = replace(REQUEST, max_tokens=3, speculation=Speculation(backend=backend))
        return await drain(service.generate([request]))

    async def work() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        waiting = [asyncio.ensure_future(generate("hf")) for _ in range(4)]
        await asyncio.sleep(0.05)
        try:
            assert await generate(None)
            with pytest.raises(UsageError, match="abacus"):
                await generate("abacus")
            waiting.pop().cancel()
        finally:
            loaded.set()
        assert all(await asyncio.gather(*waiting))

    in_loop(work)


def test_unread_chunks_are_joined(engine: Engine) -> None:
    def generate(trace: bool) -> list[TextDelta]:
        async def work() -> list[Event]:
            request = replace(REQUEST, max_tokens=60, speculation=Speculation(trace=trace))
            events = make_service(engine).generate([request])
            first = (await anext(events))[1]
            await asyncio.sleep(0.5)
            return [first, *await drain(events)]

        return [event for event in in_loop(work) if isinstance(event, TextDelta)]

    joined, traced = generate(False), generate(True)
    assert len(joined) < len(traced)
    assert "".join(event.text for event in joined) == "".join(event.text for event in traced)
    for name in ("token_ids", "drafted"):
        values = [[value for event in events for value in getattr(event.chunk, name)] for events in (joined, traced)]
        assert values[0] == values[1] and len(values[0]) == 60


def test_the_first_stop_string_is_reported(engine: Engine) -> None:
    def generate(*stop: str) -> list[Event]:
        request = GenerationRequest([5, 6, 7], SamplingParams(stop=stop), max_tokens=60)
        return in_loop(lambda: drain(make_service(engine).generate([request])))  # type: ignore[no-any-return]

    *whole, end = generate()
    text = "".join(event.text for event in whole if isinstance(event, TextDelta))
    assert isinstance(end, Finished) and end.stop is None
    first, later = text[4:7], text[12:15]
    end = generate(later, "never said", first)[-1]
    assert isinstance(end, Finished) and end.reason == "stop" and end.stop == first


def test_tokens_keep_their_spaces() -> None:
    """Decoders like that of Llama 2 drop the space at the beginning of a text."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "\u2581the": 1, "\u2581ant": 2, "s": 3}, "[UNK]"))
    words.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1, 2, 3]) == "the ants"
    texts = TokenTexts(tokenizer)
    assert [texts.text(token) for token in (1, 2, 3)] == [" the", " ant", "s"]


def test_a_catalogued_model_is_also_named_by_its_id(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    [usual] = make_service(engine).model_names
    monkeypatch.setattr("blockdraft.serving.service.model_of", lambda path: known("smollm2"))
    assert make_service(engine).model_names == ["smollm2", usual]
    assert make_service(engine, served_model_name=("other",)).model_names == ["other"]
