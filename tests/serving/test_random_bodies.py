"""Random requests from the OpenAPI description to every route: none is a server error, and nothing is kept."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from random_bodies import MISSING, RequestMaker
from serving_client import MODEL, Client
from test_random_requests import MARKERS, TEMPLATES
from tiny_models import write_coder

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.serving.backends import Backends
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings
from blockdraft.targets import load_target

MAX_STORED = 2**22  # bytes of stored responses, so that their limit is reached early
MAX_GROWTH = 100 * 2**20  # bytes of memory after the first thousand requests


@pytest.fixture(scope="module")
def any_client(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Iterator[Client]:
    target = load_target(write_coder(tmp_path_factory.mktemp("model"), tiny_target_dir, MARKERS))
    with Engine(target, load_drafter("lookup", target=target), max_batch_size=4, prefix_tokens=256) as engine:
        settings = ServeSettings(served_model_name=(MODEL,), max_stored=MAX_STORED)
        yield Client(Service(Backends(engine), settings))


def check(client: Client, seed: int) -> int:
    maker = RequestMaker(client.app.openapi(), seed)
    tokenizer = client.service.backends.usual.target.tokenizer
    assert tokenizer is not None
    tokenizer.chat_template = maker.random.choice(TEMPLATES)
    method, path, content, headers = maker.request()
    answer = client.send(method, path, content=content, headers=headers)
    context = f"seed {seed}, {method} {path}: {content[:3000]!r}\n{answer.status_code}: {answer.text[-1000:]}"
    assert answer.status_code < 500 or (answer.status_code == 501 and path in MISSING), context
    assert "The server failed" not in answer.text and '"server_error"' not in answer.text, context
    assert client.service.admission.active == 0, context
    return answer.status_code


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def answers(client: Client) -> None:
    """Check that the server still gives the answer of a usual request."""
    tokenizer = client.service.backends.usual.target.tokenizer
    assert tokenizer is not None
    tokenizer.chat_template = TEMPLATES[0]
    first, second = (client.chat(max_tokens=8)["choices"][0]["message"]["content"] for _ in range(2))
    assert first == second


def test_random_bodies(any_client: Client) -> None:
    statuses = Counter(check(any_client, seed) for seed in range(250))
    assert statuses[200] > 50 and statuses[400] > 20  # or the requests would test little
    answers(any_client)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say how much memory is used")
def test_ten_thousand_random_bodies(any_client: Client) -> None:
    statuses = Counter(check(any_client, seed) for seed in range(1000, 2000))
    gc.collect()
    before = resident_bytes()
    statuses += Counter(check(any_client, seed) for seed in range(2000, 11000))
    answers(any_client)
    gc.collect()
    growth = resident_bytes() - before
    print(dict(statuses), f"memory grew by {growth / 2**20:.1f} MiB")
    assert growth < MAX_GROWTH
