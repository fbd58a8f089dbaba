"""How much of what could be cached is, with the real model: `python -m benchmarks.cached_chats [--rounds N]`.

Two prefill and two decode workers of the default model. Eight chats of six turns begin one after the other, with one of two
system prompts of 320 tokens. Each turn sends all that was said before and 40 tokens more, some time after the answer: meanwhile
routers hear of what was cached. Once workers are chosen by what they have cached, once by load alone (`--routing`); a fresh
cluster for every round. What could be cached is what `tandem bench` calls reusable, in whole blocks, without the last token
of an answer, of which no KV was computed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

from benchmarks.lib.environment import write_result
from benchmarks.lib.load import put_load
from benchmarks.lib.servers import HOST, cluster
from loadtest.options import BenchOptions
from loadtest.records import TurnRecord
from protocol.cache.news import NEWS_GAP_S

CHATS, TURNS = 8, 6
SYSTEMS, SYSTEM, MORE, ANSWER = 2, 320, 40, 24
BLOCK_SIZE = 16
BEGIN_PER_S, THINK_S = 1.0, 3 * NEWS_GAP_S
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
    """The share of what could be cached that was, over all chats. Raises RuntimeError if a request failed."""
    options = BenchOptions(
        base_url=f"http://{HOST}:{port}",
        backend="chat",
        multi_turn=True,
        multi_turn_num_turns=TURNS,
        multi_turn_delay_ms=1000 * THINK_S,
        num_system_prompts=SYSTEMS,
        system_prompt_len=SYSTEM,
        random_input_len=MORE,
        random_output_len=ANSWER,
        num_prompts=CHATS,
        request_rate=BEGIN_PER_S,
        ignore_eos=True,
        seed=seed,
        timeout_s=120.0,
    )
    turns = [record for record in asyncio.run(put_load(options)).records if isinstance(record, TurnRecord)]
    for turn in turns:
        if turn.error is not None:
            raise RuntimeError(f"turn {turn.turn_index + 1} of chat {turn.conversation_id + 1}: {turn.error}")
    could = [reusable(turn) for turn in turns]
    return sum(min(turn.cached_tokens or 0, most) for turn, most in zip(turns, could, strict=True)) / sum(could)


def reusable(turn: TurnRecord) -> int:
    """Tokens of the prompt that could be cached, in whole blocks."""
    tokens = (turn.reusable_tokens or 0) - (1 if turn.turn_index else 0)
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def table(shares: dict[str, list[float]]) -> str:
    lines = [
        "# What is cached of chats",
        "",
        f"{CHATS} chats of {TURNS} turns over {SYSTEMS} system prompts of {SYSTEM} tokens; one begins every "
        f"{1 / BEGIN_PER_S:g} s on average. 2 prefill and 2 decode workers of smollm2, `--disaggregation auto`.",
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
