"""Accessibility of the page: keyboard, screen reader, dark colours, small screens."""

from __future__ import annotations

import re

import pytest
from fastapi import FastAPI
from pages import QUESTION, Visit
from playwright.sync_api import Browser, expect

CONTRASTS = """() => {
  const rgb = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb(color).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    if (element.tagName === "text") return getComputedStyle(element.parentNode.querySelector("rect")).fill;
    const { backgroundColor } = getComputedStyle(element);
    return rgb(backgroundColor)[3] === 0 ? behind(element.parentElement) : backgroundColor;
  };
  const texts = [...document.querySelectorAll("body *")].filter((element) =>
    [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())
    && element.checkVisibility() && !element.closest(":disabled, script, noscript"));
  return texts.map((element) => {
    const style = getComputedStyle(element);
    const [a, b] = [light(element.tagName === "text" ? style.fill : style.color), light(behind(element))];
    return [element.textContent.trim().slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  });
}"""

pytestmark = pytest.mark.slow


def test_by_keyboard_alone(visit: Visit, app: FastAPI) -> None:
    keys = visit.page.keyboard
    focused = lambda: visit.page.evaluate("document.activeElement.id || document.activeElement.tagName")  # noqa: E731
    order = []
    for _ in range(15):
        keys.press("Tab")
        order.append(focused())
    assert order[:3] == ["theme", "chat-tab", "SUMMARY"]
    sliders = ["temperature", "block_size", "tree_budget", "max_tokens"]
    assert order[3:11] == ["drafting", "system", *sliders, "seed", "backend"]
    assert order[11:] == ["log", "message", "send", "clear"]
    keys.press("Shift+Tab")
    keys.press("Shift+Tab")
    keys.type("SLOW")
    keys.press("Control+Enter")
    expect(visit.get("send")).to_have_text("Stop")
    keys.press("Escape")
    expect(visit.get("send")).to_have_text("Send")
    assert focused() == "message"
    visit.get("chat-tab").focus()
    keys.press("ArrowRight")
    assert focused() == "race-tab"
    expect(visit.get("race")).to_be_visible()
    visit.get("prompt").focus()
    keys.press("Control+Enter")
    expect(visit.get("result")).to_be_visible(timeout=20_000)
    assert focused() == "prompt"


def test_everything_that_takes_input_has_a_name(visit: Visit) -> None:
    visit.chat(QUESTION)
    for _ in range(2):
        for element in visit.page.locator("button, input, select, textarea, [tabindex='0']").all():
            if element.is_visible():
                name = re.search(r'^- \w+ "(.+?)"', element.aria_snapshot())
                assert name is not None, element.evaluate("element => element.outerHTML")
        visit.race()


def test_colours_follow_the_system_and_the_button(browser: Browser, url: str) -> None:
    visit = Visit(browser, url, color_scheme="dark")
    colour = lambda: visit.page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    dark = colour()
    visit.page.get_by_role("button", name="Light colours").click()
    light = colour()
    assert sum(map(int, re.findall(r"\d+", light))) > 600 > 150 > sum(map(int, re.findall(r"\d+", dark)))
    visit.page.get_by_role("button", name="Dark colours").click()
    assert colour() == dark
    visit.close()


def test_contrast(visit: Visit) -> None:
    shown = []

    def look() -> None:
        for scheme in ("light", "dark"):
            visit.page.emulate_media(color_scheme=scheme)
            shown.extend(visit.page.evaluate(CONTRASTS))

    visit.chat(QUESTION)
    expect(visit.get("status")).to_contain_text("complete")
    look()
    visit.race()
    look()
    visit.race("BAD", ends=False)
    expect(visit.get("problem")).not_to_have_text("")
    look()
    assert len(shown) > 200
    assert [(text, ratio) for text, ratio in shown if ratio < 4.5] == []


def test_no_width_scrolls_sideways(visit: Visit) -> None:
    visit.chat(f"{QUESTION} {'x' * 200}")
    expect(visit.get("status")).to_contain_text("complete")
    for view in ("chat", "race"):
        if view == "race":
            visit.race()
            visit.get("step").click()
        for width in (320, 480, 768, 1200):
            visit.page.set_viewport_size({"width": width, "height": 700})
            assert visit.page.evaluate("document.documentElement.scrollWidth") == width, view
            assert view == "race" or visit.get("log").evaluate("log => log.scrollWidth === log.clientWidth")


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_reduced_motion_shows_only_verified_trees(browser: Browser, url: str, motion: str) -> None:
    visit = Visit(browser, url, reduced_motion=motion)
    visit.race("SAY a b c d e f g h")
    visit.page.evaluate("""() => {
      const words = document.getElementById("tree-words");
      window.seen = [];
      new MutationObserver(() => window.seen.push(words.textContent)).observe(words, { childList: true });
    }""")
    visit.get("pace").select_option("10")
    visit.get("play").click()
    expect(visit.get("status")).to_have_text("Slow motion has ended.", timeout=20_000)
    seen = visit.page.evaluate("window.seen")
    assert any(words.startswith("Step 3: ") for words in seen)
    assert any("not yet checked" in words for words in seen) == (motion != "reduce")
    visit.close()
