"""Makes docs/page.png: a conversation on the chat page of a running cluster.

    tandem serve
    python docs/page_picture.py http://127.0.0.1:8000

Needs Chromium at /usr/bin/chromium, and the packages of the `test` extra.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

QUESTIONS = ("What is the capital of France?", "Write a Python function that adds two numbers.")


def main(url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1000, "height": 640}, color_scheme="light")
        page.goto(url)
        expect(page.get_by_text("smollm2", exact=True)).to_be_visible()
        page.get_by_role("button", name="Settings").press("Enter")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Max tokens").fill("120")
        page.keyboard.press("Escape")
        page.get_by_role("textbox", name="Message", exact=True).focus()
        for turn, question in enumerate(QUESTIONS):
            page.keyboard.type(question)
            page.keyboard.press("Enter")
            figures = page.get_by_role("article", name="smollm2").nth(turn).get_by_role("status")
            expect(figures).to_contain_text("tokens", timeout=60_000)
        page.mouse.move(0, 0)
        page.screenshot(path=Path(__file__).with_name("page.png"))
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
