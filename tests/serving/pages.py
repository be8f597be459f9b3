"""The page of the server in a Chromium without a window."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
QUESTION = "How many rolls are left?"


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def serve(app: FastAPI) -> Iterator[str]:
    """URL of the application while it runs."""
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


class Visit:
    """An open page, with its console messages and the hosts that it called."""

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
        """Assert that no other machine was called, and that the console holds nothing but failed requests."""
        self.page.context.close()
        assert self.hosts == {httpx.URL(self.url).netloc.decode()}
        assert [line for line in self.complaints if not line.startswith("Failed to load resource")] == []
