"""Load reports of which only what the router's rules read is given."""

from __future__ import annotations

from protocol.messages.load import DecodeLoad, LoadReport, PrefillLoad

NOTHING_PREFILLED = PrefillLoad(computed_tokens=0)


def prefill_report(worker_id: str, *, queued_tokens: int = 0) -> LoadReport:
    return load_report(worker_id, queued_tokens=queued_tokens, prefill=NOTHING_PREFILLED)


def decode_report(
    worker_id: str,
    *,
    queued_tokens: int = 0,
    running: int = 0,
    reservable_blocks: int = 0,
    free_blocks: int = 0,
    total_blocks: int = 1000,
    step_s: float = 0.0,
) -> LoadReport:
    decode = DecodeLoad(
        reservable_blocks=reservable_blocks,
        generated_tokens=0,
        prefilled_tokens=0,
        num_preemptions=0,
        recomputed_tokens=0,
        step_s=step_s,
    )
    return load_report(
        worker_id,
        queued_tokens=queued_tokens,
        running=running,
        free_blocks=free_blocks,
        total_blocks=total_blocks,
        decode=decode,
    )


def load_report(
    worker_id: str,
    *,
    epoch: int = 1,
    queued_tokens: int = 0,
    running: int = 0,
    free_blocks: int = 0,
    total_blocks: int = 1000,
    prefill: PrefillLoad | None = None,
    decode: DecodeLoad | None = None,
) -> LoadReport:
    """A worker that has done nothing yet."""
    return LoadReport(
        worker_id=worker_id,
        epoch=epoch,
        running=running,
        waiting=0,
        queued_tokens=queued_tokens,
        free_blocks=free_blocks,
        total_blocks=total_blocks,
        tickets=0,
        transfers=0,
        steps=0,
        busy_s=0.0,
        step_age_s=0.0,
        cached_blocks=0,
        prefix_cache_queries=0,
        prefix_cache_hits=0,
        prefill=prefill,
        decode=decode,
    )
