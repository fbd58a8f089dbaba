"""What brings cached blocks into simulated workers: loans, tiers, and the news of what there is."""

from __future__ import annotations

import pytest

from engine.memory.prefix_cache import PrefixCache
from kv_transfer.fetching import lender
from kv_transfer.sender import PIECE_TOKENS
from prefill_workers import fetching as real_fetching
from protocol.cache.news import NEWS_GAP_S, CacheNews
from simulator import fetching
from simulator.clock import Clock
from simulator.cluster import Shape, simulate
from simulator.request import Request
from simulator.shared import Caching, MemoryTier, Site, TierSize
from simulator.telling import News
from tests.unit.simulator.small_clusters import OVERHEADS, PREFILL_TOKEN_S, blocks_of, config, next_turn, profile


def test_a_fetch_takes_its_messages_and_the_links_time() -> None:
    """The prompt lies at the decode worker alone, which has computed it with its first pool full."""
    a = Request(0, 0.0, [100] * 200, 60)
    b = next_turn(a, 1, 20.0, [101] * 30, 1)
    simulate([a, b], Shape(1, 1), config(), profile())
    num_tokens = blocks_of(259) - blocks_of(200)
    assert b.brought.peer_tokens == num_tokens
    fetch_s = 2 * OVERHEADS.message_s + OVERHEADS.handoff_s + num_tokens * OVERHEADS.handoff_token_s
    assert b.brought.peer_s == pytest.approx(fetch_s, abs=1e-12)
    computed_s = (len(b.token_ids) - blocks_of(259)) * PREFILL_TOKEN_S
    assert b.ttft_s == pytest.approx(OVERHEADS.request_s + 4 * OVERHEADS.message_s + fetch_s + computed_s, abs=1e-12)


def test_a_tier_gives_back_what_pools_have_lost() -> None:
    """Others have used the only pools in between. Reading takes the time that the tier says."""
    size = TierSize(num_tokens=1 << 14, token_s=2.0**-13)
    a, others = Request(0, 0.0, [100] * 400, 1), [Request(1 + n, 5.0 + 5 * n, [200 + n] * 400, 1) for n in range(4)]
    again = Request(9, 40.0, [100] * 400, 1)
    simulate([a, *others, again], Shape(1, 1), config(), profile(), Caching(tier=size))
    assert (again.cached, again.brought.memory_tokens) == (blocks_of(399), blocks_of(399))
    assert again.brought.seconds == pytest.approx(blocks_of(399) * size.token_s)
    computed_s = (400 - blocks_of(399)) * PREFILL_TOKEN_S
    in_all = OVERHEADS.request_s + 4 * OVERHEADS.message_s + again.brought.seconds + computed_s
    assert again.ttft_s == pytest.approx(in_all, abs=1e-12)
    requests = [Request(0, 0.0, [100] * 400, 1), *others, Request(9, 40.0, [100] * 400, 1)]
    simulate(requests, Shape(1, 1), config(), profile())
    assert requests[-1].cached == 0, "without the tier it is lost"


def test_a_decode_worker_reads_the_tier_for_what_it_computes_itself() -> None:
    size = TierSize(num_tokens=1 << 14, token_s=2.0**-13)
    rows = [(0.0 if n == 0 else 5.0, [100 if n in (0, 5) else 200 + n] * 400) for n in range(6)]
    requests = [Request(n, 5.0 * n, prompt, 8) for n, (_, prompt) in enumerate(rows)]
    simulate(requests, Shape(0, 1), config(disaggregation="never"), profile(), Caching(tier=size))
    assert [request.brought.memory_tokens for request in requests] == [0, 0, 0, 0, 0, blocks_of(399)]
    assert requests[5].cached == blocks_of(399)


def test_a_tier_keeps_what_was_used_last_and_of_a_prompt_its_beginning() -> None:
    tier = MemoryTier(4, 0.0)
    first, second = [b"a", b"b", b"c"], [b"x", b"y"]
    tier.put(first)
    tier.put(second)
    assert (tier.match(first), tier.match(second), tier.match([b"b"])) == (2, 2, 1)
    tier.put(first[:1])
    tier.put([b"z", b"u"])
    assert (tier.match(first), tier.match(second), tier.match([b"z", b"u"])) == (1, 1, 2)


def lending(num_keys: int) -> tuple[Clock, PrefixCache, fetching.Lender, list[bytes]]:
    """A lender, and the keys of all blocks that it holds."""
    clock, cache = Clock(), PrefixCache(64)
    site = Site(config(), profile(), clock, {}, report=lambda report: None, beat=None, tell=None)
    keys = [bytes([n]) * 32 for n in range(num_keys)]
    table = cache.allocate(num_keys, ())
    assert table is not None
    cache.insert(keys, table)
    cache.release(keys, table)
    return clock, cache, fetching.Lender(site, cache, lambda: None, lambda: None), keys


def test_loans_share_the_lenders_link_and_pin_what_is_sent() -> None:
    clock, cache, lends, keys = lending(4)
    answers: list[tuple[float, int]] = []

    def answer(num_blocks: int) -> None:
        answers.append((clock.now, num_blocks))

    clock.at(1.0, lends.ask, [*keys, b"unknown"], 0, answer)
    clock.at(1.0, lends.ask, keys, 2, answer)
    clock.at(1.0, cache.check_integrity, ())
    pinned: list[int] = []
    clock.at(1.0, lambda: pinned.append(cache.num_references))
    clock.run()
    first = 1.0 + 64 * OVERHEADS.handoff_token_s
    over = OVERHEADS.handoff_s + OVERHEADS.message_s
    assert answers == [(first + over, 4), (first + 32 * OVERHEADS.handoff_token_s + over, 4)]
    assert pinned == [8]
    assert lends.lent_tokens == 64 + 32
    assert cache.num_free == cache.num_blocks
    cache.check_integrity(())


def test_a_lender_refuses_what_it_does_not_have_and_too_many_at_once() -> None:
    clock, cache, lends, keys = lending(4)
    answers: list[tuple[float, int]] = []

    def answer(num_blocks: int) -> None:
        answers.append((clock.now, num_blocks))

    clock.at(1.0, lends.ask, [b"unknown"], 0, answer)
    for _ in range(fetching.MOST_LOANS + 1):
        clock.at(1.0, lends.ask, keys, 1, answer)
    clock.run()
    assert answers[:2] == [(1.0 + OVERHEADS.message_s, 0), (1.0 + OVERHEADS.message_s, 1)]
    assert [num_blocks for _, num_blocks in answers[2:]] == [4] * fetching.MOST_LOANS
    assert cache.num_free == cache.num_blocks


def test_fetches_have_the_limits_of_real_ones() -> None:
    assert (fetching.MOST_LOANS, fetching.PIECE_TOKENS) == (lender.MOST_LOANS, PIECE_TOKENS)
    assert fetching.MOST_AT_ONCE == real_fetching._MOST_AT_ONCE


def test_news_come_at_once_and_then_after_a_gap_without_what_was_undone() -> None:
    clock = Clock()
    heard: list[tuple[float, CacheNews]] = []
    news = News("prefill-0", clock, lambda message: heard.append((clock.now, message)))
    keys = [bytes([n]) * 32 for n in range(3)]
    clock.at(1.0, news.note, keys[0], True)
    clock.at(1.0, news.note, keys[1], True)
    clock.at(1.0 + NEWS_GAP_S / 2, news.note, keys[2], True)
    clock.at(1.0 + NEWS_GAP_S / 2, news.note, keys[0], False)
    clock.at(1.0 + NEWS_GAP_S / 2, news.note, keys[2], False)
    clock.run()
    assert [(at, len(message.gained) // 8, len(message.lost) // 8) for at, message in heard] == [
        (1.0, 2, 0),
        (1.0 + NEWS_GAP_S, 0, 1),
    ]
    assert [message.number for _, message in heard] == [1, 2]
