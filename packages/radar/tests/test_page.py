"""The radar page: what it asks the server, what an export holds, and its use in headless Chromium."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from radar_configs import QWEN3_8B
from starlette.testclient import TestClient

from blockdraft.errors import UsageError
from blockdraft.serving.app import make_app
from blockdraft.serving.settings import ServeSettings
from blockdraft_radar.devices import find, machine_of
from blockdraft_radar.page import Query, answer, export_page
from blockdraft_radar.project import project
from blockdraft_radar.shape import known_shapes, read_shape, shape_of_config

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SITE = "http://localhost"
Run = Callable[..., Any]
expect.set_options(timeout=20_000)  # of a busy machine


def client(key: str | None = None) -> TestClient:
    """Return a client of a server without models."""
    app = make_app(Mock(), ServeSettings(api_key=key))
    return TestClient(app, base_url=SITE, raise_server_exceptions=False)


def test_rows_are_projections() -> None:
    response = client().post("/radar/rows", json={"device": "H100 SXM", "count": 2, "weights": "fp8", "batch": 8})
    body = response.json()
    machine = machine_of(find("H100 SXM"), 2)
    assert (body["device"], body["memory_gb"]) == ("2x H100 SXM", machine.memory_gb)
    assert len(body["rows"]) + len(body["short"]) == len(known_shapes())
    for row in body["rows"][:3]:
        expected = project(read_shape(row["model"]), machine, "fp8", 4096, 8).as_dict()
        del row["why"]["commands"]
        assert {name: row[name] for name in expected} == json.loads(json.dumps(expected))
    fits = [row["fits"] for row in body["rows"]]
    assert fits == sorted(fits, reverse=True)


def test_the_finest_weights_that_fit_are_shown() -> None:
    kinds = {row["model"]: row["weights"] for row in answer(Query(device="RTX 4090"))["rows"]}
    assert [kinds[name] for name in ("qwen3-8b", "qwen3-14b", "qwen3-32b", "deepseek-v3")] == [
        *("bf16", "Q8_0", "Q4_K_M", "Q4_K_M")
    ]


def test_own_model_comes_first() -> None:
    query = Query(device="RTX 4090", config=QWEN3_8B, name="mine.json", weights="int4")
    [own, *others] = answer(query)["rows"]
    expected = project(shape_of_config(QWEN3_8B, "mine.json"), machine_of(find("RTX 4090")), "int4")
    assert own["plain"]["mid"] == expected.plain.mid and own["own"]
    assert not any(row["own"] for row in others)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"device": "RTX 4091"}, "did you mean RTX 4090"),
        ({"count": 0}, "must be 1 or more"),
        ({"context": 0}, "context must be at least 1"),
        ({"batch": "many"}, "batch must be"),
        ({"task": "poetry"}, "got 'poetry'"),
        ({"weights": "int1"}, "got 'int1'"),
        ({"device": "M4", "ram": 0}, "more than 0 GB"),
        ({"config": []}, "config.json is not a JSON object"),
        ({"config": {}}, "lacks hidden_size"),
        ({"config": {**QWEN3_8B, "hidden_size": 10**400}}, "hidden_size must be"),
        ({"speed": 1}, "speed must be"),
    ],
)
def test_bad_queries(query: dict[str, Any], message: str) -> None:
    response = client().post("/radar/rows", json={"device": "RTX 4090", **query})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_only_the_page_needs_no_key() -> None:
    assert client("secret").get("/radar").status_code == client("secret").head("/radar").status_code == 200
    assert client("secret").post("/radar/rows", json={"device": "M4"}).status_code == 401


def test_policy_allows_only_the_pages_script() -> None:
    response = client().get("/radar")
    script = response.text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in response.headers["content-security-policy"]
    assert "src=" not in response.text


def test_export_to_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written to"):
        export_page(tmp_path / "file", [], [])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    tab = context.new_page()
    errors: list[str] = []
    tab.on("console", lambda message: errors.append(message.text))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    yield tab
    context.close()
    # Chromium reports responses of 400 and 401 to the console.
    assert [error for error in errors if "Failed to load resource" not in error] == []


def visit(tab: Page, key: str | None = None) -> Page:
    """Open the page, with a server without models behind it."""
    http = client(key)

    def serve(route: Route) -> None:
        request = route.request
        headers = {name: value for name, value in request.headers.items() if name != "content-length"}
        response = http.request(request.method, request.url, content=request.post_data_buffer, headers=headers)
        route.fulfill(status=response.status_code, headers=dict(response.headers), body=response.content)

    tab.route(f"{SITE}/**", serve)
    tab.goto(f"{SITE}/radar")
    return tab


@pytest.fixture
def opened(tab: Page) -> Page:
    visit(tab)
    expect(tab.locator("#rows li")).not_to_have_count(0)
    return tab


@pytest.mark.slow
def test_models_of_a_device(opened: Page) -> None:
    expect(opened.locator("#status")).to_contain_text("models fit RTX 4090 with 24 GB")
    assert opened.locator("#rows li").count() > 0.8 * len(known_shapes())
    opened.locator("#device").select_option("H100 SXM")
    opened.locator("#count").fill("8")
    expect(opened.locator("#status")).to_contain_text("models fit 8x H100 SXM with 640 GB")
    opened.locator("#find").fill("qwen3-8b")
    expect(opened.locator("#rows li")).to_have_count(1)
    opened.locator("summary").click()
    expect(opened.locator("dl")).to_contain_text("arxiv.org")
    expect(opened.locator("dl")).to_contain_text("blockdraft serve --target qwen3-8b --drafter")


@pytest.mark.slow
def test_key(tab: Page) -> None:
    visit(tab, key="secret")
    expect(tab.locator("#problem")).to_contain_text("The API key is missing")
    tab.locator("#key").fill("secret")
    tab.locator("#key").press("Enter")
    expect(tab.locator("#rows li")).not_to_have_count(0)
    expect(tab.locator("#key")).to_be_hidden()
    expect(tab.locator("#problem")).to_be_empty()


@pytest.mark.slow
def test_export_needs_no_server(tab: Page, blockdraft: Run, tmp_path: Path) -> None:
    devices = ("--device", "RTX 4090", "--device", "2x RTX 3090")
    blockdraft("radar", *devices, "--batch", 4, "--export", tmp_path / "web")
    assert [path.name for path in (tmp_path / "web").iterdir()] == ["index.html"]
    tab.goto((tmp_path / "web/index.html").as_uri())
    expect(tab.locator("#status")).to_contain_text("batch 4")
    tab.locator("#device").select_option("2x RTX 3090")
    expect(tab.locator("#status")).to_contain_text("models fit 2x RTX 3090 with 48 GB")
    tab.locator("#find").fill("qwen3-8b")
    expect(tab.locator("#rows li")).to_have_count(1)
    expected = project(read_shape("qwen3-8b"), machine_of(find("RTX 3090"), 2), batch=4).plain.mid
    expect(tab.locator("#rows .num").first).to_contain_text(f"{expected:,.0f} (")
    for name in ("#count", "#weights", "#batch", "#drop"):
        expect(tab.locator(name)).to_be_hidden()


@pytest.mark.slow
def test_memory_of_a_cpu_is_an_input(opened: Page) -> None:
    expect(opened.locator("#ram")).to_be_hidden()
    opened.locator("#device").select_option("Ryzen 9 9950X")
    opened.locator("#ram").fill("0")
    expect(opened.locator("#problem")).to_contain_text("more than 0 GB")
    opened.locator("#ram").fill("32")
    expect(opened.locator("#status")).to_contain_text("with 32 GB")


@pytest.mark.slow
def test_own_model(opened: Page, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    opened.locator("#file").set_input_files(tmp_path / "config.json")
    expect(opened.locator("#rows li").first).to_contain_text("config.json, bf16")
    (tmp_path / "broken.json").write_text("{")
    opened.locator("#file").set_input_files(tmp_path / "broken.json")
    expect(opened.locator("#problem")).to_contain_text("broken.json is not JSON")
    (tmp_path / "other.json").write_text("{}")
    opened.locator("#file").set_input_files(tmp_path / "other.json")
    expect(opened.locator("#problem")).to_contain_text("lacks hidden_size")


@pytest.mark.slow
def test_keyboard_navigation(opened: Page) -> None:
    focused = []
    for _ in range(12):
        opened.keyboard.press("Tab")
        focused.append(opened.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert focused[:3] == ["device", "count", "weights"]
    assert "file" in focused and "SUMMARY" in focused
    opened.keyboard.press("Enter")
    expect(opened.locator("details[open]")).to_have_count(1)


@pytest.mark.slow
def test_logarithmic_scale(opened: Page) -> None:
    """The scale of the bars is logarithmic, with a tick at each power of ten."""
    ticks = [float(tick.replace(",", "")) for tick in opened.locator("#axis text").all_text_contents()]
    assert ticks == [10**power for power in range(round(math.log10(ticks[0])), round(math.log10(ticks[-1])) + 1)]
    bars = opened.locator("#rows .bar").evaluate_all(
        "bars => bars.map(b => [b.querySelector('.num').textContent, b.querySelector('rect').getAttribute('width')])"
    )
    assert len(bars) > 100
    for text, size in bars:
        speed, width = float(text.split(" ")[0].replace(",", "")), float(size.removesuffix("%")) / 100
        assert ticks[0] * (ticks[-1] / ticks[0]) ** width == pytest.approx(speed, rel=0.06)
    opened.locator("#batch").fill("0")
    expect(opened.locator("#axis")).to_be_hidden()


@pytest.mark.slow
def test_narrow_window(opened: Page) -> None:
    opened.set_viewport_size({"width": 340, "height": 700})
    assert opened.evaluate("document.documentElement.scrollWidth") <= 340
