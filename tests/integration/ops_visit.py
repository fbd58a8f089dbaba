"""A visit to the operators' page in headless Chromium, and load for the cluster that it shows."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
from playwright.sync_api import Browser, Locator, expect

from tests.integration.page_visit import Visit

ANSWER_S = 60.0


class OpsVisit(Visit):
    """One visit to /ops, in a profile of its own."""

    path = "/ops"

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        super().__init__(browser, url, **options)
        self.pulse = self.page.locator("#pulse")
        self.events = self.page.get_by_role("log", name="Events").get_by_role("listitem")
        self.dialog = self.page.get_by_role("dialog")
        self.outcome = self.dialog.get_by_role("status")

    def live(self) -> None:
        """Wait until the page shows the cluster."""
        expect(self.pulse).to_have_text("Live")
        expect(self.page.get_by_role("group", name="Topology")).to_be_visible()

    def card(self, worker_id: str) -> Locator:
        return self.page.locator(".card").filter(has=self.page.get_by_role("heading", name=worker_id, exact=True))

    def workers(self) -> list[str]:
        return self.page.locator(".card h3").all_text_contents()

    def tile(self, name: str) -> Locator:
        return self.page.locator("#summary > div").filter(has_text=name).locator("dd")

    def event(self, text: str | re.Pattern[str]) -> Locator:
        return self.events.filter(has_text=text)

    def confirm(self, order: str) -> None:
        """Press the dialog's own button."""
        self.dialog.get_by_role("button", name=order, exact=True).click()

    def close_dialog(self) -> None:
        self.dialog.get_by_role("button", name="Close").click()
        expect(self.dialog).to_be_hidden()


@contextmanager
def load(url: str, streams: int, max_tokens: int = 150) -> Iterator[None]:
    """So many requests at a time while the block runs, of prompts that are new. The block fails if one of them does."""
    ending = threading.Event()

    def ask_again_and_again(seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(timeout=ANSWER_S) as client:
            while not ending.is_set():
                prompt = [rng.randrange(100, 40_000) for _ in range(rng.randrange(50, 1500))]
                body = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
                answer = client.post(f"{url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(streams) as threads:
        running = [threads.submit(ask_again_and_again, seed) for seed in range(streams)]
        try:
            yield
        finally:
            ending.set()
        for each in running:
            each.result(ANSWER_S)
