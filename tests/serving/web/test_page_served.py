"""The page with the real server and a tiny random model, whose answers are random bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pages import Visit, serve, wait_until
from playwright.sync_api import Browser, expect

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.serving.app import make_app
from blockdraft.serving.backends import Backends
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings
from blockdraft.targets import load_target
from blockdraft.types import Drafting, SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tiny_target_dir: Path, tiny_drafter_dir: Path) -> Iterator[Service]:
    target = load_target(tiny_target_dir, backend="native")
    drafting = Drafting(block_size=8, tree_budget=12)
    with Engine(target, load_drafter(tiny_drafter_dir, target=target), 4, drafting, prefix_tokens=512) as engine:
        yield Service(Backends(engine), ServeSettings(max_answer_tokens=200))


@pytest.fixture
def real(browser: Browser, service: Service) -> Iterator[Visit]:
    with serve(make_app(service, service.settings)) as url:
        visit = Visit(browser, url)
        visit.get("max_tokens").fill("96")
        yield visit
        visit.close()


@pytest.fixture
def slowly(service: Service, slow_down: Callable[[Engine, float], None]) -> None:
    slow_down(service.backends.usual, 0.03)


def test_sliders_end_at_the_limits_of_the_engine(real: Visit) -> None:
    ends = {name: real.get(name).get_attribute("max") for name in ("block_size", "tree_budget", "max_tokens")}
    assert ends == {"block_size": "8", "tree_budget": "12", "max_tokens": "256"}


def test_chat_of_two_turns(real: Visit, service: Service) -> None:
    real.get("max_tokens").fill("32")
    real.chat("the ant")
    expect(real.get("status")).to_contain_text("complete")
    answer = real.page.locator(".turn .answer").nth(1)
    params = SamplingParams(32)
    [completion] = service.backends.usual.generate([[{"role": "user", "content": "the ant"}]], params)
    assert answer.text_content() == completion.text
    assert f"{sum(completion.drafted)} of them accepted" in (real.get("status").text_content() or "")
    real.chat("and now?")
    expect(real.page.locator(".turn button")).to_have_count(2)


def test_race_to_the_end(real: Visit) -> None:
    real.get("temperature").fill("0.8")
    real.get("max_tokens").fill("64")
    real.race("the ant and the bee")
    expect(real.get("verdict")).to_contain_text("✓ Both texts are equal")
    drafted, plain = real.get("drafted"), real.get("plain")
    assert drafted.locator(".answer").text_content() == plain.locator(".answer").text_content()
    assert plain.locator("dd").nth(3).text_content() == "1.00"
    shown = sum(int(row.split()[1]) for row in real.get("histogram").locator("tr").all_inner_texts())
    assert real.get("tree-words").text_content().startswith(f"Step {shown}: ")
    assert real.get("tree").locator("g").count() > 1


@pytest.mark.usefixtures("slowly")
def test_leaving_the_page_cancels_the_request(real: Visit, service: Service) -> None:
    scheduler = service.backends.usual.scheduler
    real.get("max_tokens").fill("192")
    real.race("the ant", ends=False)
    expect(real.get("drafted").locator(".answer")).not_to_have_text("")
    assert not scheduler.idle
    real.page.reload()
    expect(real.get("drafted").locator(".answer")).to_have_text("")
    wait_until(lambda: scheduler.idle, seconds=1)
    expect(real.get("start")).to_have_text("Race")
