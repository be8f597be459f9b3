"""What a server records: finished requests of all APIs, unless their client declines."""

from pathlib import Path
from typing import Any

import pytest
from serving_client import MODEL, Client

from blockdraft.engine import Engine
from blockdraft.serving.backends import Backends
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings
from blockdraft.targets import load_target
from blockdraft_train.data.documents import read_data
from blockdraft_train.data.recording import ConversationRecorder

MESSAGES = [{"role": "user", "content": "the ant"}]
SHORT = {"model": MODEL, "max_tokens": 6}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**SHORT, "messages": MESSAGES}),
    ("/v1/completions", {**SHORT, "prompt": [5, 9, 17, 4]}),
    ("/v1/messages", {**SHORT, "messages": MESSAGES}),
    ("/v1/responses", {"model": MODEL, "max_output_tokens": 6, "input": "the ant"}),
    ("/api/chat", {"model": MODEL, "messages": MESSAGES, "stream": False, "options": {"num_predict": 6}}),
    ("/api/generate", {"model": MODEL, "prompt": "the ant", "stream": False, "options": {"num_predict": 6}}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[path for path, _ in REQUESTS])
def test_a_client_can_decline(path: str, body: dict[str, Any], tiny_target_dir: Path, tmp_path: Path) -> None:
    target = load_target(tiny_target_dir, backend="native")
    recorder = ConversationRecorder(tmp_path / "record", target)
    settings = ServeSettings(served_model_name=(MODEL,), record=tmp_path / "record", temperature=0)
    with Engine(target, max_batch_size=2, recorder=recorder) as engine:
        client = Client(Service(Backends(engine), settings))
        headers = {"Authorization": "Bearer very-secret", "x-api-key": "very-secret"}
        for fields in ({}, {"store": False}, {"store": True}):
            assert client.post(path, {**body, **fields}, headers=headers).status_code == 200
        assert client.get("/v1/models").json()["data"][0]["blockdraft"]["recording"] is True
    recorder.close()
    assert [int(document.supervised.sum()) for document in read_data(tmp_path / "record")] == [6, 6]
    assert all(b"very-secret" not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
