"""A visit to a page of the router in headless Chromium: the chat page, unless a subclass says otherwise."""

from __future__ import annotations

import re
import shutil
from importlib.resources import files
from typing import Any

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, expect

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DEADLINE_MS = 30_000
CHAT = "**/v1/chat/completions"


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong with the page as it is now: each rule, and the elements that break it."""
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text())
    found = page.evaluate("async () => (await axe.run()).violations")
    return [f"{each['id']}: {each['help']}: {', '.join(node['html'] for node in each['nodes'])}" for each in found]


class Visit:
    """One visit to the page, in a profile of its own."""

    path = "/"

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.url = url
        self.context: BrowserContext = browser.new_context(**options)
        self.context.set_default_timeout(DEADLINE_MS)
        self.requests: list[str] = []
        self.mishaps: list[str] = []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page = self.context.new_page()
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.mishaps.append(str(error)))
        self.page.goto(url + self.path)
        self.message = self.page.get_by_role("textbox", name="Message", exact=True)
        self.log = self.page.get_by_role("log", name="Conversation")
        self.questions = self.page.get_by_role("article", name="You")
        self.answers = self.page.get_by_role("article", name="smollm2")
        self.problem = self.page.get_by_role("alert")

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.mishaps.append(message.text)

    def close(self) -> None:
        self.context.close()
        assert [url for url in self.requests if not url.startswith(f"{self.url}/")] == []
        assert self.mishaps == []

    def foresee(self, mishap: str) -> None:
        """This one, which Chromium wrote to the console, was meant to happen, once."""
        (found,) = (said for said in self.mishaps if mishap in said)
        self.mishaps.remove(found)

    def forgive(self, mishap: str) -> None:
        """The like of this was meant to happen, any number of times."""
        self.mishaps = [said for said in self.mishaps if mishap not in said]

    def set(self, **values: str) -> None:
        """In the settings, by the keyboard."""
        self.page.get_by_role("button", name="Settings").press("Enter")
        for name, value in values.items():
            self.page.get_by_label(name.replace("_", " ")).fill(value)
        self.page.keyboard.press("Escape")

    def send(self, text: str) -> dict[str, Any]:
        """By the keyboard; the body of the request that comes of it."""
        expect(self.message).to_be_focused()
        self.page.keyboard.type(text)
        with self.page.expect_request(CHAT) as request:
            self.page.keyboard.press("Enter")
        body = request.value.post_data_json
        assert isinstance(body, dict)
        return body

    def figures(self, turn: int) -> Locator:
        return self.answers.nth(turn).get_by_role("status")

    def until_text(self, turn: int) -> None:
        """Some of an answer is there, and more is to come."""
        expect(self.answers.nth(turn)).to_contain_text(re.compile(r"\w+ \w+ \w+"), timeout=DEADLINE_MS)
        expect(self.page.get_by_role("button", name="Stop")).to_be_visible()
