"""Long prefills: their progress in streams and metrics, and which tokens of a chat are stored on disk."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_client import MODEL, Client

from blockdraft.drafters import load_drafter
from blockdraft.engine import Chunk, Engine, Stats
from blockdraft.machine import cache_folder
from blockdraft.serving import service as service_module
from blockdraft.serving.backends import Backends
from blockdraft.serving.chunks import ChunkQueue
from blockdraft.serving.prompts import prepare
from blockdraft.serving.request import ChatMessages, GenerationRequest
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings
from blockdraft.targets import load_target
from blockdraft.types import SamplingParams

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if loop.first and tools %}{{ tools | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "the ant and the bee " * 2
USER = {"role": "user", "content": TEXT}
SYSTEM = {"role": "system", "content": "be a good ant " * 3}
PROMPTS = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 8},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 8},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 8},
    "/v1/messages": {"messages": [USER], "max_tokens": 8},
    "/api/chat": {"messages": [USER], "options": {"num_predict": 8}},
}


@pytest.fixture
def engine(tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that reads prompts in small pieces, and stores prefixes of 32 tokens."""
    target = load_target(tiny_target_dir, backend="native")
    assert target.tokenizer is not None
    target.tokenizer.chat_template = TEMPLATE
    libraries = cache_folder() / "libraries"
    libraries.mkdir(parents=True, exist_ok=True)
    (tmp_path / "libraries").symlink_to(libraries)
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    with Engine(target, load_drafter("none", target=target), 4, prefill_tokens=4, stored_prefix_tokens=32) as engine:
        yield engine


@pytest.fixture
def client(engine: Engine) -> Client:
    return Client(Service(Backends(engine), ServeSettings(served_model_name=(MODEL,))))


@pytest.mark.parametrize("path", PROMPTS)
def test_streams_report_progress(
    client: Client, engine: Engine, path: str, slow_down: Callable[..., None], constants: Callable[..., None]
) -> None:
    body = {"model": MODEL, "temperature": 0, **PROMPTS[path]}
    whole = client.post(path, {**body, "stream": False}).json()
    slow_down(engine, 0.02)
    constants(service_module, PROGRESS_SECONDS=0.01)
    assert client.post(path, {**body, "stream": False}).json().keys() == whole.keys()
    answer = client.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    text = answer.text
    if path.startswith("/api"):  # lines of JSON have no comments
        assert ":" not in [line[:1] for line in text.splitlines()] and json.loads(text.splitlines()[0])
        return
    *comments, last = [tuple(map(int, actual)) for actual in re.findall(r"^: prefill (\d+)/(\d+)$", text, re.MULTILINE)]
    assert comments == sorted(set(comments)) and {total for _, total in (*comments, last)} == {last[1]}
    assert 0 < last[0] <= last[1] and text.index("data: ") > text.index(": prefill")


@pytest.mark.parametrize("turns", range(5))
def test_a_reader_that_is_cancelled_as_a_chunk_arrives_ends(turns: int) -> None:
    async def read() -> bool:
        queue = ChunkQueue(9, True, lambda index, chunk: None)
        reader = asyncio.ensure_future(queue.take(60))
        await asyncio.sleep(0.01)
        queue.put(0, Chunk("a", (1,), (False,), Stats()))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not reader.cancel():  # it has read the chunk
            return True
        await asyncio.wait({reader})
        return reader.cancelled()

    assert asyncio.run(read())


def test_prompt_tokens_that_are_not_read_are_a_metric(engine: Engine, client: Client) -> None:
    def left() -> float:
        return float(re.findall(r"^blockdraft:num_prefill_tokens_left (.*)$", client.get("/metrics").text, re.M)[0])

    assert left() == 0
    engine.scheduler.add([engine.request(list(range(4, 64)), SamplingParams(4))])
    engine.scheduler.step()
    assert left() == 60 - 4 * 4
    while not engine.scheduler.idle:
        engine.scheduler.step()
    assert left() == 0


def instructions(engine: Engine, *messages: dict[str, Any], **fields: Any) -> str:
    """Return the part of a chat's prompt that may be stored."""
    request = GenerationRequest(ChatMessages(list(messages), **fields), SamplingParams())
    [choice] = prepare(request, engine, ServeSettings())
    assert engine.target.tokenizer is not None
    return str(engine.target.tokenizer.decode(choice.prompt[: choice.instruction_tokens]))


def test_system_messages_and_tools_are_instructions(engine: Engine) -> None:
    tools = ({"type": "function", "function": {"name": "weather", "parameters": {}}},)
    answer = {"role": "assistant", "content": "yes"}
    for messages in ([USER], [USER, answer, USER], [USER, answer]):
        for chosen in ((), tools):
            text = instructions(engine, SYSTEM, *messages, tools=chosen)
            assert str(SYSTEM["content"]) in text and ("weather" in text) == bool(chosen)
            assert TEXT not in text and text.rstrip().endswith("user")
    assert TEXT not in instructions(engine, USER)


def test_texts_of_users_are_no_instructions(engine: Engine) -> None:
    later = {"role": "system", "content": "the late one"}
    for role in ("system", "developer"):
        text = instructions(engine, SYSTEM, USER, {"role": role, "content": "the late one"}, USER)
        assert str(SYSTEM["content"]) in text and TEXT not in text and "late" not in text
    assert "late" not in instructions(engine, USER, later)
    assert engine.target.tokenizer is not None
    engine.target.tokenizer.chat_template = "{{ documents or '' }}" + TEMPLATE
    assert "secret" not in instructions(engine, SYSTEM, USER, template={"documents": [{"text": "a secret text"}]})
    assert instructions(engine, SYSTEM, USER, template={"enable_thinking": True})
    # A template that wants no chat like the other one, to which the prompt is compared.
    engine.target.tokenizer.chat_template = (
        "{% if messages[-1].content | length < 3 %}{{ 1 / 0 }}{% endif %}" + TEMPLATE
    )
    assert instructions(engine, SYSTEM, USER) == ""


def test_the_first_request_after_a_restart_loads_its_instructions(engine: Engine, client: Client) -> None:
    def cached(client: Client, user: str) -> tuple[int, str]:
        answer = client.post(
            "/v1/chat/completions",
            {
                "model": MODEL,
                "messages": [SYSTEM, {"role": "user", "content": user}],
                "max_tokens": 8,
                "temperature": 0,
            },
        ).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["message"]["content"]

    with Engine(engine.target, engine.drafter, 4) as plain:
        expected = cached(Client(Service(Backends(plain), ServeSettings(served_model_name=(MODEL,)))), "the bee")
    for user in ("the ant", "the cat"):  # instructions are stored when they come again
        assert expected[0] == cached(client, user)[0] == 0
    engine.close()
    with Engine(engine.target, engine.drafter, 4, stored_prefix_tokens=32) as restarted:
        again = Client(Service(Backends(restarted), ServeSettings(served_model_name=(MODEL,))))
        count, text = cached(again, "the bee")
    assert count > 32 and text == expected[1]
