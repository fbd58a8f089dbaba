"""What a cache could have at most."""

from __future__ import annotations

from benchmarks.lib.cache_bounds import hit_share
from loadtest.datasets import TraceRow


def row(*hash_ids: int) -> TraceRow:
    return TraceRow(input_len=512 * len(hash_ids), output_len=1, arrival_s=0.0, hash_ids=hash_ids)


def test_a_cache_without_end_has_all_that_came_before() -> None:
    rows = [row(0, 1), row(0, 2), row(0, 1, 3), row(4)]
    assert hit_share(rows, None) == (512 + 1024) / (512 * 8)


def test_a_small_cache_forgets_the_oldest_and_of_a_prompt_its_end() -> None:
    rows = [row(0, 1), row(2), row(0, 1)]
    assert hit_share(rows, 3 * 512) == (1024 - 1) / (512 * 5), "the last token is always computed"
    assert hit_share(rows, 2 * 512) == 512 / (512 * 5)


def test_several_caches_have_less_than_one() -> None:
    rows = [row(number % 7, 10 + number % 3) for number in range(200)]
    one, several = hit_share(rows, 100 * 512), hit_share(rows, 100 * 512, num_caches=8)
    assert several < one
