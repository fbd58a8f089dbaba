"""Makes docs/ops.png: the operators' page of a running cluster, under load that this program makes.

    tandem serve --engine paced --prefill 16 --decode 16 --disaggregation always
    python docs/ops_picture.py http://127.0.0.1:8000

Takes two minutes, as long as the page's history. Needs Chromium at /usr/bin/chromium, and the packages of the `test` extra.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import httpx
from PIL import Image
from playwright.sync_api import expect, sync_playwright

PICTURE = Path(__file__).with_name("ops.png")
SIZE = {"width": 1440, "height": 930}
STREAMS = 72
SHARED_TOKENS = 1500
"""Half of the prompts begin with one of eight texts of so many tokens."""
PROMPTS = 1000
"""The token of which the first of these consists."""
HISTORY_S = 120.0
ANSWER_S = 120.0

Scheme = Literal["light", "dark"]


def ask_until(ending: threading.Event, url: str, number: int) -> None:
    """Requests with pauses between them, which become longer and shorter in the course of a minute."""
    rng = random.Random(number)
    with httpx.Client(timeout=ANSWER_S) as client:
        while not ending.wait(rng.expovariate(1) * (2 + 2 * math.sin(time.monotonic() / 10))):
            shared = rng.choice((0, SHARED_TOKENS))
            prompt = [PROMPTS + rng.randrange(8)] * shared
            prompt += [rng.randrange(100, 40_000) for _ in range(int(rng.lognormvariate(7, 1)) % 8000 + 20)]
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": rng.randrange(20, 300), "ignore_eos": True}
            client.post(f"{url}/v1/completions", json=body)


def take(url: str, seconds: float, scheme: Scheme, picture: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE, color_scheme=scheme)
        page.goto(f"{url}/ops")
        expect(page.locator("#pulse")).to_have_text("Live")
        page.wait_for_timeout(seconds * 500)
        page.locator(".decode .card button").nth(10).click()
        page.get_by_role("dialog").get_by_role("button", name="Drain").click()
        page.get_by_role("dialog").get_by_role("button", name="Close").click()
        page.mouse.move(0, 0)
        page.wait_for_timeout(seconds * 500)
        page.screenshot(path=picture)
        browser.close()
    Image.open(picture).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        picture, optimize=True
    )


def main(url: str, seconds: float = HISTORY_S, scheme: Scheme = "light", picture: Path = PICTURE) -> None:
    ending = threading.Event()
    with ThreadPoolExecutor(STREAMS) as threads:
        for number in range(STREAMS):
            threads.submit(ask_until, ending, url, number)
        try:
            take(url, seconds, scheme, picture)
        finally:
            ending.set()


if __name__ == "__main__":
    main(sys.argv[1])
