"""Whether there is room for KV, and what the caches save."""

from __future__ import annotations

from deploy.grafana.boards.shared import TICKETS
from deploy.grafana.panels import PER_S, Board, gauge, lines, rate, row

_POOLS = row(
    "Pools",
    lines("KV pools", "percentunit", gauge("tandem:kv_cache_usage_perc", "worker", how="max")),
    TICKETS,
    lines("KV transfers in flight", "short", gauge("tandem:kv_transfers_in_flight", "worker")),
    lines(
        "KV sent to other workers",
        "Bps",
        rate("tandem:kv_transfer_sent_bytes_total", "worker"),
        about="Handed over, moved, copied or lent. Without what lay there already.",
    ),
    lines(
        "Preemptions",
        PER_S,
        rate("tandem:num_preemptions_total", "worker"),
        about="Streams that gave their blocks to others and are computed again later.",
    ),
    lines("Tokens computed again", PER_S, rate("tandem:recomputed_tokens_total", "worker"), about="After a preemption."),
    lines(
        "Copies of running streams",
        PER_S,
        rate("tandem:kv_copies_total", "outcome"),
        about="At another decode worker, for the case that their own dies.",
    ),
)

_CACHES = row(
    "Prefix caches",
    lines(
        "Hits",
        "percentunit",
        rate("tandem:prefix_cache_hits_total", "role") / rate("tandem:prefix_cache_queries_total", "role"),
        about="Share of the prompt tokens that were looked up and need not be computed.",
    ),
    lines("Prompt tokens not computed, by source", PER_S, rate("tandem:prefix_cache_hits_total", "source"), stacked=True),
    lines("Cached blocks", "short", gauge("tandem:prefix_cache_blocks", "worker")),
    lines("Evicted blocks", PER_S, rate("tandem:prefix_cache_evictions_total", "worker")),
    lines("Tokens lent to other workers", PER_S, rate("tandem:lent_tokens_total", "worker")),
    lines("KV lent to other workers", "Bps", rate("tandem:lent_bytes_total", "worker")),
    lines("Fetches that brought nothing", PER_S, rate("tandem:failed_fetches_total", "worker")),
    lines("Blocks that routers know of", "short", gauge("tandem:cache_index_blocks", "router")),
    lines("Memory of what they know", "bytes", gauge("tandem:cache_index_bytes", "router")),
    lines(
        "Age of what they know",
        "s",
        gauge("tandem:cache_index_age_seconds", "router", how="max"),
        about="How long a router has waited for what it asked workers after a link came up or news got lost. 0 is whole.",
    ),
    lines(
        "News about caches",
        PER_S,
        rate("tandem:cache_news_total").named("messages"),
        rate("tandem:cache_news_keys_total").named("blocks"),
    ),
)

_TIERS = row(
    "Tiers in the nodes' memory and on their disks",
    lines(
        "Size",
        "bytes",
        gauge("tandem:kv_tier_bytes", "worker, tier", how="max"),
        about="Workers of one node share its tiers, so they show the same. Empty without tiers.",
    ),
    lines("Blocks", "short", gauge("tandem:kv_tier_blocks", "worker, tier", how="max")),
    lines(
        "Bytes read and written",
        "Bps",
        rate("tandem:kv_tier_read_bytes_total", "tier").named("{{tier}}, read"),
        rate("tandem:kv_tier_written_bytes_total", "tier").named("{{tier}}, written"),
    ),
    lines(
        "Blocks written and removed",
        PER_S,
        rate("tandem:kv_tier_stored_blocks_total", "tier").named("{{tier}}, written"),
        rate("tandem:kv_tier_evicted_blocks_total", "tier").named("{{tier}}, removed for want of room"),
        rate("tandem:kv_tier_foreign_blocks_total", "tier").named("{{tier}}, removed as another model's"),
    ).wide(),
    lines(
        "Errors",
        PER_S,
        rate("tandem:kv_tier_failed_writes_total", "worker, tier").named("{{worker}} {{tier}}, not written"),
        rate("tandem:kv_tier_damaged_blocks_total", "worker, tier").named("{{worker}} {{tier}}, damaged"),
    ).wide(),
)

KV_CACHE = Board(
    "tandem-kv-cache",
    "Tandem: KV and cache",
    "Is there room for KV, and how much of the prompts need not be computed again?",
    (_POOLS, _CACHES, _TIERS),
)
