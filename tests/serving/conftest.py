"""A tiny random model behind the server's application."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.serving.backends import Backends
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings
from blockdraft.targets import load_target
from blockdraft.types import Drafting

sys.path.insert(0, str(Path(__file__).parent))  # for pages.py, scripted_server.py and the like

from serving_client import MODEL, Client  # noqa: E402


@pytest.fixture(scope="session")
def engine(tiny_target_dir: Path) -> Iterator[Engine]:
    """Provide an engine whose target is its own drafter. It accepts greedy draft tokens and some sampled ones."""
    target = load_target(tiny_target_dir, backend="native")
    drafter = load_drafter(tiny_target_dir, target=target)
    with Engine(target, drafter, max_batch_size=4, drafting=Drafting(block_size=8), prefix_tokens=512) as made:
        yield made


@pytest.fixture
def make_client(engine: Engine) -> Callable[..., Client]:
    """Return a function that makes a client of a server with given settings."""

    def make(**given: Any) -> Client:
        return Client(Service(Backends(engine), ServeSettings(served_model_name=(MODEL,), **given)))

    return make


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client()


@pytest.fixture
def set_template(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets the engine's chat template for this test."""
    return lambda template: monkeypatch.setattr(engine.target.tokenizer, "chat_template", template)


@pytest.fixture(scope="module")
def shared_client(engine: Engine) -> Client:
    """Provide a client that several tests share. Their requests must leave nothing behind."""
    return Client(Service(Backends(engine), ServeSettings(served_model_name=(MODEL,))))


@pytest.fixture
def slow_down(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine, float], None]:
    """Return a function that adds seconds to every step of an engine, so that responses come in pieces."""

    def slow_down(engine: Engine, seconds: float) -> None:
        step = engine.scheduler.step
        monkeypatch.setattr(engine.scheduler, "step", lambda: (time.sleep(seconds), step())[1])

    return slow_down


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium. Close it after each module, since `asyncio.run` fails while it is open."""
    from pages import CHROMIUM, chromium

    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine; install chromium")
    with chromium() as browser:
        yield browser


@pytest.fixture
def app() -> FastAPI:
    """Return an application with the page and scripted responses."""
    from scripted_server import make_app

    return make_app()


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    from pages import serve

    with serve(app) as address:
        yield address


@pytest.fixture
def visit(browser: Any, url: str) -> Iterator[Any]:
    from pages import Visit

    visit = Visit(browser, url)
    yield visit
    visit.close()
