"""The configuration of a cluster: frozen, validated once, every default runs on a laptop.

Read with `configs.loader.load_config`; unknown keys and impossible values are a ConfigError with the key's path.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from configs.autoscale import AutoscaleConfig, RoleName
from configs.facts import KvCacheDtype
from configs.model_files.rope import overrides_of
from configs.paced.profile import DEFAULT_PROFILE, profile_name
from configs.speculation.config import SpeculativeConfig, read_speculative

MAX_ROUTERS = 64
Positive = Annotated[int, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]
BearerKey = Annotated[Text, Field(pattern=r"^[!-~]([ -~]*[!-~])?$")]
"""A key that a client can send in a header: printable ASCII, without a space at either end."""


def _local_path(path: str) -> str:
    if "\0" in path:
        raise ValueError("a path has no zero bytes")
    return os.path.abspath(os.path.expanduser(path))


LocalPath = Annotated[Text, AfterValidator(_local_path)]
"""A path, made absolute where the configuration is read, since routers run in other directories."""
HostName = Annotated[str, Field(pattern=r"^[^\s/:@*\[\]]+$|^\[[0-9A-Fa-f:.]+\]$"), AfterValidator(str.lower)]
"""A name or an address as it stands in a Host header, without a port."""
Origin = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9+.-]*://[^/\s*]+$"), AfterValidator(str.lower)]
"""Scheme, host and port of a web page, as browsers write it: `https://chat.example.com`."""
TransportName = Literal["auto", "shared_memory", "gloo", "cuda_ipc", "nccl"]
Priority = Annotated[int, Field(ge=-20, le=20)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Gib = Annotated[float, Field(gt=0, le=2**20)]
RouterCount = Annotated[int, Field(ge=1, le=MAX_ROUTERS)]


ProfileName = Annotated[Text, AfterValidator(profile_name)]
"""A profile that comes with Tandem, by its name, or the path of a file."""

ModelOverrides = Annotated[dict[str, Any], BeforeValidator(overrides_of)]
"""Keys of a config.json as a mapping, or as JSON that is one."""

_ALIKE = ("resources", "tensor_parallel_size", "threads", "kv_cache_tokens", "prefix_cache_tokens")
"""What a worker brings along from the role that it began with, so that routers find all workers of a role alike."""

DEFAULT_TIER = "standard"
"""The tier of keys that name none, and of requests without a key."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class HttpConfig(_Section):
    """How the cluster is reached over HTTP, and who may use it."""

    host: Text = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65_535)] = 8000
    router_replicas: RouterCount = 1
    """Number of routers, until `scale` says otherwise."""
    max_router_replicas: RouterCount | None = None
    """Most routers, of which Ray Serve then runs as many as the open requests need, but never less than `router_replicas`."""
    router_resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """What Ray sets aside for each router, such as {tandem_entry: 1}: nodes that have it get routers, and an entry at `port`.

    Without it, all routers and the one entry are on the head node.
    """
    stream_interval: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tokens of one event of a stream, after the first ones. More of them cost routers and clients less."""
    max_body_bytes: Positive = 4 * 1024 * 1024
    max_body_bytes_in_flight: Positive = 64 * 1024 * 1024
    """Bytes of bodies of one tenant that one router has read and not yet worked on. More get a 429."""
    admin_key: BearerKey | None = None
    """Bearer key for /admin. Without one, /admin is served on loopback addresses only."""
    metrics_key: BearerKey | None = None
    """Bearer key for /metrics, besides the operator's. Without one, a loopback address shows them to all of this machine."""
    keys_file: LocalPath | None = None
    """API keys, as `tandem keys` writes them. Without one, everybody who reaches a loopback address is served."""
    allowed_hosts: list[HostName] = []
    """Names that a Host header may have besides loopback names.

    On a loopback address others are refused: a web page may have its own name point here. On another address they are refused
    where this list has names.
    """
    allowed_origins: list[Origin] = []
    """Web pages of other origins that browsers may let use /v1. Requests of pages that are not listed are refused."""
    allow_anonymous: bool = False
    """Serve whoever reaches the port, without keys, also on other addresses than loopback."""
    ssl_keyfile: LocalPath | None = None
    """The private key of the certificate, in PEM and without a passphrase."""
    ssl_certfile: LocalPath | None = None
    """The certificate that the cluster answers https with, and its issuers', in PEM. Renewed files are taken up at once."""
    redis_url: Text | None = None
    """Redis (redis://, rediss://) keeps what each key has used of its rates. Without one, an actor of the cluster does."""

    @property
    def scheme(self) -> str:
        """The scheme of the cluster's URL."""
        return "http" if self.ssl_certfile is None else "https"


class TierConfig(_Section):
    """What the keys of one tier have in common. What is counted is shared by all keys that one tenant has in the tier."""

    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """The share of a waiting tenant, in proportion to the others that wait at the same priority."""
    priority: Priority = 0
    """Requests of a lower priority go first, as in vLLM. What waits catches up with the time."""
    earliest_priority: Priority = 0
    """The lowest `priority` that a request may ask for; it is added to the tier's."""
    max_context: Positive | None = None
    """Most tokens of prompt and answer together; None sets no limit."""
    max_running_requests: Positive | None = 1024
    """Answers that a tenant may have under way at one router, those that wait in line among them. More get a 429."""
    requests_per_minute: Positive | None = None
    """Requests of a tenant at all routers; None sets no limit."""
    tokens_per_minute: Positive | None = None
    """Tokens of a tenant's prompts and answers at all routers; None sets no limit."""
    tokens_per_month: Positive | None = None
    """Tokens of a tenant in a calendar month, in UTC; None sets no limit. It needs `telemetry.usage_log`."""


class PoolConfig(_Section):
    """The workers of one role."""

    workers: Annotated[int, Field(ge=0, le=1024)] = 1
    """Number of workers to begin with. It may be 0 where requests can wake the role (`autoscale`)."""
    max_workers: Annotated[int, Field(ge=1, le=1024)] = 64
    """Most workers that `scale` may ask for. What fits into memory may be less."""
    tensor_parallel_size: Annotated[int, Field(gt=0, le=1024)] = 1
    """Ranks that compute one worker's model together: `configs.sharding` says which sizes a model has."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Cores per worker; None shares the machine's cores between the workers of both roles."""
    kv_cache_tokens: Positive = 65_536
    """Size of one worker's KV pool, in tokens. Memory is touched only when used. On a GPU, the least that must fit."""
    prefix_cache_tokens: Positive | None = None
    """Tokens of earlier prompts and answers for which a pool uses memory at first.

    It grows by what was evicted and is computed again, and by what running requests need. None is 1/256 of the machine's
    memory; on a GPU, whose pool is allocated as a whole, it is all of the pool.
    """
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """What Ray sets aside for each rank of a worker, such as {GPU: 1, tandem_decode: 1}.

    Where no role names GPU, workers share the GPUs that there are (`cluster.gpu_shares`).
    """

    @property
    def on_gpu(self) -> bool:
        """Whether a worker has a GPU, or a share of one."""
        return bool(self.resources.get("GPU"))

    @property
    def gpus(self) -> float:
        """GPUs that the ranks of one worker reserve together."""
        return self.resources.get("GPU", 0.0) * self.tensor_parallel_size


SAMPLED_TOKENS = 256
"""Most tokens of prompts in a step whose logits are wanted: one where a prompt ends, and all of a prompt that is scored. On a
GPU the memory for them is set aside."""


class PrefillConfig(PoolConfig):
    """The workers that compute prompts."""

    workers: Annotated[int, Field(ge=0, le=1024)] = 1
    """Number of workers to begin with. It is 0 where decode workers compute all prompts (`disaggregation: never`), and may be
    where requests can wake the role (`autoscale`)."""
    max_batch_tokens: Positive | None = None
    """Most tokens of one prompt in a step. A cancel takes effect after one step at the latest. None: `batch_tokens`."""
    saturation_tokens: Positive | None = None
    """Number of tokens from which on a larger step computes no more tokens per second. Prompts share a step only up to it.
    None: `shared_tokens`."""
    max_queued_requests: Positive = 1024

    @property
    def batch_tokens(self) -> int:
        """Most tokens of one prompt in a step: what is configured, else 256, or 4,096 on a GPU.

        On processors `tandem serve` configures what was measured on the machine, where nobody has chosen (`cluster.measured`).
        """
        return self.max_batch_tokens or (4096 if self.on_gpu else 256)

    @property
    def shared_tokens(self) -> int:
        """Most tokens of a step that several prompts share: what is configured, else 64, or 2,048 on a GPU; at most
        `batch_tokens`.
        """
        return min(self.saturation_tokens or (2048 if self.on_gpu else 64), self.batch_tokens)


class DecodeConfig(PoolConfig):
    """The workers that compute answers."""

    max_batch_size: Positive = 64
    """Most sequences in a step."""
    max_chunk_tokens: Positive | None = None
    """Most prompt tokens in a step beside running streams, which wait for them, where decode workers compute prompts.

    None: `ClusterConfig.chunk_tokens`.
    """
    copy_every_tokens: Annotated[int, Field(ge=0)] = 32
    """Tokens after which the new KV of a running stream is copied to another decode worker; 0 copies never.

    The other worker goes on from there if the stream's own worker dies.
    """


class LimitsConfig(_Section):
    """The deadlines of a cluster. A lease is how long a silent peer keeps what it owns."""

    lease_s: Seconds = 10.0
    heartbeat_s: Seconds = 1.0
    connect_s: Seconds = 10.0
    queue_s: Seconds = 60.0
    """Seconds that a request waits for room before it is refused with 429."""
    turn_s: Seconds = 30.0
    """Seconds that a running stream may wait for its turn, where a worker has more streams than a step or its KV pool holds.

    A decode worker takes no stream of a tenant whose streams would wait longer.
    """
    header_s: Seconds = 10.0
    """Seconds that a client may take to send the head of a request."""
    body_s: Seconds = 60.0
    """Seconds that a client may take to send the body of a request."""
    client_s: Seconds = 60.0
    """Seconds that a client may leave what was sent to it unread."""
    worker_start_s: Seconds = 120.0
    drain_s: Seconds = 600.0
    shutdown_s: Annotated[float, Field(ge=0, le=86_400)] = 20.0
    """Seconds that running requests have to end when the cluster is stopped, or when their router goes."""
    max_waiting_requests: Positive = 1024
    """Requests one router holds back for want of room; more are refused at once."""


class ResumableConfig(_Section):
    """How much is kept of all streams that clients may resume."""

    retention_s: Seconds = 120.0
    """Seconds that a stream is kept after its last token, or after the last reconnection."""
    max_streams: Positive = 1024
    max_bytes: Positive = 64 * 1024 * 1024
    """Most bytes of all streams. One stream may take an eighth of them."""


class KvOffloadingConfig(_Section):
    """Where the KV of earlier prompts and answers lies besides the workers' pools. What lies on disk is prompt content."""

    memory_gib: Gib | None = None
    """GiB of each node's memory for what its workers' pools let go (`/dev/shm`); None is no memory tier."""
    disk_dir: LocalPath | None = None
    """Folder on each node's disk for the same, which survives restarts. It is made, closed to other users."""
    disk_gib: Gib | None = None
    """GiB that it may take."""

    @property
    def wanted(self) -> bool:
        """Whether a memory tier or a disk tier is configured."""
        return self.memory_gib is not None or self.disk_gib is not None


class TelemetryConfig(_Section):
    """Where the cluster sends what it knows of its requests."""

    audit_log: LocalPath | None = None
    """File of JSON lines that tells of refused requests, of what operators did and of changes of keys; on the head node."""
    usage_log: LocalPath | None = None
    """File of JSON lines, one for each request, that tells who has used how many tokens; on the head node."""
    usage_log_file_mib: Annotated[float, Field(gt=0, le=65_536)] = 64.0
    """MiB of a file from which on another one is begun."""
    usage_log_files: Annotated[int, Field(ge=0, le=10_000)] = 15
    """Files that are kept besides the one that is written."""
    usage_kafka: Annotated[str, Field(pattern=r"^[^\s/]+/[A-Za-z0-9._-]{1,249}$")] | None = None
    """Kafka's servers and a topic, `host:9092,other:9092/usage`, that gets the lines of `usage_log`."""
    usage_kafka_options: dict[Text, Text] = {}
    """Further settings of librdkafka's for that, such as {security.protocol: SSL}."""
    otlp_endpoint: Annotated[str, Field(pattern="^https?://[^/]")] | None = None
    """Base URL of an OpenTelemetry collector that takes OTLP over HTTP: it gets a trace of every request."""


class ClusterConfig(_Section):
    """Everything that a cluster is configured with."""

    model: Text = "smollm2"
    """The model: `smollm2`, a GGUF file, a Hugging Face directory or a hub id."""
    served_model_name: Text | None = None
    engine: Literal["model", "paced"] = "model"
    """What workers compute with. paced: nothing; they take the time of `paced_profile`, and their tokens are made up."""
    paced_profile: ProfileName = DEFAULT_PROFILE
    """The profile of paced workers (`configs.paced.profile`): `h200-8b`, or a file, which has to be there on every node."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What workers compute on. auto: GPUs where there are any, else the processor."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """The part of its share of a GPU's memory that a worker uses; its share is what it reserves of the GPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type of weights and activations. float16 is for GPUs.

    auto: bfloat16 on GPUs, and on processors that multiply it natively or for which there are native operators, else float32.
    """
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    """How weights are held.

    auto: quantized weights of a GGUF file are used as they are. int8, int4: weights are rounded when they are loaded. none:
    only `dtype`.
    """
    kv_cache_dtype: KvCacheDtype = "auto"
    """How keys and values lie in the pools, and travel.

    auto: as they are computed, in `dtype`. int8, on processors: a byte for each number, and a scale of 16 bits for each token
    and head. fp8, on GPUs: numbers of eight bits (E4M3) without a scale.
    """
    max_model_len: Positive | None = None
    """Most tokens of prompt and answer together; None takes the model's own context."""
    hf_overrides: ModelOverrides = {}
    """Keys of the model's config.json that others go before: how its positions are stretched to a longer context.

    Also of a GGUF file. `{rope_parameters: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 8192}}`
    """
    block_size: Literal[8, 16, 32, 64] = 16
    """Tokens per KV block."""
    disaggregation: Literal["always", "auto", "never"] = "auto"
    """Whether prompts are computed by prefill workers. always: but for streams that have to go on elsewhere while these are
    busy. auto: each where it gets its first token sooner, by what is measured.
    never: decode workers compute all of them, and there are no others (colocated)."""
    routing: Literal["cache", "load"] = "cache"
    """How workers are chosen. cache: also by what they have cached of the prompt. load: only by what they have to do."""
    transport: TransportName = "auto"
    """How KV goes from prefill to decode. auto: shared memory within a host, gloo between hosts; on GPUs CUDA IPC and NCCL."""
    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(read_speculative)] = None
    """How decode workers guess tokens, with vLLM's keys: `{method: ngram, num_speculative_tokens: 4}`, or
    `{method: draft_model, model: smollm2, num_speculative_tokens: 4}`. None: they do not."""
    encrypt_kv: bool = False
    """Whether KV is encrypted between hosts (AES-256-GCM, over gloo), and never goes over what can't do that. All workers of
    a cluster have to agree."""
    http: HttpConfig = HttpConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    limits: LimitsConfig = LimitsConfig()
    resumable: ResumableConfig = ResumableConfig()
    kv_offloading: KvOffloadingConfig = KvOffloadingConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    tiers: dict[Text, TierConfig] = {DEFAULT_TIER: TierConfig()}
    """Every key is of one of these."""
    autoscale: AutoscaleConfig = AutoscaleConfig()

    @property
    def pools(self) -> dict[RoleName, PoolConfig]:
        """The pools of both roles."""
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def working_pools(self) -> dict[RoleName, PoolConfig]:
        """Those that ever have workers."""
        return {role: pool for role, pool in self.pools.items() if self.has_workers(role)}

    def has_workers(self, role: RoleName) -> bool:
        """Whether a role ever has workers."""
        return role in self.autoscale.sizes or bool(self.pools[role].workers)

    def device_of(self, pool: PoolConfig) -> Literal["auto", "cpu", "cuda"]:
        """What a worker of this pool may compute on. `auto` is the processor for a worker that reserves no GPU."""
        return "cpu" if self.device == "auto" and not pool.on_gpu else self.device

    def gpu_memory_share(self, pool: PoolConfig) -> float:
        """The part of a GPU's memory that a worker of this pool uses: of all of it where the worker reserves no part."""
        return self.gpu_memory_utilization * min(1.0, pool.resources.get("GPU", 1.0))

    @property
    def unlike(self) -> str | None:
        """The first key in which workers of the two roles differ, so that none can change its role; None if they are alike."""
        return next((name for name in _ALIKE if getattr(self.prefill, name) != getattr(self.decode, name)), None)

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens in a step of a decode worker: what is configured, else 512 on a GPU, 128 in a colocated cluster on
        processors, whose workers have all the cores, and else 64.

        On processors `tandem serve` configures what was measured on the machine, where nobody has chosen (`cluster.measured`).
        """
        if self.decode.max_chunk_tokens is None and self.decode.on_gpu:
            return 512
        return self.decode.max_chunk_tokens or (128 if self.disaggregation == "never" else 64)
