"""Load reports of which only what the router's rules read is given."""

from __future__ import annotations

from protocol.messages import LoadReport


def prefill_report(worker_id: str, *, queued_tokens: int = 0) -> LoadReport:
    return _report(worker_id, queued_tokens=queued_tokens)


def decode_report(
    worker_id: str,
    *,
    queued_tokens: int = 0,
    running: int = 0,
    reservable_blocks: int = 0,
    free_blocks: int = 0,
    total_blocks: int = 1000,
) -> LoadReport:
    return _report(
        worker_id,
        queued_tokens=queued_tokens,
        running=running,
        reservable_blocks=reservable_blocks,
        free_blocks=free_blocks,
        total_blocks=total_blocks,
    )


def _report(
    worker_id: str,
    *,
    queued_tokens: int = 0,
    running: int = 0,
    reservable_blocks: int = 0,
    free_blocks: int = 0,
    total_blocks: int = 1000,
) -> LoadReport:
    return LoadReport(
        worker_id=worker_id,
        epoch=1,
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
        tokens=0,
        prefix_cache_queries=0,
        prefix_cache_hits=0,
        reservable_blocks=reservable_blocks,
        num_preemptions=0,
        recomputed_tokens=0,
        prefilled_tokens=0,
    )
