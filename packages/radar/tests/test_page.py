"""The radar page: the same projections as in Python, and its use in headless Chromium."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from radar_configs import DEEPSEEK_V3, LFM2_8B_A1B, QWEN3_8B, QWEN3_30B_A3B

from blockdraft.errors import UsageError
from blockdraft_radar.devices import find, machine_of
from blockdraft_radar.page import export_page, page
from blockdraft_radar.project import project
from blockdraft_radar.shape import known_shapes, read_shape, shape_of_config

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NODE = shutil.which("node")
PROJECTIONS = [
    ("qwen3-8b", "RTX 4090", "bf16", 4096, 1, "mean"),
    ("qwen3-8b", "B200 SXM", "fp8", 2048, 32, "math500"),
    ("qwen3-30b-a3b", "H100 SXM", "Q4_K_M", 8192, 8, "chat"),
    ("qwen3.5-27b", "M4 Max 40-core", "int4", 1000, 3, "code"),
    ("gemma3-27b", "Ryzen 9 9950X", "Q8_0", 20000, 2, "gsm8k"),
    ("deepseek-v3", "MI300X", "nvfp4", 4096, 16, "mean"),
    ("llama-3.3-70b", "RTX 4090", "Q4_K_M", 512, 64, "alpaca"),
    ("gpt-oss-120b", "B200 SXM", "mxfp4", 5, 1, "humaneval"),
    ("gemma4-e2b", "M4", "Q8_0", 1024, 1, "mean"),
]
COMPARED = ["fits", "memory_bytes", "first_token_seconds", "plain", "drafted", "block_size", "confidence"]


def run(script: str) -> Any:
    """Run a script with `radar` and `DATA` of the page, and return the JSON that it prints."""
    source = (
        page()
        .split("<script>")[1]
        .split("const own = []")[0]
        .replace("get = (id) => document.getElementById(id)", "get = null")
    )
    process = subprocess.run([NODE or "node", "-"], input=source + script, capture_output=True, text=True, check=True)
    return json.loads(process.stdout)


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_projections_match_python() -> None:
    rows = run(
        f"const all = {json.dumps(PROJECTIONS)};"
        "console.log(JSON.stringify(all.map(([model, device, ...rest]) => radar.project("
        "DATA.models.find((shape) => shape.name === model),"
        "DATA.machines.find((machine) => machine.name === device), ...rest))));"
    )
    for (model, device, *rest), row in zip(PROJECTIONS, rows, strict=True):
        expected = project(read_shape(model), machine_of(find(device)), *rest).as_dict()  # type: ignore[arg-type]
        assert {name: row[name] for name in COMPARED} == close({name: expected[name] for name in COMPARED}), (
            model,
            device,
        )


def close(value: Any) -> Any:
    """Return the value for a comparison with a relative tolerance of 1e-6."""
    if isinstance(value, dict):
        return {name: close(item) for name, item in value.items()}
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_shapes_match_python() -> None:
    kinds = ["sliding_attention", "linear_attention", "full_attention"] * 12
    mixed = {"text_config": {**QWEN3_8B, "layer_types": kinds, "sliding_window": 512}}
    configs = [QWEN3_8B, QWEN3_30B_A3B, DEEPSEEK_V3, LFM2_8B_A1B, mixed]
    shapes = run(f"console.log(JSON.stringify({json.dumps(configs)}.map((config) => radar.shapeOf(config, 'x'))));")
    for config, shape in zip(configs, shapes, strict=True):
        fields = shape_of_config(config, "x").__dict__
        expected = {name: value for name, value in fields.items() if name not in ("drafters", "path")}
        assert {name: shape[name] for name in expected} == expected


def test_export(tmp_path: Path) -> None:
    file = export_page(tmp_path / "web")
    assert file.read_text() == page()
    assert [path.name for path in file.parent.iterdir()] == ["index.html"]
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written to"):
        export_page(tmp_path / "file")


def test_page_is_self_contained() -> None:
    assert "src=" not in page()
    assert page().count("<script>") == page().count("</script>") == 1


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    tab = context.new_page()
    errors: list[str] = []
    tab.on("console", lambda message: errors.append(message.text))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(export_page(tmp_path / "web").as_uri())
    yield tab
    context.close()
    assert errors == []


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
