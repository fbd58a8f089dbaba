"""This worker's books for an audit (`protocol.audit`): what it holds for which ticket, and whether its own tables agree."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping

from engine.memory.prefix_cache import PrefixCache
from kv_transfer.peers import DecodePeers
from prefill_workers.scheduler import PrefillScheduler, Prompt
from protocol.audit import PinRow, PrefillBooks, PromptRow


def prefill_books(
    call_id: int, cache: PrefixCache, scheduler: PrefillScheduler, peers: DecodePeers, prompts: Mapping[Prompt, PromptRow]
) -> PrefillBooks:
    """What a prefill worker holds, all at one moment, as an audit compares it. `prompts` are all that the worker knows of."""
    return PrefillBooks(
        call_id=call_id,
        total_blocks=cache.num_blocks,
        free_blocks=cache.num_free,
        owned_blocks=cache.num_owned,
        references=cache.num_references,
        prompts=tuple(prompts.values()),
        pairs=peers.books(),
        pins=tuple(PinRow(pin.purpose, len(pin.table), time.monotonic() - pin.deadline) for pin in cache.pins),
        problems=tuple(_problems(cache, scheduler, prompts)),
    )


def _problems(cache: PrefixCache, scheduler: PrefillScheduler, prompts: Collection[Prompt]) -> Iterator[str]:
    try:
        cache.check_integrity(prompt.block_table for prompt in prompts)
    except AssertionError as error:
        yield str(error)
    holding = sum(bool(prompt.block_table) for prompt in prompts)
    if scheduler.num_held != holding:
        yield f"the scheduler gave blocks to {scheduler.num_held} prompts, of which {holding} are known"
