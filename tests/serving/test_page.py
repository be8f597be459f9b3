"""The page, in a Chromium without a window."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from scripted_server import TEXT, make_app

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
QUESTION = "How many rolls are left?"
EVIL = "SAY <img src=x onerror=alert(1)> <script>alert(2)</script> &amp; <b>bold</b>"
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
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; install `chromium`")


@contextmanager
def serve(app: FastAPI) -> Iterator[str]:
    """Its address, while it runs."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


def wait_until(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def app() -> FastAPI:
    return make_app()


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    with serve(app) as address:
        yield address


class Visit:
    """A page that was opened, and what it did behind the scenes."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.page: Page = browser.new_context(**context).new_page()
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append("a dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.hosts.add(httpx.URL(request.url).netloc.decode()))
        self.url = url
        self.page.goto(url)
        expect(self.get("about")).not_to_have_text("Asking the server what it runs…")

    def get(self, name: str) -> Locator:
        return self.page.locator(f"#{name}")

    def chat(self, text: str) -> None:
        self.get("message").fill(text)
        self.get("send").click()

    def race(self, prompt: str = QUESTION, ends: bool = True) -> None:
        self.get("race-tab").click()
        self.get("prompt").fill(prompt)
        self.get("start").click()
        if ends:
            expect(self.get("result")).to_be_visible(timeout=20_000)
            expect(self.get("start")).to_have_text("Race")

    def close(self) -> None:
        """Nothing was asked of other machines, and the console is empty but for answers that are errors."""
        self.page.context.close()
        assert self.hosts == {httpx.URL(self.url).netloc.decode()}
        assert [line for line in self.complaints if not line.startswith("Failed to load resource")] == []


@pytest.fixture
def visit(browser: Browser, url: str) -> Iterator[Visit]:
    visit = Visit(browser, url)
    yield visit
    visit.close()


def test_nothing_but_the_page_itself_may_run(url: str) -> None:
    response = httpx.get(url)
    rules = dict(rule.split(" ", 1) for rule in response.headers["Content-Security-Policy"].split("; "))
    for tag, rule in ("script", "script-src"), ("style", "style-src"):
        text = re.search(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        assert text is not None
        digest = base64.b64encode(hashlib.sha256(text[1].encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["frame-ancestors"] == rules["form-action"] == rules["base-uri"] == "'none'"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert httpx.head(url).status_code == 200
    assert re.findall(r"https?://[^\"]*", response.text) == ["http://www.w3.org/2000/svg"]  # a name, nothing to load


@needs_chromium
class TestChat:
    def test_of_several_turns(self, visit: Visit, app: FastAPI) -> None:
        visit.chat(QUESTION)
        answer = visit.page.locator(".turn").nth(1)
        expect(answer.locator(".answer")).to_have_text(TEXT)
        assert answer.locator(".guess").first.inner_text() == " baker"
        assert answer.locator(".fixed").first.inner_text() == " *"
        expect(answer).to_contain_text("23 tokens, 14 of them accepted guesses, 400 tokens/s, tau 2.75")
        visit.chat("And then?")
        expect(visit.page.locator(".turn")).to_have_count(4)
        expect(visit.get("status")).to_contain_text("complete")
        assert app.state.requests[1]["messages"] == [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": TEXT},
            {"role": "user", "content": "And then?"},
        ]
        visit.get("clear").click()
        expect(visit.page.locator(".turn")).to_have_count(0)
        visit.chat("Anew")
        wait_until(lambda: len(app.state.requests) == 3)
        assert app.state.requests[2]["messages"] == [{"role": "user", "content": "Anew"}]

    @pytest.mark.parametrize("by", ["Escape", "button"])
    def test_stopped_answers_stay_as_they_are(self, visit: Visit, app: FastAPI, by: str) -> None:
        visit.chat("SLOW")
        expect(visit.page.locator(".turn .answer").nth(1)).to_contain_text("The baker")
        expect(visit.get("send")).to_have_text("Stop")
        if by == "Escape":
            visit.page.keyboard.press("Escape")
        else:
            visit.get("send").click()
        expect(visit.get("send")).to_have_text("Send")
        expect(visit.get("status")).to_have_text("The answer was stopped.")
        wait_until(lambda: app.state.running == 0)
        text = visit.page.locator(".turn .answer").nth(1).inner_text()
        assert TEXT.startswith(text) and text != TEXT
        visit.chat("Go on")
        expect(visit.get("status")).to_contain_text("complete")
        assert app.state.requests[1]["messages"][1] == {"role": "assistant", "content": text}

    def test_text_of_the_model_is_never_html(self, visit: Visit) -> None:
        visit.chat(EVIL)
        expect(visit.page.locator(".turn .answer").nth(1)).to_have_text(EVIL.removeprefix("SAY "))
        visit.race(EVIL)
        expect(visit.get("verdict")).to_contain_text("Both texts are equal")
        assert visit.get("tree").locator("text").all_text_contents()[-1] == "·<b>bold</b>"
        assert visit.page.locator("img, main script, b").count() == 0

    def test_copy(self, browser: Browser, url: str) -> None:
        visit = Visit(browser, url, permissions=["clipboard-read", "clipboard-write"])
        visit.chat(QUESTION)
        visit.page.get_by_role("button", name="Copy").click()
        expect(visit.get("status")).to_have_text("Copied.")
        assert visit.page.evaluate("navigator.clipboard.readText()") == TEXT
        visit.close()

    def test_models_without_a_chat_template_continue_the_text(self, browser: Browser) -> None:
        app = make_app(has_chat_template=False)
        with serve(app) as url:
            visit = Visit(browser, url)
            visit.chat("Once upon ")
            expect(visit.page.locator(".turn .answer").nth(1)).to_have_text(TEXT)
            visit.chat(" The end.")
            expect(visit.page.locator(".turn .answer").nth(3)).to_have_text(TEXT)
            visit.close()
        assert app.state.requests[1]["prompt"] == f"Once upon {TEXT} The end."


@needs_chromium
class TestRace:
    def test_to_the_end(self, visit: Visit, app: FastAPI) -> None:
        visit.race()
        expect(visit.get("verdict")).to_have_text(f"✓ Both texts are equal: 23 tokens, {len(TEXT)} characters.")
        expect(visit.get("times")).to_contain_text("400 tokens/s, plain decoding 200 tokens/s")
        expect(visit.get("times")).to_contain_text("2.00 times the speed")
        for lane, tau in ("drafted", "2.75"), ("plain", "1.00"):
            assert visit.get(lane).locator(".answer").inner_text() == TEXT
            assert visit.get(lane).locator("dd").all_inner_texts()[::3] == ["23", tau]
        drafted, plain = app.state.requests
        assert drafted["speculation"]["enabled"] and not plain["speculation"]["enabled"]
        assert drafted["seed"] == plain["seed"]
        assert app.state.most_running == 1

    def test_tree_and_histogram(self, visit: Visit) -> None:
        visit.race()
        nodes = visit.get("tree").locator("g")
        assert nodes.locator("text").all_text_contents()[:3] == ["⏎The", "·answer", "·is"]
        kinds = [node.get_attribute("class") for node in nodes.all()]
        assert kinds == ["anchor", "guess", "guess", "rejected", "rejected", "rejected", "rejected", "fixed"]
        tops = [node.locator("rect").get_attribute("y") for node in nodes.all()]
        assert tops[0] == tops[1] == tops[2] == tops[7]  # the path is straight
        assert len(set(tops)) == 5
        words = "Cycle 8: 6 guesses, 2 accepted (“ answer is”), then the model's own “ \\boxed{15}.”"
        expect(visit.get("tree-words")).to_have_text(words)
        assert visit.get("tree").locator("svg").get_attribute("aria-label") == words
        rows = visit.get("histogram").locator("tr").all_inner_texts()
        assert [row.split() for row in rows] == [
            ["0", "2"],
            ["1", "2"],
            ["2", "2"],
            ["3", "1"],
            ["4", "0"],
            ["5", "1"],
        ]

    def test_first_difference_is_shown(self, visit: Visit) -> None:
        visit.race("DIFFER")
        expect(visit.get("verdict")).to_have_text("✗ The texts differ.")
        at = TEXT.index("15 rolls") + 2
        expect(visit.get("difference")).to_contain_text(f"From character {at} on")
        expect(visit.get("difference")).to_contain_text("= 1▸5 rolls left.")
        expect(visit.get("difference")).to_contain_text("= 1▸6 rolls left.")

    def test_slow_motion(self, visit: Visit) -> None:
        visit.race()
        visit.get("pace").select_option("0.5")
        visit.get("play").click()
        expect(visit.get("slow")).to_contain_text("500 times slower than they ran")
        expect(visit.get("tree-words")).to_have_text("Cycle 1: 8 guesses, not yet checked")
        expect(visit.get("result")).to_be_hidden()
        visit.get("play").click()
        expect(visit.get("status")).to_have_text("Slow motion is paused.")
        answer = visit.get("drafted").locator(".answer")
        shown = answer.inner_text()
        assert shown == "The"
        visit.get("step").click()
        words = "Cycle 1: 8 guesses, 3 accepted (“ baker has 4”), then the model's own “ *”"
        expect(visit.get("status")).to_have_text(words)
        assert answer.inner_text() == "The baker has 4 *"
        assert visit.get("plain").locator(".answer").inner_text() == "The baker"
        visit.get("pace").select_option("10")
        visit.get("play").click()
        expect(visit.get("result")).to_be_visible(timeout=20_000)
        assert visit.get("plain").locator(".answer").inner_text() == answer.inner_text() == TEXT
        visit.get("step").click()  # begins anew
        assert answer.inner_text() == "The"

    def test_stopped_in_either_lane(self, visit: Visit, app: FastAPI) -> None:
        for requests in 1, 3:  # in the lane that runs first, and in the other
            visit.race("SLOW", ends=False)
            wait_until(lambda requests=requests: len(app.state.requests) == requests)
            expect(visit.get("plain" if requests == 3 else "drafted").locator(".answer")).to_contain_text("The")
            visit.page.keyboard.press("Escape")
            expect(visit.get("status")).to_have_text("The race was stopped.")
            expect(visit.get("start")).to_have_text("Race")
            expect(visit.get("result")).to_be_hidden()
            expect(visit.get("replay")).to_be_hidden()
            wait_until(lambda: app.state.running == 0)

    def test_settings_are_sent(self, visit: Visit, app: FastAPI) -> None:
        for name, value in ("temperature", "0.7"), ("block_size", "4"), ("tree_budget", "0"), ("max_tokens", "64"):
            visit.get(name).fill(value)
        visit.get("seed").fill("7")
        visit.get("backend").select_option("hf")
        expect(visit.get("tree_budget-value")).to_have_text("0 (a chain)")
        visit.race()
        expect(visit.get("times")).to_contain_text("same seed")
        body, plain = app.state.requests
        assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.7, 64, 7)
        speculation = {"statistics": True, "trace": True, "backend": "hf"}
        assert body["speculation"] == speculation | {"enabled": True, "block_size": 4, "tree_budget": 0}
        assert plain["speculation"] == speculation | {"enabled": False}


@needs_chromium
class TestProblems:
    @pytest.mark.parametrize(
        ("prompt", "words"),
        [
            ("BUSY", "The server is busy: 64 requests are waiting. Try again in 3 seconds."),
            ("BAD", "The server refused this (400): max_tokens is 4096; the context holds 1024."),
            ("BREAK", "The server broke off its answer. Is it still running?"),
            ("FAIL", "The server could not go on: The model gave NaN."),
        ],
    )
    def test_are_told_in_words(self, visit: Visit, prompt: str, words: str) -> None:
        visit.chat(prompt)
        expect(visit.get("problem")).to_have_text(words)
        expect(visit.get("send")).to_have_text("Send")
        if prompt in ("BUSY", "BAD"):  # nothing was said, and the question is not lost
            assert visit.get("message").input_value() == prompt
            expect(visit.page.locator(".turn")).to_have_count(0)
        visit.race(prompt, ends=False)
        expect(visit.get("problem")).to_have_text(words)
        expect(visit.get("start")).to_have_text("Race")
        visit.race()
        expect(visit.get("problem")).to_have_text("")

    def test_server_gone(self, browser: Browser) -> None:
        with serve(make_app()) as url:
            visit = Visit(browser, url)
            visit.chat(f"SLOW SAY {'again and ' * 99}")
            expect(visit.page.locator(".turn .answer").nth(1)).to_contain_text("again")
        expect(visit.get("problem")).to_have_text("The server broke off its answer. Is it still running?")
        visit.chat("Hello?")
        expect(visit.get("problem")).to_have_text("The server does not answer. Is it still running?")
        expect(visit.get("send")).to_have_text("Send")
        visit.complaints = [line for line in visit.complaints if "ERR_" not in line]
        visit.close()

    def test_key(self, browser: Browser) -> None:
        with serve(make_app(key="secret")) as url:
            context = browser.new_context()
            page = context.new_page()
            page.goto(url)
            expect(page.locator("#problem")).to_have_text("The server asks for an API key.")
            expect(page.locator("#key")).to_be_focused()
            page.keyboard.type("wrong")
            page.keyboard.press("Enter")
            expect(page.locator("#problem")).to_have_text("The server does not take this API key.")
            page.locator("#key").fill("secret")
            page.keyboard.press("Enter")
            expect(page.locator("#about")).to_contain_text("scripted-target")
            page.reload()
            expect(page.locator("#about")).to_contain_text("scripted-target")
            expect(page.locator("#key-form")).to_be_hidden()
            assert page.evaluate("Object.values(localStorage).length") == 0
            context.close()

    def test_reload_while_running(self, visit: Visit, app: FastAPI) -> None:
        visit.race("SLOW", ends=False)
        wait_until(lambda: app.state.running == 1)
        visit.page.reload()
        wait_until(lambda: app.state.running == 0)
        expect(visit.get("start")).to_have_text("Race")
        expect(visit.get("drafted").locator(".answer")).to_have_text("")
        visit.race()
        expect(visit.get("verdict")).to_contain_text("equal")


@needs_chromium
class TestAccess:
    def test_by_keyboard_alone(self, visit: Visit, app: FastAPI) -> None:
        keys = visit.page.keyboard
        focused = lambda: visit.page.evaluate("document.activeElement.id || document.activeElement.tagName")  # noqa: E731
        order = []
        for _ in range(14):
            keys.press("Tab")
            order.append(focused())
        assert order[:3] == ["theme", "chat-tab", "SUMMARY"]
        assert order[3:10] == ["drafting", "temperature", "block_size", "tree_budget", "max_tokens", "seed", "backend"]
        assert order[10:] == ["log", "message", "send", "clear"]
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

    def test_everything_that_takes_input_has_a_name(self, visit: Visit) -> None:
        visit.chat(QUESTION)
        for _ in range(2):
            for element in visit.page.locator("button, input, select, textarea, [tabindex='0']").all():
                if element.is_visible():
                    name = re.search(r'^- \w+ "(.+?)"', element.aria_snapshot())
                    assert name is not None, element.evaluate("element => element.outerHTML")
            visit.race()

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_contrast(self, browser: Browser, url: str, scheme: str) -> None:
        visit = Visit(browser, url, color_scheme=scheme)
        visit.chat(QUESTION)
        expect(visit.get("status")).to_contain_text("complete")
        shown = visit.page.evaluate(CONTRASTS)
        visit.race()
        shown += visit.page.evaluate(CONTRASTS)
        visit.chat("BAD") if visit.get("chat").is_visible() else visit.race("BAD", ends=False)
        expect(visit.get("problem")).not_to_have_text("")
        shown += visit.page.evaluate(CONTRASTS)
        assert len(shown) > 100
        assert [(text, ratio) for text, ratio in shown if ratio < 4.5] == []
        visit.close()

    def test_colours_follow_the_system_and_the_button(self, browser: Browser, url: str) -> None:
        visit = Visit(browser, url, color_scheme="dark")
        colour = lambda: visit.page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
        dark = colour()
        visit.page.get_by_role("button", name="Light colours").click()
        light = colour()
        assert sum(map(int, re.findall(r"\d+", light))) > 600 > 150 > sum(map(int, re.findall(r"\d+", dark)))
        visit.page.get_by_role("button", name="Dark colours").click()
        assert colour() == dark
        visit.close()

    @pytest.mark.parametrize("width", [320, 480, 768, 1200])
    def test_no_width_scrolls_sideways(self, browser: Browser, url: str, width: int) -> None:
        visit = Visit(browser, url, viewport={"width": width, "height": 700})
        visit.chat(f"{QUESTION} {'x' * 200}")
        expect(visit.get("status")).to_contain_text("complete")
        assert visit.page.evaluate("document.documentElement.scrollWidth") == width
        visit.race()
        visit.get("step").click()
        assert visit.page.evaluate("document.documentElement.scrollWidth") == width
        visit.close()
