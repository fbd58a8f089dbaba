"""How much of what could be cached is, with the real model: `python -m benchmarks.cached_chats [--rounds N]`.

Two prefill and two decode workers of the default model. Eight chats at a time with six turns each begin with one of two system
prompts of 320 tokens; each turn sends all that was said before and 40 tokens more. Once workers are chosen by what they have
cached, once by load alone (`--routing`); a fresh cluster for every round. What could be cached is, of each prompt, the full
blocks that were computed before: of the system prompt in a first turn, of the chat so far in later ones.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.lib.environment import write_result
from benchmarks.lib.servers import HOST, cluster
from protocol.cache.news import NEWS_GAP_S

CHATS, TURNS = 8, 6
SYSTEM, MORE, ANSWER = 320, 40, 24
BLOCK_SIZE = 16
KNOWN_S, LEAST_THINK_S = 4 * NEWS_GAP_S, 1.2 * NEWS_GAP_S
"""Before the chats, and between two turns (up to a second is added): meanwhile routers hear of what was cached."""
ROUTINGS = ("cache", "load")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    shares: dict[str, list[float]] = {routing: [] for routing in ROUTINGS}
    for number in range(given.rounds):
        for routing in ROUTINGS if number % 2 == 0 else ROUTINGS[::-1]:
            with cluster(given.port, "--prefill", "2", "--decode", "2", "--routing", routing):
                shares[routing].append(measure(given.port, number))
    write_result("cached_chats", {"shares": shares}, table(shares))


def measure(port: int, seed: int) -> float:
    """The share of what could be cached that was, over all chats."""
    rng = random.Random(seed)
    systems = [tokens(rng, SYSTEM) for _ in range(2)]
    for system in systems:
        ask(port, system)
    time.sleep(KNOWN_S)
    with ThreadPoolExecutor(CHATS) as threads:
        chats = [threads.submit(chat, port, systems[number % 2], seed * CHATS + number) for number in range(CHATS)]
        found = [each.result() for each in chats]
    return sum(cached for cached, _ in found) / sum(could for _, could in found)


def chat(port: int, prompt: list[int], seed: int) -> tuple[int, int]:
    """Tokens that were cached, and that could have been."""
    rng, cached, could = random.Random(seed), 0, 0
    known = len(prompt)
    for _ in range(TURNS):
        prompt = prompt + tokens(rng, MORE)
        could += known // BLOCK_SIZE * BLOCK_SIZE
        answer, hit = ask(port, prompt)
        cached += hit
        prompt = prompt + answer
        known = len(prompt) - 1  # of the last token no KV was computed
        time.sleep(LEAST_THINK_S + rng.random())
    return cached, could


def ask(port: int, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt's were cached."""
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(count)]


def table(shares: dict[str, list[float]]) -> str:
    lines = [
        "# What is cached of chats",
        "",
        f"{CHATS} chats at a time of {TURNS} turns over 2 system prompts of {SYSTEM} tokens; 2 prefill and 2 decode workers of "
        "smollm2, `--disaggregation auto`.",
        "",
        "| workers chosen by | of what could be cached, median | rounds |",
        "|---|---|---|",
    ]
    for routing, name in (("cache", "cache and load"), ("load", "load alone")):
        rounds = ", ".join(f"{share:.1%}" for share in shares[routing])
        lines.append(f"| {name} | {statistics.median(shares[routing]):.1%} | {rounds} |")
    lines += ["", "Command: `python -m benchmarks.cached_chats`"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
