"""A tiny random model behind the server's application."""

import sys
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
    """An engine whose target is its own drafter: it accepts greedy draft tokens and rejects some sampled ones."""
    target = load_target(tiny_target_dir, backend="native")
    drafter = load_drafter(tiny_target_dir, target=target)
    with Engine(target, drafter, max_batch_size=4, drafting=Drafting(block_size=8), prefix_tokens=512) as made:
        yield made


@pytest.fixture
def make_client(engine: Engine) -> Callable[..., Client]:
    """A client of a server with these settings."""

    def make(**given: Any) -> Client:
        return Client(Service(Backends(engine), ServeSettings(served_model_name=(MODEL,), **given)))

    return make


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client()


@pytest.fixture(scope="module")
def shared_client(engine: Engine) -> Client:
    """A client that several tests share, which saves time. Their requests must leave nothing behind."""
    return Client(Service(Backends(engine), ServeSettings(served_model_name=(MODEL,))))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium of this machine. It is closed after each module, since `asyncio.run` fails while it is open."""
    from pages import CHROMIUM, chromium

    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine; install chromium")
    with chromium() as browser:
        yield browser


@pytest.fixture
def app() -> FastAPI:
    """The page with scripted answers."""
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
