"""The JSON objects that the smaller endpoints answer with, for the OpenAPI document alone: models, tokens, health, operators.

The answers are made as plain JSON in `router/endpoints/` and `router/dispatch/status.py`. That they are as described here is
checked by schemathesis, an independent client. The docstrings are part of the document: clients read them.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from router.api.document.answer_schemas import Count, exact


@exact
class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Annotated[int, Field(ge=1)]


@exact
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


@exact
class Tokens(TypedDict):
    tokens: list[Count]
    count: Count
    max_model_len: Annotated[int, Field(ge=1)]


@exact
class Text(TypedDict):
    prompt: str


@exact
class Healthy(TypedDict):
    status: Literal["ok"]


@exact
class Unhealthy(TypedDict):
    status: Literal["unavailable"]
    reason: str


@exact
class Scaled(TypedDict):
    prefill: NotRequired[Count]
    decode: NotRequired[Count]
    routers: NotRequired[Annotated[int, Field(ge=1)]]


@exact
class Drained(TypedDict):
    worker: str
    restart: bool


@exact
class ErasedRow(TypedDict):
    worker_id: str
    pool_blocks: Count
    tier_blocks: Count


@exact
class CacheReset(TypedDict):
    tenant: str | None
    workers: list[ErasedRow]


@exact
class TierRow(TypedDict):
    """What lies in a tier of a worker's node, for all workers there."""

    tokens: Count
    bytes: Count


@exact
class WorkerRow(TypedDict):
    """What a worker reports is null until it has."""

    worker_id: str
    role: Literal["prefill", "decode", "both"]
    epoch: Count
    term: Count
    state: Literal["starting", "ready", "draining", "standby"]
    standby: bool
    pid: int | None
    rank_pids: list[int]
    node: str | None
    arithmetic: str | None
    restarts: Count
    last_error: str | None
    quick_ends: Count
    start_delay_s: Annotated[float, Field(ge=0)]
    leaves_at: float | None
    linked: bool
    link_error: str | None
    revision: Count
    busy: Annotated[float, Field(ge=0, le=1)] | None
    kv_usage: Annotated[float, Field(ge=0, le=1)] | None
    cached_tokens: Count | None
    tiers: dict[str, TierRow] | None
    running: Count | None
    waiting: Count | None
    queued_tokens: Count | None
    free_blocks: Count | None
    total_blocks: Count | None
    tickets: Count | None
    transfers: Count | None
    steps: Count | None
    busy_s: float | None
    step_age_s: float | None
    tokens: Count | None
    prefilled_tokens: Count | None
    prefix_cache_queries: Count | None
    prefix_cache_hits: Count | None
    num_preemptions: Count | None
    recomputed_tokens: Count | None
    draft_tokens: Count | None
    accepted_tokens: Count | None


@exact
class WantedSizes(TypedDict):
    """How many workers there should be. A role that the cluster lacks is left out."""

    prefill: NotRequired[Count]
    decode: NotRequired[Count]


@exact
class SizeDecisionRow(TypedDict):
    """Sizes that the autoscaler has decided, and why. `at` is in seconds since 1970."""

    at: float
    sizes: WantedSizes
    reason: str


@exact
class AutoscalerStatus(TypedDict):
    """What the autoscaler does: why it is paused, what kept its latest decision from being done, and the latest decisions."""

    paused: str | None
    problem: str | None
    decisions: list[SizeDecisionRow]


@exact
class Autoscaled(TypedDict):
    """What the autoscaler was told to do: `pause` or `resume`."""

    action: Literal["pause", "resume"]


@exact
class RevisionRow(TypedDict):
    """How the workers of one revision have done since the canary began. Times are in seconds, null without a request."""

    requests: Count
    failures: Count
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None


@exact
class RolloutStatus(TypedDict):
    """How the latest rollout of a configuration goes, or has ended. `figures` has `current` and `new`, once there are some."""

    revision: Count
    phase: Literal["starting", "canary", "replacing", "done", "rolling_back", "rolled_back"]
    share: Annotated[float, Field(ge=0, le=1)]
    changes: list[str]
    verdict: str
    reason: str | None
    figures: dict[str, RevisionRow]


@exact
class RolledOut(TypedDict):
    """What was begun, and the revision of the new configuration."""

    action: Literal["start", "abort"]
    revision: Count


@exact
class Routers(TypedDict):
    """How many routers there should be, and how many serve. Where Ray Serve sizes them, `wanted` is null."""

    wanted: Count | None
    ready: Count


@exact
class ApiKeys(TypedDict):
    """The file of API keys: entries that count, what is wrong with each of the others by its id, and why none can be read."""

    read: Count
    skipped: dict[str, str]
    problem: str | None


@exact
class Status(TypedDict):
    """Without API keys, `api_keys` is null. Where pools do not size themselves, `autoscaler` is.

    `rollout` is null until there was one.
    """

    workers: list[WorkerRow]
    wanted: WantedSizes
    autoscaler: AutoscalerStatus | None
    rollout: RolloutStatus | None
    routers: Routers
    api_keys: ApiKeys | None


@exact
class Flipped(TypedDict):
    worker_id: str
    role: Literal["prefill", "decode", "both"]


@exact
class LeakRow(TypedDict):
    kind: str
    worker_id: str
    epoch: Count
    subject: str
    num_blocks: Count
    message: str


@exact
class Audit(TypedDict):
    leaks: list[LeakRow]
