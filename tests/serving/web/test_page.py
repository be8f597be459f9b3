"""The page with scripted answers."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx
import pytest
from fastapi import FastAPI
from pages import QUESTION, Visit, serve, wait_until
from playwright.sync_api import Browser, expect
from scripted_server import TEXT, make_app

EVIL = "SAY <img src=x onerror=alert(1)> <script>alert(2)</script> &amp; <b>bold</b>"

pytestmark = pytest.mark.slow


def test_policy_allows_only_the_page(url: str) -> None:
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


def test_chat_of_several_turns(visit: Visit, app: FastAPI) -> None:
    visit.chat(QUESTION)
    answer = visit.page.locator(".turn").nth(1)
    expect(answer.locator(".answer")).to_have_text(TEXT)
    assert answer.locator(".draft").first.inner_text() == " baker"
    assert answer.locator(".fixed").first.inner_text() == " *"
    expect(answer).to_contain_text("23 tokens, 14 of them accepted draft tokens, 400 tokens/s, tau 2.75")
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


def test_stopped_answers_stay(visit: Visit, app: FastAPI) -> None:
    visit.chat("SLOW")
    expect(visit.page.locator(".turn .answer").nth(1)).to_contain_text("The baker")
    expect(visit.get("send")).to_have_text("Stop")
    visit.get("send").click()
    expect(visit.get("send")).to_have_text("Send")
    expect(visit.get("status")).to_have_text("The answer was stopped.")
    wait_until(lambda: app.state.running == 0)
    text = visit.page.locator(".turn .answer").nth(1).inner_text()
    assert TEXT.startswith(text) and text != TEXT
    visit.chat("Go on")
    expect(visit.get("status")).to_contain_text("complete")
    assert app.state.requests[1]["messages"][1] == {"role": "assistant", "content": text}


def test_answers_and_blocks_of_code_can_be_copied(browser: Browser, url: str) -> None:
    visit = Visit(browser, url, permissions=["clipboard-read", "clipboard-write"])
    answer = "Two blocks:\n```python\ndef f():\n    return 1\n```\nand\n```\nls <b>"
    visit.chat(f"SAY {answer}\n")
    blocks, copies = visit.page.locator(".turn .code"), visit.page.get_by_role("button", name="Copy")
    expect(blocks).to_have_count(2)
    expect(blocks.nth(0)).to_contain_text("python")
    assert blocks.locator("pre").all_text_contents() == ["def f():\n    return 1\n", "ls <b>"]
    assert visit.page.locator(".turn .answer").nth(1).text_content().startswith("Two blocks:\n")
    assert blocks.locator("pre .draft").count() > 0
    for button, text in (blocks.nth(0).get_by_role("button"), "def f():\n    return 1\n"), (copies.last, answer):
        button.click()
        expect(visit.get("status")).to_have_text("Copied.")
        assert visit.page.evaluate("navigator.clipboard.readText()") == text
    visit.close()


def test_the_page_reports_paused_drafting(visit: Visit) -> None:
    visit.chat("PAUSE")
    expect(visit.get("status")).to_contain_text("tau 1.00. Nothing was drafted, since drafting would have been slower.")
    visit.get("drafting").uncheck()  # drafting is off
    visit.chat("And then?")
    expect(visit.page.locator(".turn button")).to_have_count(2)
    expect(visit.get("status")).not_to_contain_text("Nothing was drafted")
    visit.race("PAUSE")
    expect(visit.get("times")).to_contain_text("Nothing was drafted")


def test_race_to_the_end(visit: Visit, app: FastAPI) -> None:
    visit.race()
    expect(visit.get("verdict")).to_have_text(f"✓ Both texts are equal: 23 tokens, {len(TEXT)} characters.")
    expect(visit.get("times")).to_contain_text("400 tokens/s, plain decoding 200 tokens/s")
    expect(visit.get("times")).not_to_contain_text("Nothing was drafted")
    expect(visit.get("gain")).to_have_text("2.00 times the speed")
    for lane, tau in ("drafted", "2.75"), ("plain", "1.00"):
        assert visit.get(lane).locator(".answer").inner_text() == TEXT
        assert visit.get(lane).locator("dd").all_inner_texts()[::3] == ["23", tau]
    drafted, plain = app.state.requests
    assert drafted["speculation"]["enabled"] and not plain["speculation"]["enabled"]
    assert drafted["seed"] == plain["seed"]
    assert app.state.most_running == 1
    nodes = visit.get("tree").locator("g")
    assert nodes.locator("text").all_text_contents()[:3] == ["⏎The", "·answer", "·is"]
    kinds, tops = nodes.evaluate_all(
        "nodes => [nodes.map(n => n.getAttribute('class')), nodes.map(n => n.querySelector('rect').getAttribute('y'))]"
    )
    assert kinds == ["anchor", "draft", "draft", "rejected", "rejected", "rejected", "rejected", "fixed"]
    assert tops[0] == tops[1] == tops[2] == tops[7]  # the path is straight
    assert len(set(tops)) == 5
    words = "Step 8: 6 draft tokens, 2 accepted (“ answer is”), then the model's own “ \\boxed{15}.”"
    expect(visit.get("tree-words")).to_have_text(words)
    assert visit.get("tree").locator("svg").get_attribute("aria-label") == words
    rows = [row.split() for row in visit.get("histogram").locator("tr").all_inner_texts()]
    assert rows == [["0", "2"], ["1", "2"], ["2", "2"], ["3", "1"], ["4", "0"], ["5", "1"]]


def test_model_output_is_never_html(visit: Visit) -> None:
    visit.chat(EVIL)
    expect(visit.page.locator(".turn .answer").nth(1)).to_have_text(EVIL.removeprefix("SAY "))
    visit.race(EVIL)
    expect(visit.get("verdict")).to_contain_text("Both texts are equal")
    assert visit.get("tree").locator("text").all_text_contents()[-1] == "·<b>bold</b>"
    assert visit.page.locator("img, main script, b").count() == 0


def test_the_system_message_is_sent_first(visit: Visit, app: FastAPI) -> None:
    visit.get("system").fill("Be brief.")
    visit.chat(QUESTION)
    expect(visit.get("status")).to_contain_text("complete")
    visit.chat("And then?")
    wait_until(lambda: len(app.state.requests) == 2)
    roles = [[message["role"] for message in body["messages"]] for body in app.state.requests]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert app.state.requests[0]["messages"][0]["content"] == "Be brief."
    assert app.state.requests[0]["max_tokens"] == 1024


def test_the_progress_of_a_prefill_is_shown(visit: Visit) -> None:
    visit.chat("LONG")
    expect(visit.get("status")).to_have_text("The model is reading the prompt: 2,048 of 17,600 tokens.")
    assert visit.get("prefill").evaluate("bar => [bar.value, bar.max, bar.hidden]") == [2048, 17600, False]
    expect(visit.get("status")).to_contain_text("complete")
    expect(visit.get("prefill")).to_be_hidden()


def test_editors_get_this_server_and_its_model(visit: Visit) -> None:
    visit.get("connect-tab").click()
    address = visit.url.removesuffix("/")
    expect(visit.get("base-url")).to_have_text(f"{address}/v1")
    expect(visit.get("model-name")).to_have_text("scripted")
    expect(visit.get("settings")).to_be_hidden()
    for name in visit.get("editor").locator("option").all_text_contents():
        visit.get("editor").select_option(name)
        block = visit.get("editor-block").locator("pre").text_content() or ""
        assert address in block and "NAME" not in block and "undefined" not in block
        assert "scripted" in block or "lla" in name  # llama.cpp's plugins name no model
    visit.get("connect-tab").press("ArrowRight")
    expect(visit.get("chat-tab")).to_be_focused()


def test_lookup_races_over_an_edit(browser: Browser) -> None:
    with serve(make_app(drafter="lookup")) as url:
        visit = Visit(browser, url)
        visit.get("race-tab").click()
        prompt = visit.get("prompt").input_value()
        assert "Rename" in prompt and prompt.count("\n") > 40 and prompt.count("amount") > 5
        visit.close()


def test_models_without_a_chat_template_continue_the_text(browser: Browser) -> None:
    app = make_app(has_chat_template=False)
    with serve(app) as url:
        visit = Visit(browser, url)
        visit.chat("Once upon ")
        expect(visit.page.locator(".turn .answer").nth(1)).to_have_text(TEXT)
        visit.chat(" The end.")
        expect(visit.page.locator(".turn .answer").nth(3)).to_have_text(TEXT)
        visit.close()
    assert app.state.requests[1]["prompt"] == f"Once upon {TEXT} The end."


def test_first_difference_is_shown(visit: Visit) -> None:
    visit.race("DIFFER")
    expect(visit.get("verdict")).to_have_text("✗ The texts differ.")
    at = TEXT.index("15 rolls") + 2
    expect(visit.get("difference")).to_contain_text(f"From character {at} on")
    expect(visit.get("difference")).to_contain_text("= 1▸5 rolls left.")
    expect(visit.get("difference")).to_contain_text("= 1▸6 rolls left.")


def test_slow_motion(visit: Visit) -> None:
    visit.race()
    visit.get("pace").select_option("0.5")
    visit.get("play").click()
    expect(visit.get("how")).to_contain_text("500 times slower than they ran")
    expect(visit.get("tree-words")).to_have_text("Step 1: 8 draft tokens, not yet checked")
    visit.get("play").click()
    expect(visit.get("status")).to_have_text("Slow motion is paused.")
    answer = visit.get("drafted").locator(".answer")
    shown = answer.inner_text()
    assert shown == "The"
    visit.get("step").click()
    words = "Step 1: 8 draft tokens, 3 accepted (“ baker has 4”), then the model's own “ *”"
    expect(visit.get("status")).to_have_text(words)
    assert answer.inner_text() == "The baker has 4 *"
    assert visit.get("plain").locator(".answer").inner_text() == "The baker"
    visit.get("pace").select_option("10")
    visit.get("play").click()
    expect(visit.get("status")).to_have_text("Slow motion has ended.", timeout=20_000)
    assert visit.get("plain").locator(".answer").inner_text() == answer.inner_text() == TEXT
    visit.get("step").click()  # begins anew
    assert answer.inner_text() == "The"


def test_race_stopped_in_either_lane(visit: Visit, app: FastAPI) -> None:
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


def test_settings_are_sent(visit: Visit, app: FastAPI) -> None:
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


def test_the_page_explains_problems(visit: Visit) -> None:
    for prompt, words, kept in (
        ("BUSY", "The server is busy: 64 requests are waiting. Try again in 3 seconds.", True),
        ("BAD", "The server refused this (400): max_tokens is 4096; the context holds 1024.", True),
        ("BREAK", "The connection broke during the answer. Is the server still running?", False),
        ("FAIL", "The answer failed: The model gave NaN.", False),
    ):
        visit.get("chat-tab").click()
        visit.chat(prompt)
        expect(visit.get("problem")).to_have_text(words)
        expect(visit.get("send")).to_have_text("Send")
        if kept:  # the question is not lost
            assert visit.get("message").input_value() == prompt
            expect(visit.page.locator(".turn")).to_have_count(0)
        visit.race(prompt, ends=False)
        expect(visit.get("problem")).to_have_text(words)
        expect(visit.get("start")).to_have_text("Race")
    visit.race()
    expect(visit.get("problem")).to_have_text("")


def test_server_gone(browser: Browser) -> None:
    with serve(make_app()) as url:
        visit = Visit(browser, url)
        visit.chat(f"SLOW SAY {'again and ' * 99}")
        expect(visit.page.locator(".turn .answer").nth(1)).to_contain_text("again")
    expect(visit.get("problem")).to_have_text("The connection broke during the answer. Is the server still running?")
    visit.chat("Hello?")
    expect(visit.get("problem")).to_have_text("The server does not answer. Is it still running?")
    expect(visit.get("send")).to_have_text("Send")
    visit.complaints = [line for line in visit.complaints if "ERR_" not in line]
    visit.close()


def test_key(browser: Browser) -> None:
    with serve(make_app(key="secret")) as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#problem")).to_have_text("The server needs an API key.")
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#problem")).to_have_text("The server refuses this API key.")
        page.locator("#key").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#about")).to_contain_text("scripted-target")
        page.locator("#connect-tab").click()
        for name in page.locator("#editor option").all_text_contents():
            page.locator("#editor").select_option(name)
            assert "YOUR_KEY" in (page.locator("#editor-block").text_content() or ""), name
        page.reload()
        expect(page.locator("#about")).to_contain_text("scripted-target")
        expect(page.locator("#key-form")).to_be_hidden()
        assert page.evaluate("Object.values(localStorage).length") == 0
        context.close()
